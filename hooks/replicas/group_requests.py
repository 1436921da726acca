"""The requests of a group, on its first stage: added, adopted, released, advanced by tokens, recomputed, ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from transformers.generation.continuous_batching.requests import RequestState

from ...offload.policy.request_slo import NOTHING
from .group_settings import GroupSettings
from .requests import Request, state_of
from .scheduling import GroupPreemption, GroupScheduler
from .span_cache import SpanCache

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
