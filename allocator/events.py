"""The log of memory decisions: what was decided, by whom, and its predicted and measured cost.

Events of the core, in the middle of an operator, are in its own log (`Device.events`) until a call takes them over
(`Events.hear`); decisions in Python are added where they are made.

Note [Added from anywhere]
    A finalizer or a signal handler may add an event in the middle of `add` on the same thread. So the lock is one that
    a thread may take again, an event first goes into an inbox, in one step, and a call that is already emptying it
    takes the event along.

Note [As long as before]
    The cost of copies is predicted from the link, where they are decided. What only changes owners or addresses (pages
    of idle activations, spills, a budget) takes driver calls, or waits for others: there the prediction is what a page
    took on average in all events of this source and verb before.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NamedTuple, Protocol

from .defaults import EVENTS

Row = tuple[int, str, int, int, int, int]  # of Device.events: time in ns, kind, pages, key, thread, duration in ns
KINDS: Final[Mapping[str, tuple[str, str]]] = {  # of the core; `take`, `yield`: of the source that listed it
    "inflate": ("idle activations", "reclaim"),
    "deflate": ("idle activations", "restore"),
    "take": ("", "reclaim"),
    "yield": ("", "yield"),
    "spill": ("spill", "reclaim"),
    "unspill": ("spill", "restore"),
    "request": ("wait", "reclaim"),
    "refuse": ("refuse", "reclaim"),
    "budget": ("budget", "set"),
    "budget refused": ("budget", "refuse"),
}


class CoreEvents(Protocol):
    """What has the core's events: a `Device`."""

    def events(self) -> list[Row]:
        """Hands over the rows since the last call."""


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """One decision."""

    when: int  # ns of CLOCK_MONOTONIC
    source: str
    verb: str  # reclaim, restore; yield: reclaimed because another thread asked; of the budget: set, refuse
    pages: int  # moved, or requested
    what: str = ""  # whose pages
    by: str = ""  # who asked: a thread, a model
    predicted: float | None = None  # seconds; see Note [As long as before]
    measured: float | None = None  # seconds

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, ready for JSON."""
        return asdict(self)


class Count(NamedTuple):
    """The sums of all events of one source and verb: how many, their pages, the seconds that were measured."""

    events: int
    pages: int
    seconds: float


Counts = dict[str, dict[str, Count]]  # by source and verb


class Named(NamedTuple):
    """A published entry: which source takes it, whose pages it has, what taking it should cost in seconds; and how many
    `pages` that is for, where fewer may be taken."""

    source: str
    what: str
    predicted: float | None
    pages: int = 0

    def cost(self, pages: int) -> float | None:
        """Predicted seconds to take so many of the pages."""
        if self.predicted is None or not self.pages:
            return self.predicted
        return self.predicted * pages / self.pages


class Heard(NamedTuple):
    """`events` since a cursor, in the order in which they came; the next `cursor`; `lost`: events since then that are
    not kept any more."""

    events: list[LoggedEvent]
    cursor: int
    lost: int


def unnamed(key: int) -> Named:
    """Returns the name of an unknown entry."""
    return Named("reclaim", f"entry {key}", None)


class Events:
    """The log of one device: the last `limit` events, and counts of all. Thread-safe, see Note [Added from anywhere].

    `naming` maps the key of a published entry to its name; it is called without a lock of the log.
    """

    def __init__(self, core: CoreEvents | None = None, limit: int = EVENTS) -> None:
        self.naming: Callable[[int], Named] = unnamed
        self._core = core
        self._inbox: deque[LoggedEvent] = deque()
        self._sorting = False
        self._kept: deque[LoggedEvent] = deque(maxlen=limit)
        self._counts: dict[tuple[str, str], Count] = {}
        self._timed: dict[tuple[str, str], tuple[int, float]] = {}  # pages and seconds of those that were measured
        self._came = 0
        self._lock = threading.RLock()

    def add(self, event: LoggedEvent) -> None:
        """Adds an event, in a few microseconds at most."""
        self._inbox.append(event)
        with self._lock:
            self._empty_inbox()

    def decided(
        self,
        source: str,
        verb: str,
        pages: int,
        *,
        what: str = "",
        by: str | None = None,
        predicted: float | None = None,
        measured: float | None = None,
    ) -> None:
        """Adds an event of this moment; `by` is the calling thread unless another asked."""
        asked = threading.current_thread().name if by is None else by
        self.add(LoggedEvent(time.monotonic_ns(), source, verb, pages, what, asked, predicted, measured))

    def hear(self) -> None:
        """Takes over the core's events since the last call."""
        if self._core is None:
            return
        rows = self._core.events()
        if rows:
            threads = {thread.ident: thread.name for thread in threading.enumerate()}
            for row in rows:
                self.add(self._of(row, threads))

    def since(self, cursor: int = 0) -> Heard:
        """Returns the events after the cursor, with 0 from the first one on."""
        with self._lock:
            self._empty_inbox()
            came = self._came
            wanted = min(came - cursor, len(self._kept))
            kept = list(self._kept)[len(self._kept) - wanted :]
        return Heard(kept, came, came - cursor - wanted)

    def counts(self) -> Counts:
        """Returns the counts of all events that ever came, by source and verb, sources in the order of their first."""
        with self._lock:
            self._empty_inbox()
            counts = dict(self._counts)
        return _by_source(counts)

    def _empty_inbox(self) -> None:
        """Empties the inbox. The caller holds the lock."""
        if self._sorting:
            return
        self._sorting = True
        try:
            while self._inbox:
                self._sort(self._inbox.popleft())
        finally:
            self._sorting = False

    def _sort(self, event: LoggedEvent) -> None:
        name = event.source, event.verb
        took = event.measured
        if took is not None:
            pages, seconds = self._timed.get(name, (0, 0.0))
            if event.predicted is None and pages:
                event = replace(event, predicted=event.pages * seconds / pages)
            self._timed[name] = pages + event.pages, seconds + took
        count = self._counts.get(name, Count(0, 0, 0.0))
        self._counts[name] = Count(count.events + 1, count.pages + event.pages, count.seconds + (event.measured or 0.0))
        self._kept.append(event)
        self._came += 1

    def _of(self, row: Row, threads: Mapping[int | None, str]) -> LoggedEvent:
        when, kind, pages, key, thread, took = row
        source, verb = KINDS.get(kind, (kind, "reclaim"))
        named = Named(source, "", None) if source else self.naming(key)
        by = threads.get(thread, f"thread {thread}") if thread else "ballonet"
        seconds = took / 1e9 if took else None
        return LoggedEvent(when, named.source, verb, pages, named.what, by, named.cost(pages), seconds)


def more(now: Mapping[str, Mapping[str, Count]], before: Mapping[str, Mapping[str, Count]]) -> Counts:
    """Returns the counts of events between two readings of `counts`."""
    grown: dict[tuple[str, str], Count] = {}
    for source, verbs in now.items():
        for verb, count in verbs.items():
            old = before.get(source, {}).get(verb, Count(0, 0, 0.0))
            if count.events > old.events:
                grown[source, verb] = Count(
                    count.events - old.events, count.pages - old.pages, count.seconds - old.seconds
                )
    return _by_source(grown)


def _by_source(counts: Mapping[tuple[str, str], Count]) -> Counts:
    nested: Counts = {}
    for (source, verb), count in counts.items():
        nested.setdefault(source, {})[verb] = count
    return nested
