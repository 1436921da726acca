"""Records a run: owners of pages, budget, decisions, requests. `timeline(path)` writes the recording at the end.

A generation loop is told apart by its name, that of its model. Times are ns of CLOCK_MONOTONIC.

Note [Several recorders]
    A device hands over each row once. So a collecting thread gives the rows to all recorders of the device
    (`Recorders`, which its runtime keeps); each recorder begins with the owners as they were then, and skips older
    rows.
"""

from __future__ import annotations

import atexit
import copy
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Protocol, Self

from ...allocator import devices
from ...allocator._native import Device
from ...allocator.devices import Runtime
from ...allocator.events import Counts, Events, LoggedEvent, more
from .file import VIEWER, End, Level, RequestSeries, Row, SeriesRecording, fewer, is_picture, summary, thinned, write
from .file import check as check

# What a trace has that a browser opens at once: marks and requests, the first ones, and batches of each loop. Chosen.
MARKS: Final = 200
_REQUESTS: Final = 2_000
_BATCHES: Final = 20_000


@dataclass(frozen=True, slots=True)
class Timelines:
    """How often a recorder collects, and how much it keeps. All chosen, as above."""

    interval: float = 0.05  # seconds between two collections; the device's own log lasts for seconds
    rows: int = 20_000  # of pages by owner
    events: int = 10_000  # decisions


@dataclass(slots=True)
class Served:
    """Requests and batches of loops, bounded: of too many requests those that came first are kept, and the others
    counted; of too many batches the largest of each stretch of time."""

    most_requests: int
    most_batches: int
    requests: list[RequestSeries] = field(default_factory=list)
    batches: dict[str, list[Level]] = field(default_factory=dict)  # by loop: time, requests, new tokens
    missing: int = 0  # requests that came and are not kept
    _known: dict[tuple[str, str], RequestSeries] = field(default_factory=dict)  # the last one of each loop and name

    def came(self, loop: str, name: str, when: int, prompt: int) -> None:
        """Notes that a new request waits."""
        self._known.pop((loop, name), None)
        if len(self.requests) >= self.most_requests:
            self.missing += 1
            return
        self.requests.append(RequestSeries(loop, name, when, prompt))
        self._known[loop, name] = self.requests[-1]

    def again(self, loop: str, name: str) -> None:
        """Notes that a request that has begun waits again, or begins anew."""
        if (known := self._known.get((loop, name))) is not None:
            known.again, known.ended, known.end = known.again + 1, 0, ""

    def batch(self, loop: str, when: int, requests: list[tuple[str, int]], tokens: int) -> None:
        """Notes that a batch begins with requests (name, tokens generated), and so many new tokens."""
        kept = self.batches.setdefault(loop, [])
        kept.append((when, len(requests), tokens))
        if len(kept) > self.most_batches:
            self.batches[loop] = thinned(kept, self.most_batches)
        for name, got in requests:
            if (known := self._known.get((loop, name))) is not None:
                known.began = known.began or when
                if got:
                    known.first = known.first or when

    def rests(self, loop: str, when: int) -> None:
        """Notes that the loop has no batch."""
        kept = self.batches.get(loop)
        if kept and kept[-1][1]:
            kept.append((when, 0, 0))

    def ended(self, loop: str, name: str, when: int, tokens: int, end: End) -> None:
        """Notes that a request is over, with so many tokens."""
        if (known := self._known.get((loop, name))) is not None:
            known.ended, known.end, known.tokens = when, end, tokens
            if tokens:
                known.first = known.first or when


class TimelineSource(Protocol):
    """The part of `Device` that is recorded."""

    def timeline(self) -> list[Row]:
        """Hands over the rows since the last call, one per change."""

    def snapshot(self) -> dict[str, Any]:
        """The numbers of this moment: page_size, budget, pages, host_pages."""


class Recorders:
    """The recorders of one device. The lock is held to use the list, and to collect."""

    def __init__(self, source: TimelineSource, events: Events | None = None) -> None:
        self.source = source
        self.log = Events() if events is None else events
        self.all: list[Recorder] = []
        self.lock = threading.Lock()

    def collect(self) -> None:
        """Gives all recorders the device's new rows. See Note [Several recorders]."""
        rows, snapshot = self.source.timeline(), self.source.snapshot()
        for recorder in self.all:
            recorder.take(rows, snapshot)

    def mark(self, name: str) -> None:
        """Marks the beginning of a call, such as "generate()", in all timelines."""
        for recorder in self.all:
            recorder.mark(name)

    def served(self, note: Callable[[Served], object]) -> None:
        """Calls `note` with the requests of each recorder."""
        if self.all:
            with self.lock:
                for recorder in self.all:
                    note(recorder.served)

    def forget(self) -> None:
        """Drops all recorders in a child after a fork: it has no thread that collects, and the lock's holder is
        gone."""
        self.lock = threading.Lock()
        self.all.clear()


def recorders_of(runtime: Runtime) -> Recorders:
    """Returns the recorders of a runtime's device."""
    return runtime.parts.of(Recorders, lambda: Recorders(runtime.device, runtime.events))


class Recorder:
    """Collects in a thread what a device does, until `stop()`. A context manager. Memory is bounded: rows and events
    are thinned when they become too many."""

    def __init__(self, recorders: Recorders, tuning: Timelines | None = None) -> None:
        """`recorders`: of the device, which this one joins until its end."""
        self._recorders = recorders
        self._log = recorders.log
        self._tuning = tuning or Timelines()
        self._rows: list[Row] = []
        self._levels: list[Level] = []
        self._events: list[LoggedEvent] = []
        self._missing = 0
        self._marks: list[tuple[int, str]] = []
        self.served = Served(_REQUESTS, _BATCHES)
        self._counts: Counts = {}
        self._done = threading.Event()
        self._error: Exception | None = None
        self._stop: int | None = None
        with recorders.lock:
            recorders.collect()
            self._start, self._began = time.monotonic_ns(), time.time()
            snapshot = recorders.source.snapshot()
            self._page_size: int = snapshot["page_size"]
            self._log.hear()
            self._cursor = self._log.since().cursor
            self._before = self._log.counts()
            pages = snapshot["pages"]
            first = (
                self._start,
                pages["free"],
                pages["weights"],
                pages["activations"],
                pages["kv"],
                pages["pending_free"],
            )
            self.take([first], snapshot)
            recorders.all.append(self)
        self._thread = threading.Thread(target=self._run, name="ballonet-timeline", daemon=True)
        self._thread.start()

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows collected so far, in order of time."""
        return tuple(self._rows)

    def stop(self) -> SeriesRecording:
        """Collects what is left and ends. Raises what the device raised meanwhile. Idempotent: returns the same
        recording."""
        self._done.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self.recording()

    def recording(self) -> SeriesRecording:
        """Returns the recording up to now, or up to the end."""
        with self._recorders.lock:
            if self._stop is None:
                self._recorders.collect()
            return SeriesRecording(
                self._start,
                time.monotonic_ns() if self._stop is None else self._stop,
                self._began,
                self._page_size,
                tuple(self._rows),
                tuple(self._levels),
                tuple(sorted(self._events, key=lambda event: event.when)),
                self._counts if self._stop is not None else more(self._log.counts(), self._before),
                self._missing,
                tuple(map(copy.copy, self.served.requests)),
                self.served.missing,
                {loop: tuple(batches) for loop, batches in self.served.batches.items()},
                tuple(self._marks),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        recorders = self._recorders
        try:
            while not self._done.wait(self._tuning.interval):
                with recorders.lock:
                    recorders.collect()
            with recorders.lock:
                recorders.collect()
                self._counts = more(self._log.counts(), self._before)
                self._stop = time.monotonic_ns()
        except Exception as error:
            self._error = error
        finally:
            with recorders.lock:
                recorders.all.remove(self)

    def mark(self, name: str) -> None:
        """Marks the beginning of a call; see Recorders.mark."""
        if len(self._marks) < MARKS:
            self._marks.append((time.monotonic_ns(), name))

    def take(self, rows: list[Row], snapshot: Mapping[str, Any]) -> None:
        """Adds rows and the present numbers of the device. The caller holds the lock."""
        most_rows, most_events = self._tuning.rows, self._tuning.events
        self._rows = thinned([*self._rows, *((max(row[0], self._start), *row[1:]) for row in rows)], most_rows)
        self._log.hear()
        heard = self._log.since(self._cursor)
        self._cursor = heard.cursor
        level = snapshot["budget"], snapshot["host_pages"]
        if not self._levels:
            self._levels.append((self._start, *level))
        elif self._levels[-1][1:] != level:
            _, budget, _ = self._levels[-1]
            told = [event.when for event in heard.events if event.source == "budget" and event.verb == "set"]
            when = told[-1] if told and budget != level[0] else time.monotonic_ns()
            self._levels = thinned([*self._levels, (max(when, self._levels[-1][0]), *level)], most_rows)
        came = [*self._events, *heard.events]
        self._events = fewer(came, most_events)
        self._missing += heard.lost + len(came) - len(self._events)


def mark(name: str, device: Device | None = None) -> None:
    """Calls `Recorders.mark` for the device, with None that of the first runtime. Does nothing where there is none."""
    runtimes = [runtime for runtime in devices.every() if device in (None, runtime.device)]
    if runtimes:
        recorders_of(runtimes[0]).mark(name)


def _forget() -> None:
    for runtime in devices.every():
        if (recorders := runtime.parts.get(Recorders)) is not None:
            recorders.forget()


os.register_at_fork(after_in_child=_forget)


@contextmanager
def timeline(path: str | os.PathLike[str]) -> Iterator[Recorder]:
    """Records who owns which page and every decision while it is open, and writes that to `path` however it ends.

    The suffix says how: `.json`, a trace for ui.perfetto.dev; `.png`, a picture of the pages. Raises ConfigError where
    the path cannot be used, NotInstalled; OSError at the end.
    """
    finish = _begin(path)
    try:
        yield finish.recorder
    finally:
        finish()


def until_exit(path: str | os.PathLike[str]) -> None:
    """Records as `timeline` until this process exits, by its end, an exception, Ctrl-C or sys.exit. Prints the path and
    a summary, or the error, on stderr."""
    atexit.register(_begin(path, tells=True))


@dataclass(frozen=True, slots=True)
class _Finish:
    """Ends a recording and writes it. In a child after a fork it does nothing."""

    recorder: Recorder
    path: str
    pid: int
    tells: bool  # prints the path and a summary on stderr

    def __call__(self) -> None:
        if os.getpid() == self.pid:
            recording = self.recorder.stop()
            write(recording, self.path)
            if self.tells:
                opened = "" if is_picture(self.path) else f" (open it at {VIEWER})"
                print(f"ballonet: the timeline is in {self.path}{opened}. {summary(recording)}", file=sys.stderr)


def _begin(path: str | os.PathLike[str], tells: bool = False) -> _Finish:
    target = os.path.abspath(path)
    check(target)
    return _Finish(Recorder(recorders_of(devices.of())), target, os.getpid(), tells)
