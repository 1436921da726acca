"""What a server with replicas writes down: the timeline of its processes, and the log of its controller.

Note [One clock]
    Processes of one machine share the monotonic clock. A message of a replica on another machine has its time of
    sending; the least difference to the time of receipt is the offset of the clocks, up to the latency of the fastest
    message.

Note [Two files]
    A server runs for months, and each replica adds some kilobytes per second. So a file that has reached its size limit
    is renamed, replacing the file before it, and another one is begun: the latest part of the log is kept, between one
    and two times the limit. As long as nothing was replaced, both files together are the whole log, and are read so.
    A disk that is full leaves a gap: once there is room another file is begun, which says how many decisions came
    before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ...allocator.errors import ManageError
from ...offload.policy.replicas.protocol import Continued, Decision, Entry, Setup, from_line, to_line
from ...offload.timeline.file import REST
from ...offload.timeline.fleet import REQUESTS, Bar, FleetMark, FleetRecording
from ...offload.timeline.recorder import MARKS
from .messages import Seen

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
        bars, self._bars = tuple(self._bars), []
        return bars


def machine() -> str:
    """Returns the boot id of this machine: processes with the same one share a monotonic clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Recording:
    """Collects bars and marks, the first ones. Used by one thread."""

    def __init__(self, clock: Callable[[], float], most_bars: int = 50_000) -> None:
        self._clock = clock
        self._most_bars = most_bars  # some minutes of microbatches. Chosen
        self._machine = machine()
        self._start = clock()
        self._bars: list[Bar] = []
        self._foreign: dict[int, list[Bar]] = {}  # by replica of another machine, on its own clock
        self._apart: dict[int, float] = {}  # seconds that the server's clock is ahead, by replica
        self._marks: list[FleetMark] = []
        self._missing = 0

    def seen(self, member: int, seen: Seen) -> None:
        """Adds the bars of a replica."""
        bars = [Bar(member, *noted) for noted in seen.bars]
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
        self._keep(self._bars, [Bar(-1, REQUESTS, *part) for part in parts])

    def mark(self, name: str) -> None:
        """Adds a mark with this name at the present time."""
        if len(self._marks) < MARKS:
            self._marks.append(FleetMark(name, self._clock()))

    def recording(self) -> FleetRecording:
        """Returns everything recorded so far."""
        moved = [
            bar._replace(begin=bar.begin + self._apart[member], end=bar.end + self._apart[member])
            for member, bars in self._foreign.items()
            for bar in bars
        ]
        bars = (*self._bars, *moved)
        return FleetRecording(self._start, self._clock(), bars, tuple(self._marks), self._missing)

    def _keep(self, kept: list[Bar], bars: list[Bar]) -> None:
        room = self._most_bars - len(self._bars) - sum(map(len, self._foreign.values()))
        kept += bars[: max(0, room)]
        self._missing += len(bars) - max(0, min(room, len(bars)))


class DecisionFile:
    """Writes entries, when called with them. Lines are flushed at once, so they survive the end of the process. Call
    `close` at the end."""

    def __init__(
        self,
        path: Path,
        say: Callable[[str], object],
        most: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins a new file. `say`: called with a line where it cannot be written to, as a full disk must not end the
        server; `most`: bytes of a file, see Note [Two files]; None: no limit; `clock`: seconds. ManageError where the
        file cannot be written."""
        self._path = path
        self._say = say
        self._most = most
        self._clock = clock
        self._closed = False
        self._rests: float | None = None  # until then nothing is written, as it failed
        self._written = 0  # bytes of this file
        self._decisions = 0  # of all files
        self._setup: Setup | None = None
        try:
            self._file = path.open("wb", buffering=0)
            _earlier(path).unlink(missing_ok=True)
        except OSError as error:
            raise ManageError(f"no log of decisions can be written to {path}: {error.strerror}") from None

    def __call__(self, entry: Entry) -> None:
        """Writes an entry."""
        if self._closed:
            return
        try:
            if self._rests is not None and self._clock() >= self._rests:
                self._rotate()
                self._rests = None
            elif self._most is not None and self._written >= self._most:
                self._rotate()
            if self._rests is None:
                self._write(entry)
        except OSError as error:
            if self._rests is None:
                self._say(f"decisions are not logged for now: {self._path} cannot be written to: {error.strerror}")
            self._rests = self._clock() + REST
        if isinstance(entry, Setup):
            self._setup = entry
        self._decisions += isinstance(entry, Decision)

    def close(self) -> None:
        """Closes the file. Idempotent."""
        self._closed = True
        self._file.close()

    def _rotate(self) -> None:
        """Renames the file, unless it is empty, and begins the next one. OSError."""
        self._file.close()
        if self._written:
            self._path.replace(_earlier(self._path))
            self._written = 0
        self._file = self._path.open("wb", buffering=0)
        self._write(Continued(self._decisions))
        if self._setup is not None:
            self._write(self._setup)

    def _write(self, entry: Entry) -> None:
        """Writes a line, as a whole or not at all. OSError."""
        line = f"{to_line(entry)}\n".encode()
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError:
            with suppress(OSError):  # a device, which has no length
                self._file.truncate(self._written)
            raise
        self._written += len(line)


def read_decisions(path: Path) -> list[Entry]:
    """Returns all remaining entries of a log; the first is a Setup where the log is complete. ManageError where a line
    is no entry; OSError."""
    entries = _entries(path)
    if not entries or not isinstance(entries[0], Continued):
        return entries
    earlier = _entries(_earlier(path)) if _earlier(path).exists() else []
    before = sum(isinstance(entry, Decision) for entry in earlier)
    if earlier and isinstance(earlier[0], Continued):
        before += earlier[0].decisions
    if not earlier or before != entries[0].decisions:
        return entries
    return [*earlier, *(entry for entry in entries if isinstance(entry, Decision))]


def _entries(path: Path) -> list[Entry]:
    entries = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            entries.append(from_line(text))
        except ValueError as error:
            raise ManageError(f"{path}, line {number}: {error}") from None
    return entries


def _earlier(path: Path) -> Path:
    """Returns the path of the log's earlier file."""
    return path.with_name(f"{path.name}.1")
