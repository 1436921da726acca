"""The timeline of a server with replicas: its own marks and the bars of its replicas, on the server's clock.

Note [One clock]
    Processes of one machine share the monotonic clock. A message of a replica on another machine has its time of
    sending; the least difference to the time of receipt is the offset of the clocks, up to the latency of the fastest
    message.
"""

from __future__ import annotations

from collections.abc import Callable

from ...offload.policy.tuning import DEFAULT, Timelines
from ...offload.timeline.fleet import REQUESTS, Bar, FleetMark, FleetRecording
from .messages import Seen
from .notes import machine


class Recording:
    """Collects bars and marks, the first `tuning.bars` and `tuning.marks` of them. Used by one thread."""

    def __init__(self, clock: Callable[[], float], tuning: Timelines = DEFAULT.timeline) -> None:
        self._clock = clock
        self._tuning = tuning
        self._machine = machine()
        self._start = clock()
        self._bars: list[Bar] = []
        self._foreign: dict[int, list[Bar]] = {}  # by replica of another machine, on its own clock
        self._apart: dict[int, float] = {}  # seconds that the server's clock is ahead, by replica
        self._marks: list[FleetMark] = []
        self._missing = 0

    def seen(self, member: int, seen: Seen) -> None:
        """Adds the bars of a replica."""
        bars = [Bar(member, *each) for each in seen.bars]
        if seen.machine == self._machine:
            self._keep(self._bars, bars)
            return
        apart = self._clock() - seen.sent
        self._apart[member] = min(apart, self._apart.get(member, apart))
        self._keep(self._foreign.setdefault(member, []), bars)

    def request(self, name: str, came: float, first: float | None) -> None:
        """Adds a request that has ended now. `came`, `first`: times of its arrival, and of its first token."""
        now = self._clock()
        parts = [(f"{name} waits", came, now if first is None else first)]
        if first is not None:
            parts.append((name, first, now))
        self._keep(self._bars, [Bar(-1, REQUESTS, *each) for each in parts])

    def mark(self, name: str) -> None:
        """Adds a mark with this name at the present time."""
        if len(self._marks) < self._tuning.marks:
            self._marks.append(FleetMark(name, self._clock()))

    def recording(self) -> FleetRecording:
        """Returns everything recorded so far."""
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
