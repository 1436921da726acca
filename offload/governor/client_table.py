"""The clients that a governor knows, and which of them are idle: unused for a pause, or only kept, and not leased.

Note [Whose pages]
    A range of KV is made within a forward. Where that is one of a managed model, the cache is that model's: it has its
    priority, and its pages count for the model's floor. Others have priority 0 and no floor.

Note [Collected at any moment]
    Page clients are collected, not closed. So they are referred to weakly, and whichever thread takes a reference may
    hold the last one: the finalizer then runs on this thread, which holds the governor's lock, so it only queues the
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
import weakref
from collections import deque
from collections.abc import Mapping, Sequence

from ..policy.reclaim_order import Candidate
from ..policy.tuning import WeightPlans
from .activity import Activity, Progress
from .candidates import Held
from .client import ModelClient, PageClient
from .client_state import ClientState, ModelState, PageState
from .lend import Use
from .running import Running


class Clients:
    """`pause`: see Idleness; `progress`: of the device; `plans`: for the states of models. Not thread-safe, but for
    `left` and `client_left`: whoever calls holds the governor's lock."""

    def __init__(self, pause: float, progress: Progress, plans: WeightPlans) -> None:
        self._plans = plans
        self._progress = progress
        self._numbers = 0
        self.by_model: dict[int, ModelState] = {}  # by id of the model, in the order in which they came
        self._paged: dict[int, PageState] = {}  # by number
        self.gone: deque[tuple[bool, int]] = deque()  # (True, id of a model) or (False, number): collected
        self.running = Running(progress)
        self.idleness = Idleness(self, pause)

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
        activity, streamed = Activity(self._progress), len(model.plan.streamed)
        self.idleness.changed()
        self.by_model[id(model)] = ModelState(self._numbers, name, activity, model, streamed, self._plans)

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

    def pop(self, model: ModelClient) -> ModelState | None:
        """Removes the model. Idempotent."""
        return self._take_out(id(model))

    def left(self, model: ModelClient) -> None:
        """Notes that a model was collected."""
        if id(model) in self.by_model:
            self.gone.append((True, id(model)))

    def client_left(self, number: int) -> None:
        """Notes that a page client was collected."""
        self.gone.append((False, number))

    def drop_dead(self) -> tuple[bool, bool]:
        """Removes the clients that are gone; were there any, models or others?"""
        dropped: set[bool] = set()
        for _ in range(len(self.gone)):
            model, key = self.gone.popleft()
            if (self._take_out(key) if model else self._paged.pop(key, None)) is not None:
                dropped.add(model)
        if dropped:
            self.idleness.changed()
        return True in dropped, False in dropped

    # -- what they have

    def took(self, number: int, index: int) -> None:
        """The core took a layer of a model, or an offer of a page client."""
        for state in (*self.by_model.values(), *self._paged.values()):
            if state.number == number:
                state.taken.add(index)

    def held(self, now: float) -> list[Held]:
        """The page clients, at this moment."""
        return [
            Held(
                state,
                state.offers(),
                not self.idleness.idle(state, it, now),
                state.used,
                it.displaced,
                it.displaced_on_peer,
            )
            for state, it in self.paged
        ]

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

    def _take_out(self, key: int) -> ModelState | None:
        """Nothing refers to the model of that id any more."""
        self.idleness.changed()
        state = self.by_model.pop(key, None)
        self.running.forget(state)
        return state


class Idleness:
    """`pause`: seconds after its last iteration, as the device does it, after which a client is idle. Not thread-safe:
    callers hold the governor's lock."""

    def __init__(self, clients: Clients, pause: float) -> None:
        self._clients = clients
        self._pause = pause
        self._resting: tuple[int, ...] = ()  # idle models, in the order in which they ran
        self._unused: tuple[int, ...] = ()  # idle page clients, in the order in which they were used
        self.calm_until = -math.inf  # before then no client becomes idle: all are in use, none is only kept

    def woke(self, state: ClientState, now: float) -> bool:
        """Has the client, whose iteration is about to begin, been idle until now?"""
        return now >= self.calm_until and self.rests(state, now)

    def changed(self) -> None:
        """Notes that clients came or went, or are only kept or not any more."""
        self.calm_until = -math.inf

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
        if now < self.calm_until:
            return False, False
        active, before = self.active(now), (self._resting, self._unused)
        idle = [state for state in self._clients.models if state.number not in active]
        for state in self._clients.models:
            state.waking |= state.number in active and state.number in before[0]
        self._resting = tuple(model.number for model in sorted(idle, key=lambda model: model.used))
        unused = ((state.used, state.number) for state, _ in self._clients.paged if state.number not in active)
        self._unused = tuple(number for _, number in sorted(unused))
        paged = self._clients.paged
        states: list[ClientState] = [*self._clients.models, *(state for state, _ in paged)]
        first = min((state.used for state in states), default=-math.inf) + self._pause
        by_others = any(client.only_cached for _, client in paged) or any(state.wanted is not None for state in states)
        self.calm_until = -math.inf if by_others else first
        return self._resting != before[0], self._unused != before[1]

    def idle_pages(self, offered: Mapping[int, int], now: float, but: int) -> int:
        """Pages offered by idle clients other than `but`. `offered`: by number."""
        there = {state.number for state in self._clients.models}.union(state.number for state, _ in self._clients.paged)
        idle = there - self.active(now) - {but}
        return sum(pages for number, pages in offered.items() if number in idle)
