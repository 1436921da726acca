"""The clients that a manager knows: the record of each one (`ClientState`), which model's forward runs on which thread
(`Running`), and who is idle: unused for a pause, or only kept, and not leased (`Idleness`).

Note [Whose pages]
    A range of KV is made within a forward. Where that is one of a managed model, the cache is that model's: it has its
    priority, and its pages count for the model's floor. Others have priority 0 and no floor.

Note [Collected at any moment]
    Page clients are collected, not closed. So they are referred to weakly, and whichever thread takes a reference may
    hold the last one: the finalizer then runs on this thread, which holds the manager's lock, so it only queues the
    removal (`client_left`) for the next `drop_dead`.

Note [Scheduled models]
    A model whose requests a scheduler serves is in use while there are any, however long its turn does not come, and
    idle as soon as the last one has ended (Oneiros §5.2): no timer decides. Its iterations count by time where they
    came later, as it was used by itself then; so do those of any other model. That is all that the scheduler has to
    say: in which order models ran is known from their iterations, each of which says when it begins, and a priority is
    of a model (`manage(priority=)`), not of a request, whose urgency is its SLO.
"""

from __future__ import annotations

import math
import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, NamedTuple

from ..policy.giving import standing
from ..policy.kv_pages import Way
from ..policy.lending import Use
from ..policy.plan import ASSUMED_RATIO, Costs, Plan
from ..policy.reclaim_order import Candidate
from ..policy.tuning import DEFAULT, WeightPlans
from ..record.record import Phase, Point
from .activity import Activity, Progress
from .client import INDICES_PER_SPLIT, KEYS_PER_CLIENT, OUTSIDE_LAYERS, Client, ModelClient, Offer, PageClient

FIRST: Final[dict[Phase, Point]] = {"prefill": Point("prefill", 1, 1), "decode": Point("decode", 1, 1)}
# Sizes of each phase, the last ones, for which one plan keeps both SLOs of a model that prefills and decodes in turn.
# Measured: the power of two above the longest of the last 16 prompts changes with 2 to 6 % of the requests of three
# traces (Azure code, Mooncake, ShareGPT), of the last 8 with 9 to 13 %, of one alone with 56 to 84 %.
SIZES: Final = 16


class Validity(NamedTuple):
    """Under what a decision holds as it is: until the `version` is another one, the clock has passed `until`, or other
    numbers of pages are free, or in the budget in bytes, than (free, budget) of `seen`."""

    version: int
    until: float
    seen: tuple[int, int]


class Version:
    """The version of what a manager has decided: `number` is another one after each event that may change a decision.
    `validity`: under what the last one holds, None for no time. Read on any thread, without a lock or a call."""

    validity: Validity | None = None

    def __init__(self) -> None:
        self._numbers = count(1)
        self.number = 0

    def bump(self) -> None:
        """Notes an event. May be called in the middle of anything, even here: no number is given twice."""
        self.number = next(self._numbers)


@dataclass(slots=True, eq=False)
class ClientState(ABC):
    """`number`: never used again. `activity`: of its iterations. `taken`: layers or offers that the core took, and the
    client does not know of yet; `left`: when the first of what is away was taken, None where nothing is. `used`: when
    it was in use last, as known at the last query; `usual`: seconds for which it is idle as a rule, None where nobody
    knows. `returning`: pages that are to come back, whatever their absence has cost."""

    number: int
    name: str
    activity: Activity
    taken: set[int] = field(default_factory=set, kw_only=True)
    left: float | None = field(default=None, kw_only=True)
    used: float = field(default=-math.inf, kw_only=True)
    usual: float | None = field(default=None, kw_only=True)
    returning: int = field(default=0, kw_only=True)

    def key(self, index: int) -> int:
        """The key of the client's layer or offer in the reclaim list."""
        return self.number * KEYS_PER_CLIENT + index

    def last_use(self, now: float) -> float:
        """Returns when the client was in use last, by its iterations."""
        return self.activity.last(now)

    def woke(self, now: float) -> None:
        """Notes that it has work again after it was idle, unless that was noted already."""
        idle = now - self.used
        if 0 < idle < math.inf:
            self.usual = idle if self.usual is None else (self.usual + idle) / 2

    @property
    def wanted(self) -> float | None:
        """Until when requests need the client; see ModelClient.wanted_until."""
        return None

    @abstractmethod
    def client(self) -> Client | None:
        """The client; None where it was collected."""

    def entry(self, index: int) -> tuple[Any, list[Any]] | None:
        """Returns the client's entry for `Device.publish`; see Client.entry."""
        client = self.client()
        return None if client is None else client.entry(index)


@dataclass(slots=True, eq=False)
class ModelState(ClientState):
    """State of a ModelClient. `taken`: since `model.plan`. `held`: while not empty, nothing of it may be taken.
    `faster`: a plan that takes less time and no more pages. `lent`: the plan that an SLO gave it last.
    `passes`: its iterations since its plan was compared last, by phase; `due`: after how many the next comparison is;
    `streams`: did it stream at its last decision? `sizes`: of its last iterations, each time that they changed."""

    model: ModelClient
    tuning: WeightPlans = DEFAULT.weights
    point: Point | None = None
    last: dict[Phase, Point] = field(default_factory=lambda: dict(FIRST))
    held: set[object] = field(default_factory=set)
    faster: Plan | None = None
    lent: Plan | None = None
    noticed: set[Phase] = field(default_factory=set)
    costs: dict[Point, tuple[Costs, bool]] = field(default_factory=dict)
    passes: Counter[Phase] = field(default_factory=Counter)
    due: int = 0
    streams: bool = False
    sizes: dict[Phase, deque[Point]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.due = self.tuning.look
        self.sizes = {phase: deque([size], SIZES) for phase, size in FIRST.items()}

    def turn_to(self, point: Point) -> None:
        """Notes that iterations of another size begin."""
        self.point = self.last[point.phase] = point
        self.sizes[point.phase].append(point)

    @property
    def has_slo(self) -> bool:
        return self.model.tpot_slo is not None or self.model.ttft_slo is not None

    @property
    def alternates(self) -> bool:
        """Does one plan serve both phases, as both have an SLO? See coordinator.py, Note [Phases in turn]."""
        return self.model.tpot_slo is not None and self.model.ttft_slo is not None

    @property
    def auto(self) -> bool:
        """May its layers come and go?"""
        return self.model.interval == "auto"

    def slo(self, phase: Phase) -> float:
        """The SLO of that phase in seconds; infinite where none was given."""
        slo = self.model.tpot_slo if phase == "decode" else self.model.ttft_slo
        return math.inf if slo is None else slo

    @property
    def wanted(self) -> float | None:
        return self.model.wanted_until()

    def client(self) -> ModelClient:
        return self.model

    def keys(self) -> list[int]:
        """The keys of all that it may offer."""
        return [self.key(index) for index in (*range(len(self.model.plan.pages)), OUTSIDE_LAYERS)]

    def costs_at(self, point: Point, page_seconds: float | None) -> tuple[Costs, bool]:
        """Returns (costs of such an iteration, are they measured)."""
        costs = self.costs.get(point)
        if costs is None:
            costs = self.costs[point] = self._costs(point, page_seconds)
        return costs

    def expected(self, point: Point, page_seconds: float | None) -> Costs | None:
        """Returns the usual seconds of such an iteration; None where it was not measured."""
        timings = self.model.timings
        seconds = timings.typical(point)
        if seconds is None or page_seconds is None:
            return None
        return Costs(self.model.plan.pages, seconds, page_seconds, timings.entering)

    def standing(self, point: Point, page_seconds: float | None) -> Plan:
        """Returns the plan that memory demands now; see giving.standing."""
        if not self.taken:
            return self.model.plan
        costs, _ = self.costs_at(point, page_seconds)
        return standing(self.model.plan, self.taken, costs, self.tuning.slots)

    def passed(self, phase: Phase) -> bool:
        """Counts an iteration; False, uncounted, where its plan is to be compared instead."""
        if sum(self.passes.values()) + 1 >= self.due:
            return False
        self.passes[phase] += 1
        return True

    def arranged(self, before: Plan, promised: Plan | None) -> None:
        """Notes that its plan was arranged anew. `before`: the plan until then; `promised`: `faster` at that time."""
        if self.model.plan not in (before, promised):
            self.due = self.tuning.look

    def _costs(self, point: Point, page_seconds: float | None) -> tuple[Costs, bool]:
        pages, ratio = self.model.plan.pages, float(ASSUMED_RATIO)
        seconds = self.model.timings.seconds(point)
        measured = seconds is not None and page_seconds is not None
        if seconds is None:
            seconds = max(1, sum(pages)) * (page_seconds or 1.0) / ratio
        if page_seconds is None:
            page_seconds = seconds * ratio / max(1, sum(pages))
        return Costs(pages, seconds, page_seconds, self.model.timings.entering), measured


@dataclass(slots=True, eq=False)
class PageState(ClientState):
    """State of a PageClient. `model`: the number of the model whose client it is, 0 of none; `away`: its pages on the
    host, as it was asked last; of each of these: seconds that iterations have `waited` for it, and that the link has
    `copied` it."""

    paged: weakref.ref[PageClient] = field(kw_only=True)
    model: int = field(default=0, kw_only=True)
    away: int = field(default=0, kw_only=True)
    waited: float = field(default=0.0, kw_only=True)
    copied: float = field(default=0.0, kw_only=True)

    def client(self) -> PageClient | None:
        return self.paged()

    def notice(self, away: int) -> None:
        """Notes how many pages are away. What was taken since the last iteration has been waited for by none."""
        part = min(1.0, self.away / away) if away else 0.0
        self.waited, self.copied, self.away = self.waited * part, self.copied * part, away

    def reads(self, client: PageClient, page_seconds: float) -> None:
        """Notes that an iteration reads what is away."""
        read, streamed = client.read_displaced * page_seconds, client.streamed
        waits = read if streamed.way is Way.ZERO_COPY else streamed.exposed
        self.waited, self.copied = self.waited + waits / self.away, self.copied + read / self.away

    def last_use(self, now: float) -> float:
        client = self.paged()
        known = self.activity.last(now)
        return known if client is None else max(client.used, known)

    def entry(self, index: int) -> tuple[Any, list[Any]] | None:
        client = self.paged()
        return None if client is None else client.entry(index % INDICES_PER_SPLIT)

    def offers(self) -> list[Offer]:
        """Returns the client's offers, without those that were taken and it does not know of yet."""
        client = self.paged()
        if client is None:
            return []
        return [offer for offer in client.offers() if offer.divisible or offer.index not in self.taken]


@dataclass(frozen=True, slots=True)
class Held:
    """A page client at the moment of a decision: what it offers; whether a forward uses it, or did so just now."""

    state: PageState
    offers: Sequence[Offer]
    active: bool


class Running:
    """The forwards of a device's models. `progress`: of the device. Not thread-safe, but for `ended`: callers hold the
    manager's lock."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.ahead: Final = progress.ahead
        self.on: dict[int, ModelState] = {}  # the model whose forward runs, by thread
        self.read: dict[int, set[PageState]] = {}  # the page clients that the forward has used so far, by thread

    @property
    def models(self) -> tuple[ModelState, ...]:
        """The models whose forward runs, or was interrupted."""
        return tuple(self.on.values())

    @property
    def here(self) -> ModelState | None:
        """The model whose forward runs on this thread."""
        return self.on.get(threading.get_ident())

    def began(self, state: ModelState, now: float) -> None:
        """Notes that an iteration of the model begins on this thread."""
        state.used = now
        if self._progress.ahead:
            self._progress.begin()
        state.activity.at = max(state.activity.at, now)
        self.on[threading.get_ident()] = state

    def client_began(self, state: PageState, now: float) -> None:
        """Notes that an iteration of the client begins on this thread, within one of its model, if any."""
        state.activity.at = max(state.activity.at, now)
        thread = threading.get_ident()
        if thread in self.on:
            self.read.setdefault(thread, set()).add(state)

    def ended(self, state: ModelState | None, now: float) -> None:
        """Notes that the iteration on this thread has been launched, if it began; None: of a model that is gone. May be
        called in the middle of anything."""
        thread = threading.get_ident()
        read = self.read.pop(thread, set())
        if state is None:
            return
        end = self._progress.end() if self._progress.ahead else None
        state.activity.ended(now, end)
        for cache in read:
            cache.activity.ended(now, end)
        if self.on.get(thread) is state:
            del self.on[thread]

    def forget(self, state: ModelState | None) -> None:
        """Forgets a model that is gone: its iteration ends without it, or has been interrupted."""
        for thread, on in list(self.on.items()):
            if on is state:
                self.on.pop(thread, None)


class Clients:
    """`pause`: see Idleness; `progress`: of the device; `plans`: for the states of models. Not thread-safe, but for
    `left` and `client_left`: whoever calls holds the manager's lock."""

    def __init__(self, pause: float, progress: Progress, plans: WeightPlans, version: Version) -> None:
        self._version = version
        self._plans = plans
        self._progress = progress
        self._numbers = 0
        self.by_model: dict[int, ModelState] = {}  # by id of the model, in the order in which they came
        self._paged: dict[int, PageState] = {}  # by number
        self.gone: deque[tuple[bool, int]] = deque()  # (True, id of a model) or (False, number): collected
        self.running = Running(progress)
        self.idleness = Idleness(self, pause, version)

    # -- who is there

    @property
    def models(self) -> tuple[ModelState, ...]:
        """The states of models, in the order in which they came."""
        return tuple(self.by_model.values())

    @property
    def paged(self) -> list[tuple[PageState, PageClient]]:
        """The page clients that are alive, in the order in which they came."""
        return [(state, it) for state in tuple(self._paged.values()) if (it := state.client()) is not None]

    def of_model(self, model: ModelClient) -> ModelState:
        """KeyError where there is no such model any more."""
        return self.by_model[id(model)]

    @property
    def several(self) -> bool:
        """Is there more than one model?"""
        return len(self.by_model) > 1

    def get(self, model: ModelClient) -> ModelState | None:
        """None where there is no such model any more."""
        return self.by_model.get(id(model))

    def numbered(self, number: int) -> PageState | None:
        """The page client of that number; None where it is gone."""
        return self._paged.get(number)

    def add(self, model: ModelClient) -> None:
        """Adds a model, under a name of its own."""
        self._numbers += 1
        name = model.name
        if any(state.name == name for state in self.models):
            name = f"{name} ({self._numbers})"
        self.idleness.changed()
        self.by_model[id(model)] = ModelState(self._numbers, name, Activity(self._progress), model, self._plans)

    def add_paged(self, client: PageClient) -> int:
        """Adds a page client and returns its number. See Note [Whose pages]."""
        self._numbers += 1
        on = self.running.here
        whose, model = (client.model_name, 0) if on is None else (on.name, on.number)
        name = f"{client.name} of {whose}" if whose else client.name
        state = PageState(self._numbers, name, Activity(self._progress), paged=weakref.ref(client), model=model)
        self.idleness.changed()
        self._paged[self._numbers] = state
        return self._numbers

    def pop(self, key: int) -> ModelState | None:
        """Removes the model of that id. Idempotent."""
        self.idleness.changed()
        state = self.by_model.pop(key, None)
        self.running.forget(state)
        return state

    def left(self, model: ModelClient) -> None:
        """Notes that a model was collected."""
        if id(model) in self.by_model:
            self.gone.append((True, id(model)))
            self._version.bump()

    def client_left(self, number: int) -> None:
        """Notes that a page client was collected."""
        self.gone.append((False, number))
        self._version.bump()

    def drop_dead(self) -> tuple[bool, bool]:
        """Removes the clients that are gone; were there any, models or others?"""
        dropped: set[bool] = set()
        for _ in range(len(self.gone)):
            model, key = self.gone.popleft()
            if (self.pop(key) if model else self._paged.pop(key, None)) is not None:
                dropped.add(model)
        if dropped:
            self.idleness.changed()
        return True in dropped, False in dropped

    # -- what they have

    def took(self, number: int, index: int, now: float) -> None:
        """The core took a layer of a model, or an offer of a page client. What lies outside of layers shows by itself
        that it was taken."""
        for state in (*self.by_model.values(), *self._paged.values()):
            if state.number == number and index != OUTSIDE_LAYERS:
                state.taken.add(index)
                state.left = now if state.left is None else state.left

    def held(self, now: float) -> list[Held]:
        """The page clients, at this moment."""
        return [Held(state, state.offers(), active=not self.idleness.idle(state, it, now)) for state, it in self.paged]

    def floors(self) -> dict[int, int]:
        """Device pages that the weights of models keep for their floors: what is missing in full pages of KV."""
        floors = {state.number: state.model.floor for state in self.models if state.model.floor}
        for state, _ in self.paged:
            if state.model in floors:
                floors[state.model] -= sum(offer.pages for offer in state.offers())
        return floors

    def claim(self, number: int, model: ModelState) -> None:
        """The page client is this model's, if it is no other's."""
        state = self._paged.get(number)
        if state is not None and not any(state.model == other.number for other in self.models):
            state.model = model.number

    def whose(self, number: int) -> ModelState | None:
        """The model of a page client that is used on this thread; None of nobody."""
        state, on = self._paged.get(number), self.running.here
        if on is not None:
            self.claim(number, on)
        return next((model for model in self.models if state is not None and model.number == state.model), None)

    def use(self, model: ModelState, now: float) -> Use:
        """What the caches of the model have."""
        floor = max(0, model.model.floor - model.model.plan.device_pages) if model.model.floor else 0
        use = Use(model.number, model.name, model.model.priority, floor)
        for state, client in self.paged:
            if state.model == model.number:
                use.held += client.device_pages
                use.block = max(use.block, client.grows_by)
                use.used += 0 if self.idleness.idle(state, client, now) else client.pages
        return use

    def uses(self, now: float) -> list[Use]:
        """What each model's caches have, in the order in which the models came."""
        return [self.use(state, now) for state in self.models]

    def of(self, candidates: Sequence[Candidate]) -> list[tuple[ClientState, Candidate]]:
        """With whose they are."""
        states: dict[int, ClientState] = {state.number: state for state in self.models}
        states.update((state.number, state) for state, _ in self.paged)
        return [(states[candidate.client], candidate) for candidate in candidates if candidate.client in states]


class Idleness:
    """`pause`: seconds after its last iteration, as the device does it, after which a client is idle. Not thread-safe:
    callers hold the manager's lock."""

    def __init__(self, clients: Clients, pause: float, version: Version) -> None:
        self._clients = clients
        self._version = version
        self._pause = pause
        self._resting: tuple[int, ...] = ()  # idle models, in the order in which they ran
        self._unused: tuple[int, ...] = ()  # idle page clients, in the order in which they were used
        # before then no client becomes idle while schedulers want the same: all are in use, none is only kept
        self.calm_until = -math.inf
        self._wanted: list[float | None] = []
        self.scheduled = False  # has any model a scheduler? See Note [Scheduled models]

    def wanted(self) -> list[float | None]:
        """Until when requests need each model; see ModelClient.wanted_until."""
        return [state.wanted for state in self._clients.by_model.values()]

    def is_calm(self, now: float) -> bool:
        """Are all clients in use that were, and has none gone idle?"""
        return now < self.calm_until and self.wanted() == self._wanted

    def woke(self, state: ClientState, now: float) -> bool:
        """Has the client, whose iteration is about to begin, been idle until now?"""
        in_use = now < self.calm_until if state.wanted is None else self.is_calm(now)
        return not in_use and self.rests(state, now)

    def changed(self) -> None:
        """Notes that clients came or went, or are only kept or not any more."""
        self.calm_until = -math.inf
        self._version.bump()

    def rests(self, state: ClientState, now: float) -> bool:
        """Has the client been unused for the pause, even if leased now, or does its scheduler have no request? Sets
        `ClientState.used`."""
        state.used, wanted = state.last_use(now), state.wanted
        if wanted is not None and wanted >= state.used:
            return wanted != math.inf
        return now - state.used >= self._pause

    def idle(self, state: PageState, client: PageClient, now: float) -> bool:
        """Does the client rest, or is it only kept, with no lease on it?"""
        return (self.rests(state, now) or client.only_cached) and not client.running

    def resting(self, now: float) -> list[PageClient]:
        """The page clients that are idle. A model whose forward has begun is about to use the one that it used last."""
        idle = [(state, client) for state, client in self._clients.paged if self.idle(state, client, now)]
        if not idle:
            return []
        running, next_used = {state.number for state in self._clients.running.models}, dict[int, PageState]()
        for state, _ in self._clients.paged:
            if state.model in running and state.used >= next_used.get(state.model, state).used:
                next_used[state.model] = state
        return [client for state, client in idle if next_used.get(state.model) is not state]

    def active(self, now: float) -> frozenset[int]:
        """The numbers of the clients that are not idle."""
        models = {state.number for state in self._clients.models if not self.rests(state, now) or state.model.running}
        return frozenset(
            models.union(state.number for state, it in self._clients.paged if not self.idle(state, it, now))
        )

    def rested(self, now: float) -> tuple[bool, bool]:
        """Has the set or order of idle clients changed since the last call? Returns (of models, of page clients)."""
        if self.is_calm(now):
            return False, False
        self._wanted = self.wanted()
        self.scheduled = any(wanted is not None for wanted in self._wanted)
        active, before = self.active(now), (self._resting, self._unused)
        idle = [state for state in self._clients.models if state.number not in active]
        for state in self._clients.models:  # of those that are scheduled, requests come before iterations
            if state.number in active and state.number in before[0]:
                state.woke(now)
        self._resting = tuple(model.number for model in sorted(idle, key=lambda model: model.used))
        unused = ((state.used, state.number) for state, _ in self._clients.paged if state.number not in active)
        self._unused = tuple(number for _, number in sorted(unused))
        paged, scheduled = self._clients.paged, zip(self._clients.models, self._wanted, strict=True)
        # those with requests are in use until their scheduler says another time
        states: list[ClientState] = [*(it for it, wanted in scheduled if wanted != math.inf), *(it for it, _ in paged)]
        first = min((state.used for state in states), default=math.inf) + self._pause
        self.calm_until = -math.inf if any(client.only_cached for _, client in paged) else first
        return self._resting != before[0], self._unused != before[1]

    def idle_pages(self, offered: Mapping[int, int], now: float, but: int) -> int:
        """Pages offered by idle clients other than `but`. `offered`: by number."""
        there = {state.number for state in self._clients.models}.union(state.number for state, _ in self._clients.paged)
        idle = there - self.active(now) - {but}
        return sum(pages for number, pages in offered.items() if number in idle)
