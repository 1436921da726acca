"""Bars of a process for a timeline, in lanes. None are recorded unless switched on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Noted = tuple[str, str, float, float]  # lane, name, begin and end in seconds of the process's clock


class Notes:
    """Records bars, if `on`. Used by one thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.on = False
        self._clock = clock
        self._bars: list[Noted] = []
        self._open: dict[str, tuple[str, float]] = {}  # by lane: name and begin of its open bar

    def bar(self, lane: str, name: str, begin: float, end: float) -> None:
        """Adds a bar from `begin` to `end`."""
        if self.on:
            self._bars.append((lane, name, begin, end))

    def now(self, lane: str, name: str | None) -> None:
        """Ends the open bar of a lane, and opens one with this name; None: opens none. Does nothing where a bar of this
        name is open."""
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
        """Ends all open bars."""
        for lane in list(self._open):
            self.now(lane, None)

    def take(self) -> tuple[Noted, ...]:
        """Removes and returns the bars that have ended."""
        found, self._bars = tuple(self._bars), []
        return found


def machine() -> str:
    """Returns the boot id of this machine: processes with the same one share a monotonic clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
