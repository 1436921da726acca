"""The port between a server's endpoints and what computes their answers: a loop of batches (loops.py), or replicas
(hooks/replicas/frontend.py).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, Self

from ...allocator.errors import SequenceTooLong
from ..sampling.settings import ChosenToken, Sampling

# Seconds after which a request that was refused as too many wait may be sent again: some steps. Chosen.
RETRY: Final = 1.0


@dataclass(frozen=True, slots=True)
class Generation:
    """A request for tokens. `name`: of no other request that has not ended; `prompt`: token ids, at least one; `most`:
    tokens of the answer; `ends`: tokens that end it; `ttft`, `tpot`: its SLOs in seconds; None: none."""

    name: str
    prompt: tuple[int, ...]
    most: int
    sampling: Sampling
    ends: tuple[int, ...] = ()
    ttft: float | None = None
    tpot: float | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """New tokens of an answer. `ended`: why it has ended with these: a token of `Generation.ends`, which is among
    `tokens`, or the end of a grammar, or `Generation.most`; None: more will come."""

    tokens: tuple[ChosenToken, ...]
    ended: Literal["stop", "length"] | None = None


class Denial(Exception):
    """What a request is answered instead of being computed, or computed further. `status`: of HTTP; `code`: OpenAI's
    name of the kind; `param`: the field it is about; `retry_after`: seconds after which trying again may help."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(status, message, code, param, retry_after)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after

    def __str__(self) -> str:
        return self.message


class Engine(Protocol):
    """Computes the answers of one model. Used by the event loop's thread, which nothing here may hold up."""

    def generate(self, generation: Generation) -> AsyncGenerator[Update, None]:
        """Computes an answer. The request is cancelled when the generator is closed early. Denial: 400 where it is
        longer than the model's longest sequence (`context_length_exceeded`), or asks for what this engine cannot do
        (`unsupported_parameter`); 409 where a request of its name has not ended; 413 where it can never fit in memory,
        422 where its SLO cannot be kept, 429 where too many wait, 503 where nothing can be answered."""

    async def score(self, generation: Generation) -> tuple[ChosenToken, ...]:
        """Computes the logprobs of the tokens of a prompt, with `sampling.logprobs` likeliest ones each. Denial."""

    def tell(self) -> None:
        """Begins to end all requests, with Denial 503. Does not wait."""

    def close(self) -> None:
        """Ends all requests, with Denial 503, and waits until nothing runs any more."""

    def sleep(self, level: int, timeout: float | None) -> None:
        """Puts the model to sleep, as `Managed.sleep`; a request wakes it. Waits, so that it is called on a thread of
        its own. Denial: 409 where requests or forwards go on, or there is no room for its weights; 501 where this
        engine cannot."""

    def wake(self) -> None:
        """Wakes the model. Waits. Denial as `sleep`."""

    @property
    def asleep(self) -> int:
        """The level at which the model sleeps, 0 while it is awake."""

    @property
    def answers(self) -> bool:
        """Can a request be answered now? False once the loop behind this has died and cannot be started again."""

    @property
    def waiting(self) -> int:
        """Number of requests that have not begun."""


class Listener:
    """Who waits for the answer to a request, on the event loop that made this. `source`: computes it; `is_over`: has
    the last update come?"""

    def __init__(self, generation: Generation, source: Any = None) -> None:
        self.name = generation.name
        self.source = source
        self.is_over = False
        self.events = asyncio.get_running_loop()
        self._ends = generation.ends
        self._told = 0
        self._news = asyncio.Queue[Update | Denial]()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Update:
        """Waits for the next update, until the last one. Denial."""
        if self.is_over and self._news.empty():
            raise StopAsyncIteration
        news = await self._news.get()
        if isinstance(news, Denial):
            raise news
        return news

    def update(self, tokens: Sequence[ChosenToken], over: bool) -> Update:
        """Makes the update with what is new of all tokens so far. `over`: is the answer complete?"""
        new, self._told = tuple(tokens[self._told :]), len(tokens)
        stopped = bool(tokens) and tokens[-1].token in self._ends
        return Update(new, ("stop" if stopped else "length") if over else None)

    def put(self, news: Update | Denial) -> None:
        """Takes news, on the event loop's thread."""
        self.is_over = self.is_over or isinstance(news, Denial) or news.ended is not None
        self._news.put_nowait(news)


def tell(news: Iterable[tuple[Listener, Update | Denial]]) -> None:
    """Brings news to their listeners, from any thread, with one call for each event loop."""
    grouped = defaultdict[asyncio.AbstractEventLoop, list[tuple[Listener, Update | Denial]]](list)
    for listener, update in news:
        grouped[listener.events].append((listener, update))
    for events, group in grouped.items():
        with suppress(RuntimeError):  # it is closed: nobody waits any more
            events.call_soon_threadsafe(_put, group)


def _put(news: Iterable[tuple[Listener, Update | Denial]]) -> None:
    for listener, update in news:
        listener.put(update)


def check_name(name: str, taken: Container[str]) -> None:
    """Refuses a request with the name of another that has not ended. Denial."""
    if name in taken:
        raise Denial(409, f"a request with the name {name!r} has not ended: give another one", "name_in_use")


def check_fits(generation: Generation, new: int, longest: int, vocabulary: int) -> None:
    """Refuses a request that a model cannot answer, whatever memory there is. `new`: tokens that it is to compute;
    `longest`: sequence of the model, 0 where that is not known; `vocabulary`: tokens of the model. Denial."""
    prompt = generation.prompt
    if not prompt:
        raise Denial(400, "the prompt has no tokens", "invalid_value", "prompt")
    for name, tokens in (("prompt", prompt), ("logit_bias", [token for token, _ in generation.sampling.bias])):
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise Denial(400, f"{name} has tokens that the model has not: it has {vocabulary}", "invalid_value", name)
    if longest and len(prompt) + new > longest:
        why = SequenceTooLong("the request", len(prompt), new, longest)
        raise Denial(400, str(why), "context_length_exceeded")


def check_waiting(waiting: int, most: int) -> None:
    """Refuses a request where `most` wait already. Denial."""
    if waiting >= most:
        raise Denial(429, f"{most} requests wait already: try again later", "rate_limit_exceeded", retry_after=RETRY)
