"""Makes and publishes the reclaim list of a device, and has pages copied ahead so that those that go first are clean.

Note [What is prepared]
    The list has whatever `entry` offers, always. Nothing of weights is prepared: a layer's bytes go to the host when it
    is taken, and a model whose layers never are never pays. KV is copied ahead (`write_behind`) only while pages are
    short, and only so much that those that are taken first are clean, or as much as is borrowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..policy.peer import Near, lacking, leaving
from ..policy.reclaim_order import Candidate
from .candidates import Held, to_clean
from .client import PageClient
from .overview import Overview
from .situation import Situation


class Offered(NamedTuple):
    """Pages that others give when asked. Of these, `dirty` have their bytes copied to the host then, and `in_use` are
    used by others."""

    pages: int
    dirty: int
    in_use: int


class ReclaimList:
    """Makes and publishes the list. Thread-safe; callers do not hold the governor's lock. See overview.py, Note
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
            now = self._known.clock()
            self._known.update_idle(now)
            return self._known.listed(
                self._known.situation(now, 0), self._known.clients.held(now), self._known.owed(now)
            )

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
            now = self._known.clock()
            self._known.update_idle(now)
            situation, held = self._known.situation(now, 0), self._known.clients.held(now)
            candidates = self._known.listed(situation, held, self._known.owed(now))
            behind = self._plan_write_behind(situation, candidates, held, now)
            draft = self._known.list.draft(self._known.clients.of(candidates))
        if draft is not None:
            draft.fill()
            with self._known.lock:
                self._known.list.publish(draft)
        return behind

    def _plan_write_behind(
        self, now: Situation, candidates: Sequence[Candidate], held: Sequence[Held], time: float
    ) -> list[tuple[PageClient, int]]:
        """Returns how many pages caches should copy to the host now: some while pages are short and the link serves no
        layers. The caller holds the lock."""
        busy = any(state.model.plan.copied or state.taken for state in now.states if state.number in now.active)
        if not self._known.pages.short:
            return []
        tuning = self._known.tuning.write_behind
        step = 0 if busy else max(1, tuning.step // self._known.device.page_size)
        borrowed = self._known.lending.borrowed(self._known.clients.uses(time)) if len(now.states) > 1 else 0
        pages = to_clean(candidates, held, max(self._known.pages.total // tuning.clean, borrowed), step)
        return [(cache, pages.get(state.number, 0)) for state, cache in self._known.clients.paged]

    def _leaving(self) -> list[tuple[PageClient, int]]:
        """Returns how many pages of caches should leave the peer for the host; see peer.py."""
        free, total = self._known.peer()
        if not total:
            return []
        with self._known.lock:
            active = self._known.clients.idleness.active(self._known.clock())
            caches = {state.number: cache for state, cache in self._known.clients.paged}
            wanted = lacking(
                free + sum(cache.leaving_peer for cache in caches.values()), total, self._known.tuning.peer
            )
            near = [
                Near(number, cache.peer_pages, number in active, cache.used)
                for number, cache in caches.items()
                if wanted
            ]
        return [(caches[number], pages) for number, pages in leaving(near, wanted).items()]
