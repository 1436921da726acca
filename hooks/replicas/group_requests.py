"""The requests of a group, on its first stage: how they come and go, are scheduled and preempted."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.generation.continuous_batching.requests import RequestState

from ...offload.policy.admission import Memory
from ...offload.policy.request_slo import NOTHING
from ..batching.memory import RequestMemory, memory_of, most_of
from ..batching.scheduler import ElasticFIFO
from ..batching.seams import others_run
from ..batching.steps import PagePreemption
from .replica_model import GroupSettings, SpanCache
from .requests import Request, state_of


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
        tuning = cache.pages.client.governor.tuning.serving
        self.in_flight: Counter[str] = Counter()
        self._stages = stages
        memory = RequestMemory(
            cache,
            lambda: limited(memory_of(cache.pages), room() * cache.token_bytes),
            lambda: limited(most_of(cache.pages), most() * cache.token_bytes),
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


Notify = Callable[[Request, Exception | None], object]  # called with a request after each token, or when it has failed


class GroupRequests:
    """The requests of a group. Used by one thread. `by_name`: those that have not ended, with their tokens so far.
    `scheduler`, `preemption`: hold transformers' states of them."""

    def __init__(
        self,
        cache: SpanCache,
        settings: GroupSettings,
        stages: int,
        notify: Notify,
        room: Callable[[], float],
        most: Callable[[], float],
    ) -> None:
        """`room`, `most`: tokens, see GroupScheduler."""
        self.by_name: dict[str, Request] = {}
        self.scheduler = GroupScheduler(cache, settings, stages, room, most)
        self.preemption = GroupPreemption(cache, self.scheduler, settings)
        self._notify = notify
        self._lacking = 0  # answers in a row from which chunks were left out

    # -- coming and going

    def add(self, request: Request) -> None:
        """Queues a request without KV, which may have delivered tokens. RequestTooLarge, SLOError, ManageError."""
        self._promise(request)
        self.scheduler.add_waiting_request(state_of(request))
        self.by_name[request.name] = request

    def adopt(self, request: Request, held: int) -> None:
        """Takes a request `held` tokens of which have KV in the cache."""
        self._promise(request)
        self.scheduler.active_requests[request.name] = state_of(request, held)
        self.by_name[request.name] = request

    def cancel(self, request: str) -> None:
        """Ends a request: `notify` is not called for it any more, and its name is free at once."""
        if self.by_name.pop(request, None) is not None:
            self.scheduler.set_request_cancellation(request)
            for state in self.scheduler.clear_cancelled_requests():
                self.preemption.free_request_cpu_cache(state)

    def release(self, request: str) -> Request:
        """Removes a request, and returns it for another group; its KV stays in the caches. To be called while nothing
        is in flight."""
        scheduler = self.scheduler
        scheduler.active_requests.pop(request, None)
        if scheduler.waiting_requests.pop(request, None) is not None:
            scheduler.waiting_requests_order.remove(request)
        slo, found = scheduler.slos.asked(request), self.by_name.pop(request)
        scheduler.slos.note(request, NOTHING)
        return found if slo == NOTHING else replace(found, waited=scheduler.clock() - slo.arrived)

    def held(self, request: str) -> int:
        """Returns the number of a request's tokens that have KV. To be called while nothing is in flight."""
        state = self.scheduler.active_requests.get(request) or self.scheduler.waiting_requests.get(request)
        return 0 if state is None else int(state.current_len())

    @property
    def waiting(self) -> list[int]:
        """Tokens of each prompt that waits to begin."""
        return [len(state.initial_tokens) for state in self.scheduler.waiting_requests.values()]

    def runs(self, state: RequestState) -> bool:
        """Returns whether this is the state of a request that has begun and not ended."""
        return self.scheduler.active_requests.get(state.request_id) is state

    # -- what came out

    def take_tokens(self, states: Mapping[str, RequestState], tokens: Iterable[tuple[str, int]]) -> None:
        """Appends one token to each request. Those without a state were cancelled."""
        for name, token in tokens:
            state = states.get(name)
            if state is None:
                continue
            request = self.by_name[name] = self.by_name[name].with_token(token)
            if state.update_and_check_completion(token, None):
                self.scheduler.finish_request(name)
                self.scheduler.block_new_requests = False
                del self.by_name[name]
            self._notify(request, None)

    def compute_again(self, lacking: Sequence[tuple[RequestState, int]]) -> None:
        """Queues requests for which a stage (second item: its number) had no memory, to be computed anew from all of
        their tokens. A request that is alone fails after `tuning.lonely` attempts."""
        if lacking:
            self._lacking += 1
        if any(stage == 0 for _, stage in lacking):
            self.scheduler.raise_reserve()
        for state, _ in reversed(lacking):
            alone = len(self.scheduler.active_requests) == 1
            if alone and self._lacking > self.scheduler.tuning.lonely:
                self.fail(state, no_room(state.request_id))
            else:
                self.preemption.compute_again(state)

    def lacked_nothing(self) -> None:
        """Notes a microbatch from which no chunk was left out."""
        self._lacking = 0

    def fail(self, state: RequestState, error: Exception) -> None:
        """Ends a request with an error."""
        self.scheduler.failed(state)
        self.scheduler.finish_request(state.request_id)
        request = self.by_name.pop(state.request_id, None)
        if request is not None:
            self._notify(request, error)

    def landed(self, requests: Iterable[str]) -> None:
        """Counts one microbatch less in flight for each of these requests."""
        flying = self.scheduler.in_flight
        names = list(requests)
        flying.subtract(names)
        for name in names:
            if flying[name] <= 0:
                del flying[name]

    def _promise(self, request: Request) -> None:
        self.scheduler.slos.note(request.name, request.slo(self.scheduler.clock()))


def no_room(request: str) -> torch.OutOfMemoryError:
    """Returns the error of a request for which a stage has no memory, although it runs alone."""
    return torch.OutOfMemoryError(
        f"ballonet: no memory for request {request} to go on, although no other one runs: models and tensors have it "
        "on a replica of its group. Give a larger budget, or drop what is not needed"
    )


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
        for state, why in [*scheduler.pop_late(), *preemption.pop_unservable()]:
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
