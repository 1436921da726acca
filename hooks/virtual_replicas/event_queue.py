"""Virtual time: a queue of actions, ordered by the time at which they happen."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class EventQueue:
    """Actions by their time in seconds; those of one time in the order in which they were added. `now`: the time of the
    latest action performed."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._added = 0

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Schedules `act` at that time, or now if that has passed."""
        self._added += 1
        heapq.heappush(self._queue, (max(when, self.now), self._added, act))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Schedules `act` in so many seconds."""
        self.at(self.now + seconds, act)

    def step(self) -> bool:
        """Advances to the next action, and performs it. Returns whether there was one."""
        if not self._queue:
            return False
        self.now, _, act = heapq.heappop(self._queue)
        act()
        return True
