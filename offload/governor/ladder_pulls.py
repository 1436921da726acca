"""Pulls and reverts rungs of the ladder on request: of levers.py, and of whoever sets a lower budget."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ...allocator.interrupts import Guarded, guarded
from ..policy.reclaim_order import OF_LAYERS, Rung
from .client import KEYS_PER_CLIENT
from .overview import Overview
from .reclaim_list import ReclaimList
from .restore import plan_restore


class LadderPulls:
    """Thread-safe; nobody who calls holds the governor's lock."""

    def __init__(self, known: Overview, reclaim: ReclaimList) -> None:
        self._known = known
        self._reclaim = reclaim

    def pull(self, rung: Rung, pages: int) -> int:
        """Takes so many device pages of a rung of the list, those first that are first, as far as this thread may; how
        many. DriverError."""
        self._reclaim.publish_now()
        keys, left = [], pages
        for candidate in self._reclaim.candidates():
            if left > 0 and candidate.rung is rung:
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

    def make_room(self, pages: int, last: Rung) -> None:
        """Has so many device pages given by the rungs of the list up to the last, or as many as they have.
        DriverError."""
        self._reclaim.publish_now()
        wished = last < Rung.DUPLICATES
        for candidate in self._reclaim.candidates():
            if pages > 0 and candidate.rung <= last:
                if candidate.rung > Rung.DUPLICATES and not wished:
                    wished = True
                    self._known.duplicates.request_drop(pages)
                pages -= self._known.device.take([candidate.client * KEYS_PER_CLIENT + candidate.index])
        if pages > 0 and not wished:
            self._known.duplicates.request_drop(pages)

    def revert(self, rung: Rung, pages: int) -> int:
        """Up to so many free pages go back to those who gave of this rung, without a dwell; how many will."""
        layers = rung in OF_LAYERS
        with self._known.lock:
            self._known.drain_core_events()
            now = self._known.clock()
            free = self._known.look(now)
            situation, held = self._known.situation(now, free), self._known.clients.held(now)
            back = plan_restore(situation, [] if layers else held, min(pages, situation.spare), models=layers)
            self._known.grant(back)
            states = {state.number: state for state in situation.states}
            plans = sum(
                plan.device_pages - situation.standing(states[number]).device_pages
                for number, plan in back.plans.items()
            )
            return plans + sum(back.pages.values())
