"""Whether a replica is alive: its count of iterations moves (paper 003 has no failure detector; REPLICAS, detection).

Note [Progress, not presence]
    A thread that says "I live" still does so when the main loop hangs in a kernel or in a wait for a third party. So
    what counts is the number of iterations of the main loop. It may stand still for a second, or for five of the
    longest iterations of late, whichever is more: a long prefill must not look like a death. Neither must the first
    one, before which there were but short ones: what a batch full of a prompt's tokens is predicted to take counts as
    one of them.
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
        """The replica has told its count of iterations."""
        if progress == self._progress:
            return
        if self._progress is not None and progress > self._progress:
            self._iterations.append((at - self._moved) / (progress - self._progress))
        self._progress, self._moved = progress, at

    def excuse(self, seconds: float) -> None:
        """Takes so much time out of account: nobody could listen."""
        self._moved += seconds

    @property
    def patience(self) -> float:
        """Seconds that its count may stand still."""
        return max(self._tuning.silent, self._tuning.iterations * max([self._full, *self._iterations]))

    def is_dead(self, at: float) -> bool:
        return at - self._moved > self.patience
