"""Answers as text: tokens become characters, stop strings end them, and parsers divide them into text, reasoning and
calls of tools.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeVar

import msgspec
from msgspec import Struct
from tokenizers.decoders import DecodeStream
from transformers.utils.chat_parsing import ResponseParser

from ..sampling.settings import ChosenToken
from .engine import Denial, Generation
from .served import ServedModel

Item = TypeVar("Item")
_IMPOSSIBLE: Final = -9999.0  # OpenAI's log probability


class TokenUsage(Struct, frozen=True):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, prompt: int, completion: int) -> TokenUsage:
        """Adds them up."""
        return cls(prompt, completion, prompt + completion)


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """What new tokens add to an answer. `offsets`: where the text of each begins, in characters of the whole answer;
    `ended`: why it has ended with these."""

    text: str
    tokens: tuple[ChosenToken, ...]
    offsets: tuple[int, ...]
    ended: Literal["stop", "length"] | None


class StopStrings:
    """Cuts a text before the first of some strings. Text that may be the begin of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Returns what can be shown now, and whether a stop string has come."""
        text = self._held + text
        begins = [begin for stop in self._stops if (begin := text.find(stop)) >= 0]
        if begins:
            self._held = ""
            return text[: min(begins)], True
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        shown, self._held = text[: len(text) - held], text[len(text) - held :]
        return shown, False

    def rest(self) -> str:
        """Returns what was held back, as no more will come."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of the text that the string begins with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


async def pieces(
    model: ServedModel,
    generation: Generation,
    stops: Sequence[str],
    after: Sequence[int] = (),
    *,
    special: bool = False,
) -> AsyncGenerator[AnswerPiece, None]:
    """Computes an answer. `after`: tokens that its text continues; `special`: is the text of special tokens shown?
    Closing this early cancels the request, as a stop string does. A character whose tokens have not all come is not
    shown. Denial."""
    characters, cut = DecodeStream([*after], skip_special_tokens=not special), StopStrings(stops)
    backend, length, count = model.tokenizer.backend_tokenizer, 0, 0
    async with aclosing(model.engine.generate(generation)) as updates:
        async for update in updates:
            shown, offsets, stopped = "", list[int](), False
            for token in update.tokens:
                count += 1
                offsets.append(length)
                if token.token in generation.ends:  # the last one: it ends the answer, and is no part of it
                    continue
                text = characters.step(backend, token.token) or ""
                length += len(text)
                if count <= generation.sampling.least:
                    shown += text
                    continue
                text, stopped = cut.add(text)
                shown += text
                if stopped:
                    break
            ended = "stop" if stopped else update.ended
            if ended and not stopped:
                shown += cut.rest()
            yield AnswerPiece(shown, update.tokens[: len(offsets)], tuple(offsets), ended)
            if ended:
                return
    raise Denial(503, "the answer was not finished")


async def together(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[tuple[int, Item], None]:
    """Yields what comes of several streams, with its number. An error of one ends all; closing this closes them."""
    queue: asyncio.Queue[tuple[int, Item | None, BaseException | None]] = asyncio.Queue(len(streams))

    async def pump(number: int, stream: AsyncGenerator[Item, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put((number, item, None))
        except Exception as error:  # any error: whoever reads this raises it
            await queue.put((number, None, error))
        else:
            await queue.put((number, None, None))

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            number, item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                left -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def told(logprob: float | None) -> float:
    """A logprob as JSON can have it: as OpenAI says what is impossible."""
    return max(logprob or 0.0, _IMPOSSIBLE)


@dataclass(frozen=True, slots=True)
class Said:
    """A part of what an assistant says. `call`: it begins a call of this function, with the text as arguments; further
    parts of kind arguments belong to the last call."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    call: str = ""


class Reader(Protocol):
    """Divides one answer into what an assistant says. `is_over`: may no more come?"""

    is_over: bool

    def feed(self, text: str) -> Iterator[Said]:
        """Takes more text."""

    def end(self) -> Iterator[Said]:
        """Takes the end."""


class PlainReader:
    """A Reader of texts."""

    is_over = False

    def feed(self, text: str) -> Iterator[Said]:
        """Takes more text."""
        if text:
            yield Said("content", text)

    def end(self) -> Iterator[Said]:
        """Takes the end."""
        return iter(())


class ArgumentsReader:
    """A Reader of the arguments of one call that was chosen."""

    is_over = False

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def feed(self, text: str) -> Iterator[Said]:
        """Takes more text."""
        if text:
            yield Said("arguments", text) if self._begun else Said("call", text, self._name)
            self._begun = True

    def end(self) -> Iterator[Said]:
        """Takes the end."""
        return iter(())


class CallsReader:
    """A Reader of a list of calls, as `grammars.of_calls` has it. What was cut off is text."""

    is_over = False

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> Iterator[Said]:
        """Takes more text."""
        self._text += text
        return iter(())

    def end(self) -> Iterator[Said]:
        """Takes the end."""
        try:
            calls = msgspec.json.decode(self._text, type=list[_Call])
        except msgspec.MsgspecError:
            yield Said("content", self._text)
            return
        for call in calls:
            yield Said("call", bytes(call.arguments).decode(), call.name)


class _Call(Struct):
    name: str
    arguments: msgspec.Raw


_REASONING: Final = ("reasoning_content", "thinking", "reasoning")  # names of templates for it


class TemplateReader:
    """A Reader by transformers' parser of a model's answers. What it cannot parse is text."""

    def __init__(self, template: dict[str, Any], opening: str, tools: list[Any] | None, *, several: bool) -> None:
        """`opening`: what the prompt has begun of the answer; `tools`: that may be called; `several`: may there be more
        than one call?"""
        fields = {name: given for name, given in template["fields"].items() if tools or name != "tool_calls"}
        self._parser: Any = ResponseParser({**template, "fields": fields}, prefix=opening, tools=tools)
        self._several = several
        self._raw = ""  # of the region that is open
        self.is_over = False
        self._begun = list(self._read(self._parser.initial_events))

    def feed(self, text: str) -> Iterator[Said]:
        """Takes more text."""
        yield from self._begun
        self._begun.clear()
        if self._parser is None:
            yield from PlainReader().feed(text)
        elif text and not self.is_over:
            try:
                yield from self._read(self._parser.feed(text))
            except (ValueError, RuntimeError, TypeError, KeyError, AttributeError):  # a malformed call
                yield from self._give_up(text)

    def end(self) -> Iterator[Said]:
        """Takes the end."""
        if self._parser is None or self.is_over:
            return
        try:
            yield from self._read(self._parser.finalize()[1])
        except (ValueError, RuntimeError, TypeError, KeyError, AttributeError):
            yield from self._give_up("")

    def _give_up(self, text: str) -> Iterator[Said]:
        self._parser = None
        yield from PlainReader().feed(self._raw + text)

    def _read(self, events: list[dict[str, Any]]) -> Iterator[Said]:
        for event in events:
            kind, field_ = event["type"], event.get("field")
            if kind == "region_chunk" and not event.get("dirty"):
                if field_ in _REASONING:
                    yield Said("reasoning", event["text"])
                elif field_ == "content":
                    yield Said("content", event["text"])
            elif kind == "region_chunk":
                self._raw += event["text"]
            elif kind == "region_close" and field_ == "tool_calls":
                self._raw = ""
                function = event["value"]["function"]
                arguments = function["arguments"]
                text = arguments if isinstance(arguments, str) else json.dumps(arguments)
                yield Said("call", text, str(function["name"]))
                if not self._several:
                    self.is_over = True
                    return


@dataclass
class AnswerSoFar:
    """An answer as it is so far. `calls`: (name, arguments) of each."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    tokens: list[ChosenToken] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    ended: Literal["stop", "length"] | None = None

    def add(self, said: Said) -> None:
        """Takes a part."""
        if said.kind == "content":
            self.content += said.text
        elif said.kind == "reasoning":
            self.reasoning += said.text
        elif said.kind == "call":
            self.calls.append((said.call, said.text))
        else:
            name, arguments = self.calls[-1]
            self.calls[-1] = name, arguments + said.text

    def note(self, piece: AnswerPiece) -> None:
        """Takes the tokens of a piece."""
        self.tokens += piece.tokens
        self.offsets += piece.offsets
        self.ended = piece.ended

    @property
    def logprob(self) -> float:
        """The sum of the logprobs of its tokens."""
        return sum(token.logprob or 0.0 for token in self.tokens)
