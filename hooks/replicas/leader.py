"""The first stage of a group: it has the requests, plans microbatches, computes its own part and hears the tokens.

Note [Places]
    A group has as many microbatches in flight as stages, so that each stage has one (KunServe Fig. 8: the first stage
    takes microbatch k once k - stages has left the last one). As soon as a place is free an iteration is planned of the
    requests that are in no microbatch, in as many microbatches as places are free: after the first iteration that is
    one, so the requests of a microbatch stay together, and new ones join whichever has a place next.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from transformers.generation.continuous_batching.requests import RequestState

from ...allocator.errors import DriverError
from ...offload.policy.request_slo import NOTHING
from .flight import Microbatch, Rooms, formed
from .follower import OutOfStep, pass_on, sampled
from .forming import Form, by_tokens
from .plan import Answer, Chunk, Passing, Plan
from .requests import Request, state_of
from .scheduling import GroupPreemption, GroupScheduler
from .settings import GroupSettings
from .span_cache import SpanCache
from .span_runner import SpanRunner, States
from .stage_link import StageLink, tensor_of, text_of

Told = Callable[[Request, Exception | None], object]  # of a request after each token, or that it has failed


class Leader:
    """Used by one thread. `requests`: those that are not over, as far as their tokens have come."""

    def __init__(
        self,
        epoch: int,
        cache: SpanCache,
        runner: SpanRunner,
        settings: GroupSettings,
        told: Told,
        *,
        after: StageLink | None = None,
        last: StageLink | None = None,
        rooms: tuple[int, ...] = (),
        most: float = float("inf"),
        reads: float = float("inf"),
        form: Form = by_tokens,
    ) -> None:
        """`after`, `last`: links to the next stage and to the last one, where there are others. `rooms`: tokens that
        each follower has memory for; `most`: that each could have if no request ran; `reads`: that each can read in a
        microbatch."""
        self.epoch = epoch
        self.cache = cache
        self.requests: dict[str, Request] = {}
        self.plans = True  # else only what is in flight is brought to its end
        self._runner = runner
        self._told = told
        self._after = after
        self._last = last
        self._form = form
        self._stages = 1 + len(rooms)
        self._rooms = left = Rooms(rooms)
        self._reads = int(min(reads, cache.max_tokens_read))
        self._scheduler = GroupScheduler(cache, settings, self._stages, lambda: left.least, lambda: most)
        self._preemption = GroupPreemption(cache, self._scheduler, settings)
        self._queue: deque[Microbatch] = deque()  # planned
        self._flying: deque[Microbatch] = deque()  # and begun
        self._number = 0
        self._known: set[str] = set()  # requests that followers have KV of
        self._begun: set[str] = set()  # requests of which followers know how they are sampled
        self._gone: list[str] = []  # of these, what they do not know to be gone
        self._lacking = 0  # answers in a row from which something was left out
        self._failed: list[RequestState] = []  # of requests in flight that this stage had no memory for
        cache.who_is_told = weakref.WeakMethod(self._forgotten)  # no cycle: memory goes with the group, at once

    # -- requests

    def add(self, request: Request) -> None:
        """Takes a request that has no KV, which may have delivered tokens before. RequestTooLarge, SLOError,
        ManageError."""
        self._promise(request)
        self._scheduler.add_waiting_request(state_of(request))
        self.requests[request.name] = request

    def adopt(self, request: Request, held: int) -> None:
        """Takes a request `held` tokens of which have KV in the caches of all stages."""
        self._promise(request)
        self._scheduler.active_requests[request.name] = state_of(request, held)
        self.requests[request.name] = request
        self._known.add(request.name)

    def cancel(self, request: str) -> None:
        """Ends a request, whose tokens are told no more; its name is free at once."""
        if self.requests.pop(request, None) is not None:
            self._scheduler.set_request_cancellation(request)
            for state in self._scheduler.clear_cancelled_requests():
                self._preemption.free_request_cpu_cache(state)

    def held(self, request: str) -> int:
        """Tokens of a request that have KV. To be asked while nothing is in flight."""
        state = self._state(request)
        return 0 if state is None else state.current_len()

    def forget(self, request: str) -> None:
        """Has all stages free what they have of a request that is not here."""
        self._known.add(request)
        self.cache.free_blocks(request)

    def release(self, request: str) -> Request:
        """Gives a request to somebody else; its KV stays in the caches until it is freed there. Nothing is in
        flight."""
        scheduler = self._scheduler
        scheduler.active_requests.pop(request, None)
        if scheduler.waiting_requests.pop(request, None) is not None:
            scheduler.waiting_requests_order.remove(request)
        slo, found = scheduler.promises.asked(request), self.requests.pop(request)
        scheduler.promises.note(request, NOTHING)
        return found if slo == NOTHING else replace(found, waited=scheduler.clock() - slo.arrived)

    def _promise(self, request: Request) -> None:
        scheduler = self._scheduler
        scheduler.promises.note(request.name, request.slo(scheduler.clock()))

    @property
    def waiting(self) -> list[int]:
        """Tokens of the prompts that wait to begin."""
        return [len(state.initial_tokens) for state in self._scheduler.waiting_requests.values()]

    @property
    def in_flight(self) -> int:
        """Microbatches that were begun and not answered."""
        return len(self._flying)

    @property
    def queued(self) -> int:
        """Microbatches that are planned and not begun."""
        return len(self._queue)

    @property
    def idle(self) -> bool:
        """Is there nothing to do until a request comes?"""
        return not (self._queue or self._flying or self._news or self._scheduler.has_pending_requests())

    # -- steps

    def launch(self) -> bool:
        """Begins a microbatch, if there is a place and anything to compute or to tell. Was there?"""
        if len(self._flying) >= self._stages:
            return False
        if not self._queue and self.plans:
            self._plan()
        while self._queue:
            found = self._queue.popleft()
            current = found.without([not self._goes_on(each) for each in found.states])
            self._landed([each.request for each in found.chunks if each not in current.chunks])
            if current.chunks:
                self._begin(current)
                return True
        if self._news:
            self._begin(Microbatch((), ()))
            return True
        return False

    def collect(self) -> bool:
        """Takes in the answer to the oldest microbatch, waiting for it. Was there one? OutOfStep."""
        if not self._flying:
            return False
        found = self._flying.popleft()
        answer = found.answer
        if answer is None:
            assert self._last is not None
            answer = Answer.from_json(text_of(self._last.recv("answer")))
        if (answer.epoch, answer.number) != (self.epoch, found.number):
            raise OutOfStep(f"the first stage expects an answer to microbatch {found.number} of epoch {self.epoch}")
        self._rooms.answered(found.number, answer.rooms)
        self._landed([chunk.request for chunk in found.chunks])
        states = {state.request_id: state for state in found.states if self._runs(state)}
        self._take_tokens(states, answer)
        lacking = [(states[name], stage) for name, stage in answer.left_out if name in states]
        if found.chunks and not lacking:
            self._lacking = 0
        self._compute_again(lacking)
        self._failed = [each for each in self._failed if all(each is not state for state in found.states)]
        return True

    # -- planning

    @property
    def _news(self) -> bool:
        return self._stages > 1 and bool(self._gone or self._preemption.aside)

    def _plan(self) -> None:
        scheduler, preemption = self._scheduler, self._preemption
        if not scheduler.active_requests:
            scheduler.block_new_requests = False  # no end of a request would allow them
        for state, why in [*scheduler.late(), *preemption.hopeless()]:
            self._fail(state, why)
        found = self._scheduled() if scheduler.has_pending_requests() else []
        scheduler.begins(bool(found) or bool(self._flying))
        if not found:
            self.cache.pool.try_to_free_sectors()
            return
        preemption.scheduled()
        preemption.restore_scheduled_requests(found)
        states = [each.state for each in found]
        chunks = [_chunk(each) for each in found]
        places = self._stages - len(self._flying)
        self._queue.extend(formed(chunks, states, self._form, places))
        for each in self._queue:
            scheduler.in_flight.update(chunk.request for chunk in each.chunks)

    def _scheduled(self) -> list[Any]:
        """The requests of the next iteration; empty where none can run now."""
        scheduler, preemption = self._scheduler, self._preemption
        while True:
            found, *_ = scheduler.schedule_batch(self.cache.max_batch_tokens, self._reads)
            if found is not None:
                if scheduler.starved_requests:
                    preemption.offload_requests()
                return list(found)
            if preemption.offload_requests():
                continue
            if not self._flying and scheduler.active_requests:
                self._give_way()
            return []

    def _give_way(self) -> None:
        """No request can go on, and no answer is awaited: the newest begins again later, or fails if it is alone."""
        active = self._scheduler.active_requests
        state = next(reversed(active.values()))
        if len(active) > 1 or self._preemption.may_wait():
            self._preemption.compute_again(state)
        else:
            self._fail(state, _no_room(state.request_id))

    # -- computing

    def _begin(self, batch: Microbatch) -> None:
        begun = [each.request for each in batch.chunks if each.request not in self._begun]
        names = tuple((name, self.requests[name].sampling) for name in begun)
        gone, aside = tuple(self._gone), tuple(name for name in self._preemption.aside if name in self._known)
        plan = Plan(self.epoch, self._number, tuple(batch.chunks), names, gone, aside)
        self._gone, self._preemption.aside = [], []
        self._known.update(begun)
        self._begun.update(begun)
        batch.number, self._number = self._number, self._number + 1
        if self._after is not None:
            self._after.send(tensor_of(plan.to_json()), "plan", True)
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
        """None where there was no memory."""
        if not batch.chunks:
            return ()
        try:
            return self._runner.run(batch.chunks, batch.states, None)
        except (torch.OutOfMemoryError, DriverError):
            return None

    def _sampling(self, batch: Microbatch) -> dict[str, Any]:
        return {each.request: self.requests[each.request].sampling for each in batch.chunks}

    def _new_tokens(self, batch: Microbatch) -> int:
        blocks = sum(self.cache.blocks_for(each.before, each.end) for each in batch.chunks)
        size: int = self.cache.block_tokens
        return blocks * size

    # -- answers

    def _take_tokens(self, states: dict[str, RequestState], answer: Answer) -> None:
        for name, token in answer.tokens:
            state = states.get(name)
            if state is None:  # it was cancelled
                continue
            request = self.requests[name] = self.requests[name].with_token(token)
            if state.update_and_check_completion(token, None):
                self._scheduler.finish_request(name)
                self._scheduler.block_new_requests = False
                del self.requests[name]
            self._told(request, None)

    def _compute_again(self, lacking: list[tuple[RequestState, int]]) -> None:
        """Requests that a stage had no memory for wait, and begin again with all of their tokens; one that is alone
        fails in the end."""
        if lacking:
            self._lacking += 1
        if any(stage == 0 for _, stage in lacking):
            self._scheduler.lacked()
        for state, _ in reversed(lacking):
            alone = len(self._scheduler.active_requests) == 1
            if alone and self._lacking > self._scheduler.tuning.lonely:
                self._fail(state, _no_room(state.request_id))
            else:
                self._preemption.compute_again(state)

    def _fail(self, state: RequestState, error: Exception) -> None:
        self._scheduler.finish_request(state.request_id)
        request = self.requests.pop(state.request_id, None)
        if request is not None:
            self._told(request, error)

    def _landed(self, requests: list[str]) -> None:
        flying = self._scheduler.in_flight
        flying.subtract(requests)
        for name in requests:
            if flying[name] <= 0:
                del flying[name]

    def _runs(self, state: RequestState) -> bool:
        return self._scheduler.active_requests.get(state.request_id) is state

    def _goes_on(self, state: RequestState) -> bool:
        return self._runs(state) and not any(state is each for each in self._failed)

    def _state(self, request: str) -> RequestState | None:
        scheduler = self._scheduler
        return scheduler.active_requests.get(request) or scheduler.waiting_requests.get(request)

    def _forgotten(self, request: str) -> None:
        self._begun.discard(request)
        if request in self._known:
            self._known.discard(request)
            self._gone.append(request)
        with suppress(ValueError):
            self._preemption.aside.remove(request)


def _chunk(scheduled: Any) -> Chunk:
    state = scheduled.state
    return Chunk(state.request_id, tuple(state.tokens_to_process), state.position_offset, scheduled.has_new_token)


def _no_room(request: str) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(
        f"ballonet: no memory for request {request} to go on, although no other one runs: models and tensors have it "
        "on a replica of its group. Give a larger budget, or drop what is not needed"
    )
