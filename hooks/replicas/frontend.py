"""Stands before the supervisor for a server's endpoints: an Engine whose answers replicas compute."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final, Protocol

from ...allocator.errors import RequestTooLarge, SLOError
from ..compat import longest_sequence
from ..sampling.grammar import GrammarRefused
from ..sampling.settings import ChosenToken, Sampling
from ..server.engine import Denial, Generation, Listener, Update, check_fits, check_name, check_waiting, tell
from .microbatch_plan import Request

# the begin of a replica's error message -> (status, code, the field it is about)
_REFUSALS: Final[dict[str, tuple[int, str, str | None]]] = {
    SLOError.__name__: (422, "slo_not_kept", None),
    RequestTooLarge.__name__: (413, "request_too_large", None),
    GrammarRefused.__name__: (400, "invalid_value", "response_format"),
}


class RequestSink(Protocol):
    """The supervisor's methods for clients. Thread-safe."""

    def submit(self, request: Request) -> str | None:
        """Takes a request. Returns why it is refused; None: it is taken."""

    def cancel(self, name: str) -> None:
        """Cancels a request whose client has gone away."""

    def end_requests(self) -> None:
        """Begins to end all requests, and notifies their clients. Does not wait."""

    @property
    def failed(self) -> str | None:
        """Why nothing can be served; None while requests can be."""

    @property
    def waiting(self) -> int:
        """Number of requests that wait for their first token."""


class FleetEngine:
    """An Engine of one model that replicas have. `deliver` is called on the supervisor's threads, all else on the event
    loop's."""

    def __init__(self, supervisor: RequestSink, config: Any, most_waiting: int, ends: tuple[int, ...]) -> None:
        """`config`: of the model; `most_waiting`: requests that may wait; `ends`: tokens of the model that end an
        answer."""
        self._supervisor = supervisor
        self._most_waiting = most_waiting
        self._ends = ends
        self._longest = longest_sequence(config)
        self._vocabulary: int = config.get_text_config().vocab_size
        self._listeners: dict[str, Listener] = {}
        self._is_ending = False

    def generate(self, generation: Generation) -> AsyncGenerator[Update, None]:
        """Computes an answer, see Engine. Denial."""
        if generation.sampling.grammar is not None:
            generation = replace(generation, ends=tuple({*generation.ends, *self._ends}))
        return self._answer(generation)

    async def score(self, generation: Generation) -> tuple[ChosenToken, ...]:
        """Computes the logprobs of the tokens of a prompt, see Engine. Denial."""
        check_fits(generation, 0, self._longest, self._vocabulary)
        first, *rest = generation.prompt
        sampling, tokens = Sampling(logprobs=generation.sampling.logprobs or 0), [ChosenToken(first)]
        if rest:
            given = replace(generation, prompt=(first,), most=len(rest), sampling=sampling, ends=())
            async with aclosing(self._answer(given, tuple(rest))) as updates:
                async for update in updates:
                    tokens += update.tokens
        return tuple(tokens)

    async def _answer(self, generation: Generation, scored: tuple[int, ...] = ()) -> AsyncGenerator[Update, None]:
        """Computes an answer. `scored`: it, where it is given. Denial."""
        check_fits(generation, generation.most, self._longest, self._vocabulary)
        check_name(generation.name, self._listeners)
        check_waiting(self.waiting, self._most_waiting)
        request = Request(
            generation.name,
            generation.prompt,
            generation.most,
            generation.sampling,
            generation.ends,
            ttft=generation.ttft,
            tpot=generation.tpot,
            scored=scored,
        )
        listener = self._listeners[request.name] = Listener(generation)
        try:
            if (why := self._supervisor.submit(request)) is not None:
                raise Denial(503, why, "unavailable")
            async for update in listener:
                yield update
        finally:
            del self._listeners[request.name]
            if not listener.is_over:
                self._supervisor.cancel(request.name)

    def deliver(self, request: Request, error: str | None = None) -> None:
        """Tells of a request's new tokens, or of the error that ends it."""
        if (listener := self._listeners.get(request.name)) is None:
            return
        if error is None:
            tell([(listener, listener.update(request.delivered, request.over))])
            return
        kind, _, why = error.partition(": ")
        status, code, field = _REFUSALS.get(kind, (503, "unavailable", None))
        if kind in _REFUSALS:  # which may begin with the request's name
            error = re.sub(rf"^(request )?{re.escape(request.name)}", "the request", why)
        tell([(listener, Denial(status, error, code, field))])

    def tell(self) -> None:
        """Begins to end all requests, without waiting; their clients are notified."""
        self._is_ending = True
        self._supervisor.end_requests()

    def close(self) -> None:
        """Begins to end all requests: the fleet waits for their end as it is closed."""
        self.tell()

    def sleep(self, level: int, timeout: float | None) -> None:
        """Refused: layers of a model are spread over replicas. Denial."""
        raise Denial(
            501, "the model runs on replicas, which cannot sleep: end them, or serve it alone", "not_supported"
        )

    def wake(self) -> None:
        """Does nothing: no replica sleeps."""

    @property
    def asleep(self) -> int:
        """Always 0: awake."""
        return 0

    @property
    def answers(self) -> bool:
        """Can a request be answered now?"""
        return not self._is_ending and self._supervisor.failed is None

    @property
    def waiting(self) -> int:
        """Number of requests that wait for their first token."""
        return self._supervisor.waiting
