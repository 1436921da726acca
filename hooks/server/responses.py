"""`/v1/responses`. Nothing is stored: a client sends what was said before as its input."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any, Final, Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response

from . import fields, requests
from .answers import AnswerSoFar, Said
from .chat import TokenLogprob, logprobs_of, template_tools, tool_chosen
from .http import ErrorDetail, HTTPCall, answered, streamed
from .messages import Status, template_items
from .rendering import Conversation
from .served import Models
from .turns import AssistantTurn, Wanted, turn


class SaidText(Struct, tag_field="type", tag="output_text"):
    """A text that is said."""

    text: str = ""
    annotations: list[None] = []
    logprobs: list[TokenLogprob] = []


class SaidThought(Struct, tag_field="type", tag="reasoning_text"):
    """A text that is thought."""

    text: str = ""


class MessageOutput(Struct, tag_field="type", tag="message", kw_only=True):
    """What an assistant says."""

    id: str
    content: list[SaidText] = []
    role: Literal["assistant"] = "assistant"
    status: Status = "in_progress"


class ReasoningOutput(Struct, tag_field="type", tag="reasoning", kw_only=True):
    """What an assistant thinks."""

    id: str
    content: list[SaidThought] = []
    summary: list[None] = []
    status: Status = "in_progress"


class CallOutput(Struct, tag_field="type", tag="function_call", kw_only=True):
    """A call of a function. `arguments`: an object of JSON, as text."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: Status = "in_progress"


class InputDetails(Struct, frozen=True):
    """Where tokens of an input come from. What was cached is not told."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(Struct, frozen=True):
    """What tokens of an output are. Those of reasoning are not told apart."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct, frozen=True):
    """Numbers of tokens."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails = InputDetails()
    output_tokens_details: OutputDetails = OutputDetails()


class ResponseFailure(Struct, frozen=True):
    """Why a stream has ended."""

    message: str
    code: Literal["server_error"] = "server_error"


class Incomplete(Struct, frozen=True):
    """Why an answer is shorter than it would be."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


Output = MessageOutput | ReasoningOutput | CallOutput


class ResponseAnswer(Struct, frozen=True, kw_only=True):
    """The answer to an input, with the settings that it was made by. `usage` is null until it has ended."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None = None
    incomplete_details: Incomplete | None = None
    model: str
    output: list[Output]
    usage: ResponseUsage | None
    temperature: float
    top_p: float
    parallel_tool_calls: bool
    tool_choice: requests.ToolMode | requests.ResponseToolChoice
    tools: list[requests.ResponseTool]
    text: requests.TextConfig
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str] | None
    prompt_cache_key: str | None
    reasoning: requests.Reasoning | None
    safety_identifier: str | None
    service_tier: str | None
    top_logprobs: int | None
    user: str | None
    previous_response_id: None = None
    background: Literal[False] = False
    store: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"


class ResponseEvent(Struct, frozen=True, kw_only=True):
    """A part of a stream; its `type` says what else it has. `item_id`, `output_index`: the item it is about."""

    type: str
    sequence_number: int
    response: ResponseAnswer | UnsetType = UNSET
    item: Output | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: SaidText | SaidThought | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ResponsesEndpoint:
    """Handles responses."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def __call__(self, call: HTTPCall) -> Response:
        """Answers an input. Denial."""
        body = await self._models.read(requests.Responses, call.content)
        model = self._models.get(body.model)
        answer = _Answer(await turn(model, call, body, _wanted(body)), body)
        return await streamed(answer.events(), answer.failed) if body.stream else answered(await answer.whole())


def _wanted(body: requests.Responses) -> Wanted:
    tools = [tool.function() for tool in body.tools or ()]
    choice = tool_chosen(tools, body.tool_choice)
    conversation = Conversation(
        template_items(body.input, body.instructions),
        template_tools(tools, choice),
        body.chat_template_kwargs,
        body.chat_template,
        None if body.reasoning is None else body.reasoning.effort,
    )
    told = body.include or body.top_logprobs is not None
    several = body.parallel_tool_calls is not False
    form = None if body.text is None else body.text.format
    return Wanted(
        conversation, tools, choice, several, form, (body.top_logprobs or 0) if told else None, body.max_output_tokens
    )


class _Answer:
    """The answer to one input: items, of which at most the last is open. `told`: logprobs that no event has had yet."""

    def __init__(self, begun: AssistantTurn, body: requests.Responses) -> None:
        self._turn = begun
        self._body = body
        self._created = int(time.time())
        self._draft = AnswerSoFar()
        self._items: list[Output] = []
        self._is_open = False
        self._words = None if begun.wanted.logprobs is None else begun.model.tokens
        self._told: list[TokenLogprob] = []
        self._numbers = itertools.count()

    async def whole(self) -> ResponseAnswer:
        """Computes the answer. Denial."""
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass
        return self._response(self._status)

    async def events(self) -> AsyncGenerator[ResponseEvent, None]:
        """Computes the answer, and yields what happens. Denial."""
        async with aclosing(self._turn.parts()) as parts:
            async for piece, said in parts:
                if not self._draft.tokens:
                    yield self._event("response.created", response=self._response("in_progress"))
                    yield self._event("response.in_progress", response=self._response("in_progress"))
                self._draft.note(piece)
                if self._words is not None:
                    self._told += logprobs_of(self._words, piece.tokens)
                for part in said:
                    for event in self._say(part):
                        yield event
        for event in (*([] if self._items else self._opened(Said("content", ""))), *self._closed(last=True)):
            yield event
        yield self._event(f"response.{self._status}", response=self._response(self._status))

    def failed(self, fault: ErrorDetail) -> ResponseEvent:
        """Makes the event of an error in a stream."""
        return self._event("response.failed", response=self._response("failed", ResponseFailure(fault.message)))

    @property
    def _status(self) -> Literal["completed", "incomplete"]:
        """How it has ended."""
        return "incomplete" if self._draft.ended == "length" else "completed"

    def _say(self, part: Said) -> Iterator[ResponseEvent]:
        """The events of a new part."""
        if part.kind == "call" or not self._is_open or not isinstance(self._items[-1], _TYPES[part.kind]):
            yield from self._closed()
            yield from self._opened(part)
        item = self._items[-1]
        if isinstance(item, CallOutput):
            item.arguments += part.text
            yield self._event("response.function_call_arguments.delta", item, delta=part.text)
            return
        content = item.content[0]
        content.text += part.text
        if isinstance(content, SaidText):
            content.logprobs += self._told
            yield self._event("response.output_text.delta", item, content_index=0, delta=part.text, logprobs=self._told)
        else:
            yield self._event("response.reasoning_text.delta", item, content_index=0, delta=part.text)
        self._told = []

    def _opened(self, part: Said) -> Iterator[ResponseEvent]:
        """The events of a new item."""
        kind, name = _TYPES[part.kind], f"{self._turn.generation.name}_{len(self._items)}"
        item: Output
        if kind is CallOutput:
            item = CallOutput(id=f"fc_{name}", call_id=f"call_{name}", name=part.call)
        else:
            item = MessageOutput(id=f"msg_{name}") if kind is MessageOutput else ReasoningOutput(id=f"rs_{name}")
        self._items.append(item)
        self._is_open = True
        yield self._event("response.output_item.added", item=item)
        if isinstance(item, CallOutput):
            return
        if isinstance(item, MessageOutput):
            item.content = [SaidText()]
        else:
            item.content = [SaidThought()]
        yield self._event("response.content_part.added", item, content_index=0, part=item.content[0])

    def _closed(self, *, last: bool = False) -> Iterator[ResponseEvent]:
        """The events of an item that has ended, if there is one. `last`: has the answer ended, too?"""
        if not self._is_open:
            return
        item = self._items[-1]
        self._is_open = False
        item.status = self._status if last else "completed"
        if isinstance(item, CallOutput):
            yield self._event("response.function_call_arguments.done", item, arguments=item.arguments, name=item.name)
        else:
            content, more = item.content[0], dict[str, Any]()
            if isinstance(content, SaidText):
                content.logprobs += self._told
                more = {"logprobs": content.logprobs}
            kind = f"response.{content.__struct_config__.tag}.done"
            yield self._event(kind, item, content_index=0, text=content.text, **more)
            yield self._event("response.content_part.done", item, content_index=0, part=content)
        yield self._event("response.output_item.done", item=item)

    def _event(self, kind: str, of: Output | None = None, **more: Any) -> ResponseEvent:
        """An event; `of`: the item that it is about, the last one."""
        if of is not None:
            more["item_id"] = of.id
        if of is not None or "item" in more:
            more["output_index"] = len(self._items) - 1
        return ResponseEvent(type=kind, sequence_number=next(self._numbers), **more)

    def _response(
        self, status: Literal["in_progress", "completed", "incomplete", "failed"], error: ResponseFailure | None = None
    ) -> ResponseAnswer:
        body, sampling, prompt = self._body, self._turn.generation.sampling, len(self._turn.generation.prompt)
        count = len(self._draft.tokens)
        return ResponseAnswer(
            id=f"resp_{self._turn.generation.name}",
            created_at=self._created,
            status=status,
            error=error,
            incomplete_details=Incomplete() if status == "incomplete" else None,
            model=body.model,
            output=[*self._items],
            usage=None if status == "in_progress" else ResponseUsage(prompt, count, prompt + count),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            text=body.text or requests.TextConfig(format=fields.TextFormat()),
            **{name: getattr(body, name) for name in _REPEATED},
        )


_TYPES: Final[dict[str, type[Output]]] = {
    "content": MessageOutput,
    "reasoning": ReasoningOutput,
    "call": CallOutput,
    "arguments": CallOutput,
}
_REPEATED: Final = (  # fields of a body
    *("instructions", "max_output_tokens", "max_tool_calls", "metadata", "prompt_cache_key", "reasoning"),
    *("safety_identifier", "service_tier", "top_logprobs", "user"),
)
