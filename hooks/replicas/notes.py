"""What a process notes of what it does, for a timeline: bars in lanes. Nothing where nobody wants one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Noted = tuple[str, str, float, float]  # lane, name, begin and end in seconds of the process's clock


class Notes:
    """Used by one thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.on = False  # does anybody want them?
        self._clock = clock
        self._bars: list[Noted] = []
        self._open: dict[str, tuple[str, float]] = {}  # by lane: what goes on there, and since when

    def bar(self, lane: str, name: str, begin: float, end: float) -> None:
        """Something went on from `begin` to `end`."""
        if self.on:
            self._bars.append((lane, name, begin, end))

    def now(self, lane: str, name: str | None) -> None:
        """What goes on in a lane from now on; None: nothing. May be said again and again."""
        before = self._open.get(lane)
        if not self.on or name == (None if before is None else before[0]):
            return
        at = self._clock()
        if before is not None:
            del self._open[lane]
            self._bars.append((lane, before[0], before[1], at))
        if name is not None:
            self._open[lane] = name, at

    def close(self) -> None:
        """Nothing goes on any more."""
        for lane in list(self._open):
            self.now(lane, None)

    def take(self) -> tuple[Noted, ...]:
        """What is over and was not taken."""
        found, self._bars = tuple(self._bars), []
        return found


def machine() -> str:
    """Says which machine this is since it was started: processes of one machine have one monotonic clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
