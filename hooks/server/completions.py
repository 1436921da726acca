"""`/v1/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Literal

import msgspec
from msgspec import Struct
from starlette.responses import Response

from ..sampling.settings import ChosenToken
from . import requests
from .answers import AnswerPiece, AnswerSoFar, TokenUsage, pieces, together, told
from .engine import Generation
from .http import HTTPCall, answered, streamed
from .rendering import Rendered, RenderJob
from .served import Models, ServedModel
from .turns import form_of, generation_of, numbered


class TextLogprobs(Struct, frozen=True):
    """The tokens of a text: of each its text, its logprob, the likeliest ones, where it begins. A prompt's first token
    has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, frozen=True):
    """One of several answers, or what is new of it. A stream's finish_reason is null until its last chunk."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None
    logprobs: TextLogprobs | None


class Completion(Struct, frozen=True, kw_only=True):
    """The answer to prompts, or a part of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TokenUsage | msgspec.UnsetType | None = msgspec.UNSET


class TextCompletions:
    """Handles completions."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def __call__(self, call: HTTPCall) -> Response:
        """Answers prompts. Denial."""
        body = await self._models.read(requests.Completions, call.content)
        model = self._models.get(body.model)
        answer = _Answer(model, call, body, await _rendered(model, body))
        return await streamed(answer.chunks()) if body.stream else answered(await answer.whole())


async def _rendered(model: ServedModel, body: requests.Completions) -> Rendered:
    """The prompts' tokens, and the grammar. Denial."""
    grammar = form_of(body, body.response_format)
    texts = tuple(prompt for prompt in body.prompts if isinstance(prompt, str))
    prompts = tuple(tuple(prompt) for prompt in body.prompts if not isinstance(prompt, str))
    if not texts and grammar is None:
        return Rendered(prompts)
    made = await model.render(RenderJob(texts=texts, grammar=grammar))
    return made if texts else Rendered(prompts, grammar=made.grammar)


class _Answer:
    """The answers to the prompts of one request: `n` for each, in the order of the prompts."""

    def __init__(self, model: ServedModel, call: HTTPCall, body: requests.Completions, rendered: Rendered) -> None:
        self._model = model
        self._body = body
        self._id = f"cmpl-{call.name}"
        self._created = int(time.time())
        self._tries = body.best_of or body.n or 1  # for each prompt
        logprobs = 0 if body.logprobs is None and self._tries > (body.n or 1) else body.logprobs
        self._generations = []
        for number, prompt in enumerate(rendered.prompts):
            first = generation_of(model, call, body, prompt, body.max_tokens, logprobs, rendered.grammar)
            first = first if not number else replace(first, name=f"{first.name}-p{number}")
            self._generations += [numbered(first, choice) for choice in range(self._tries)]
        self._drafts = [AnswerSoFar() for _ in self._generations]
        self._texts = [""] * len(self._drafts)
        self._computed = 0  # tokens
        self._words = model.tokens if body.logprobs is not None else None

    async def whole(self) -> Completion:
        async with aclosing(together([self._parts(number) for number in range(len(self._drafts))])) as parts:
            async for number, piece in parts:
                self._note(number, piece)
        kept = [
            number
            for first in range(0, len(self._drafts), self._tries)
            for number in self._best(range(first, first + self._tries))
        ]
        choices = [
            CompletionChoice(
                index, self._texts[number], draft.ended or "stop", self._logprobs(draft.tokens, draft.offsets)
            )
            for index, number in enumerate(kept)
            for draft in [self._drafts[number]]
        ]
        return self._completion(choices, self._usage)

    async def chunks(self) -> AsyncGenerator[Completion, None]:
        async with aclosing(together([self._parts(number) for number in range(len(self._drafts))])) as parts:
            async for number, piece in parts:
                self._note(number, piece)
                if piece.text or piece.ended or self._words is not None:
                    logprobs = self._logprobs(piece.tokens, piece.offsets)
                    choice = CompletionChoice(number, piece.text, piece.ended, logprobs)
                    yield self._completion([choice], None if self._body.tells_usage else msgspec.UNSET)
        if self._body.tells_usage:
            yield self._completion([], self._usage)

    async def _parts(self, number: int) -> AsyncGenerator[AnswerPiece, None]:
        """Computes one answer, behind its prompt where that is echoed."""
        generation, length = self._generations[number], 0
        if self._body.echo:
            echoed = await self._echoed(generation, self._body.prompts[number // self._tries])
            length = len(echoed.text)
            yield echoed
            if echoed.ended:
                return
        after = generation.prompt if self._body.echo else ()
        async with aclosing(pieces(self._model, generation, self._body.stops, after)) as stream:
            async for piece in stream:
                self._computed += len(piece.tokens)
                yield replace(piece, offsets=tuple(offset + length for offset in piece.offsets)) if length else piece

    async def _echoed(self, generation: Generation, given: str | list[int]) -> AnswerPiece:
        """A prompt as a piece of the answer."""
        decode = self._model.tokenizer.decode
        text = given if isinstance(given, str) else decode(given, skip_special_tokens=True)
        ended: Literal["length"] | None = "length" if self._body.max_tokens == 0 else None
        if self._words is None:
            return AnswerPiece(text, (), (), ended)
        scored = await self._model.engine.score(generation)
        offsets, length = [], 0
        for token in scored:  # single texts, as a part of a character has none of its own
            offsets.append(min(length, len(text)))
            length += len(self._words.text(token.token))
        return AnswerPiece(text, scored, tuple(offsets), ended)

    def _note(self, number: int, piece: AnswerPiece) -> None:
        self._drafts[number].note(piece)
        self._texts[number] += piece.text

    def _best(self, tries: range) -> Sequence[int]:
        """The answers to one prompt that are told: those of the largest logprob."""
        count = self._body.n or 1
        if len(tries) == count:
            return tries
        return sorted(tries, key=lambda number: self._drafts[number].logprob, reverse=True)[:count]

    def _logprobs(self, tokens: Sequence[ChosenToken], offsets: Sequence[int]) -> TextLogprobs | None:
        if self._words is None:
            return None
        words = self._words
        likeliest: list[dict[str, float] | None] = []
        for token in tokens:
            best = dict[str, float]()
            for other, logprob in (*token.likeliest, (token.token, token.logprob)):
                best.setdefault(words.text(other), told(logprob))
            likeliest.append(None if token.logprob is None else best)
        return TextLogprobs(
            [words.text(token.token) for token in tokens],
            [None if token.logprob is None else told(token.logprob) for token in tokens],
            likeliest,
            list(offsets),
        )

    def _completion(self, choices: list[CompletionChoice], usage: TokenUsage | msgspec.UnsetType | None) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._body.model, choices=choices, usage=usage)

    @property
    def _usage(self) -> TokenUsage:
        """Each prompt is counted once; an echoed one is none of an answer's tokens."""
        prompts = sum(len(generation.prompt) for generation in self._generations[:: self._tries])
        return TokenUsage.of(prompts, self._computed)
