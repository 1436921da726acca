"""The scheduler of a group: considers requests that are in no microbatch, and the memory of all stages."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...offload.policy.admission import Memory
from ..batching.memory import RequestMemory
from ..batching.preemption import PagePreemption
from ..batching.scheduler import ElasticFIFO
from ..batching.seams import others_run
from ..sectors.memory import memory_of, most_of
from .group_settings import GroupSettings
from .span_cache import SpanCache


def limited(own: Memory, room: float) -> Memory:
    """Returns the first stage's memory, reduced so that at most `room` bytes are usable. The activations of followers
    are as large as the first stage's, so they count as well."""
    excess = own.usable - max(0.0, room)
    if excess <= 0:
        return own
    total = max(0, own.total - math.ceil(excess))
    activations = min(own.activations, total)
    kv = min(own.kv, total - activations)
    return replace(own, kv=kv, activations=activations, elsewhere=total - activations - kv)


class GroupScheduler(ElasticFIFO):
    """An ElasticFIFO that leaves out requests which are in flight. `in_flight`: microbatches of each request that are
    not answered yet."""

    def __init__(
        self,
        cache: SpanCache,
        settings: GroupSettings,
        stages: int,
        room: Callable[[], float],
        most: Callable[[], float],
    ) -> None:
        """`room`: returns the tokens for which every follower has memory beyond those planned; `most`: the same if no
        request ran; infinity without followers."""
        client = cache.pages.client
        tuning = client.governor.tuning.serving
        self.in_flight: Counter[str] = Counter()
        self._stages = stages
        memory = RequestMemory(
            cache,
            lambda: limited(memory_of(cache.on, client, tuning), room() * cache.token_bytes),
            lambda: limited(most_of(cache.on, client, tuning), most() * cache.token_bytes),
            tuning,
        )
        super().__init__(
            cache,
            None,
            settings.batching.max_requests_per_batch,
            memory=memory,
            others=functools.partial(others_run, cache.model),
            tuning=tuning,
        )

    def begins(self, found: bool) -> None:
        """Called when an iteration begins, see ElasticScheduler. The time between two microbatches of a pipeline is no
        step of the model, so no cost is learned from it."""
        if self._stages > 1:
            self._step = None
        super().begins(found)

    def _process_candidates(
        self, candidates: list[Any], token_budget: int, *args: Any
    ) -> tuple[list[Any], bool, bool, int, int]:
        free = [state for state in candidates if state.request_id not in self.in_flight]
        if not free:
            self.starved_requests = []
            return [], False, False, 0, 0
        return super()._process_candidates(free, token_budget, *args)


class GroupPreemption(PagePreemption):
    """A PagePreemption. `aside`: preempted requests whose KV followers may move to the host as well."""

    def __init__(self, cache: SpanCache, scheduler: GroupScheduler, settings: GroupSettings) -> None:
        super().__init__(
            cache=cache,
            scheduler=scheduler,
            cpu_offload_space_gib=0.0,
            safety_threshold=0.0,
            compute_stream=None,
            distributed_helper=settings.helper,
        )
        self.aside: list[str] = []

    def _keep_for_later(self, state: Any) -> None:
        self.aside.append(state.request_id)
        super()._keep_for_later(state)
