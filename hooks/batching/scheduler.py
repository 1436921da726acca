"""The scheduler of a generation loop, for transformers: admits, orders and ends requests (with selection.py), and
records them in timelines (offload/timeline/recorder.py) and histograms of latencies (measure/timings.py).
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.continuous_batching.scheduler import FIFOScheduler, PrefillFirstScheduler, Scheduler

from ...allocator import devices
from ...allocator.devices import Runtime
from ...allocator.errors import DriverError, ManageError, RequestTooLarge
from ...allocator.units import format_size
from ...offload.policy.admission import IdleHeap
from ...offload.policy.progress import StepProgress
from ...offload.policy.step_costs import NOTHING, Step
from ...offload.policy.tuning import DEFAULT, Serving
from ...offload.timeline.file import End
from ...offload.timeline.recorder import recorders_of
from ..device.streams import marks_of
from ..measure.pace import packed
from ..measure.timings import Latencies, RequestTimes
from ..sampling.carried import is_scored
from .cache import ElasticPagedCache
from .memory import RequestMemory, pages_lacking
from .repeated import RepeatedSteps
from .selection import RequestSLOs, Selected, Selection
from .step_times import StepTimes
from .turns import PlaceInTurns


class ElasticScheduler(Scheduler):
    """A scheduler that admits a request to a step only if all memory that it needs there is free: on the device, or
    for the KV of its prompt on the host. The order is that of the other base class."""

    cache: ElasticPagedCache
    takes_turns = True  # does its model take turns with those of other loops (offload/manager/turns.py)?

    def __init__(
        self,
        cache: ElasticPagedCache,
        safety_margin: float | None,
        max_requests_per_batch: int,
        memory: RequestMemory,
        others: Callable[[], bool],
        tuning: Serving = DEFAULT.serving,
    ) -> None:
        """The admission's reserve replaces `safety_margin`. `others`: do requests of other models run?"""
        self.memory = memory
        self.others_run = others
        self.tuning = tuning
        self.clock = cache.pages.client.manager.clock  # in seconds
        self.slos = RequestSLOs(cache, self.clock)
        self.selection = Selection(cache, memory, self.slos, others, tuning)
        self.repeated = RepeatedSteps(cache, memory, self.slos)
        self._repeats = False  # is the step that was prepared last like the one before?
        self.timed = True  # is the step that is computed next?
        self.cancelled: Callable[[str], object] = lambda request: None  # called once a cancelled request is removed
        self.progress = StepProgress(tuning)
        self._scored: dict[str, int] = {}  # tokens of the step, by request whose prompt is scored
        self._none_fits = False  # is all free memory too little for each waiting request?
        self._began: float | None = None  # when the last step did
        self.next = Step(0, 0)  # the step that is computed next
        self._needed = 0  # bytes of activations that it needs
        self._idle = IdleHeap(tuning.idle)
        self._limits = math.inf, math.inf  # (seconds of the step, deadline): passing either misses an SLO
        self._ended = -math.inf  # since when there is no request; infinity: there were some
        self._waited = self.clock()  # when others waited last for the end of a batch
        manager, device = cache.pages.client.manager, cache.model.device
        marks = marks_of(device, manager.nanoseconds)
        driver = device.driver_ns if manager.nanoseconds is time.monotonic_ns else int  # the driver's clock is real
        self.times = StepTimes(marks, driver)
        self.recorder = RequestRecorder(cache.model.name, cache.model.latencies, devices.holding(device))
        self.place = PlaceInTurns(cache, self.slos, self.takes_turns)
        super().__init__(cache, 0.0, max_requests_per_batch)
        cache.user = weakref.ref(self)
        cache.pages.client.lacking = partial(pages_lacking, weakref.ref(memory))
        cache.model.scheduled_by(self)

    def reset(self) -> None:
        """Forgets which requests were passed over."""
        super().reset()
        self.selection.reset()

    def add_waiting_request(self, state: Any) -> None:
        """Queues a request. Raises RequestTooLarge or SequenceTooLong where it can never run, SLOError where its SLO
        cannot be kept, and ManageError where it has no tokens, which would end the loop."""
        if not state.initial_tokens:
            raise ManageError(f"request {state.request_id} has no tokens")
        if (slo := self.cache.model.slo) != NOTHING:
            self.slos.note(state.request_id, replace(slo, arrived=self.clock()), unless=True)
        self.recorder.came(state)
        sizes = state.request_id, len(state.initial_tokens), state.max_new_tokens or 0
        if (why := self.memory.refusal(*sizes) or self.slos.impossible(*sizes)) is not None:
            self.slos.note(state.request_id, NOTHING)
            self.recorder.ended(state, "refused")
            raise why
        super().add_waiting_request(state)

    @property
    def runs(self) -> bool:
        """Has any request begun, and not ended?"""
        return bool(self.active_requests)

    @property
    def alone(self) -> bool:
        """Do requests wait while none runs, of this model or of others, whose end could free memory?"""
        waits = bool(self.waiting_requests) and not self.place.waits
        return waits and not self.runs and not self.others_run()

    def pop_unservable(self) -> list[tuple[Any, Exception]]:
        """Takes requests out of the queue that need more than all free memory. Call it where requests are `alone`: the
        memory is less than `RequestMemory.refusal` could know. From then on one request at a time may use all of it,
        without a reserve; where that was too little for each, the oldest one is taken out."""
        gone = list[tuple[Any, Exception]]()
        for state in list(self.waiting_requests.values()):
            if (why := self._too_large(state)) is not None:
                gone.append((self._drop(state), why))
        if self._none_fits and not gone:
            state = self.waiting_requests[self.waiting_requests_order[0]]
            gone.append((self._drop(state), no_room(state.request_id)))
        self.memory.without_reserve, self._none_fits = bool(self.waiting_requests), False
        return gone

    def why_no_memory(self, state: Any) -> Exception:
        """Returns why a request finds no memory although no other one runs."""
        return self._too_large(state) or no_room(state.request_id)

    def _too_large(self, state: Any) -> RequestTooLarge | None:
        """Returns why all memory that is free while no other one runs is too little for a request; None otherwise."""
        now, blocks = self.memory.free(), self.cache.pages
        most = replace(now, elsewhere=now.elsewhere + blocks.nbytes - blocks.fixed)
        return self.memory.refused(state.request_id, len(state.initial_tokens), state.max_new_tokens or 0, most)

    def _drop(self, state: Any) -> Any:
        del self.waiting_requests[state.request_id]
        self.waiting_requests_order.remove(state.request_id)
        self.recorder.ended(state, "refused")
        return state

    def _process_candidates(
        self, candidates: list[Any], token_budget: int, *args: Any
    ) -> tuple[list[Any], bool, bool, int, int]:
        """Makes the next step of the candidates' requests, if the model may compute now: admits them, maps their pages,
        and notes what is computed next (steps.py)."""
        waiting, self._repeats = self.waiting_requests, False
        alone = len(self.place.seats) < 2  # then it takes no turns
        selected = self.repeated.again(candidates) if alone and not waiting else None
        if selected is None:
            if not alone and not (candidates := self.place.candidates(candidates, self.active_requests, waiting)):
                self.starved_requests = []  # they wait for others
                return [], False, False, 0, 0
            selected = None if alone or waiting else self.repeated.again(candidates)
        if selected is not None:
            step = super()._process_candidates(candidates, len(candidates), *args)
            if len(step[0]) == len(candidates):
                self._repeats, self._began = True, self.clock()
                self.repeated.begins(self._began)
                if self.recorder.recorders.all:
                    self.recorder.batch([request.state for request in step[0]], len(candidates))
                return step
        else:
            self.cache.pool.try_to_free_sectors()
            token_budget = int(min(token_budget, self.progress.tokens))
            requests = self.active_requests, waiting
            selected = self.selection.select(candidates, token_budget, self.progress.requests, *requests)
            if leaving := self.selection.leaving:  # transformers preempts, and selects again
                self.starved_requests = [one for one in selected.left_out if one[0].request_id in leaving]
                return [], True, False, 0, 0
            step = self._map_blocks(selected, token_budget, *args)
            if not alone and not any(request.query_length > 1 for request in step[0]):
                self.place.let_prompts_pass()
        scheduled = step[0]
        now = {request.state.request_id for request in scheduled}
        lacking = {state.request_id for state, _ in selected.left_out}
        self.cache.begins(now, self.active_requests.keys() - now - lacking if now else ())
        self._note_scheduled(scheduled, selected)
        return step

    def _try_to_meet_safety_margin(self) -> bool:
        """Does not look, as there is none: what no request has is freed before requests are selected."""
        return True

    def _map_blocks(self, selected: Selected, token_budget: int, *args: Any) -> tuple[list[Any], bool, bool, int, int]:
        """Gives the selected requests their blocks, with pages. Returns what transformers' scheduler does."""
        where = selected.admission.where
        self.cache.on_host = frozenset([name for name, place in where.items() if place == "host"])
        for chosen in selected.steps:
            self._scored = {state.request_id: tokens for state, tokens in chosen if is_scored(state)}
            tokens = min(token_budget, sum([tokens for _, tokens in chosen]))
            states = [state for state, _ in chosen]
            scheduled, failed, fast, new, read = super()._process_candidates(states, tokens, *args)
            if scheduled:
                break
        self._needed = selected.admission.activations
        self._none_fits = self.memory.without_reserve and bool(where or selected.left_out) and not scheduled
        return scheduled, failed or bool(selected.left_out), fast, new, read

    def _infer_request_tokens(self, state: Any, *args: Any) -> list[int]:
        """Finds blocks with the beginning of a prompt, unless its own tokens are scored."""
        computes_all = state.status != RequestStatus.DECODING and is_scored(state)
        tokens: list[int]
        tokens = state.remaining_prefill_tokens if computes_all else super()._infer_request_tokens(state, *args)
        return tokens

    def _schedule_request(self, state: Any, request_tokens: list[int], token_budget: int, *args: Any) -> None:
        """Schedules a request, of a prompt that is scored no more tokens than were selected."""
        most = self._scored.get(state.request_id, token_budget)
        super()._schedule_request(state, request_tokens, min(token_budget, most), *args)

    def _note_scheduled(self, scheduled: list[Any], selected: Selected) -> None:
        """Notes what is computed next, what SLOs ask of it, and who lacks memory to go on."""
        states = [request.state for request in scheduled]
        sequences = [(request.query_length, request.state.current_len()) for request in scheduled]
        away, copied = self.cache.pages.client.read_displaced, self.cache.model.lends(0).copied if scheduled else 0
        self.cache.point, self.next = packed(sequences), replace(Step.of(sequences), away=away, copied=copied)
        if scheduled:
            self.recorder.batch(states, sum([new for new, _ in sequences]))
        if self.waiting_requests or self.others_run():
            self._waited = self.clock()
        others = self.clock() - self._waited <= self.tuning.behind
        self.slos.require(states, others)
        known = [*self.active_requests.values(), *self.waiting_requests.values()]
        self._limits = self.slos.limits(states, known)
        known_to_all = not any(map(self.recorder.lacks_token, [state.request_id for state in states]))
        steady = known_to_all and not self.waiting_requests and self.cache.model.costs.settled(self.next)
        self.repeated.looked(selected, scheduled, steady)
        self.starved_requests += [
            candidate for candidate in selected.left_out if candidate[0].request_id in self.active_requests
        ]

    def begins(self, prepared: bool) -> None:
        """Prepares the computation of a batch; without one the loop waits."""
        repeats, self._repeats = self._repeats, False
        self.timed = not repeats
        if prepared and repeats:
            return
        now, slow = self.clock(), False
        for step, seconds in self.times.drain():
            self.cache.model.costs.observe(step, seconds)
            slow |= self.selection.bound.observe(step, seconds)
        passed, self.repeated.passed = self.repeated.passed, 0
        if passed:
            self.selection.bound.pass_over(passed)
            self.memory.buffer.observe_calm(passed)
        if self._began is not None and self._limits != (math.inf, math.inf):
            # an SLO is of the time that passes for whoever waits
            self.memory.buffer.observe(tpot=now - self._began > self._limits[0], ttft=now > self._limits[1])
        elif self._began is not None:  # without one the own past counts: see step_bound.py
            self.memory.buffer.observe(tpot=slow, ttft=not slow and bool(self.waiting_requests))
        self._began = now if prepared else None
        if not prepared:
            self.recorder.rests()
        elif self._idle.passed(self._needed, passed + 1) and self._idle.gives(self.memory.idle, self._streams):
            self._trim()
        version, pending = self.cache.pages.client.manager.version, self.has_pending_requests()
        if pending != (self._ended == math.inf):
            version.bump()  # an event: models are idle or not by what `wanted` says
        if pending:
            self._ended = math.inf
            return
        if self._ended == math.inf:
            if len(self.place.seats) > 1:
                self.memory.drop_unmovable()
            if self._streams:
                self._trim()
            self._ended = now
        self.place.rest()

    @property
    def _streams(self) -> bool:
        """Do layers stream for want of pages?"""
        return self.cache.model.lends(0).copied > 0

    def _trim(self) -> None:
        """Gives back idle pages of the heap, when the last request has ended or admission.py says so. The heap keeps
        what the largest batch took, and the manager counts free pages only: under a lighter load streamed layers
        would never be restored."""
        with suppress(DriverError):  # the pages stay in the heap then
            self.cache.on.trim()

    @property
    def wanted(self) -> float:
        """The time until which requests need the model, by `clock`: infinity while there are any and it may compute."""
        if self.has_pending_requests():
            return self.place.until
        return self._ended if self._ended < math.inf else -math.inf  # the loop has died

    def pop_late(self) -> list[tuple[Any, Exception]]:
        """Takes requests out of the queue whose SLO cannot be kept any more."""
        gone = list[tuple[Any, Exception]]()
        for name in [name for name in self.waiting_requests if name in self.slos]:
            state = self.waiting_requests[name]
            if not state.generated_tokens and not state.is_cpu_offloaded and not state._true_initial_tokens:
                error = self.slos.impossible(name, len(state.initial_tokens), state.max_new_tokens or 0)
                if error is not None:
                    gone.append((self._drop(state), error))
        return gone

    def finish_request(self, request_id: str) -> None:
        """Ends a request, and records that."""
        if (state := self.active_requests.get(request_id)) is not None:
            self.recorder.ended(state)
            self.place.note_answer(generated(state))
        self.leave(request_id)

    def leave(self, request_id: str) -> None:
        """Frees the blocks of a request that ends, or begins again."""
        if (state := self.active_requests.get(request_id)) is not None:
            self.cache.ended(state)
        super().finish_request(request_id)
        self.slos.note(request_id, NOTHING)

    def clear_cancelled_requests(self) -> list[Any]:
        """Removes cancelled requests, and records that."""
        names = list(self._requests_to_cancel)
        states: list[Any] = super().clear_cancelled_requests()
        for state in states:
            self.recorder.ended(state, "cancelled")
            self.slos.note(state.request_id, NOTHING)
            self.progress.forget(state.request_id)
        for name in names:
            self.cancelled(name)
        return states

    def wait_again(self, state: Any) -> None:
        """Queues a request that has run before."""
        self.recorder.again(state)
        super().add_waiting_request(state)

    def lose_step(self, sizes: Mapping[str, int], why: object = "") -> torch.OutOfMemoryError | None:
        """Notes that a step of these requests, with so many new tokens of each, found no memory. Returns the error of
        its request if that happened too often, with the reason of the last time; None: they are computed again."""
        self._began = None  # its duration says nothing
        self.times.forget()
        self.repeated.forget()
        self.cache.model.latencies.lost += 1
        others = bool(self.active_requests.keys() - sizes.keys())
        if len(sizes) > 1:
            self.memory.raise_reserve()
        elif others and sum(sizes.values()) == 1:
            self.block_new_requests = True  # until one of the others has ended
        tries = self.progress.lose(sizes, others)
        if tries <= self.tuning.tries:
            return None
        ((name, state),) = self.active_requests.items()
        free, budget = format_size(self.memory.free().total), format_size(self.cache.on.budget)
        return torch.OutOfMemoryError(
            f"ballonet: no memory for token {state.current_len()} of request {name}, in {tries} steps of it alone: of "
            f"a budget of {budget}, {free} are free. Give more (ballonet.set_budget), or drop what is not needed. {why}"
        )


def no_room(request: str) -> torch.OutOfMemoryError:
    """Makes the error of a request that finds no memory although no other one runs."""
    return torch.OutOfMemoryError(
        f"ballonet: no memory for request {request} to go on, although no other one runs: models and tensors have it. "
        "Give a larger budget (ballonet.set_budget) or host budget, or drop what is not needed"
    )


class ElasticFIFO(ElasticScheduler, FIFOScheduler):
    """Requests that decode first, then prompts in the order in which they came."""


class ElasticPrefillFirst(ElasticScheduler, PrefillFirstScheduler):
    """Prompts that have begun first."""


class RequestRecorder:
    """Records the requests of one loop. `loop`: the name of its model. `latencies`: of its model's requests."""

    def __init__(self, loop: str, latencies: Latencies, on: Runtime) -> None:
        self._loop = loop
        self.recorders = recorders_of(on)
        self._times = RequestTimes(latencies)
        self.lacks_token = self._times.lacks_token  # does the request of this id wait for its first token?

    def came(self, state: Any) -> None:
        """Records a new request, which waits."""
        came, prompt = round(state.created_time * 1e9), len(state.initial_tokens)
        self._times.came(state.request_id, state.created_time)
        self.recorders.served(lambda all_: all_.came(self._loop, state.request_id, came, prompt))

    def again(self, state: Any) -> None:
        """Records that a request that has begun waits again."""
        self.recorders.served(lambda all_: all_.again(self._loop, state.request_id))

    def batch(self, states: Iterable[Any], tokens: int) -> None:
        """Records a batch that is computed next. Names its thread after the model, for the log of decisions."""
        thread = threading.current_thread()
        if "_run_generation_loop" in thread.name:
            thread.name = f"batches of {self._loop}"
        now = time.monotonic_ns()
        for state in states:
            if self.lacks_token(state.request_id):
                self._times.got(state.request_id, now / 1e9, generated(state))
        if self.recorders.all:
            requests = [(state.request_id, generated(state)) for state in states]
            self.recorders.served(lambda all_: all_.batch(self._loop, now, requests, tokens))

    def rests(self) -> None:
        """Records that there is nothing to compute."""
        self.recorders.served(lambda all_: all_.rests(self._loop, time.monotonic_ns()))

    def ended(self, state: Any, end: End = "finished") -> None:
        """Records the end of a request: the first that is said of it."""
        if not self._times.live(state.request_id):
            return
        tokens, now = generated(state), time.monotonic_ns()
        self._times.ended(state.request_id, now / 1e9, tokens, end == "finished")
        self.recorders.served(lambda all_: all_.ended(self._loop, state.request_id, now, tokens, end))


def generated(state: Any) -> int:
    """Tokens generated for a request, including those before it was computed again."""
    before = len(state.initial_tokens) - state._true_initial_tokens if state._true_initial_tokens else 0
    return before + len(state.generated_tokens)
