"""What changes who has pages: the reclaim list is made and published (`ReclaimList`), sources give pages and get
them back on request (`ReclaimSources`), models take back what they lent (`Repayment`), a model's plan changes
(`ModelChange`).

Note [What is prepared]
    The list has whatever `entry` offers, always. Nothing of weights is prepared: a layer's bytes go to the host when it
    is taken, and a model whose layers never are never pays. KV is copied ahead (`write_behind`) only while pages are
    short, and only so much that those that are taken first are clean, or as much as is borrowed.

Note [The fate of what was borrowed]
    In this order, until what is due is given back; no byte is moved, and what is in use is never touched.
    1   prefixes that are only kept, and that the host has as well (they are copied there ahead of need, as soon as
        pages are short: reclaim.py): one call of the core leads their addresses there. Their keys stay, and lead
        to the same bytes as before.
    2   prefixes of which only the device has the bytes: their keys are forgotten first, from the tail, and then their
        pages go back, a sequence at a time, however many they are (store.py).
    3   what is left is due yet. It is the first on the reclaim list (PageSource.LEND), so
        that the core takes it the moment that the worker finds no page; what a thread leases is requested of it, and
        given at its next layer boundary, as ever.

Note [When]
    `needs`: before a cache grows, by the thread that uses it, on which its model may take pages back. `keep`: when a
    request leaves something behind that is kept: a model keeps no more than its own reserve and what others can spare,
    so that a worker that comes back finds its pages free. While the reserve covers what is used, and pages are free,
    neither costs more than a look at the counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from ...allocator.interrupts import Guarded, guarded
from ..policy.kv_pages import Near, lacking, leaving
from ..policy.lending import Lent
from ..policy.plan import Plan, fewest
from ..policy.reclaim_order import OF_LAYERS, Candidate, PageSource
from .candidates import to_clean
from .client import KEYS_PER_CLIENT, ModelClient, PageClient
from .clients import Held, ModelState
from .decision import Situation
from .overview import Overview

# 1/8 of the budget is kept clean, so that a cache that grows by less takes pages and copies nothing. Chosen.
CLEAN: Final = 8
# Bytes that are started at once: 1.2 ms of a PCIe 5 link of 55 GB/s, so that what must be copied now waits no longer.
_STARTED: Final = 2**26


class Offered(NamedTuple):
    """Pages that others give when asked. Of these, `dirty` have their bytes copied to the host then, and `in_use` are
    used by others."""

    pages: int
    dirty: int
    in_use: int


class ReclaimList:
    """Makes and publishes the list. Thread-safe; callers do not hold the manager's lock. See overview.py, Note
    [Locks]."""

    def __init__(self, known: Overview) -> None:
        self._known = known

    def publish_now(self) -> None:
        """Publishes all that is offered at this moment."""
        with self._known.lock:
            self._known.list.void()
        self.publish()

    def offered(self, but: int) -> Offered:
        """Returns what clients other than number `but` have on the published list, within caps."""
        with self._known.lock:
            published = self._known.list
            return Offered(
                *(sum(its.values()) - its.get(but, 0) for its in (published.pages, published.dirty, published.in_use)),
            )

    def candidates(self) -> list[Candidate]:
        """Returns all that may be taken now, in the order of taking."""
        with self._known.lock:
            self._known.drain_core_events()
            return self._known.listed(self._known.clock())[0]

    def prices(self) -> list[tuple[int, float]]:
        """(pages, seconds that each of these loses in each second while it is away) of what may be taken, in the order
        of taking. What costs less than twice as much as what comes before it is told with that."""
        steps, horizon = list[tuple[int, float]](), self._known.horizon
        for candidate in self.candidates():
            price = candidate.price.over(horizon)
            if steps and price < 2 * steps[-1][1]:
                steps[-1] = steps[-1][0] + candidate.pages, steps[-1][1]
            else:
                steps.append((candidate.pages, price))
        return steps

    def publish(self) -> None:
        """Publishes the list if it is out of date, and starts the copies that it calls for. See overview.py, Note
        [Locks]."""
        behind = self.publish_if_stale()
        if behind:
            with self._known.lock:
                resting = self._known.clients.idleness.resting(self._known.clock())
            for cache in resting:
                cache.give_slots()
        for cache, pages in behind:
            cache.write_behind(pages)
        if behind:
            self.publish_if_stale()
            for cache, pages in self._leaving():
                cache.demote(pages)

    def publish_if_stale(self) -> list[tuple[PageClient, int]]:
        """Publishes the list if it is out of date. Returns how many pages caches should copy to the host after that."""
        with self._known.lock:
            self._known.drain_core_events()
            if not self._known.list.stale:
                return []
            candidates, situation, held = self._known.listed(self._known.clock())
            behind = self._plan_write_behind(situation, candidates, held)
            draft = self._known.list.draft(self._known.clients.of(candidates))
        if draft is not None:
            draft.fill()
            with self._known.lock:
                self._known.list.publish(draft)
        return behind

    def _plan_write_behind(
        self, now: Situation, candidates: Sequence[Candidate], held: Sequence[Held]
    ) -> list[tuple[PageClient, int]]:
        """Returns how many pages caches should copy to the host now: some while pages are short and the link serves no
        layers. The caller holds the lock."""
        if not self._known.pages.short:
            return []
        busy = any(state.model.plan.copied or state.taken for state in now.states if state.number in now.active)
        step = 0 if busy else max(1, _STARTED // self._known.device.page_size)
        borrowed = self._known.lending.borrowed(self._known.clients.uses(now.at)) if len(now.states) > 1 else 0
        pages = to_clean(candidates, held, max(self._known.pages.total // CLEAN, borrowed), step)
        return [(cache, pages.get(state.number, 0)) for state, cache in self._known.clients.paged]

    def _leaving(self) -> list[tuple[PageClient, int]]:
        """Returns how many pages of caches should leave the peer for the host; see kv_pages.py."""
        free, total = self._known.peer()
        if not total:
            return []
        with self._known.lock:
            active = self._known.clients.idleness.active(self._known.clock())
            caches = {state.number: cache for state, cache in self._known.clients.paged}
            wanted = lacking(free + sum(cache.leaving_peer for cache in caches.values()), total)
            near = [
                Near(number, cache.peer_pages, number in active, cache.used)
                for number, cache in caches.items()
                if wanted
            ]
        return [(caches[number], pages) for number, pages in leaving(near, wanted).items()]


class ReclaimSources:
    """Thread-safe; nobody who calls holds the manager's lock."""

    def __init__(self, known: Overview, reclaim: ReclaimList) -> None:
        self._known = known
        self._reclaim = reclaim

    def reclaim(self, source: PageSource, pages: int) -> int:
        """Takes so many device pages of a source, those first that cost least, as far as this thread may; how many.
        DriverError."""
        self._reclaim.publish_now()
        keys, left = [], pages
        for candidate in self._reclaim.candidates():
            if left > 0 and candidate.source is source:
                keys.append(candidate.client * KEYS_PER_CLIENT + candidate.index)
                left -= candidate.pages
        return self._known.device.take(keys, pages) if keys else 0

    def preparing(self) -> Guarded[Callable[[], int]]:
        """Publishes the reclaim list anew on a thread of its own, for a budget that the list before refused. Hands out
        what tells whether that is still going on. No lock is taken on this thread: it may be in a signal's handler."""

        def begin() -> Callable[[], int]:
            publishing = threading.Thread(target=self._reclaim.publish_now, name="ballonet-prepare", daemon=True)
            publishing.start()

            return lambda: int(publishing.is_alive())

        return guarded(begin, lambda failed: None)

    def make_room(self, pages: int, running: bool = False) -> None:
        """Has so many device pages given by what nobody uses, with `running` also by what runs, or as many as that has.
        DriverError."""
        self._reclaim.publish_now()
        wished = False
        for candidate in self._reclaim.candidates():
            if pages > 0 and (running or candidate.source.idle):
                if candidate.source.exposed and not wished:
                    wished = True
                    self._known.duplicates.request_drop(pages)
                pages -= self._known.device.take([candidate.client * KEYS_PER_CLIENT + candidate.index])
        if running and pages > 0 and not wished:
            self._known.duplicates.request_drop(pages)

    def restore(self, source: PageSource, pages: int) -> int:
        """Up to so many free pages go back to those who gave of this source before their next iteration, whatever their
        absence has cost; how many will."""
        known, back = self._known, 0
        with known.lock:
            known.drain_core_events()
            now = known.clock()
            situation = known.situation(now, known.look(now))
            left = min(pages, situation.spare)
            for state in situation.states if source in OF_LAYERS else ():
                standing = situation.standing(state)
                costs, _ = situation.costs(state, state.point or state.last["prefill"])
                plan = fewest(standing.pages, standing.device_pages + left, costs.ratio, slots=state.tuning.slots)
                if state.auto and not state.has_slo and plan is not None and standing.streamed:
                    state.returning = plan.device_pages - standing.device_pages
                    left, back = left - state.returning, back + state.returning
            for paged, cache in known.clients.paged if source not in OF_LAYERS else ():
                paged.returning = min(left, cache.displaced)
                left, back = left - paged.returning, back + paged.returning
            known.moved()
        return back


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
            if model is None or not self._known.clients.several:
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
            if not self._known.clients.several:
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
        if self._known.clients.several and now >= self._known.lending.due_at:
            self._dues(now)

    def _dues(self, now: float) -> Mapping[int, int]:
        """Updates the reserves, and returns the pages due by model. The caller holds the lock."""
        uses = self._known.clients.uses(now)
        for use, pages in self._known.lending.look(uses, now, self._known.pages.total):
            if pages < 0:
                self._known.events.decided(PageSource.LEND.label, "restore", -pages, what=use.name, by="ballonet")
        return self._known.lending.due(uses, self._known.pages.unused, self._known.pages.total)

    def _take_back(self, owed: Mapping[int, int], by: str) -> None:
        """Takes back the pages due by model. See Note [The fate of what was borrowed]."""
        with self._known.lock:
            self._known.list.void()
        self._reclaim.publish_if_stale()  # write-behind waits for the next list
        keys = [
            candidate.client * KEYS_PER_CLIENT + candidate.index
            for candidate in self._reclaim.candidates()
            if candidate.borrowed and candidate.source is PageSource.PREFIX
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
                self._known.events.decided(PageSource.LEND.label, "reclaim", gone, what=what, by=by, measured=took)
        self._known.pages.given()


class ModelChange:
    """The context of `MemoryManager.changing`. `state`: the model's, None until `begin` has found it."""

    def __init__(self, known: Overview, reclaim: ReclaimList, model: ModelClient) -> None:
        self.model = model
        self.state: ModelState | None = None
        self.before = model.plan
        self.promised: Plan | None = None
        self.taken: frozenset[int] = frozenset()
        self.began = known.clock()
        self._known = known
        self._reclaim = reclaim

    def begin(self) -> frozenset[int]:
        """Withdraws the model's offers, and returns the layers that were taken. KeyError."""
        with self._known.lock:
            state = self.state = self._known.clients.of_model(self.model)
            self.before, self.promised = self.model.plan, state.faster
            state.held.add(self)
            self._known.models_changed()
            self._known.list.void()
        self._known.device.withdraw(state.keys())
        with self._known.lock:
            self._known.drain_core_events()
            self.taken = frozenset(state.taken)
        return self.taken

    def end(self, failed: bool) -> None:
        """Offers the model again, as its plan says now. `failed`: an exception leaves `changing`."""
        state, before = self.state, self.before
        if state is None:
            return
        with self._known.lock:
            try:
                if not failed and self in state.held:
                    state.taken -= self.taken
                    state.arranged(before, self.promised)
                    taken = sum(map(before.pages.__getitem__, self.taken))
                    if before.pages == state.model.plan.pages:  # else pages of the two plans cannot be compared
                        self._tell(state, state.model.plan.device_pages - before.device_pages + taken)
            finally:
                state.held.discard(self)
                state.faster = None
                state.passes.clear()
                self._known.moved(state)
                self._known.list.void()
        if not failed:
            self._reclaim.publish()
            self._known.watch()

    def _tell(self, state: ModelState, more: int) -> None:
        """Logs that the layers have `more` device pages than before, or fewer. The caller holds the lock."""
        if not more:
            return
        known, plan = self._known, state.model.plan
        costs, measured = state.costs_at(state.point or state.last["decode"], known.link.page_seconds)
        stalls = costs.expected(plan) > (1 + known.tuning.prices.hidden) * costs.seconds
        source = PageSource.STALLING_WEIGHTS if stalls else PageSource.HIDDEN_WEIGHTS
        predicted = max(0, more) * costs.page_seconds if measured else None
        took = known.clock() - self.began
        if more > 0:
            known.returned(state)
        verb = "restore" if more > 0 else "reclaim"
        known.events.decided(source.label, verb, abs(more), what=state.name, predicted=predicted, measured=took)
