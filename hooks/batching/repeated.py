"""Steps of a generation loop that are like the last: nothing is decided for them, and none is timed.

Note [Steps like the last]
    Where each of the requests of the last step gets one more token, none waits, none needs a new block and nothing has
    happened since on the device (memory_manager.py, Note [Events]), the next step is the last one again: the same
    requests, with the same memory. So only what each step changes is noted, that it begins and how much its requests
    hold; all else is transformers' own. A step that is not given all of its requests is noted like any other.
    So that costs, which are learned, count, one step of each `sampled` is looked at and timed; all are while it is
    being learned what they take, and where there are SLOs, pages are scarce, or KV is on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.generation.continuous_batching.requests import RequestStatus

from .cache import ElasticPagedCache
from .memory import RequestMemory
from .selection import RequestSLOs, Selected


class RepeatedSteps:
    """The steps of one loop that are like the last. Used by its thread."""

    def __init__(self, cache: ElasticPagedCache, memory: RequestMemory, slos: RequestSLOs) -> None:
        self.passed = 0  # steps that were like it, since this was set
        self._cache = cache
        self._memory = memory
        self._slos = slos
        self._on = cache.on
        self._version = cache.pages.client.manager.version
        self._selected: Selected | None = None  # in the step that was looked at last
        self._left = 0  # steps that may follow before one has to be looked at
        self._requests: Sequence[int] = ()  # their ids; `_selected` refers to them
        self._seen: Sequence[int] = ()  # the manager's version, and the core's numbers

    def again(self, candidates: Sequence[Any]) -> Selected | None:
        """Returns what is selected for the next step, of these requests, where it is like the last, and counts it. In
        one call, as each step asks."""
        on = self._on
        if (
            not self._left
            or self._seen != (self._version.number, on.available, on.budget, on.page_request, on.reclaimed)
            or [*map(id, candidates)] != self._requests
            or self._slos.known
        ):
            return None
        self._left -= 1
        self.passed += 1
        return self._selected

    def begins(self, now: float) -> None:
        """Notes that a step like the last is computed next."""
        cache, self._cache.pages.client.used = self._cache, now
        if (point := cache.point) is not None:
            cache.point = point._replace(length=point.length + 1)

    def looked(self, selected: Selected, scheduled: Sequence[Any], steady: bool) -> None:
        """Notes a step that was looked at, with the requests that it is given (FutureRequestState). `steady`: may the
        next ones be like it, by what else their loop knows?"""
        client, on, block = self._cache.pages.client, self._on, self._cache.block_tokens
        chosen = [candidate for step in selected.steps for candidate in step]
        requests = [id(state) for state, _ in chosen]
        decode = requests == [id(request.state) for request in scheduled] and not any(
            tokens != 1 or state.status != RequestStatus.DECODING for state, tokens in chosen
        )
        if not decode or requests != self._requests:
            self._cache.batch = object()
        self._selected, self._requests, self._left = selected, requests if decode else (), 0
        if (
            steady
            and decode
            and requests
            and not selected.left_out
            and self._slos.quiet
            and not self._memory.without_reserve
            and not client.displaced
            and not client.manager.pages.scarce
            and "host" not in selected.admission.where.values()
        ):
            free = min(block - 1 - state.current_len() % block for state, _ in chosen)  # tokens until one needs a block
            self._left = min(free, client.manager.tuning.weights.sampled - 1)
            self._seen = self._version.number, on.available, on.budget, on.page_request, on.reclaimed

    def forget(self) -> None:
        """The next step is looked at."""
        self._left = 0
