"""Carries out what models of a device lend each other: a model takes its own pages back, and none keeps what is due.

Note [The fate of what was borrowed]
    In this order, until what is due is given back; no byte is moved, and what is in use is never touched.
    1   prefixes that are only kept, and that the host has as well (they are copied there ahead of need, as soon as
        pages are short: reclaim_list.py): one call of the core leads their addresses there. Their keys stay, and lead
        to the same bytes as before.
    2   prefixes of which only the device has the bytes: their keys are forgotten first, from the tail, and then their
        pages go back, a sequence at a time, however many they are (store.py).
    3   what is left is due yet. It is in the reclaim list before everything but clean prefixes and what costs nothing
        (Rung.LEND), so that the core takes it the moment that the worker finds no page; what a thread leases is
        requested of it, and given at its next layer boundary, as ever.

Note [When]
    `needs`: before a cache grows, by the thread that uses it, on which its model may take pages back. `keep`: when a
    request leaves something behind that is kept: a model keeps no more than its own reserve and what others can spare,
    so that a worker that comes back finds its pages free. While the reserve covers what is used, and pages are free,
    neither costs more than a look at the counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..policy.reclaim_order import Rung
from .client import KEYS_PER_CLIENT, ModelClient
from .lend import Lent
from .overview import Overview
from .reclaim_list import ReclaimList


class Repayment:
    """Takes pages back that models have lent. Thread-safe."""

    def __init__(self, known: Overview, reclaim: ReclaimList) -> None:
        self._known = known
        self._reclaim = reclaim

    def needs(self, number: int, pages: int) -> None:
        """Takes back what the cache's model has lent, as far as so many pages more need it. On the thread that uses the
        cache. DriverError."""
        with self._known.lock:
            model = self._known.clients.whose(number)
            if model is None or len(self._known.clients.models) < 2:
                return
            self._known.drain_core_events()
            now = self._known.clock()
            if (
                self._known.lending.covers(self._known.clients.use(model, now), now)
                and self._known.pages.unused >= pages
            ):
                return
            owed = self._dues(now)
        if owed:
            self._take_back(owed, model.name)

    def keep(self, model: ModelClient, caches: Iterable[int]) -> None:
        """Marks `caches` as only kept for prompts to the model. DriverError."""
        with self._known.lock:
            state = self._known.clients.get(model)
            if state is None:
                return
            self._known.clients.idleness.changed()
            for number in caches:
                self._known.clients.claim(number, state)
            if len(self._known.clients.models) < 2:
                return
            self._known.drain_core_events()
            owed = self._dues(self._known.clock())
        if owed:
            self._take_back(owed, "reserves")

    def lending_of(self, model: ModelClient) -> Lent:
        """What the model has reserved, lent and borrowed."""
        with self._known.lock:
            state = self._known.clients.get(model)
            return (
                Lent() if state is None else self._known.lending.of(self._known.clients.use(state, self._known.clock()))
            )

    def spare(self, now: float) -> None:
        """Lowers, now and then, reserves that were not used for long enough. The caller holds the lock."""
        if len(self._known.clients.models) > 1 and now >= self._known.lending.due_at:
            self._dues(now)

    def _dues(self, now: float) -> Mapping[int, int]:
        """Updates the reserves, and returns the pages due by model. The caller holds the lock."""
        uses = self._known.clients.uses(now)
        for use, pages in self._known.lending.look(uses, now, self._known.pages.total):
            if pages < 0:
                self._known.events.decided(Rung.LEND.label, "revert", -pages, what=use.name, by="ballonet")
        return self._known.lending.due(uses, self._known.pages.unused, self._known.pages.total)

    def _take_back(self, owed: Mapping[int, int], by: str) -> None:
        """Takes back the pages due by model. See Note [The fate of what was borrowed]."""
        with self._known.lock:
            self._known.list.void()
        self._reclaim.publish_if_stale()  # write-behind waits for the next list
        keys = [
            candidate.client * KEYS_PER_CLIENT + candidate.index
            for candidate in self._reclaim.candidates()
            if candidate.borrowed and candidate.rung is Rung.PREFIX
        ]
        if keys:
            self._known.device.take(keys)
        with self._known.lock:
            self._known.drain_core_events()
            owed = self._known.owed(self._known.clock())
            models = [(state, owed[state.number]) for state in self._known.clients.models if state.number in owed]
        for state, pages in models:
            began = self._known.clock()
            if gone := state.model.give_up(pages):
                took, what = self._known.clock() - began, f"prefixes of {state.name}"
                self._known.events.decided(Rung.LEND.label, "pull", gone, what=what, by=by, measured=took)
        self._known.pages.given()
