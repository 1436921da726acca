"""An assistant's turn, for chats and responses: its prompt, what holds it to a form, and how it is read."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from . import grammars
from .answers import ArgumentsReader, CallsReader, PlainReader, Reader, Said, TemplateReader, pieces
from .engine import Denial, Generation, check_fits
from .fields import FunctionTool
from .http import HTTPCall
from .rendering import Conversation, RenderJob
from .requests import Asked, derived_seed
from .served import ServedModel


@dataclass(frozen=True)
class Wanted:
    """What a turn has to be. `choice`: none, auto, required, or the one tool's; `several`: may it call more than one?
    `format`: a response format; `logprobs`: so many likeliest tokens are told; `most`: tokens, None: open."""

    conversation: Conversation
    tools: Sequence[FunctionTool]
    choice: str | FunctionTool
    several: bool
    format: Any
    logprobs: int | None
    most: int | None


@dataclass(frozen=True)
class AssistantTurn:
    """A turn that can be computed. `generation`: of the first answer."""

    model: ServedModel
    generation: Generation
    stops: tuple[str, ...]
    opening: str
    wanted: Wanted

    async def parts(self, choice: int = 0) -> AsyncGenerator[tuple[Any, list[Said]], None]:
        """Computes an answer, and yields its pieces and what they say. `choice`: which answer of several. Denial."""
        generation, reader = numbered(self.generation, choice), self._reader()
        special = isinstance(reader, TemplateReader)
        async with aclosing(pieces(self.model, generation, self.stops, special=special)) as stream:
            async for piece in stream:
                said = list(reader.feed(piece.text))
                if reader.is_over:
                    piece = replace(piece, ended="stop")
                elif piece.ended:
                    said += reader.end()
                yield piece, said
                if reader.is_over:
                    return

    def _reader(self) -> Reader:
        wanted = self.wanted
        if isinstance(wanted.choice, FunctionTool):
            return ArgumentsReader(wanted.choice.name)
        if wanted.choice == "required":
            return CallsReader()
        is_held = self.generation.sampling.grammar is not None and not wanted.conversation.tools
        if is_held or (template := self.model.answer_template) is None:
            return PlainReader()
        return TemplateReader(template, self.opening, wanted.conversation.tools, several=wanted.several)


async def turn(model: ServedModel, call: HTTPCall, body: Asked, wanted: Wanted) -> AssistantTurn:
    """Renders a conversation. Denial."""
    grammar, strict = _form(model, body, wanted)
    rendered = await model.render(RenderJob(wanted.conversation, grammar=grammar, strict=strict))
    generation = generation_of(model, call, body, rendered.prompts[0], wanted.most, wanted.logprobs, rendered.grammar)
    return AssistantTurn(model, generation, body.stops, rendered.opening, wanted)


def _form(model: ServedModel, body: Asked, wanted: Wanted) -> tuple[str | None, tuple[FunctionTool, ...]]:
    """The grammar of an answer, and the functions whose calls in a text are held to schemas. Denial."""
    grammar = form_of(body, wanted.format)
    offered = wanted.tools if wanted.choice != "none" else ()
    if not offered:
        return grammar, ()
    if grammar is not None:
        raise Denial(
            400, "tool_choice: calls and a format exclude each other: give none", "invalid_value", "tool_choice"
        )
    if isinstance(wanted.choice, FunctionTool):
        return grammars.of_arguments(wanted.choice), ()
    if wanted.choice == "required":
        return grammars.of_calls(offered, wanted.several), ()
    if "tool_calls" not in (model.answer_template or {}).get("fields", {}):
        why = "how this model writes calls is not known: give required, none or a named one"
        raise Denial(400, f"tool_choice: {why}", "unsupported_parameter", "tool_choice")
    return None, tuple(offered) if any(tool.strict for tool in offered) else ()


def form_of(body: Asked, response_format: Any) -> str | None:
    """The grammar of a format or structure; None: any text. Denial where there are both."""
    grammar = grammars.of_format(response_format)
    if body.structured_outputs is None:
        return grammar
    if grammar is not None:
        why = "structured_outputs: response_format says the form already"
        raise Denial(400, why, "invalid_value", "structured_outputs")
    return grammars.of_structure(body.structured_outputs)


def generation_of(
    model: ServedModel,
    call: HTTPCall,
    body: Asked,
    prompt: tuple[int, ...],
    most: int | None,
    logprobs: int | None,
    grammar: str | None,
) -> Generation:
    """Makes the request to an engine. Denial 400."""
    if most is not None and (body.min_tokens or 0) > most:
        raise Denial(400, f"min_tokens: {body.min_tokens} is more than {most}", "invalid_value", "min_tokens")
    ends = (*(() if body.ignore_eos else model.ends), *(body.stop_token_ids or ()))
    sampling = body.sampling(model.defaults, logprobs, grammar)
    new = model.most(len(prompt), most)
    generation = Generation(call.name, prompt, new, sampling, ends, call.ttft, call.tpot)
    check_fits(generation, new, model.longest or 0, model.vocabulary)
    return generation


def numbered(generation: Generation, choice: int) -> Generation:
    """The request for one of several answers: with a name and a seed of its own."""
    if not choice:
        return generation
    sampling = msgspec.structs.replace(generation.sampling, seed=derived_seed(generation.sampling.seed, choice))
    return replace(generation, name=f"{generation.name}-{choice}", sampling=sampling)
