"""A device as its manager sees it: its pages over time (`DevicePages`), the list of what may be taken, as the native
core has it (`Published`), and its links with others' traffic on them (`HostLink`).

Note [Drafts]
    What may be taken is decided under the manager's lock, but entries are made by the models, without it. So a list is
    drafted, filled, and published if it is the latest draft by then, and it was not voided meanwhile (`void`). Until
    one is published what the core has counts as out of date.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from threading import Lock
from typing import Any, Final, Protocol

from ...allocator.errors import BallonetError
from ...allocator.events import Events, Named, unnamed
from ..policy.kv_pages import mark, scarce
from ..policy.reclaim_order import Candidate, PageSource
from ..policy.tuning import FreePages
from ..residency.backing import FAR
from .activity import StreamMarks
from .clients import ClientState, Version

_EXPOSED: Final = {source.label for source in PageSource if source.exposed}


class DeviceView(Protocol):
    """The part of `Device` that the manager uses."""

    @property
    def page_size(self) -> int: ...
    @property
    def budget(self) -> int: ...
    @property
    def available(self) -> int: ...
    @property
    def page_request(self) -> int: ...
    def yield_pages(self) -> int: ...
    def trim(self) -> int: ...
    def take(self, keys: list[int], pages: int | None = None) -> int: ...
    def snapshot(self) -> dict[str, Any]: ...
    def publish(self, entries: list[Any], limits: dict[int, int]) -> None: ...
    def taken(self) -> list[tuple[int, int, int]]: ...
    def withdraw(self, keys: list[int]) -> None: ...


@dataclass
class Draft:
    """The next list while it is made: candidates with their clients, in the order of taking."""

    number: int
    order: Sequence[tuple[ClientState, Candidate]]
    entries: list[Any] = field(default_factory=list)
    pages: dict[int, int] = field(default_factory=dict)  # by number of the client, but for layers that passes wait for
    limits: dict[int, int] = field(default_factory=dict)  # pages of what is divisible, by key
    dirty: dict[int, int] = field(default_factory=dict)  # of `pages`, those whose bytes go to the host when taken
    in_use: dict[int, int] = field(default_factory=dict)  # and those that are in use

    @property
    def keys(self) -> list[tuple[int, PageSource, bool, int]]:
        """The facts by which lists differ: (key, source, borrowed, pages where divisible) of each candidate."""
        return [
            (client.key(it.index), it.source, it.borrowed, it.pages if it.divisible else 0) for client, it in self.order
        ]

    def fill(self) -> None:
        """Gets the entries from the clients."""
        for client, candidate in self.order:
            entry = client.entry(candidate.index)
            if entry is not None:
                self.entries.append((client.key(candidate.index), *entry))
                if candidate.divisible:
                    self.limits[client.key(candidate.index)] = candidate.pages
                if candidate.source is not PageSource.STALLING_WEIGHTS:
                    self.pages[client.number] = self.pages.get(client.number, 0) + candidate.pages
                    dirty = min(candidate.pages, _dirty(entry[1]))
                    self.dirty[client.number] = self.dirty.get(client.number, 0) + dirty
                    if not candidate.source.idle:
                        self.in_use[client.number] = self.in_use.get(client.number, 0) + candidate.pages

    def names(self) -> dict[int, Named]:
        """The names of its entries, by key."""
        return {
            client.key(candidate.index): Named(
                candidate.label, client.name, candidate.leaving, candidate.pages if candidate.divisible else 0
            )
            for client, candidate in self.order
        }


class Published:
    """The list that the core has. Not thread-safe, but for `named`: callers hold the manager's lock."""

    def __init__(self, device: DeviceView, version: Version) -> None:
        self._device = device
        self._version = version
        self._number = 0
        self._keys: list[tuple[int, PageSource, bool, int]] = []
        self._current = True  # has the core the last list that was drafted?
        self._names: deque[Mapping[int, Named]] = deque(maxlen=2)  # of this list and the one before it, by key
        self.pages: dict[int, int] = {}  # in the list, but for layers that passes wait for, by number of the client
        self.dirty: dict[int, int] = {}  # of these, those whose bytes go to the host when they are taken
        self.in_use: dict[int, int] = {}  # and those that are in use
        self.published = 0  # lists, so far
        self.stale = False  # may the order be another one now?

    def outdate(self) -> None:
        """Notes that the order may be another one now."""
        self.stale = True
        self._version.bump()

    def void(self) -> None:
        """Forbids to publish the present draft, and has the next list made anew."""
        self._number += 1
        self._current = False
        self.outdate()

    def draft(self, order: Sequence[tuple[ClientState, Candidate]]) -> Draft | None:
        """Begins a draft. None where the core has that list already."""
        self.stale = False
        self._number += 1
        draft = Draft(self._number, order)
        if self._current and draft.keys == self._keys:
            return None
        self._current = False
        return draft

    def publish(self, draft: Draft) -> None:
        """Publishes the draft, unless a later one was begun."""
        if draft.number == self._number:
            self._names.appendleft(draft.names())
            self._device.publish(draft.entries, draft.limits)
            self.published += 1
            self._keys, self._current = draft.keys, True
            self.pages, self.dirty, self.in_use = draft.pages, draft.dirty, draft.in_use

    def named(self, key: int) -> Named:
        """Returns the source, client and predicted cost of the entry of this key. On any thread."""
        return next((names[key] for names in tuple(self._names) if key in names), unnamed(key))

    def is_exposed(self, key: int) -> bool:
        """Does each pass wait for what the entry of this key has, once it is away?"""
        return self.named(key).source in _EXPOSED


def _dirty(parts: Iterable[Any]) -> int:
    """Pieces of an entry whose backing has no page yet."""
    return sum(
        count
        for _, _, wanted, twin, first, _ in parts
        if twin is not None
        for _, count, backing in twin.runs(first, wanted)
        if backing not in FAR
    )


# From 5/16 of the budget on free pages are ample: above `FreePages.short`, so that nothing flaps at the border. Chosen.
_AMPLE: Final = 5 / 16
# Seconds between looks at others' traffic, each 20 ms of a thread; looks of which the middle one counts, as copies come
# in bursts; parts of the link in which it is told apart, as each change has all decisions made anew. Chosen.
_PERIOD: Final = 1.0
_LOOKS: Final = 5
_STEPS: Final = 16


class DevicePages:
    """Free pages over time. `look` is not thread-safe, its callers hold the manager's lock; the others are."""

    def __init__(
        self,
        device: DeviceView,
        tuning: FreePages,
        waits: Callable[[], float] = time.monotonic,
    ) -> None:
        """`waits`: the clock by which `wait` gives up."""
        self.short = False  # were few free at the last look?
        self.scarce = False  # were few free, and have they not been ample for long enough since?
        self.quiet_until = -math.inf  # before then time alone does not change the result of a look
        self.seen = 0, 0  # free pages at the last look, and the budget
        self._ample: float | None = None  # since when pages are ample
        self._device = device
        self._tuning = tuning
        self._waits = waits
        self._given = threading.Condition()

    @property
    def total(self) -> int:
        """Pages of the budget."""
        return self._device.budget // self._device.page_size

    @property
    def mark(self) -> int:
        """Pages that stay free and are never given back."""
        return mark(self.total)

    @property
    def free(self) -> int:
        """Free pages."""
        return self._device.available

    @property
    def unused(self) -> int:
        """Pages that are free, pending free, or under free blocks."""
        now = self._device.snapshot()
        idle: int = now["heap"]["cached"] // self._device.page_size
        used: int = sum(now["pages"][owner] for owner in ("weights", "activations", "kv"))
        return max(0, self.total - used + idle)

    def look(self, now: float) -> int:
        """Returns how many pages are free."""
        free, budget = self._device.available, self._device.budget
        total = budget // self._device.page_size
        self.short = scarce(free, total, self._tuning)
        if self.short or free < _AMPLE * total or not self.scarce:
            self._ample = None
        elif self._ample is None:
            self._ample = now
        recent = self._ample is None or now - self._ample < self._tuning.forget
        self.scarce = self.short or (self.scarce and recent)
        self.seen = free, budget
        ample = math.inf if self._ample is None else self._ample + self._tuning.forget
        self.quiet_until = -math.inf if self.short else ample
        return free

    def wait(self, timeout: float) -> bool:
        """Waits until others may have given pages, `timeout` seconds at most, and gives meanwhile what others request
        of this thread. False at the timeout."""
        end, before, requested = self._waits() + timeout, self.free, 0
        while True:
            requested, was = self._device.page_request, requested
            if (requested and self._device.yield_pages()) or self.free > before or requested < was:
                return True
            left = end - self._waits()
            if left <= 0:
                return False
            with self._given:
                if self._given.wait(min(left, self._tuning.look)):
                    return True

    def given(self) -> None:
        """Wakes waiting threads, as pages were freed."""
        with self._given:
            self._given.notify_all()


class Traffic:
    """A daemon thread that measures while anything streams. A look takes 20 ms (record/link.py, `received`), too long
    for a forward thread."""

    def __init__(
        self,
        received: Callable[[], int | None],
        copied: Callable[[], int],
        tell: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        """`received`: bytes per second that the device receives, None where not known, which ends the looks; `copied`:
        bytes that ballonet sent to the device so far; `tell`: is called with the bytes per second of others; `clock`:
        seconds."""
        self._received = received
        self._copied = copied
        self._tell = tell
        self._clock = clock
        self._seen: deque[float] = deque(maxlen=_LOOKS)
        self._lock = threading.Lock()
        self._stop: threading.Event | None = None  # ends the thread

    def wanted(self, streams: bool) -> None:
        """Starts the thread, or stops it. Returns at once."""
        with self._lock:
            if streams and self._stop is None:
                self._stop = threading.Event()
                thread = threading.Thread(
                    target=self._watch, args=(self._stop,), name="ballonet-link-traffic", daemon=True
                )
                thread.start()
            elif not streams and self._stop is not None:
                self._stop.set()
                self._stop = None
                self._seen.clear()

    def look(self) -> bool:
        """Measures once. False where the traffic is not known."""
        began, before = self._clock(), self._copied()
        received = self._received()
        if received is None:
            return False
        passed = self._clock() - began
        own = (self._copied() - before) / passed if passed > 0 else 0.0
        self._seen.append(max(0.0, received - own))
        self._tell(median(self._seen))
        return True

    def _watch(self, stop: threading.Event) -> None:
        with suppress(BallonetError):  # the device may be closed meanwhile
            while self.look() and not stop.wait(_PERIOD):
                pass


def sent(device: DeviceView) -> int:
    """Bytes that ballonet has copied from the host to the device."""
    copied: dict[str, int] = device.snapshot()["copied"]
    return sum(count for name, count in copied.items() if name.endswith("_h2d"))


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a manager is told beside its device. `bandwidth`: of the link from the host, bytes per second, None where
    not measured; `received`: bytes per second that go over it (record/link.py), None where not known: called in the
    background, while anything streams. `clock`: seconds, by which all is decided that depends on time; `waits`: the
    same, by which one thread waits no longer for another. `events`: the device's log; `marks`: of its streams, None
    where operators are complete when they return."""

    bandwidth: float | None = None
    received: Callable[[], int | None] | None = None
    clock: Callable[[], float] = time.monotonic
    waits: Callable[[], float] = time.monotonic
    events: Events | None = None
    marks: StreamMarks | None = None


class HostLink:
    """The measured links of a device. Thread-safe. Bandwidths are in bytes per second, None where not measured."""

    def __init__(self, device: DeviceView, lock: Lock, moved: Callable[[], None], around: Surroundings) -> None:
        """`lock`: of the manager, under which `moved` is called where earlier decisions may not hold any more."""
        self.traffic = 0.0  # bytes per second that others take
        self._page = device.page_size
        self._lock = lock
        self._moved = moved
        self._bandwidth = around.bandwidth
        self._peer_bandwidth: float | None = None
        self._watcher = (
            None
            if around.received is None
            else Traffic(around.received, lambda: sent(device), self.set_traffic, around.clock)
        )

    @property
    def bandwidth(self) -> float | None:
        """Bandwidth from the host. Needed before a model with an SLO is added."""
        return self._bandwidth

    @bandwidth.setter
    def bandwidth(self, bandwidth: float) -> None:
        with self._lock:
            self._bandwidth = bandwidth
            self._moved()

    @property
    def page_seconds(self) -> float | None:
        """Seconds to copy a page from the host."""
        return None if self._bandwidth is None else self._page / self._bandwidth

    @property
    def peer_bandwidth(self) -> float | None:
        """Bandwidth between the device and its peer; None also where there is none."""
        return self._peer_bandwidth

    @peer_bandwidth.setter
    def peer_bandwidth(self, bandwidth: float) -> None:
        with self._lock:
            self._peer_bandwidth = bandwidth
            self._moved()

    @property
    def peer_page_seconds(self) -> float | None:
        """Seconds to copy a page to the peer or back."""
        return None if self._peer_bandwidth is None else self._page / self._peer_bandwidth

    def set_traffic(self, rate: float) -> None:
        """Notes that others take so many bytes per second of the link to the host."""
        with self._lock:
            if self._bandwidth is None:
                return
            step = self._bandwidth / _STEPS
            before, self.traffic = self.traffic, math.ceil(rate / step) * step
            if before != self.traffic:
                self._moved()

    def watch(self, streams: bool) -> None:
        """Watches others' traffic, which matters only while anything streams."""
        if self._watcher is not None:
            self._watcher.wanted(streams)
