"""Iterations of a group: selects the requests of the next one, and preempts one where none can go on."""

from __future__ import annotations

from typing import Any

from .group_requests import GroupRequests, no_room
from .span_cache import SpanCache


class Iterations:
    """Schedules iterations. Used by one thread."""

    def __init__(self, cache: SpanCache, requests: GroupRequests, reads: float) -> None:
        """`reads`: tokens that every follower can read in a microbatch."""
        self._cache = cache
        self._requests = requests
        self._reads = int(min(reads, cache.max_tokens_read))

    def next(self, awaited: bool) -> list[Any]:
        """Returns transformers' FutureRequestState of each scheduled request; empty where none can run now. `awaited`:
        a microbatch is in flight."""
        scheduler, preemption = self._requests.scheduler, self._requests.preemption
        if not scheduler.active_requests:
            scheduler.block_new_requests = False  # no end of a request would allow them
        for state, why in [*scheduler.late(), *preemption.hopeless()]:
            self._requests.fail(state, why)
        found = self._scheduled(awaited) if scheduler.has_pending_requests() else []
        scheduler.begins(bool(found) or awaited)
        if not found:
            self._cache.pool.try_to_free_sectors()
            return []
        preemption.scheduled()
        preemption.restore_scheduled_requests(found)
        return found

    def _scheduled(self, awaited: bool) -> list[Any]:
        scheduler, preemption = self._requests.scheduler, self._requests.preemption
        while True:
            found, *_ = scheduler.schedule_batch(self._cache.max_batch_tokens, self._reads)
            if found is not None:
                if scheduler.starved_requests:
                    preemption.offload_requests()
                return list(found)
            if preemption.offload_requests():
                continue
            if not awaited and scheduler.active_requests:
                self._preempt_newest()
            return []

    def _preempt_newest(self) -> None:
        """Preempts the newest request, to be computed anew later; fails it if it is alone. For when no request can go
        on, and none is in flight."""
        active, preemption = self._requests.scheduler.active_requests, self._requests.preemption
        state = next(reversed(active.values()))
        if len(active) > 1 or preemption.may_wait():
            preemption.compute_again(state)
        else:
            self._requests.fail(state, no_room(state.request_id))
