"""A model that is served, and the models of a server."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from msgspec import Struct

from .engine import Denial, Engine
from .fields import ASKING, Body, decoded
from .render_pool import RenderPool
from .rendering import Rendered, RenderJob, Source, answer_template, render, tokenizer_of
from .requests import DECODERS, Defaults


class Tokens:
    """The texts of a tokenizer's single tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._before = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]  # so that a leading space is kept
        self._length = len(tokenizer.decode(self._before))
        self.text = functools.lru_cache(maxsize=None)(self._text)

    def _text(self, token: int) -> str:
        """The text of a token, U+FFFD for a part of a character."""
        return str(self._tokenizer.decode([*self._before, token])[self._length :])

    def bytes(self, token: int) -> list[int] | None:
        """The bytes of a token's text; None for a part of a character."""
        return None if "\ufffd" in (text := self.text(token)) else list(text.encode())


class ModelCard(Struct, frozen=True):
    """What clients are told of a model. `created`: seconds since 1970; `max_model_len`: tokens of a sequence, null:
    without a limit."""

    id: str
    created: int
    max_model_len: int | None
    object: Literal["model"] = "model"
    owned_by: Literal["ballonet"] = "ballonet"


class ModelList(Struct, frozen=True):
    """The models of a server."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


Renderer = Callable[[Source, RenderJob], Awaitable[Rendered]]


def pooled(pool: RenderPool) -> Renderer:
    """Makes what does jobs in processes."""
    return functools.partial(pool.run, f"{render.__module__}:{render.__name__}", result=Rendered)


def prepared_by(sources: Iterable[Source]) -> tuple[Any, ...]:
    """Returns the jobs by which processes load what they need of models."""
    return tuple((f"{answer_template.__module__}:{answer_template.__name__}", (source,)) for source in sources)


@dataclass(frozen=True)
class ServedModel:
    """A served model. `name`: that clients ask for; `renderer`: does jobs beside the event loop; `longest`: tokens of a
    sequence, None: without a limit; `vocabulary`: tokens that there are; `ends`: tokens that end an answer; `created`:
    seconds since 1970."""

    name: str
    engine: Engine
    source: Source
    renderer: Renderer
    longest: int | None
    vocabulary: int
    ends: tuple[int, ...] = ()
    defaults: Defaults = field(default_factory=Defaults)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def card(self) -> ModelCard:
        """What clients are told of it."""
        return ModelCard(self.name, self.created, self.longest)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return tokenizer_of(self.source)

    @functools.cached_property
    def tokens(self) -> Tokens:
        """The texts of its tokens."""
        return Tokens(self.tokenizer)

    @property
    def answer_template(self) -> dict[str, Any] | None:
        """How its answers are divided; None: that is not known."""
        return answer_template(self.source)

    async def render(self, job: RenderJob) -> Rendered:
        """Does a request's job. Denial."""
        return await self.renderer(self.source, job)

    def most(self, prompt: int, given: int | None) -> int:
        """Tokens that the answer to a prompt of so many may have: what is given, else what there is room for."""
        if given is not None:
            return given
        room = self.defaults.most if self.longest is None else self.longest - prompt
        return max(1, min(self.defaults.most, room))


def ends_of(config: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end an answer, by a GenerationConfig, else by the tokenizer."""
    given = tokenizer.eos_token_id if config.eos_token_id is None else config.eos_token_id
    return () if given is None else (given,) if isinstance(given, int) else tuple(given)


class Models:
    """The models of a server, by name."""

    def __init__(self, served: Iterable[ServedModel]) -> None:
        self._served = {model.name: model for model in served}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._served.values())

    def get(self, name: str) -> ServedModel:
        """Returns one. Denial 404 where there is none of that name."""
        if name not in self._served:
            raise Denial(404, f"no model {name!r} here: {', '.join(sorted(self._served))}", "model_not_found", "model")
        return self._served[name]

    async def read(self, kind: type[Body], content: bytearray) -> Body:
        """Parses and checks a body, which is empty afterwards, as it would take memory beside what was parsed for as
        long as its request. Denial 400."""
        if len(content) > ASKING.body:
            await next(iter(self)).render(RenderJob(body=content, kind=kind.__name__))
        body = decoded(content, DECODERS[kind.__name__])
        content.clear()
        return cast(Body, body)

    def check(self) -> None:
        """Checks that every model can answer. Denial 503."""
        if dead := [model.name for model in self if not model.engine.answers]:
            raise Denial(503, f"nothing answers for {', '.join(dead)}", "not_available")

    def tell(self) -> None:
        """Begins to end all requests, without waiting."""
        for model in self:
            model.engine.tell()

    def close(self) -> None:
        """Ends all requests, and waits."""
        for model in self:
            model.engine.close()
