"""A failure detector: a replica is alive while its count of iterations grows (paper 003 has no failure detector).

Note [Progress, not presence]
    A heartbeat thread goes on when the main loop hangs in a kernel or in a wait for another process. So the count of
    iterations of the main loop is watched. It may stand still for a second, or for five times the longest recent
    iteration, whichever is more: a long prefill must not look like a death. Nor must the first long one, after only
    short iterations: the predicted time of a batch full of prompt tokens counts as an iteration.
"""

from __future__ import annotations

from collections import deque

from ..tuning import DEFAULT
from ..tuning import Replicas as Tuning


class Heartbeat:
    """The progress of one replica, from `at` on. `full`: seconds that a full batch is predicted to take."""

    def __init__(self, at: float, tuning: Tuning = DEFAULT.replicas, full: float = 0.0) -> None:
        self._tuning = tuning
        self._full = full
        self._moved = at
        self._progress: int | None = None
        self._iterations: deque[float] = deque(maxlen=tuning.remembered)

    def beat(self, at: float, progress: int) -> None:
        """Takes in a reported count of iterations."""
        if progress == self._progress:
            return
        if self._progress is not None and progress > self._progress:
            self._iterations.append((at - self._moved) / (progress - self._progress))
        self._progress, self._moved = progress, at

    def discount(self, seconds: float) -> None:
        """Leaves so many seconds out of account, in which no report could be received."""
        self._moved += seconds

    @property
    def patience(self) -> float:
        """Seconds that the count may stand still."""
        return max(self._tuning.silent, self._tuning.iterations * max([self._full, *self._iterations]))

    def is_dead(self, at: float) -> bool:
        return at - self._moved > self.patience
