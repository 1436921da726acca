"""`/v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from msgspec import Struct
from starlette.responses import Response

from ..sampling.settings import ChosenToken
from . import requests
from .answers import AnswerSoFar, Said, TokenUsage, together, told
from .fields import FunctionTool
from .http import HTTPCall, answered, streamed
from .messages import template_messages
from .rendering import Conversation
from .served import Models, Tokens
from .turns import AssistantTurn, Wanted, turn

Reason = Literal["stop", "length", "tool_calls"]


class LikelyToken(Struct, frozen=True):
    """A token that was likely. `bytes`: of its text."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(LikelyToken, frozen=True):
    """A token of an answer."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(Struct, frozen=True):
    """The tokens of an answer."""

    content: list[TokenLogprob]
    refusal: None = None


class Function(Struct, frozen=True, omit_defaults=True):
    """A function that is called."""

    arguments: str
    name: str | None = None


class FunctionCall(Struct, frozen=True, tag_field="type", tag="function"):
    """A call of a function."""

    id: str
    function: Function


class FunctionCallDelta(Struct, frozen=True, omit_defaults=True):
    """A part of a call."""

    index: int
    function: Function
    id: str | None = None
    type: Literal["function"] | None = None


class ChatMessage(Struct, frozen=True):
    """What an assistant said."""

    content: str | None
    reasoning_content: str | msgspec.UnsetType | None = msgspec.UNSET
    tool_calls: list[FunctionCall] | msgspec.UnsetType = msgspec.UNSET
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(Struct, frozen=True):
    """One of several answers."""

    index: int
    message: ChatMessage
    finish_reason: Reason
    logprobs: ChatLogprobs | None


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """The answer to a chat."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage


class Delta(Struct, frozen=True, omit_defaults=True):
    """What is new of an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[FunctionCallDelta] | None = None


class ChunkChoice(Struct, frozen=True):
    """What is new of one of several answers."""

    index: int
    delta: Delta
    finish_reason: Reason | None = None
    logprobs: ChatLogprobs | None = None


class ChatChunk(Struct, frozen=True, kw_only=True):
    """A part of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: TokenUsage | msgspec.UnsetType | None = msgspec.UNSET


class Chats:
    """Handles chats."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def __call__(self, call: HTTPCall) -> Response:
        """Answers a chat. Denial."""
        body = await self._models.read(requests.Chat, call.content)
        model = self._models.get(body.model)
        begun = await turn(model, call, body, _wanted(body))
        answer = _Answer(begun, body)
        return await streamed(answer.chunks()) if body.stream else answered(await answer.whole())


def _wanted(body: requests.Chat) -> Wanted:
    tools = [tool.function for tool in body.tools or ()]
    choice = tool_chosen(tools, body.tool_choice)
    conversation = Conversation(
        template_messages(body.messages),
        template_tools(tools, choice),
        body.chat_template_kwargs,
        body.chat_template,
        body.reasoning_effort,
    )
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return Wanted(
        conversation, tools, choice, body.parallel_tool_calls is not False, body.response_format, logprobs, most
    )


def tool_chosen(tools: Sequence[FunctionTool], choice: Any) -> str | FunctionTool:
    """Returns none, auto, required, or the tool that was chosen by its name."""
    if choice is None:
        return "auto"
    if isinstance(choice, str):
        return choice
    name = getattr(choice, "function", choice).name
    return next(tool for tool in tools if tool.name == name)


def template_tools(tools: Sequence[FunctionTool], choice: str | FunctionTool) -> list[dict[str, Any]] | None:
    """Makes what a chat template is given of tools: nothing where none may be called."""
    if not tools or choice == "none":
        return None
    return [{"type": "function", "function": _described(tool)} for tool in tools]


def _described(tool: FunctionTool) -> dict[str, Any]:
    given = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {name: value for name, value in given.items() if value is not None}


def logprobs_of(words: Tokens, tokens: Sequence[ChosenToken]) -> list[TokenLogprob]:
    """Tells the logprobs of tokens."""
    return [
        TokenLogprob(
            words.text(token.token),
            told(token.logprob),
            words.bytes(token.token),
            [LikelyToken(words.text(other), told(logprob), words.bytes(other)) for other, logprob in token.likeliest],
        )
        for token in tokens
    ]


def reason_of(draft: AnswerSoFar) -> Reason:
    """Says why an answer has ended."""
    return "tool_calls" if draft.calls and draft.ended == "stop" else draft.ended or "stop"


class _Answer:
    """The answers to one chat."""

    def __init__(self, begun: AssistantTurn, body: requests.Chat) -> None:
        self._turn = begun
        self._body = body
        self._id = f"chatcmpl-{begun.generation.name}"
        self._created = int(time.time())
        self._drafts = [AnswerSoFar() for _ in range(body.n or 1)]
        self._words = begun.model.tokens if body.logprobs else None

    async def whole(self) -> ChatCompletion:
        async with aclosing(self._parts()) as parts:
            async for _ in parts:
                pass
        choices = [
            ChatChoice(index, self._message(index, draft), reason_of(draft), self._logprobs(draft.tokens))
            for index, draft in enumerate(self._drafts)
        ]
        return ChatCompletion(
            id=self._id, created=self._created, model=self._body.model, choices=choices, usage=self._usage
        )

    async def chunks(self) -> AsyncGenerator[ChatChunk, None]:
        begun = set[int]()
        async with aclosing(self._parts()) as parts:
            async for index, (piece, said) in parts:
                if index not in begun:
                    begun.add(index)
                    yield self._chunk(ChunkChoice(index, Delta("assistant", "")))
                draft = self._drafts[index]
                deltas = [self._delta(index, draft, number, part) for number, part in _counted(draft, said)]
                logprobs = self._logprobs(piece.tokens)
                if logprobs is not None and not deltas:
                    deltas = [Delta()]
                for number, delta in enumerate(deltas):
                    yield self._chunk(ChunkChoice(index, delta, logprobs=None if number else logprobs))
                if piece.ended:
                    yield self._chunk(ChunkChoice(index, Delta(), reason_of(draft)))
        if self._body.tells_usage:
            yield self._chunk(usage=self._usage)

    async def _parts(self) -> AsyncGenerator[tuple[int, Any], None]:
        """The parts of all answers; they are noted when they are yielded, but for calls, which `_counted` notes."""
        async with aclosing(together([self._turn.parts(index) for index in range(len(self._drafts))])) as streams:
            async for index, (piece, said) in streams:
                draft = self._drafts[index]
                draft.note(piece)
                for part in said:
                    draft.add(part)
                yield index, (piece, said)

    def _delta(self, index: int, draft: AnswerSoFar, number: int, part: Said) -> Delta:
        if part.kind == "content":
            return Delta(content=part.text)
        if part.kind == "reasoning":
            return Delta(reasoning_content=part.text)
        if part.kind == "arguments":
            return Delta(tool_calls=[FunctionCallDelta(number, Function(part.text))])
        made = FunctionCallDelta(number, Function(part.text, part.call), self._call_id(index, number), "function")
        return Delta(tool_calls=[made])

    def _message(self, index: int, draft: AnswerSoFar) -> ChatMessage:
        calls = [
            FunctionCall(self._call_id(index, number), Function(arguments, name))
            for number, (name, arguments) in enumerate(draft.calls)
        ]
        return ChatMessage(
            None if calls and not draft.content else draft.content,
            draft.reasoning or msgspec.UNSET,
            calls or msgspec.UNSET,
        )

    def _call_id(self, index: int, number: int) -> str:
        return f"call_{self._turn.generation.name}_{index}_{number}"

    def _logprobs(self, tokens: Sequence[ChosenToken]) -> ChatLogprobs | None:
        return None if self._words is None else ChatLogprobs(logprobs_of(self._words, tokens))

    def _chunk(self, *choices: ChunkChoice, usage: TokenUsage | None = None) -> ChatChunk:
        shown = usage if self._body.tells_usage else msgspec.UNSET
        return ChatChunk(id=self._id, created=self._created, model=self._body.model, choices=[*choices], usage=shown)

    @property
    def _usage(self) -> TokenUsage:
        return TokenUsage.of(len(self._turn.generation.prompt), sum(len(draft.tokens) for draft in self._drafts))


def _counted(draft: AnswerSoFar, said: Sequence[Said]) -> list[tuple[int, Said]]:
    """What was said, with the number of the call that it belongs to. `draft` has it already."""
    number = len(draft.calls) - sum(part.kind == "call" for part in said) - 1
    counted = []
    for part in said:
        number += part.kind == "call"
        counted.append((number, part))
    return counted
