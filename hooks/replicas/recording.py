"""The timeline of a server with replicas: what it noted, and what its replicas told, on the server's clock.

Note [One clock]
    Processes of one machine share the monotonic clock. What a replica of another machine tells has its time of sending;
    the least that the server's clock was ahead of that when it came is how far the clocks are apart, but for the
    fastest message's way.
"""

from __future__ import annotations

from collections.abc import Callable

from ...offload.policy.tuning import DEFAULT, Timelines
from ...offload.timeline.fleet import REQUESTS, Bar, FleetMark, FleetRecording
from .messages import Seen
from .notes import machine


class Recording:
    """Used by one thread. Bounded: of too many bars the first ones are kept."""

    def __init__(self, clock: Callable[[], float], tuning: Timelines = DEFAULT.timeline) -> None:
        self._clock = clock
        self._tuning = tuning
        self._machine = machine()
        self._start = clock()
        self._bars: list[Bar] = []
        self._foreign: dict[int, list[Bar]] = {}  # of other machines, by their own clocks
        self._apart: dict[int, float] = {}
        self._marks: list[FleetMark] = []
        self._missing = 0

    def seen(self, member: int, seen: Seen) -> None:
        """A replica tells what it has done."""
        bars = [Bar(member, *each) for each in seen.bars]
        if seen.machine == self._machine:
            self._keep(self._bars, bars)
            return
        apart = self._clock() - seen.sent
        self._apart[member] = min(apart, self._apart.get(member, apart))
        self._keep(self._foreign.setdefault(member, []), bars)

    def request(self, name: str, came: float, first: float | None) -> None:
        """A request has ended now."""
        now = self._clock()
        parts = [(f"{name} waits", came, now if first is None else first)]
        if first is not None:
            parts.append((name, first, now))
        self._keep(self._bars, [Bar(-1, REQUESTS, *each) for each in parts])

    def mark(self, name: str) -> None:
        """Something has happened."""
        if len(self._marks) < self._tuning.marks:
            self._marks.append(FleetMark(name, self._clock()))

    def recording(self) -> FleetRecording:
        """All so far."""
        moved = [
            each._replace(begin=each.begin + self._apart[member], end=each.end + self._apart[member])
            for member, bars in self._foreign.items()
            for each in bars
        ]
        bars = (*self._bars, *moved)
        return FleetRecording(self._start, self._clock(), bars, tuple(self._marks), self._missing)

    def _keep(self, kept: list[Bar], bars: list[Bar]) -> None:
        room = self._tuning.bars - len(self._bars) - sum(map(len, self._foreign.values()))
        kept += bars[: max(0, room)]
        self._missing += len(bars) - max(0, min(room, len(bars)))
