"""Which requests are in the next batch: transformers' order, and eLLM's admission (offload/policy/admission.py)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.continuous_batching.scheduler import FIFOScheduler, PrefillFirstScheduler, Scheduler

from ...allocator import runtime
from ...allocator.errors import DriverError, ManageError, RequestTooLarge, SequenceTooLong
from ...offload.policy.admission import Admission, Demand, Memory, admit, can_ever_run
from ...offload.policy.buffer import LogicalBuffer
from ...offload.policy.idle_heap import IdleHeap
from ...offload.policy.ladder import Rung
from ...offload.policy.request_slo import NOTHING, may_begin
from ...offload.policy.step_costs import Step, StepCosts
from ...offload.policy.tuning import DEFAULT, Serving
from ..device.shared import lacks, may_grow
from ..measure.point import packed
from ..sectors.beginnings import Beginnings
from .cache import ElasticPagedCache
from .noting import Noting
from .promises import Promises


class ElasticScheduler(Scheduler):
    """A scheduler with which a request takes part only where there is room for all that it needs in this step: on the
    device, or for the KV of its prompt on the host. The order is that of the other class that it is made of."""

    cache: ElasticPagedCache

    def __init__(
        self,
        cache: ElasticPagedCache,
        safety_margin: float | None,
        max_requests_per_batch: int,
        memory: Callable[[], Memory],
        most: Callable[[], Memory],
        others: Callable[[], bool],
        tuning: Serving = DEFAULT.serving,
    ) -> None:
        """As Scheduler, but that the reserve of the admission stands for the margin. `memory`: what there is for KV and
        activations at this moment; `most`: once no request runs any more. `others`: do requests of other models run?"""
        self._memory = memory
        self._most = most
        self._others_run = others
        self.tuning = tuning
        self._passed: dict[str, int] = {}
        self.promises = Promises(cache, lambda: cache.pages.client.governor.clock())
        self.reasons = dict[str, Exception | None]()  # by request whose end somebody waits for: why it failed
        self.cancelled: Callable[[str], object] = lambda request: None  # is called once a cancelled request is gone
        self._caution = 0  # bytes that stay free beside the reserve
        self.without_reserve = False  # may one request have all that is free?
        self._none_fits = False  # and is that too little for each?
        self._step: tuple[Step, float] | None = None  # the last batch, and when it was begun
        self._next = Step(0, 0)  # the batch that is computed next
        self._needed = 0  # bytes of activations that it needs
        self._idle = IdleHeap(tuning.idle)
        host: int = cache.on.snapshot()["host_budget"] if cache.on.host_pages else 0
        host = int(tuning.most * host)
        self.buffer = LogicalBuffer(host, cache.on.page_size, int(tuning.buffer * host), tuning)
        self._aside = 0 if tuning.inflation else _stock_aside(cache, memory())  # bytes that only activations may have
        self._limits = math.inf, math.inf  # seconds of the step, and the moment, that miss an SLO if they pass
        self._ended = -math.inf  # since when there is no request; infinity: there were some
        self._waited = cache.pages.client.governor.clock()  # when others waited last for the end of a batch
        self._in_row = 0  # steps of prompts alone since requests that decode had one
        living, blocks = cache.model.living, cache.kept
        shared = None if living is None else living.store
        self._beginnings = None if shared is None or blocks is None else Beginnings(blocks, shared, cache.renew)
        self._noting = Noting(cache.model.name, cache.model.latencies, runtime.holding(cache.model.device))
        super().__init__(cache, 0.0, max_requests_per_batch)
        cache.user = weakref.ref(self)
        cache.model.scheduled_by(self)

    def reset(self) -> None:
        """No request has been passed over."""
        super().reset()
        self._passed = {}

    def add_waiting_request(self, state: Any) -> None:
        """As Scheduler's. For the one request RequestTooLarge or SequenceTooLong where it can never run, SLOError where
        it cannot have what it asks, and ManageError where it has no tokens, which would end the loop."""
        if not state.initial_tokens:
            raise ManageError(f"request {state.request_id} has no tokens")
        if (slo := self.cache.model.slo) != NOTHING:
            self.promises.note(state.request_id, replace(slo, arrived=self.clock()), unless=True)
        self._noting.came(state)
        sizes = state.request_id, len(state.initial_tokens), state.max_new_tokens or 0
        if (why := self.refusal(*sizes) or self.promises.impossible(*sizes)) is not None:
            self.promises.note(state.request_id, NOTHING)
            self._noting.ended(state, "refused")
            raise why
        super().add_waiting_request(state)

    def refusal(self, request: str, prompt: int, new: int) -> RequestTooLarge | SequenceTooLong | None:
        """Says why a request of so many tokens, and so many new ones, can never run; None where it can. On any
        thread."""
        positions = self.cache.model.positions
        if positions is not None and prompt + max(0, new - 1) > positions:  # the last token is not computed with
            return SequenceTooLong(request, prompt, new, positions)
        return self._refused(request, prompt, new, self._most())

    def _refused(self, request: str, prompt: int, new: int, most: Memory) -> RequestTooLarge | None:
        """`most`: all that there is for it."""
        staging = self.cache.sizes.of(min(prompt, self.cache.max_batch_tokens), prompt + new)
        needed, most_read = self.cache.bytes_of(prompt + new) + staging, self.cache.max_tokens_read
        most = replace(most, reserve=most.reserve + self._aside)
        if not can_ever_run(needed, staging, most):
            return RequestTooLarge(request, needed, most.total - most.reserve, most.host)
        if prompt + new > most_read:
            return RequestTooLarge(request, needed, most.total - most.reserve, most.host, (prompt + new, most_read))
        return None

    @property
    def runs(self) -> bool:
        """Has any request begun, and not ended?"""
        return bool(self.active_requests)

    @property
    def alone(self) -> bool:
        """Do requests wait although none runs, of this model or of others, whose end could give them memory?"""
        return bool(self.waiting_requests) and not self.runs and not self._others_run()

    def hopeless(self) -> list[tuple[Any, Exception]]:
        """Takes those out of the queue that all that is free now is too little for. To be called where requests are
        `alone`: what there is has turned out to be less than `refusal` could know. From now on one of the others at a
        time may have all of it, without a reserve; where that was too little for each, the oldest one goes."""
        now, gone, blocks = self._free(), list[tuple[Any, Exception]](), self.cache.pages
        most = replace(now, elsewhere=now.elsewhere + blocks.nbytes - blocks.fixed)
        for name, state in list(self.waiting_requests.items()):
            why = self._refused(name, len(state.initial_tokens), state.max_new_tokens or 0, most)
            if why is not None:
                gone.append((self._drop(state), why))
        if self._none_fits and not gone:
            state = self.waiting_requests[self.waiting_requests_order[0]]
            gone.append((self._drop(state), no_room(state.request_id)))
        self.without_reserve, self._none_fits = bool(self.waiting_requests), False
        return gone

    def _free(self) -> Memory:
        """All that one request may have while no other one runs."""
        return replace(self._memory(), reserve=0)

    def _drop(self, state: Any) -> Any:
        del self.waiting_requests[state.request_id]
        self.waiting_requests_order.remove(state.request_id)
        self._noting.ended(state, "refused")
        return state

    def _process_candidates(
        self, candidates: list[Any], token_budget: int, *args: Any
    ) -> tuple[list[Any], bool, bool, int, int]:
        self.cache.pool.try_to_free_sectors()
        looked = self._looked(candidates, token_budget)
        if not looked and self._beginnings is not None and self._beginnings.wait(self.tuning.look):
            looked = self._looked(candidates, token_budget)
        found, now = self._admitted(looked), self._now()
        taken = found.kv + found.activations - (now.usable - now.dear)
        if taken > 0 and self.cache.evict_oldest(taken):  # rather than that others get slower
            found = self._admitted(looked)
        lacking = [self.demand(*each) for each in looked if each[0].request_id not in found.where]
        if lacking and self.cache.evict_oldest(sum(each.kv + each.activations for each in lacking)):
            found = self._admitted(looked)
        self._make_room(found)
        left_out = [each for each in looked if each[0].request_id not in found.where]
        lacking = [self.demand(*each) for each in left_out]
        lacks(self.cache.on, sum(each.kv + each.activations for each in lacking))
        self._passed = {name: self._passed.get(name, 0) + 1 for name in found.passed}
        self.cache.on_host = frozenset(name for name, where in found.where.items() if where == "host")
        for chosen in self._steps([each for each in looked if each[0].request_id in found.where]):
            tokens = min(token_budget, sum(tokens for _, tokens in chosen))
            states = [state for state, _ in chosen]
            scheduled, failed, fast, new, read = super()._process_candidates(states, tokens, *args)
            if scheduled:
                break
        self._needed = found.activations
        self._none_fits = self.without_reserve and bool(looked) and not scheduled
        self.cache.begins(each.state.request_id for each in scheduled)
        sequences = [(each.query_length, each.state.current_len()) for each in scheduled]
        away = self.cache.pages.client.read_away
        self.cache.point, self._next = packed(sequences), replace(Step.of(sequences), away=away)
        if scheduled:
            self._noting.batch((each.state for each in scheduled), sum(each.query_length for each in scheduled))
        if self.waiting_requests or self._others_run():
            self._waited = self.clock()
        others = self.clock() - self._waited <= self.tuning.behind
        self.promises.require([each.state for each in scheduled], others)
        self._limits = self.promises.limits(
            [each.state for each in scheduled], [*self.active_requests.values(), *self.waiting_requests.values()]
        )
        self.starved_requests += [each for each in left_out if each[0].request_id in self.active_requests]
        return scheduled, failed or bool(left_out), fast, new, read

    def _admitted(self, looked: list[tuple[Any, int]]) -> Admission:
        """Algorithm 1; with the memory that the model's own layers would give, and with KV of new requests on the host,
        only where that makes more tokens per second than fewer requests do without."""
        demands, now = [self.demand(*each) for each in looked], self._now()
        found = admit(demands, now, self.tuning)
        self.without_reserve = self.without_reserve and not found.where
        if not found.where:
            alone = (admit([each], self._free(), self.tuning) for each in self._may_have_all(demands))
            return next((each for each in alone if each.where), found)
        if not self.cache.model.fast:
            return found
        own = min(self.cache.model.lends(0).offered * self.cache.on.page_size, now.elsewhere)
        without = [now] if self._lacking(found, now, own) <= 0 else [now, replace(now, elsewhere=now.elsewhere - own)]
        for memory in (*without[1:], *(replace(each, host=0) for each in without)):
            fewer = admit(demands, memory, self.tuning)
            begun = fewer.where.keys() >= found.where.keys() & self.active_requests.keys()
            if fewer.where and (memory.host or begun):
                steps = [self._decoding(looked, each, self._lacking(each, now, own)) for each in (fewer, found)]
                found = fewer if self._costs.faster(*steps) else found
        return found

    def _may_have_all(self, demands: list[Demand]) -> list[Demand]:
        """Returns those one of which may have all that is free, without a reserve: the one that runs, where nobody else
        could give memory, or those that have waited for long (`hopeless`)."""
        if len(self.active_requests) == 1 and not self._others_run() and not may_grow(self.cache.on):
            return [each for each in demands if each.request in self.active_requests]
        return demands if self.without_reserve and not self.runs else []

    def _lacking(self, chosen: Admission, now: Memory, own: int) -> int:
        """Bytes of these that the model's own layers have to give. `own`: that they could."""
        return chosen.kv + chosen.activations + now.reserve - (now.total - own) if own else 0

    def _make_room(self, found: Admission) -> None:
        """Has pages that rest leave before KV takes those that lie idle in the heap, as activations use the same ones
        in each step, and would map them anew in each: more than twice of what they take may go."""
        page, now = self.cache.on.page_size, self._memory()
        spare = self.cache.on.available + max(0, now.activations - 2 * found.activations) // page
        lacking = found.kv // page - spare
        if lacking > 0:
            lacking = max(lacking, now.reserve // page)
            with suppress(DriverError):
                lacking -= self.cache.pages.client.governor.ladder.pull(Rung.IDLE_KV, lacking)
            if lacking > 0:
                self.cache.evict_oldest(lacking * page)

    def _decoding(self, looked: list[tuple[Any, int]], chosen: Admission, lacking: int) -> Step:
        """The step in which those that are admitted decode, after this one. `lacking`: bytes that own layers give."""
        states = [(state, tokens) for state, tokens in looked if state.request_id in chosen.where]
        away = sum(
            self.demand(state, tokens).kv if chosen.where[state.request_id] == "host" else 0 for state, tokens in states
        )
        lent = self.cache.model.lends(max(0, -(-lacking // self.cache.on.page_size)))
        step = Step.of((1, state.current_len() + tokens) for state, tokens in states)
        away = away // self.cache.on.page_size + self.cache.pages.client.displaced
        return replace(step, copied=lent.then if lacking > 0 else lent.copied, away=away)

    def begins(self, found: bool) -> None:
        """A batch is about to be computed; where there is none the loop waits."""
        now = self.clock()
        if self._step is not None:
            copied = self.cache.model.lends(0).copied
            self._costs.observe(replace(self._step[0], copied=copied), now - self._step[1])
            self.buffer.observe(tpot=now - self._step[1] > self._limits[0], ttft=now > self._limits[1])
        self._step = (self._next, now) if found else None
        if not found:
            self._noting.rests()
        elif self._idle.passed(self._needed) and self._idle.gives(self._memory().activations, self._streams):
            self._trim()
        if self.has_pending_requests():
            self._ended = math.inf
        elif self._ended == math.inf:
            if self._streams:
                self._trim()
            self._ended = now

    @property
    def _streams(self) -> bool:
        """Do layers stream for want of pages?"""
        return self.cache.model.lends(0).copied > 0

    def _trim(self) -> None:
        """Gives the pages back that lie idle in the heap: when the last request has ended, or as idle_heap.py says. The
        heap keeps what the largest batch took, and the governor counts with free pages alone: under a lighter load
        layers that stream would never come home."""
        with suppress(DriverError):  # they stay in the heap then
            self.cache.on.trim()

    @property
    def wanted(self) -> float:
        """Until when requests need the model, by `clock`: infinity while there are any."""
        if self.has_pending_requests():
            return math.inf
        return self._ended if self._ended < math.inf else -math.inf  # the loop has died

    def _looked(self, candidates: list[Any], token_budget: int) -> list[tuple[Any, int]]:
        """Returns those that could be in the batch, with the new tokens of each: none whose beginning is being read."""
        looked: list[tuple[Any, int]] = []
        if self._beginnings is not None:
            self._beginnings.only(self.waiting_requests)
        for state in self._worth(candidates):
            if token_budget <= 0:
                break
            if self._begun(state, looked):
                looked.append((state, min(self._tokens(state), token_budget)))
                token_budget -= looked[-1][1]
        return looked

    def _begun(self, state: Any, before: list[tuple[Any, int]]) -> bool:
        """Is what is stored of its prompt where it is found, if the request has none of its own yet? `before`: those
        that go before it, with their new tokens."""
        if self._beginnings is None or state.status != RequestStatus.PENDING or state.is_cpu_offloaded:
            return True

        def room() -> int:
            demands = [self.demand(*each) for each in [*before, (state, 1)]]
            return self.room() - sum(each.kv + each.activations for each in demands)

        return self._beginnings.look(state.request_id, state.remaining_prefill_tokens, room)

    def _worth(self, candidates: list[Any]) -> list[Any]:
        """Returns the candidates without those that wait and would make steps slower than is worth it, or is asked."""
        running, room = len(self.active_requests), len(candidates)
        if candidates and self.cache.model.fast:
            length = sum(state.current_len() + self._tokens(state) for state in candidates) / len(candidates)
            if self._costs.slower(len(candidates), length):
                room = max(0, (self._costs.largest(length) or 0) - running) or not running
        beside = [(_at_end(state), self.promises.asked(state.request_id)) for state in self.active_requests.values()]
        worth = []
        for state in candidates:
            if state.request_id not in self.active_requests:
                tokens, slo = _at_end(state), self.promises.asked(state.request_id)
                if not room or not may_begin(self._costs.parts, beside, tokens, slo):
                    continue
                room -= 1
                beside.append((tokens, slo))
            worth.append(state)
        return worth

    def _steps(self, admitted: list[tuple[Any, int]]) -> list[list[tuple[Any, int]]]:
        """One step of all that are admitted; or, where prompts are faster in one of their own, two, of which the second
        counts where the first is none: prompts first, which make the batch larger, but only so many times."""
        decoding = [each for each in admitted if each[0].status == RequestStatus.DECODING]
        prompts = [each for each in admitted if each[0].status != RequestStatus.DECODING]
        parts = [Step.of((tokens, state.current_len()) for state, tokens in part) for part in (decoding, prompts)]
        if not decoding or not prompts or not self.cache.model.fast or not self._costs.apart(*parts):
            return [admitted]
        hurry = any(self.promises.asked(state.request_id).tpot is not None for state, _ in decoding)
        self._in_row = (self._in_row + 1) % ((1 if hurry else self.tuning.prompts) + 1)
        return [prompts, decoding] if self._in_row else [decoding, prompts]

    def late(self) -> list[tuple[Any, Exception]]:
        """Takes those out of the queue that have waited too long for what they ask."""
        gone = list[tuple[Any, Exception]]()
        for name in [name for name in self.waiting_requests if name in self.promises]:
            state = self.waiting_requests[name]
            if not state.generated_tokens and not state.is_cpu_offloaded and not state._true_initial_tokens:
                error = self.promises.impossible(name, len(state.initial_tokens), state.max_new_tokens or 0)
                if error is not None:
                    gone.append((self._drop(state), error))
        return gone

    def finish_request(self, request_id: str) -> None:
        """As Scheduler's."""
        if (state := self.active_requests.get(request_id)) is not None:
            self.cache.ended(state)
            self._noting.ended(state)
        super().finish_request(request_id)
        self.promises.note(request_id, NOTHING)

    def clear_cancelled_requests(self) -> list[Any]:
        """As Scheduler's."""
        names = list(self._requests_to_cancel)
        found: list[Any] = super().clear_cancelled_requests()
        for state in found:
            self._noting.ended(state, "cancelled")
            self.promises.note(state.request_id, NOTHING)
        for name in names:
            self.cancelled(name)
        return found

    def clock(self) -> float:
        """Seconds, as the governor has them."""
        return self.cache.pages.client.governor.clock()

    @property
    def _costs(self) -> StepCosts:
        return self.cache.model.costs

    def wait_again(self, state: Any) -> None:
        """A request that has run before waits for its turn."""
        self._noting.again(state)
        super().add_waiting_request(state)

    def lacked(self) -> None:
        """A step found no memory in the middle, although it was admitted: from now on more stays free."""
        self._caution += max(self._caution, self._memory().reserve)
        self._step = None  # what it took says nothing

    def dares(self) -> bool:
        """Nothing runs as too much stays free: no more than the reserve does from now on, and all of the host may be
        used. False where it is so."""
        before, self._caution = self._caution, 0
        return self.buffer.open() or before > 0

    def room(self) -> int:
        """Bytes that requests may have beyond what they have."""
        return self._now().usable

    def seconds_again(self, state: Any) -> float | None:
        """What it takes to compute all tokens of a request again; None where nobody knows."""
        parts = self._costs.parts
        return None if parts is None else parts.prefill(state.current_len(), self.cache.max_batch_tokens)

    def demand(self, state: Any, tokens: int) -> Demand:
        """What a request needs for so many more tokens."""
        sizes, kept = self.cache.sizes, state.is_cpu_offloaded  # see preemption.py, Note [Preempted]
        exchanged = self.tuning.inflation  # else activations have what lies aside
        away = self.cache.on_host_bytes(state.request_id) if kept else 0
        return Demand(
            state.request_id,
            self.cache.bytes_needed(state, tokens) + away,
            sizes.of(tokens, state.current_len() + self._found(state)) if exchanged else 0,
            staging=sizes.staging(tokens),
            decoding=kept or state.status == RequestStatus.DECODING,
            passed=self._passed.get(state.request_id, 0),
            away=away,
        )

    def _now(self) -> Memory:
        now = self._memory()
        used = self.cache.pages.client.displaced * self.cache.on.page_size
        host = min(now.host, self.buffer.usable(used))
        return replace(now, reserve=now.reserve + self._caution + self._aside, host=host)

    def _tokens(self, state: Any) -> int:
        if state.status == RequestStatus.DECODING:
            return len(state.tokens_to_process)
        return len(state.remaining_prefill_tokens) - self._found(state)

    def _found(self, state: Any) -> int:
        """Tokens of a request that has none yet, which blocks of others hold."""
        if self._beginnings is None or state.status != RequestStatus.PENDING or state.is_cpu_offloaded:
            return 0
        return self._beginnings.found(state.request_id)


def _stock_aside(cache: ElasticPagedCache, memory: Memory) -> int:
    """What stock sets aside for the activations of the largest batch, which reads all KV that there is room for."""
    sizes, batch = cache.sizes, cache.sizes.of(cache.max_batch_tokens, 0)
    kv = cache.bytes_per_sector / cache.tokens_per_sector
    return batch + round(max(0, memory.total - batch) * sizes.read / (kv + sizes.read))


def _at_end(state: Any) -> int:
    """Tokens that the request holds when it ends."""
    return len(state.initial_tokens) + (state.max_new_tokens or 0)


def no_room(request: str) -> torch.OutOfMemoryError:
    """Says that a request finds no memory although no other one runs."""
    return torch.OutOfMemoryError(
        f"ballonet: no memory for request {request} to go on, although no other one runs: models and tensors have it. "
        "Give a larger budget (ballonet.set_budget) or host budget, or drop what is not needed"
    )


class ElasticFIFO(ElasticScheduler, FIFOScheduler):
    """Requests that decode first, then prompts in the order in which they came."""


class ElasticPrefillFirst(ElasticScheduler, PrefillFirstScheduler):
    """Prompts that have begun first."""
