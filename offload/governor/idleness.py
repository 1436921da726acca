"""Which clients of a governor are idle: unused for a pause, or only kept, and not leased.

Note [Scheduled models]
    A model whose requests a scheduler serves is in use while there are any, however long its turn does not come, and
    idle as soon as the last one has ended (Oneiros §5.2): no timer decides. Its iterations count by time where they
    came later, as it was used by itself then; so do those of any other model. That is all that the scheduler has to
    say: in which order models ran is known from their iterations, each of which says when it begins, and a priority is
    of a model (`manage(priority=)`), not of a request, whose urgency is its SLO.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .client import PageClient
from .client_state import ClientState, PageState

if TYPE_CHECKING:
    from .client_table import Clients


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
        self._resting = tuple(each.number for each in sorted(idle, key=lambda each: each.used))
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
