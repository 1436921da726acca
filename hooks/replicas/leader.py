"""The first stage of a group: holds the requests, plans microbatches, computes its layers, and receives the tokens.

Note [Places]
    A group has as many microbatches in flight as stages, so that each stage has one (KunServe Fig. 8: the first stage
    takes microbatch k once k - stages has left the last one). As soon as a place is free an iteration of the requests
    that are in no microbatch is planned, in as many microbatches as there are free places: one, after the first
    iteration, so the requests of a microbatch stay together, and new ones join the next microbatch.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from transformers.generation.continuous_batching.requests import RequestState

from ...allocator.errors import DriverError
from .follower import OutOfStep, pass_on, sampled
from .group_requests import GroupRequests, Iterations, Notify
from .microbatch_plan import (
    Answer,
    Chunk,
    FollowerRoom,
    Microbatch,
    MicrobatchPlan,
    Passing,
    Sampling,
    SplitPolicy,
    StageLink,
    record_of,
    split_by_tokens,
    split_iteration,
    tensor_of,
)
from .replica_model import GroupSettings, SpanCache, SpanRunner, States
from .requests import Request

# Sampling of new requests; requests whose KV is to be freed; preempted requests, whose KV may go to the host
Updates = tuple[tuple[tuple[str, Sampling], ...], tuple[str, ...], tuple[str, ...]]


class FollowerUpdates:
    """Collects updates for followers: a request is gone once the first stage's cache frees its blocks. Used by one
    thread."""

    def __init__(self, cache: SpanCache, requests: GroupRequests) -> None:
        self._requests = requests
        self._known: set[str] = set()  # requests of which followers have KV
        self._begun: set[str] = set()  # requests whose sampling they have
        self._gone: list[str] = []  # known requests that are gone, which they have not been told
        cache.on_freed = weakref.WeakMethod(self._add_gone)  # no cycle: memory is freed with the group, at once

    def __bool__(self) -> bool:
        """Whether there are updates other than the sampling of new requests."""
        return bool(self._gone or self._requests.preemption.aside)

    def add_known(self, request: str) -> None:
        """Notes that followers have KV of a request that was in no plan."""
        self._known.add(request)

    def take(self, chunks: Iterable[Chunk]) -> Updates:
        """Removes and returns the updates for the plan of these chunks."""
        begun = [each.request for each in chunks if each.request not in self._begun]
        names = tuple((name, self._requests.by_name[name].sampling) for name in begun)
        aside = tuple(name for name in self._requests.preemption.aside if name in self._known)
        gone, self._gone, self._requests.preemption.aside = tuple(self._gone), [], []
        self._known.update(begun)
        self._begun.update(begun)
        return names, gone, aside

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
        epoch: int,
        cache: SpanCache,
        runner: SpanRunner,
        settings: GroupSettings,
        notify: Notify,
        *,
        after: StageLink | None = None,
        last: StageLink | None = None,
        rooms: tuple[int, ...] = (),
        most: float = float("inf"),
        reads: float = float("inf"),
        split: SplitPolicy = split_by_tokens,
    ) -> None:
        """`notify`: called with each request that got a token, or failed; `after`, `last`: links to the next and the
        last stage, if there are others; `rooms`: tokens for which each follower has memory; `most`: the least of their
        rooms if no request ran; `reads`: tokens that every follower can read in a microbatch."""
        self.epoch = epoch
        self.cache = cache
        self.plans = True  # else only microbatches that are planned already are computed
        self._runner = runner
        self._after = after
        self._last = last
        self._split = split
        self._stages = 1 + len(rooms)
        self._rooms = left = FollowerRoom(rooms)
        self.requests = GroupRequests(cache, settings, self._stages, notify, lambda: left.least, lambda: most)
        self._iterations = Iterations(cache, self.requests, reads)
        self._updates = FollowerUpdates(cache, self.requests)
        self._queue: deque[Microbatch] = deque()  # planned
        self._flying: deque[Microbatch] = deque()  # begun, and not answered
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
        return len(self._flying)

    @property
    def queued(self) -> int:
        """Number of microbatches that are planned and not begun."""
        return len(self._queue)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do until a request comes."""
        return not (self._queue or self._flying or self._has_updates or self.requests.scheduler.has_pending_requests())

    # -- steps

    def launch(self) -> bool:
        """Begins a microbatch, if a place is free and there is anything to compute, or followers need an update.
        Returns whether it did."""
        if len(self._flying) >= self._stages:
            return False
        if not self._queue and self.plans:
            self._plan()
        while self._queue:
            found = self._queue.popleft()
            current = found.without([not self._goes_on(each) for each in found.states])
            self.requests.landed([each.request for each in found.chunks if each not in current.chunks])
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
        if not self._flying:
            return False
        found = self._flying.popleft()
        answer = found.answer
        if answer is None:
            assert self._last is not None
            answer = record_of(self._last.recv("answer"), Answer)
        if (answer.epoch, answer.number) != (self.epoch, found.number):
            raise OutOfStep(f"the first stage expects an answer to microbatch {found.number} of epoch {self.epoch}")
        self._rooms.answered(found.number, answer.rooms)
        self.requests.landed([chunk.request for chunk in found.chunks])
        states = {state.request_id: state for state in found.states if self.requests.runs(state)}
        self.requests.take_tokens(states, answer.tokens)
        lacking = [(states[name], stage) for name, stage in answer.left_out if name in states]
        if found.chunks and not lacking:
            self.requests.lacked_nothing()
        self.requests.compute_again(lacking)
        self._failed = [each for each in self._failed if all(each is not state for state in found.states)]
        return True

    # -- planning

    @property
    def _has_updates(self) -> bool:
        return self._stages > 1 and bool(self._updates)

    def _plan(self) -> None:
        found = self._iterations.next(bool(self._flying))
        if not found:
            return
        states = [each.state for each in found]
        chunks = [_chunk(each) for each in found]
        places = self._stages - len(self._flying)
        self._queue.extend(split_iteration(chunks, states, self._split, places))
        for each in self._queue:
            self.requests.scheduler.in_flight.update(chunk.request for chunk in each.chunks)

    def _goes_on(self, state: RequestState) -> bool:
        return self.requests.runs(state) and not any(state is each for each in self._failed)

    # -- computing

    def _begin(self, batch: Microbatch) -> None:
        plan = MicrobatchPlan(self.epoch, self._number, tuple(batch.chunks), *self._updates.take(batch.chunks))
        batch.number, self._number = self._number, self._number + 1
        if self._after is not None:
            self._after.send(tensor_of(plan), "plan", True)
        found = self._compute(batch)
        if found is None:
            self._failed.extend(batch.states)
        left_out = () if found is not None else tuple((each.request, 0) for each in batch.chunks)
        if self._after is None:
            tokens = sampled(plan.chunks, self._sampling(batch), found[0]) if found else ()
            batch.answer = Answer(self.epoch, batch.number, tokens, left_out)
        else:
            states = found or ()
            pass_on(self._after, Passing(self.epoch, batch.number, left_out, tensors=len(states)), states)
        self._rooms.planned(batch.number, self._new_tokens(batch))
        self._flying.append(batch)

    def _compute(self, batch: Microbatch) -> States | None:
        """Runs this stage's layers. None where there was no memory."""
        if not batch.chunks:
            return ()
        try:
            return self._runner.run(batch.chunks, batch.states, None)
        except (torch.OutOfMemoryError, DriverError):
            return None

    def _sampling(self, batch: Microbatch) -> dict[str, Any]:
        return {each.request: self.requests.by_name[each.request].sampling for each in batch.chunks}

    def _new_tokens(self, batch: Microbatch) -> int:
        blocks = sum(self.cache.blocks_for(each.before, each.end) for each in batch.chunks)
        size: int = self.cache.block_tokens
        return blocks * size


def _chunk(scheduled: Any) -> Chunk:
    state = scheduled.state
    return Chunk(state.request_id, tuple(state.tokens_to_process), state.position_offset, scheduled.has_new_token)
