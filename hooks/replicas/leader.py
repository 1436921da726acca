"""The first stage of a group: its requests, and their microbatches through the pipeline.

Note [Places]
    A group has as many microbatches in flight as stages, so that each stage has one (KunServe Fig. 8: the first stage
    takes microbatch k once k - stages has left the last one). As soon as a place is free an iteration of the requests
    that are in no microbatch is planned, in as many microbatches as there are free places: one, after the first
    iteration, so the requests of a microbatch stay together, and new ones join the next microbatch.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from msgspec import structs
from transformers.generation.continuous_batching.requests import RequestState

from ...allocator.errors import DriverError
from ...offload.policy.admission import Memory
from ...offload.policy.step_costs import NOTHING
from ..batching.memory import RequestMemory, memory_of, most_of
from ..batching.patches import others_run
from ..batching.scheduler import ElasticFIFO
from ..batching.steps import PagePreemption
from ..sampling.carried import is_scored
from ..sampling.grammar import Grammars
from ..sampling.settings import ChosenToken
from ..splice.forms import States
from .follower import ChosenTokens, OutOfStep, StageSampler, pass_on
from .microbatch_plan import (
    Begun,
    Chunk,
    FollowerSize,
    Microbatch,
    MicrobatchPlan,
    Passing,
    Request,
    SplitPolicy,
    UnderWay,
    record_of,
    split_by_tokens,
    split_iteration,
    state_of,
    tensor_of,
)
from .replica_model import GroupSettings, SpanCache, StageParts


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
    """An ElasticFIFO that leaves out requests which are in a microbatch. It takes no turns: replicas on other devices
    would wait with it."""

    takes_turns = False

    def __init__(
        self,
        cache: SpanCache,
        settings: GroupSettings,
        stages: int,
        under_way: UnderWay,
        most: float,
    ) -> None:
        """`most`: tokens for which every follower would have memory if no request ran; infinity without followers."""
        tuning = cache.pages.client.manager.tuning.serving
        self._under_way = under_way
        self._stages = stages
        memory = RequestMemory(
            cache,
            lambda: limited(memory_of(cache.pages), under_way.room * cache.token_bytes),
            lambda: limited(most_of(cache.pages), most * cache.token_bytes),
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

    def begins(self, has_batch: bool) -> None:
        """Called when an iteration begins, see ElasticScheduler. The time between two microbatches of a pipeline is no
        step of the model."""
        if self._stages > 1:
            self._began = None
        super().begins(has_batch)

    def _process_candidates(
        self, candidates: list[Any], token_budget: int, *args: Any
    ) -> tuple[list[Any], bool, bool, int, int]:
        under_way = self._under_way.requests
        free = [state for state in candidates if state.request_id not in under_way]
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
        under_way: UnderWay,
        most: float,
        grammars: Grammars,
    ) -> None:
        """`under_way`, `most`: see GroupScheduler; `grammars`: with which the last stage will match answers."""
        self.by_name: dict[str, Request] = {}
        self.scheduler = GroupScheduler(cache, settings, stages, under_way, most)
        self.preemption = GroupPreemption(cache, self.scheduler, settings)
        self._notify = notify
        self._grammars = grammars

    # -- coming and going

    def add(self, request: Request) -> None:
        """Queues a request without KV, which may have delivered tokens. RequestTooLarge, SLOError, ManageError,
        GrammarRefused."""
        if request.sampling.grammar is not None:
            self._grammars.matcher(request.sampling.grammar)
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
        slo, released = scheduler.slos.asked(request), self.by_name.pop(request)
        scheduler.slos.note(request, NOTHING)
        return released if slo == NOTHING else structs.replace(released, waited=scheduler.clock() - slo.arrived)

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

    def take_tokens(self, states: Mapping[str, RequestState], tokens: Collection[tuple[str, ChosenToken]]) -> None:
        """Appends tokens to requests: one that was sampled, or some that were scored. Those without a state were
        cancelled."""
        served = set[str]()
        for name, token in tokens:
            state = states.get(name)
            if state is None:
                continue
            request = self.by_name[name] = self.by_name[name].with_token(token)
            if request.over or not request.scored:  # else more of its prompt comes
                served.add(name)
                if state.update_and_check_completion(token.token, None):
                    self.scheduler.finish_request(name)
                    self.scheduler.block_new_requests = False
                    del self.by_name[name]
            self._notify(request, None)
        self.preemption.give_tokens(served)

    def compute_again(self, lacking: Sequence[RequestState], sizes: Mapping[str, int]) -> None:
        """Queues requests for which a stage had no memory, to be computed anew from all of their tokens, or fails the
        one that had too few too often. `sizes`: new tokens by request of the microbatch."""
        why = self.scheduler.lose_step(sizes)
        for state in reversed(lacking):
            if why is None:
                self.preemption.compute_again(state)
            else:
                self.fail(state, why)

    def fail(self, state: RequestState, error: Exception) -> None:
        """Ends a request with an error."""
        self.scheduler.recorder.ended(state, "failed")
        self.scheduler.finish_request(state.request_id)
        request = self.by_name.pop(state.request_id, None)
        if request is not None:
            self._notify(request, error)

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
        scheduled = self._scheduled(awaited) if scheduler.has_pending_requests() else []
        scheduler.begins(bool(scheduled) or awaited)
        if not scheduled:
            self._cache.pool.try_to_free_sectors()
            return []
        preemption.restore_scheduled_requests(scheduled)
        return scheduled

    def _scheduled(self, awaited: bool) -> list[Any]:
        scheduler, preemption = self._requests.scheduler, self._requests.preemption
        while True:
            scheduled, *_ = scheduler.schedule_batch(self._cache.max_batch_tokens, self._reads)
            if scheduled is not None:
                if scheduler.starved_requests:
                    preemption.offload_requests()
                return list(scheduled)
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


# New requests; requests whose KV is to be freed; preempted requests, whose KV may go to the host
Updates = tuple[tuple[Begun, ...], tuple[str, ...], tuple[str, ...]]


class FollowerUpdates:
    """Collects updates for followers: a request is gone once the first stage's cache frees its blocks. Used by one
    thread."""

    def __init__(self, cache: SpanCache, requests: GroupRequests) -> None:
        self._requests = requests
        self._known: set[str] = set()  # requests of which followers have KV
        self._begun: set[str] = set()  # requests that they have been told of
        self._gone: list[str] = []  # known requests that are gone, which they have not been told
        cache.on_freed = weakref.WeakMethod(self._add_gone)  # no cycle: memory is freed with the group, at once

    def __bool__(self) -> bool:
        """Whether there are updates other than new requests."""
        return bool(self._gone or self._requests.preemption.aside)

    def add_known(self, request: str) -> None:
        """Notes that followers have KV of a request that was in no plan."""
        self._known.add(request)

    def take(self, chunks: Iterable[Chunk]) -> Updates:
        """Removes and returns the updates for the plan of these chunks."""
        begun = [chunk.request for chunk in chunks if chunk.request not in self._begun]
        told = tuple(Begun.of(self._requests.by_name[name]) for name in begun)
        aside = tuple(name for name in self._requests.preemption.aside if name in self._known)
        gone, self._gone, self._requests.preemption.aside = tuple(self._gone), [], []
        self._known.update(begun)
        self._begun.update(begun)
        return told, gone, aside

    def _add_gone(self, request: str) -> None:
        self._begun.discard(request)
        if request in self._known:
            self._known.discard(request)
            self._gone.append(request)
        with suppress(ValueError):
            self._requests.preemption.aside.remove(request)


class Leader:
    """The leader of a group. Used by one thread. `requests`: of its group."""

    def __init__(
        self,
        parts: StageParts,
        settings: GroupSettings,
        notify: Notify,
        followers: Sequence[FollowerSize] = (),
        split: SplitPolicy = split_by_tokens,
    ) -> None:
        """`notify`: called with each request that got a token, or failed; `followers`: the other stages, in order."""
        self.epoch = parts.epoch
        self.cache = cache = parts.cache
        self.plans = True  # else only microbatches that are planned already are computed
        self._runner = parts.runner
        self._after = parts.after
        self._last = parts.before
        self._split = split
        self._stages = 1 + len(followers)
        self._under_way = UnderWay([follower.room for follower in followers])
        most = min((follower.most for follower in followers), default=math.inf)
        self.requests = GroupRequests(cache, settings, self._stages, notify, self._under_way, most, parts.grammars)
        reads = min((follower.reads for follower in followers), default=math.inf)
        self._iterations = Iterations(cache, self.requests, reads)
        self._updates = FollowerUpdates(cache, self.requests)
        self._sampler = StageSampler(cache, parts.grammars)  # where no other stage is the last
        self._number = 0
        self._failed: list[RequestState] = []  # of requests in flight for which this stage had no memory

    def adopt(self, request: Request, held: int) -> None:
        """Takes a request `held` tokens of which have KV in the caches of all stages."""
        self.requests.adopt(request, held)
        self._updates.add_known(request.name)

    def forget(self, request: str) -> None:
        """Has all stages free the KV of a request that this group does not adopt."""
        self._updates.add_known(request)
        self.cache.free_blocks(request)

    @property
    def in_flight(self) -> int:
        """Number of microbatches that were begun and not answered."""
        return len(self._under_way.begun)

    @property
    def queued(self) -> int:
        """Number of microbatches that are planned and not begun."""
        return len(self._under_way.planned)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do until a request comes."""
        return not (
            self._under_way.planned
            or self._under_way.begun
            or self._has_updates
            or self.requests.scheduler.has_pending_requests()
        )

    # -- steps

    def launch(self) -> bool:
        """Begins a microbatch, if a place is free and there is anything to compute, or followers need an update.
        Returns whether it did."""
        if len(self._under_way.begun) >= self._stages:
            return False
        if not self._under_way.planned and self.plans:
            self._plan()
        while self._under_way.planned:
            planned = self._under_way.planned.popleft()
            current = planned.without([not self._goes_on(state) for state in planned.states])
            if current.chunks:
                self._begin(current)
                return True
        if self._has_updates:
            self._begin(Microbatch((), ()))
            return True
        return False

    def collect(self) -> bool:
        """Waits for the answer to the oldest microbatch, and takes it in. Returns whether one was in flight.
        OutOfStep."""
        if not self._under_way.begun:
            return False
        batch = self._under_way.begun.popleft()
        answer = batch.answer
        if answer is None:
            assert self._last is not None
            answer = record_of(self._last.recv("answer"), Passing)
        if (answer.epoch, answer.number) != (self.epoch, batch.number):
            raise OutOfStep(f"the first stage expects an answer to microbatch {batch.number} of epoch {self.epoch}")
        self._under_way.rooms = answer.rooms
        states = {state.request_id: state for state in batch.states if self.requests.runs(state)}
        self.requests.take_tokens(states, answer.tokens)
        if lacking := [states[name] for name, _ in answer.left_out if name in states]:
            self.requests.compute_again(lacking, {chunk.request: len(chunk.ids) for chunk in batch.chunks})
        self._failed = [failed for failed in self._failed if all(failed is not state for state in batch.states)]
        return True

    # -- planning

    @property
    def _has_updates(self) -> bool:
        return self._stages > 1 and bool(self._updates)

    def _plan(self) -> None:
        scheduled = self._iterations.next(bool(self._under_way.begun))
        if not scheduled:
            return
        states = [future.state for future in scheduled]
        chunks = [_chunk(future) for future in scheduled]
        places = self._stages - len(self._under_way.begun)
        self._under_way.planned.extend(split_iteration(chunks, states, self._split, places))

    def _goes_on(self, state: RequestState) -> bool:
        return self.requests.runs(state) and not any(state is failed for failed in self._failed)

    # -- computing

    def _begin(self, batch: Microbatch) -> None:
        plan = MicrobatchPlan(self.epoch, self._number, tuple(batch.chunks), *self._updates.take(batch.chunks))
        batch.number, self._number = self._number, self._number + 1
        if self._after is not None:
            self._after.send(tensor_of(plan), "plan", True)
        for name in plan.gone:
            self._sampler.forget(name)
        self._sampler.begin(plan.begun)
        states, tokens = self._compute(batch)
        if states is None:
            self._failed.extend(batch.states)
        left_out = () if states is not None else tuple((chunk.request, 0) for chunk in batch.chunks)
        if self._after is None:
            batch.answer = Passing(self.epoch, batch.number, left_out, tokens=tokens)
        else:
            pass_on(self._after, Passing(self.epoch, batch.number, left_out, tensors=len(states or ())), states or ())
        batch.tokens = self._new_tokens(batch)
        self._under_way.begun.append(batch)

    def _compute(self, batch: Microbatch) -> tuple[States | None, ChosenTokens]:
        """Runs this stage's layers, and chooses tokens where it is the only one. None where there was no memory."""
        if not batch.chunks:
            return (), ()
        scheduler = self.requests.scheduler
        times = scheduler.times if self._stages == 1 and scheduler.timed else None  # those of a stage are no step's
        try:
            if times is not None:
                times.begin(scheduler.next)
            states = self._runner.run(batch.chunks, batch.states, None)
            tokens = self._sampler.choose(batch.chunks, states[0]) if self._after is None else ()
            if times is not None:
                times.end()
            return states, tokens
        except (torch.OutOfMemoryError, DriverError):
            return None, ()

    def _new_tokens(self, batch: Microbatch) -> int:
        blocks = sum(self.cache.blocks_for(chunk.before, chunk.end) for chunk in batch.chunks)
        size: int = self.cache.block_tokens
        return blocks * size


def _chunk(scheduled: Any) -> Chunk:
    state, scores = scheduled.state, is_scored(scheduled.state)
    ids, samples = tuple(state.tokens_to_process), scheduled.has_new_token and not scores
    return Chunk(state.request_id, ids, state.position_offset, samples, scores)
