"""`/v1/responses`. Nothing is stored: a client sends what was said before as its input."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any, Final

import msgspec
from starlette.responses import Response

from . import requests
from .answers import AnswerSoFar, Said
from .chat import logprobs_of, template_tools, tool_chosen
from .http import ErrorDetail, HTTPCall, answered, streamed
from .messages import template_items
from .rendering import Conversation
from .served import Models
from .turns import AssistantTurn, Wanted, turn

Event = dict[str, Any]


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
        self._items: list[Any] = []
        self._is_open = False
        self._words = None if begun.wanted.logprobs is None else begun.model.tokens
        self._told: list[Any] = []
        self._numbers = itertools.count()

    async def whole(self) -> Any:
        """Computes the answer. Denial."""
        response = None
        async with aclosing(self.events()) as events:
            async for event in events:
                response = event.get("response", response)
        return response

    async def events(self) -> AsyncGenerator[Event, None]:
        """Computes the answer, and yields what happens. Denial."""
        async with aclosing(self._turn.parts()) as parts:
            async for piece, said in parts:
                if not self._draft.tokens:
                    yield self._event("response.created", response=self._response("in_progress"))
                    yield self._event("response.in_progress", response=self._response("in_progress"))
                self._draft.note(piece)
                if self._words is not None:
                    self._told += msgspec.to_builtins(logprobs_of(self._words, piece.tokens))
                for part in said:
                    for event in self._say(part):
                        yield event
        for event in (*([] if self._items else self._opened(Said("content", ""))), *self._closed(last=True)):
            yield event
        status = "incomplete" if self._draft.ended == "length" else "completed"
        yield self._event(f"response.{status}", response=self._response(status))

    def failed(self, fault: ErrorDetail) -> Event:
        """Makes the event of an error in a stream."""
        error = {"code": "server_error", "message": fault.message}
        return self._event("response.failed", response=self._response("failed") | {"error": error})

    def _say(self, part: Said) -> Iterator[Event]:
        """The events of a new part."""
        if part.kind == "call" or not self._is_open or _TYPES[part.kind] != self._items[-1]["type"]:
            yield from self._closed()
            yield from self._opened(part)
        item = self._items[-1]
        if part.kind in ("call", "arguments"):
            item["arguments"] += part.text
            yield self._event("response.function_call_arguments.delta", item, delta=part.text)
            return
        content = item["content"][0]
        content["text"] += part.text
        if part.kind == "reasoning":
            yield self._event("response.reasoning_text.delta", item, content_index=0, delta=part.text)
        else:
            content["logprobs"] += self._told
            yield self._event("response.output_text.delta", item, content_index=0, delta=part.text, logprobs=self._told)
        self._told = []

    def _opened(self, part: Said) -> Iterator[Event]:
        """The events of a new item."""
        kind, name = _TYPES[part.kind], f"{self._turn.generation.name}_{len(self._items)}"
        item: dict[str, Any] = {"id": f"{_IDS[kind]}_{name}", "type": kind, "status": "in_progress"}
        if kind == "function_call":
            item |= {"call_id": f"call_{name}", "name": part.call, "arguments": ""}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        else:
            item |= {"role": "assistant", "content": []}
        self._items.append(item)
        self._is_open = True
        yield self._event("response.output_item.added", item=dict(item))
        if kind == "function_call":
            return
        content: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["content"] = [content]
        yield self._event("response.content_part.added", item, content_index=0, part=dict(content))

    def _closed(self, *, last: bool = False) -> Iterator[Event]:
        """The events of an item that has ended, if there is one. `last`: has the answer ended, too?"""
        if not self._is_open:
            return
        item = self._items[-1]
        self._is_open = False
        item["status"] = "incomplete" if last and self._draft.ended == "length" else "completed"
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("response.function_call_arguments.done", item, **done)
        else:
            content, more = item["content"][0], dict[str, Any]()
            if item["type"] == "message":
                content["logprobs"] += self._told
                more = {"logprobs": content["logprobs"]}
            kind = f"response.{content['type']}.done"
            yield self._event(kind, item, content_index=0, text=content["text"], **more)
            yield self._event("response.content_part.done", item, content_index=0, part=content)
        yield self._event("response.output_item.done", item=item)

    def _event(self, kind: str, of: dict[str, Any] | None = None, **more: Any) -> Event:
        """An event; `of`: the item that it is about, the last one."""
        where = {} if of is None else {"item_id": of["id"]}
        if of is not None or "item" in more:
            where["output_index"] = len(self._items) - 1
        return {"type": kind, "sequence_number": next(self._numbers), **where, **more}

    def _response(self, status: str) -> dict[str, Any]:
        body, sampling, prompt = self._body, self._turn.generation.sampling, len(self._turn.generation.prompt)
        count = len(self._draft.tokens)
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": count,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + count,
        }
        return {
            "id": f"resp_{self._turn.generation.name}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": body.model,
            "output": list(self._items),
            "usage": None if status == "in_progress" else usage,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "background": False,
            "store": False,
            "truncation": "disabled",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "tool_choice": "auto" if body.tool_choice is None else msgspec.to_builtins(body.tool_choice),
            "tools": msgspec.to_builtins(body.tools or []),
            "text": {"format": {"type": "text"}} if body.text is None else msgspec.to_builtins(body.text),
            **{name: msgspec.to_builtins(getattr(body, name)) for name in _TOLD},
        }


_TYPES: Final = {"content": "message", "reasoning": "reasoning", "call": "function_call", "arguments": "function_call"}
_IDS: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_TOLD: Final = (  # fields of a body that its answer repeats
    *("instructions", "max_output_tokens", "max_tool_calls", "metadata", "previous_response_id", "prompt_cache_key"),
    *("reasoning", "safety_identifier", "service_tier", "top_logprobs", "user"),
)
