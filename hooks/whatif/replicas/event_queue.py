"""Virtual time: what happens when, in order."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class EventQueue:
    """Actions by the second at which they happen; those of one moment in the order in which they were added. `now`:
    the moment of the last one."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._added = 0

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Has `act` called at that moment, or now where it has passed."""
        self._added += 1
        heapq.heappush(self._queue, (max(when, self.now), self._added, act))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Has `act` called so many seconds from now."""
        self.at(self.now + seconds, act)

    def step(self) -> bool:
        """Goes on to the next moment at which something happens. Returns whether there was one."""
        if not self._queue:
            return False
        self.now, _, act = heapq.heappop(self._queue)
        act()
        return True
