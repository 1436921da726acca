"""Which candidates are in the next batch, and in which step: eLLM's admission (offload/policy/admission.py), and what
the SLOs of requests ask of it; and the stored beginnings of prompts, copied into blocks before their requests are
chosen.

Note [Looked up once]
    A waiting request is looked up when it could be in the next batch. Tokens that sequences of `generate()` have are
    copied at once. Tokens in files are read on a reading thread, one request at a time; only that request waits for it.
    Filled blocks are found by transformers' own search, like those of requests that have ended; if they are evicted
    before, their tokens are computed. No more is copied than fits, and an error is a miss.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from transformers.generation.continuous_batching.requests import RequestStatus

from ...allocator.errors import BallonetError, PoolExhausted, SLOError
from ...offload.policy.admission import Admission, Demand, Memory, admit
from ...offload.policy.prefixes import chain
from ...offload.policy.step_bound import ReadingTurns, StepBound
from ...offload.policy.step_costs import NOTHING, RequestSLO, Step, may_begin, refused, tightest
from ...offload.policy.tuning import DEFAULT, Serving
from ..device.shared import lacks, may_grow
from ..prefix.sequence import Gone, StoredTokens, TokenRun, open_runs
from ..prefix.store import PrefixStore
from ..sampling.carried import is_scored
from .blocks import ListedBlocks
from .cache import ElasticPagedCache
from .memory import RequestMemory

Candidate = tuple[Any, int]  # (transformers' state of a request, the new tokens that it would have in the batch)
_FAILURES = (BallonetError, PoolExhausted, torch.OutOfMemoryError, MemoryError, Gone)
Opened = Callable[[int, int], AbstractContextManager[StoredTokens | None]]  # opens the tokens [start, end)
# So many steps of prompts alone may follow one another before those that decode have one: a gap of five steps. Chosen.
_PROMPTS: Final = 4


@dataclass(frozen=True, slots=True)
class Selected:
    """A selected batch. `admission`: of the candidates that were looked at. `steps`: the chosen candidates by step,
    where a step counts only if those before it are empty. `left_out`: the others."""

    admission: Admission
    steps: list[list[Candidate]]
    left_out: list[Candidate]


class Selection:
    """Selects the batches of one loop. Used by its thread."""

    def __init__(
        self,
        cache: ElasticPagedCache,
        memory: RequestMemory,
        slos: RequestSLOs,
        others: Callable[[], bool],
        tuning: Serving = DEFAULT.serving,
    ) -> None:
        """`others`: do requests of other models run?"""
        self._cache = cache
        self._memory = memory
        self._slos = slos
        self._others_run = others
        self._tuning = tuning
        self._passed: dict[str, int] = {}  # by request: how often it was passed over
        self._in_row = 0  # steps of prompts alone since requests that decode had one
        self.bound = StepBound(tuning)
        self._turns = ReadingTurns(tuning)
        self.leaving = frozenset[str]()  # requests that have begun, and give up their pages before there is a batch
        loop_caches, blocks = cache.model.loop_caches, cache.kept
        shared = None if loop_caches is None else loop_caches.store
        self._loader = None if shared is None or blocks is None else PrefixLoader(blocks, shared, cache.renew)

    def reset(self) -> None:
        """Forgets which requests were passed over."""
        self._passed = {}

    def select(
        self, candidates: Sequence[Any], budget: int, most: float, active: Mapping[str, Any], waiting: Collection[str]
    ) -> Selected:
        """Selects from candidates, of which `active` have begun and `waiting` have not, no more than `budget` new
        tokens of `most` requests. Frees unused blocks and pages where some lack memory."""
        reading = self._in_turn(candidates, active)
        selected = self._selected(reading, budget, most, active, waiting)
        if selected.admission.where or len(reading) == len(candidates):
            return selected
        return self._selected(candidates, budget, most, active, waiting)  # the others lack memory

    def _selected(
        self, candidates: Sequence[Any], budget: int, most: float, active: Mapping[str, Any], waiting: Collection[str]
    ) -> Selected:
        self.leaving = frozenset()
        looked = self._looked(candidates, budget, active, waiting)
        if not looked and self._loader is not None and self._loader.wait_for_files(self._tuning.look):
            looked = self._looked(candidates, budget, active, waiting)
        admission = self._admitted(looked, active)
        if len(looked) > most:
            fitting = [candidate for candidate in looked if candidate[0].request_id in admission.where]
            looked = (fitting or looked)[: int(most)]
            admission = self._admitted(looked, active)
        now = self._memory.now()
        taken = admission.kv + admission.activations - (now.usable - now.in_use)
        if taken > 0 and self._cache.evict_kept(taken):  # rather than that others get slower
            admission = self._admitted(looked, active)
        lacking = self.needed(candidate for candidate in looked if candidate[0].request_id not in admission.where)
        if lacking and self._cache.evict_kept(lacking):
            admission = self._admitted(looked, active)
        self._memory.make_room(admission)
        left_out = [candidate for candidate in looked if candidate[0].request_id not in admission.where]
        lacks(self._cache.on, self.needed(left_out))
        self._passed = {name: self._passed.get(name, 0) + 1 for name in admission.passed}
        steps = self._steps([candidate for candidate in looked if candidate[0].request_id in admission.where])
        return Selected(admission, steps, left_out)

    def _looked(
        self, candidates: Sequence[Any], budget: int, active: Mapping[str, Any], waiting: Collection[str]
    ) -> list[Candidate]:
        """Returns the candidates for the batch with the new tokens of each, without those whose beginning is still
        being read from files."""
        looked: list[Candidate] = []
        scores = self._cache.logit_rows
        if self._loader is not None:
            self._loader.keep_only(waiting)
        for state in self._worth(candidates, active):
            if budget <= 0:
                break
            tokens = min(budget, scores) if is_scored(state) else budget
            if tokens and self._begun(state, looked):
                looked.append((state, min(self._tokens(state), tokens)))
                budget -= looked[-1][1]
                scores -= looked[-1][1] if is_scored(state) else 0
        return looked

    def _in_turn(self, candidates: Sequence[Any], active: Mapping[str, Any]) -> Sequence[Any]:
        """Returns the candidates without those that decode with KV on the host, and are not to read it in the next
        step (offload/policy/step_bound.py)."""
        if not self._cache.model.fast or not self._cache.pages.client.displaced:
            return candidates
        decoding = [
            state for state in candidates if state.request_id in active and state.status == RequestStatus.DECODING
        ]
        away = self._pages_away(decoding)
        most = self._readable(Step.of((1, state.current_len()) for state in decoding), active)
        reading = self._turns.choose(away, most, len(away) < len(decoding))
        return [state for state in candidates if state.request_id not in away or state.request_id in reading]

    def _pages_away(self, states: Iterable[Any]) -> dict[str, int]:
        """Pages of KV on the host, by request, of those of these that have any."""
        page, pages = self._cache.on.page_size, self._cache.request_pages
        if not self._cache.pages.client.displaced:
            return {}
        sizes = {state.request_id: pages.on_host_bytes(state.request_id) // page for state in states}
        return {request: size for request, size in sizes.items() if size}

    def _readable(self, step: Step, active: Mapping[str, Any]) -> float:
        """Pages of KV on the host that a step may read: as its requests' SLO says, or else the steps before it."""
        slo = tightest(self._slos.asked(request) for request in active).tpot
        return self._cache.model.costs.readable(step, self.bound.seconds if slo is None else slo)

    def _begun(self, state: Any, before: list[Candidate]) -> bool:
        """Is the stored beginning of the request's prompt in blocks, or has it begun already? `before`: the candidates
        that go before it, with their new tokens."""
        if (loader := self._loader_of(state)) is None:
            return True

        def room() -> int:
            return self._memory.now().usable - self.needed([*before, (state, 1)])

        return loader.look_up(state.request_id, state.remaining_prefill_tokens, room)

    def _loader_of(self, state: Any) -> PrefixLoader | None:
        """Returns what fills blocks for a request; None where it has begun, or computes all of its tokens itself."""
        begins = state.status == RequestStatus.PENDING and not state.is_cpu_offloaded and not is_scored(state)
        return self._loader if begins else None

    def _worth(self, candidates: Sequence[Any], active: Mapping[str, Any]) -> list[Any]:
        """Returns the candidates without waiting ones that would slow down steps more than is worthwhile, or than SLOs
        allow."""
        costs, room = self._cache.model.costs, len(candidates)
        if candidates and self._cache.model.fast:
            length = sum(state.current_len() + self._tokens(state) for state in candidates) / len(candidates)
            if costs.slower(len(candidates), length):
                room = max(0, (costs.largest(length) or 0) - len(active)) or not active
        beside = [(_at_end(state), self._slos.asked(state.request_id)) for state in active.values()]
        worth = []
        for state in candidates:
            if state.request_id not in active:
                tokens, slo = _at_end(state), self._slos.asked(state.request_id)
                if not room or not may_begin(costs.parts, beside, tokens, slo):
                    continue
                room -= 1
                beside.append((tokens, slo))
            worth.append(state)
        return worth

    def _admitted(self, looked: list[Candidate], active: Mapping[str, Any]) -> Admission:
        """Runs Algorithm 1. Takes memory from the model's own layers and from what others use, and puts KV of new
        requests on the host, only where that makes more tokens per second than fewer requests do without."""
        demands, now = [self.demand(*candidate) for candidate in looked], self._memory.now()
        if self._cache.model.fast and [demand for demand in demands if not demand.decoding]:
            step = Step.of((1, state.current_len() + tokens) for state, tokens in looked)
            pages = max(0, self._readable(step, active) - self._cache.pages.client.displaced)
            now = replace(now, host=int(min(now.host, pages * self._cache.on.page_size)))
        best = admit(demands, now, self._tuning)
        best = best if best.where else self._one(demands, active)
        self._memory.without_reserve = self._memory.without_reserve and not best.where
        if not best.where:
            alone = (
                admit([demand], self._memory.free(), self._tuning) for demand in self._may_have_all(demands, active)
            )
            return next((admission for admission in alone if admission.where), best)
        if not self._cache.model.fast:
            return best
        own = min(self._cache.model.lends(0).offered * self._cache.on.page_size, now.elsewhere)
        now = replace(now, in_use=max(0, now.in_use - own))  # its own layers have a price of their own
        without = [now] if self._lacking(best, now, own) <= 0 else [now, replace(now, elsewhere=now.elsewhere - own)]
        choices = [(demands, memory) for memory in (*without[1:], *(replace(free, host=0) for free in without))]
        if active and now.in_use:
            begun_alone = [demand for demand in demands if demand.request in active]
            choices += (demands, replace(now, elsewhere=now.elsewhere - now.in_use)), (begun_alone, now)
        for some, memory in choices:
            fewer = admit(some, memory, self._tuning)
            begun = fewer.where.keys() >= best.where.keys() & active.keys()
            if fewer.where and (memory.host or begun):
                steps = [self._decoding(looked, choice, now, own) for choice in (fewer, best)]
                best = fewer if self._cache.model.costs.faster(*steps) else best
        if len(active) > 1 and (now.in_use or self._cache.pages.client.displaced):
            begun_alone = [demand for demand in demands if demand.request in active]
            best, self.leaving = self._shrunk(looked, best, begun_alone, replace(now, reserve=0), own)
        return best

    def _shrunk(
        self, looked: list[Candidate], best: Admission, begun: list[Demand], now: Memory, own: int
    ) -> tuple[Admission, frozenset[str]]:
        """Returns `best`, or an admission of fewer of those that have `begun`, if that makes more tokens per second
        than pages that others use, or that are read on the host: those that lack pages wait for a step, or the newest
        give up theirs. These are named. `now`: without a reserve, which is for those that begin."""
        faster, leaving, leave = self._cache.model.costs.faster, list[str](), frozenset[str]()
        pages, page = self._cache.request_pages, self._cache.on.page_size
        step = self._decoding(looked, best, now, own)
        while len(begun) > 1:
            fewer = admit(begun, replace(now, elsewhere=now.elsewhere - now.in_use), self._tuning, pass_over=True)
            its = self._decoding(looked, fewer, now, own)
            if fewer.where and faster(its, step):
                best, step, leave = fewer, its, frozenset(leaving)
            decoding = [demand for demand in begun if demand.decoding]
            if all(demand.request in fewer.where for demand in decoding):
                break
            begun = [demand for demand in begun if demand is not decoding[-1]]
            leaving.append(newest := decoding[-1].request)
            given = pages.count(newest) * page - pages.on_host_bytes(newest)
            now = replace(now, elsewhere=now.elsewhere + given)
        return best, leave

    def _one(self, demands: list[Demand], active: Mapping[str, Any]) -> Admission:
        """Admits one request, whose step is made as small as it has to be (offload/policy/progress.py): what lost steps
        have added to the reserve is for several."""
        memory = self._memory.now(plain=True)
        where = admit(demands, memory, self._tuning).where
        fitting = [demand for demand in demands if demand.request in where]
        return admit([one for one in fitting if not active or one.request in active][:1], memory, self._tuning)

    def _may_have_all(self, demands: list[Demand], active: Mapping[str, Any]) -> list[Demand]:
        """Returns the demands one of which may use all free memory, without a reserve: that of the running request if
        no other could free memory, or those that have waited for long (`ElasticScheduler.pop_unservable`)."""
        if len(active) == 1 and not self._others_run() and not may_grow(self._cache.on):
            return [demand for demand in demands if demand.request in active]
        return demands if self._memory.without_reserve and not active else []

    def _lacking(self, chosen: Admission, now: Memory, own: int) -> int:
        """Bytes that the model's own layers have to give for these. `own`: bytes that they could give."""
        return chosen.kv + chosen.activations + now.reserve - (now.total - own) if own else 0

    def _decoding(self, looked: list[Candidate], chosen: Admission, now: Memory, own: int) -> Step:
        """The later step in which the admitted requests decode. What others use and would lack costs them what reading
        as much on the host does. `own`: bytes that the model's own layers could give."""
        states = [(state, tokens) for state, tokens in looked if state.request_id in chosen.where]
        away = sum(
            self.demand(state, tokens).kv if chosen.where[state.request_id] == "host" else 0 for state, tokens in states
        )
        lacking, taken = self._lacking(chosen, now, own), chosen.kv + chosen.activations + now.reserve - now.total
        lent = self._cache.model.lends(max(0, -(-lacking // self._cache.on.page_size)))
        step = Step.of((1, state.current_len() + tokens) for state, tokens in states)
        page = self._cache.on.page_size
        away = (away + max(0, taken + now.in_use + self._cache.pages.client.displaced * page)) // page
        return replace(step, copied=lent.then if lacking > 0 else lent.copied, away=away)

    def _steps(self, admitted: list[Candidate]) -> list[list[Candidate]]:
        """Returns one step of all admitted requests; or two, the second of which counts if the first is empty, where
        prompts are faster in a step of their own, or what the others read on the host would make one step too long:
        prompts first, which make the batch larger, but only so many times in a row."""
        decoding = [candidate for candidate in admitted if candidate[0].status == RequestStatus.DECODING]
        prompts = [candidate for candidate in admitted if candidate[0].status != RequestStatus.DECODING]
        parts = [Step.of((tokens, state.current_len()) for state, tokens in part) for part in (decoding, prompts)]
        if not decoding or not prompts or not self._cache.model.fast:
            return [admitted]
        states = {state.request_id: state for state, _ in decoding}
        reads = sum(self._pages_away(states.values()).values())
        too_long = reads > 0 and reads > self._readable(parts[0] + parts[1], states)
        if not too_long and not self._cache.model.costs.apart(*parts):
            return [admitted]
        hurry = too_long or any(self._slos.asked(state.request_id).tpot is not None for state, _ in decoding)
        self._in_row = (self._in_row + 1) % ((1 if hurry else _PROMPTS) + 1)
        return [prompts, decoding] if self._in_row else [decoding, prompts]

    def needed(self, candidates: Iterable[Candidate]) -> int:
        """Bytes of the device that candidates need."""
        demands = [self.demand(*candidate) for candidate in candidates]
        return sum(demand.kv + demand.activations for demand in demands)

    def demand(self, state: Any, tokens: int) -> Demand:
        """Returns the memory that a request needs for so many more tokens."""
        sizes, kept = self._cache.sizes, state.is_cpu_offloaded  # see steps.py, Note [Preempted]
        exchanged = self._tuning.activations_give  # else activations have memory of their own
        away = self._cache.request_pages.on_host_bytes(state.request_id) if kept else 0
        return Demand(
            state.request_id,
            self._cache.bytes_needed(state, tokens) + away,
            sizes.of(tokens, state.current_len() + self._found(state)) if exchanged else 0,
            staging=sizes.staging(tokens),
            decoding=kept or state.status == RequestStatus.DECODING,
            passed=self._passed.get(state.request_id, 0),
            away=away,
        )

    def _tokens(self, state: Any) -> int:
        if state.status == RequestStatus.DECODING:
            return len(state.tokens_to_process)
        return len(state.remaining_prefill_tokens) - self._found(state)

    def _found(self, state: Any) -> int:
        """Tokens of a new request that other requests' blocks hold."""
        loader = self._loader_of(state)
        return 0 if loader is None else loader.loaded_tokens(state.request_id)


def _at_end(state: Any) -> int:
    """Tokens that the request holds when it ends."""
    return len(state.initial_tokens) + (state.max_new_tokens or 0)


Required = tuple[float | None, float | None, bool]
_NOT_REQUIRED: Final[Required] = (None, None, False)


class RequestSLOs:
    """SLOs by request. The server notes them on any thread; the loop reads them."""

    def __init__(self, cache: ElasticPagedCache, clock: Callable[[], float]) -> None:
        """`clock`: the manager's, in seconds."""
        self._cache = cache
        self._clock = clock
        self.known: dict[str, RequestSLO] = {}  # by request, of those that have one
        self._required: Required = _NOT_REQUIRED  # the last call of `require`

    @property
    def quiet(self) -> bool:
        """Does no request ask for anything, and has the manager been told so?"""
        return not self.known and self._required[:2] == _NOT_REQUIRED[:2]

    def __contains__(self, request: str) -> bool:
        return request in self.known

    def note(self, request: str, slo: RequestSLO, *, unless: bool = False) -> None:
        """Notes the SLO of a request, which may be NOTHING; `unless`: only where none is noted."""
        if slo == NOTHING:
            self.known.pop(request, None)
        elif unless:
            self.known.setdefault(request, slo)
        else:
            self.known[request] = slo

    def asked(self, request: str) -> RequestSLO:
        """Returns the SLO of the request."""
        return self.known.get(request, NOTHING)

    def impossible(self, request: str, prompt: int, new: int) -> SLOError | None:
        """Returns why the SLO of a waiting request cannot be kept; None where it can. On any thread."""
        slo, batch = self.asked(request), self._cache.max_batch_tokens
        refusal = refused(self._cache.model.costs.parts, slo, prompt, new, batch, self._clock())
        return None if refusal is None else SLOError(f"request {request}: {refusal}", refusal.possible, None)

    def require(self, scheduled: Sequence[Any], others: bool) -> None:
        """Tells the manager the SLOs of the batch, and whether `others` wait for its end. The time to a first token is
        what is left of it, in steps of a third."""
        if self.known or self._required != _NOT_REQUIRED:
            slos, now = [self.asked(state.request_id) for state in scheduled], self._clock()
            prompts = [slo for state, slo in zip(scheduled, slos, strict=True) if not state.generated_tokens]
            left = min((max(1e-3, slo.arrived + slo.ttft - now) for slo in prompts if slo.ttft), default=None)
            ttft = None if left is None else 10 ** (math.floor(math.log10(left) * 8) / 8)
            self._required = tightest(slos).tpot, ttft, others
            self._cache.model.require(*self._required)

    def due(self, running: Iterable[str], waiting: Iterable[Any], could: float) -> float:
        """Returns until when the model has to have the device for its requests' SLOs; infinity where there are none.
        `could`: when it could compute last."""
        if not self.known:
            return math.inf
        parts, batch = self._cache.model.costs.parts, self._cache.max_batch_tokens
        tpot = tightest(self.asked(name) for name in running).tpot
        moments = [math.inf if tpot is None else could + tpot]
        for state in waiting:
            if (slo := self.asked(state.request_id)).ttft is not None:
                prompt = 0.0 if parts is None else parts.prefill(len(state.initial_tokens), batch)
                moments.append(slo.arrived + slo.ttft - prompt)
        return min(moments)

    def limits(self, scheduled: Sequence[Any], known: Sequence[Any]) -> tuple[float, float]:
        """Returns (seconds that the step may take for its decoding requests, the earliest deadline of a first token
        among the `known` requests), infinity where there is no SLO."""
        if not self.known:
            return math.inf, math.inf
        decoding = tightest(self.asked(state.request_id) for state in scheduled if state.generated_tokens).tpot
        asked = [self.asked(state.request_id) for state in known if not state.generated_tokens]
        due = min((slo.arrived + slo.ttft for slo in asked if slo.ttft is not None), default=math.inf)
        return math.inf if decoding is None else decoding, due


class PrefixLoader:
    """Fills blocks with the beginnings of prompts. Used by the scheduling thread."""

    def __init__(self, listed: ListedBlocks, store: PrefixStore, renew: Callable[[], None]) -> None:
        """`store`: of the same model. `renew`: drops blocks that were computed before the model changed."""
        self._listed = listed
        self._blocks = listed.blocks
        self._renew = renew
        self._store = store
        self._hashes: dict[str, list[int]] = {}  # by waiting request that was looked up: the hashes of its prompt
        self._readings: dict[str, _Reading] = {}
        self._one = threading.Lock()  # held by the thread that reads files

    def keep_only(self, requests: Collection[str]) -> None:
        """Forgets all requests except these, which wait."""
        for name in [name for name in self._hashes if name not in requests]:
            del self._hashes[name]
            self._readings.pop(name, None)

    def loaded_tokens(self, request: str) -> int:
        """Returns how many tokens of a request that was looked up are in blocks, without the last one."""
        return self._listed.found(self._hashes.get(request, ())) * self._blocks.tokens

    def look_up(self, request: str, ids: Sequence[int], room: Callable[[], int]) -> bool:
        """Looks up once the stored beginning of a prompt. `room`: returns the bytes that its blocks may take. False
        while files are read."""
        if request not in self._hashes:
            self._hashes[request] = [*self._listed.hashes(ids[:-1])]
            with suppress(*_FAILURES):
                self._begin(request, ids, room)
            if request not in self._readings:
                self._count(request, 0)
        reading = self._readings.get(request)
        if reading is None or not reading.is_alive():
            if self._readings.pop(request, None) is not None and reading is not None:
                before = self.loaded_tokens(request)
                if reading.runs and before >= reading.runs[0].start:
                    runs = reading.runs
                    self._fill(self._hashes[request], runs[-1].end, room, partial(open_runs, runs))
                self._count(request, self.loaded_tokens(request) - before)
            return True
        return False

    def wait_for_files(self, seconds: float) -> bool:
        """Waits for the reading thread, at most so many seconds. Returns whether there is one."""
        for reading in self._readings.values():
            reading.join(seconds)
            return True
        return False

    def _count(self, request: str, from_files: int) -> None:
        """Counts the found tokens of a prompt, so many of which were read from files."""
        counts, tokens = self._store.counts, self.loaded_tokens(request)
        counts.hit(from_files, 1.0, on_disk=True)
        counts.hit(tokens - from_files, *self._blocks.away(self._hashes[request]))

    def _begin(self, request: str, ids: Sequence[int], room: Callable[[], int]) -> None:
        store, listed, hashes = self._store, self._listed, self._hashes[request]
        self._renew()
        now = listed.identity
        assert now is not None
        listed.used(hashes)
        stored = store.filler.count_batched(ids, now, listed.found(hashes) * listed.tokens)
        self._fill(hashes, stored, room, partial(store.read, ids, now))
        saver, full = store.contents.saver, (len(ids) - 1) // store.block
        count = listed.found(hashes) * listed.tokens // store.block
        if saver is not None and count < full and listed.found(hashes) < len(hashes):
            keys = chain(ids[:-1], store.block, now.settings)
            self._readings[request] = _Reading(self._one, partial(saver.find, keys, count, ids, now))
            self._readings[request].start()

    def _fill(self, hashes: Sequence[int], end: int, room: Callable[[], int], opened: Opened) -> None:
        """Fills blocks with the tokens of a prompt before `end` that no block holds yet, as far as they fit."""
        blocks, done = self._blocks, False
        size, first = blocks.tokens, self._listed.found(hashes)
        if (count := min(end // size, len(hashes)) - first) <= 0:
            return
        try:
            placed = blocks.place(count, room())
        except _FAILURES:
            return
        try:
            done = bool(placed) and self._copy(placed, partial(opened, first * size, (first + len(placed)) * size))
        except _FAILURES:
            pass
        finally:
            if not done:
                blocks.drop(placed)
        if done:
            self._listed.keep(hashes, first, placed)

    def _copy(self, placed: Sequence[int], opened: Callable[[], AbstractContextManager[StoredTokens | None]]) -> bool:
        blocks = self._blocks
        blocks.wait()
        with torch.no_grad(), opened() as tokens:
            if tokens is None or list(tokens.layers) != blocks.layers:
                return False
            if not all(blocks.write(layer, placed, tokens(layer)) for layer in tokens.layers):
                return False
        blocks.wait()
        return True


class _Reading(threading.Thread):
    """The thread that reads the tokens of one prompt from files."""

    def __init__(self, one: threading.Lock, find: Callable[[], list[TokenRun]]) -> None:
        """`find`: reads the tokens, under the lock `one`."""
        super().__init__(name="ballonet-prefix-reads", daemon=True)
        self._one = one
        self._find = find
        self.runs: list[TokenRun] = []

    def run(self) -> None:
        """Runs the thread."""
        with self._one:
            self.runs = self._find()
