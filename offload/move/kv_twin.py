"""The host side of a range of KV: twins of its pages, so that full ones may be taken while the cache is in use.

Words
    full       all layers of the range have their tokens in the page: appending writes to it no more
    dirty      only the device has its bytes; they are copied when it is taken
    clean      its twin, a page of the host, has them too
    away       its addresses lead to the host: it is slower to use, and as valid as ever

Note [What is known where]
    What a piece leads to the native core knows best: it takes pages at any moment, on any thread. Kept here is what it
    cannot know: which pages are full, and which twins have the bytes. To the core a twin with a page has them, and one
    without gets them when its piece is taken. So as long as no twin has a page and other bytes than the device, an
    entry is right, be it ever so old.

Note [Dirty again]
    Whoever is about to write to full pages, or to drop them, says so first (`lower`), holding a lease: their twins give
    up their pages, which voids what was published of them, and nothing is copied behind before they are said to be full
    again.

Note [Interrupts]
    Ctrl-C comes between any two lines. So a piece is in `_copying` before its twin gets a page, and in `_coming` before
    it gets one of the device again; what is found there later with nobody at work was interrupted, and is undone, or
    done again (`settle`).
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

from ...allocator._native import Device, Done, Group, Range, Transfer
from ...allocator.errors import PoolExhausted

if TYPE_CHECKING:
    from ...allocator._native import Part

Copies = list[tuple[int, int, int]]  # (to, from, bytes)
ALIKE: Final = 64  # runs of one length before they get longer

_NO_PAGE: Final = ("none", "retiring", "kept")


class Run(NamedTuple):
    """Pieces of the range number `range` that may be taken together."""

    range: int
    first: int
    pieces: int
    clean: bool


class KVTwin:
    """Of the range `home`. Its thread, the one that uses the cache, calls everything; others `look`, `spans`, `part`,
    `copy_behind` and `settle`."""

    def __init__(self, device: Device, group: Group, home: Range, lock: threading.Lock) -> None:
        """`lock`: held while pages are copied behind or get dirty again; of the cache."""
        self.home = home
        self.full = 0  # pieces, from the start of the range
        self.extent = 0  # pieces that are in use: what lies behind them is not touched
        self.restless = False  # clean pages were written to lately: copying them behind is of no use
        self._device = device
        self._group = group
        self._page = device.page_size
        self._lock = lock
        self._made: dict[str, Range] = {}
        self._away: set[int] = set()  # as far as known
        self._clean: set[int] = set()
        self._copying: dict[int, Done | None] = {}
        self._coming: set[int] = set()
        self._most = 0  # pieces that were full at any time
        self._asked = -1  # the piece that was to be mapped ahead last

    @property
    def pages(self) -> Range:
        """The twin: addresses for as many pieces, on the host."""
        made = self._made.get("pages")
        # Two threads may get here at once; they keep one.
        return made or self._made.setdefault(
            "pages", self._device.reserve(self.home.nbytes, "kv", self._group, reuse=False)
        )

    @property
    def away(self) -> int:
        """Pieces that lead to the host, as far as known."""
        return len(self._away)

    @property
    def interrupted(self) -> bool:
        """Was the way back interrupted? Then `finish` before anything is read."""
        return bool(self._coming)

    def look(self) -> None:
        """Finds out what was taken."""
        for piece in range(min(self.full, self.extent)):
            if piece not in self._away and self.home.backing(piece) == "alias":
                self._away.add(piece)

    def spans(self) -> Iterator[tuple[int, int, bool]]:
        """(first, count, clean) of the full pieces that have a page of the device and may be taken."""

        def state(piece: int) -> bool | None:
            return None if piece in self._away or piece in self._coming else self._is_clean(piece)

        for clean, found in groupby(range(self.full), state):
            if clean is not None:
                pieces = list(found)
                yield pieces[0], len(pieces), clean

    def part(self, first: int, count: int) -> Part | None:
        """For `Device.publish`. None where these pieces are not what they were. See Note [What is known where]."""
        pages = self.pages
        for piece in range(first, first + count):
            clean = self._is_clean(piece)
            if piece >= self.full or piece in self._coming or self.home.backing(piece) != "device":
                return None
            if clean is None or (not clean and pages.backing(piece) not in _NO_PAGE):
                return None
        return self.home, first, count, pages, first, []

    def _is_clean(self, piece: int) -> bool | None:
        """None while it is being copied."""
        if piece not in self._copying:
            return piece in self._clean
        done = self._copying.get(piece)
        return True if done is not None and done.passed() else None

    # -- full, and not

    def raise_to(self, full: int) -> None:
        """So many pieces are full now."""
        self.full = full
        if full > self._most:
            self._most, self.restless = full, False

    def lower(self, full: int, stream: int) -> None:
        """No more than these stay full: the others may be written by what `stream` is given from now on. The caller
        holds a lease. See Note [Dirty again]."""
        with self._lock:
            self.full = min(self.full, full)
            for piece in sorted(piece for piece in {*self._clean, *self._copying} if piece >= full):
                done = self._copying.get(piece)
                if done is not None:
                    done.before(stream)
                if self.home.backing(piece) != "alias":
                    self.pages.retire(piece, 1)
                self._clean.discard(piece)
                self._copying.pop(piece, None)
                self.restless = True

    def drop(self, first: int, end: int) -> None:
        """The pieces [first, end) lead nowhere now, or to new pages: what their twins have is of no use, but for those
        that a tensor still shows."""
        self._away.difference_update(range(first, end))
        for pages in self._made.values():
            for piece in range(first, end):
                if pages.backing(piece) not in _NO_PAGE and self.home.backing(piece) != "alias":
                    pages.retire(piece, 1)

    def map_ahead(self) -> None:
        """The next piece may be mapped before it is needed."""
        if self._asked != self.extent < self.home.pieces:
            self._asked = self.extent
            self.home.map_ahead(self.extent, 1)

    def extended(self, first: int, end: int) -> None:
        """The pieces [first, end) have pages: of the device, or where it had none of the host."""
        self.drop(first, end)
        self.extent = end
        self._away.update(piece for piece in range(first, end) if self.home.backing(piece) == "host")

    # -- to the host

    def mark(self, pieces: Iterable[int]) -> None:
        """These are about to be copied behind, and not offered from now on. The caller holds the lock."""
        self._copying.update(dict.fromkeys(pieces))

    def copy_behind(self, pieces: Iterable[int]) -> tuple[list[int], Copies]:
        """Twins of those that are still marked get pages, as many as the host has: which, and what brings their bytes
        there. The caller holds the lock, and says when they have been submitted (`copied`)."""
        ready: list[int] = []
        for piece in pieces:
            known = piece in self._copying and piece < self.full
            if not known or self.home.backing(piece) != "device" or self.pages.backing(piece) not in _NO_PAGE:
                continue
            try:
                self.pages.map_host(piece, 1)
            except PoolExhausted:
                break
            ready.append(piece)
        return ready, [self._copy(piece, home=False) for piece in ready]

    def copied(self, pieces: Iterable[int], done: Done) -> None:
        """The copies of these have been submitted. The caller holds the lock."""
        self._copying.update(dict.fromkeys(pieces, done))

    def settle(self) -> bool:
        """Pages whose copies have passed are clean, and what was interrupted is undone. The caller holds the lock. Did
        anything change? DriverError."""
        before = len(self._copying)
        for piece, done in tuple(self._copying.items()):
            if done is None:
                if self.home.backing(piece) != "alias":
                    self.pages.retire(piece, 1)
                del self._copying[piece]
            elif done.passed():
                self._clean.add(piece)  # first: it is offered once it is nowhere else
                del self._copying[piece]
        return len(self._copying) != before

    def displace(self, piece: int, transfer: Transfer, stream: int) -> bool:
        """The piece leads to its twin from now on, which gets its bytes, if it does not have them. False where that
        cannot be now. The caller holds a lease. DriverError."""
        if piece >= self.extent or self.home.backing(piece) != "device" or piece in self._coming:
            return False
        with self._lock:
            if piece in self._copying:
                return False
            clean = piece in self._clean and self.pages.backing(piece) == "host"
            if not clean:
                self._copying[piece] = None
                try:
                    self.pages.retire(piece, 1)
                    self.pages.map_host(piece, 1)
                    transfer.copy([self._copy(piece, home=False)], after=stream, owner="kv", to="host").wait()
                except PoolExhausted:
                    del self._copying[piece]
                    return False
            led = self.home.alias(piece, self.pages, piece, 1)
            if led:
                self._away.add(piece)
            elif not clean:
                self.pages.retire(piece, 1)
            self._copying.pop(piece, None)
        return led

    # -- and back

    def bring_back(self, limit: int, transfer: Transfer, stream: int, chosen: Iterable[int] | None = None) -> int:
        """Up to so many pieces that are away get pages of the device again, those of the newest tokens first; what
        `stream` is given from now on finds them there. Takes nothing from anyone. Returns how many. The caller holds a
        lease. DriverError."""
        self.finish(transfer, stream)
        limit = min(limit, available(self._device))
        found = sorted(self._away if chosen is None else self._away.intersection(chosen), reverse=True)
        wanted = [piece for piece in found if piece < self.extent][: max(0, limit)]
        back = 0
        for first, count, backing in _runs(sorted(wanted), self.home.backing):
            if backing == "alias" and self._own(first, count, transfer, stream):
                back += count
            elif backing == "host":
                back += sum(self.home.move(piece, "device") for piece in range(first, first + count))
            for piece in range(first, first + count):
                if self.home.backing(piece) not in ("alias", "host"):
                    self._away.discard(piece)
        return back

    def finish(self, transfer: Transfer, stream: int) -> None:
        """What has pages of the device again and not its bytes, as an interrupt came between, gets them now."""
        for piece in sorted(self._coming):
            if self.home.backing(piece) == "device" and self.pages.backing(piece) == "host":
                transfer.copy([self._copy(piece, home=True)], after=stream, owner="kv", to="device").before(stream)
                self._arrived((piece,))
            self._coming.discard(piece)

    def _own(self, first: int, count: int, transfer: Transfer, stream: int) -> bool:
        """See Note [Interrupts]."""
        pieces = range(first, first + count)
        start = first * self._page
        self._coming.update(pieces)
        try:
            if not self.home.own(first, count):
                self._coming.difference_update(pieces)
                return False
            copy = self.home.address + start, self.pages.address + start, count * self._page
            transfer.copy([copy], after=stream, owner="kv", to="device").before(stream)
        except BaseException as error:
            if self.home.backing(first) != "device" or self.home.alias(first, self.pages, first, count):
                self._coming.difference_update(pieces)
            if isinstance(error, PoolExhausted):
                return False
            raise
        self._arrived(pieces)
        self._coming.difference_update(pieces)
        return True

    def _arrived(self, pieces: Iterable[int]) -> None:
        """They have pages of the device again, and their bytes."""
        with self._lock:
            for piece in pieces:
                self._away.discard(piece)
                if piece < self.full:
                    self._clean.add(piece)
                else:  # it may be written to at any time
                    self.pages.retire(piece, 1)

    def _copy(self, piece: int, *, home: bool) -> tuple[int, int, int]:
        """What brings a piece home, or to its twin."""
        here, there = self.home.address + piece * self._page, self.pages.address + piece * self._page
        return (here, there, self._page) if home else (there, here, self._page)


def arrange(spans: Sequence[Sequence[tuple[int, int, bool]]], tokens: Sequence[float]) -> list[Run]:
    """What may be taken of a cache, in this order: clean pages before dirty ones, and of each the oldest tokens first.

    `spans`: (first, count, clean) of each range's pages, ascending; `tokens`: how many of each lie on a page. The first
    runs are of one page, and they double in length every `ALIKE` runs, so that there are never many.
    """
    runs: list[Run] = []
    for clean in (True, False):
        heap = [
            (first * tokens[place], place, first, count)
            for place, found in enumerate(spans)
            for first, count, kind in found
            if kind is clean
        ]
        heapq.heapify(heap)
        while heap:
            _, place, first, count = heap[0]
            length = min(count, 1 << (len(runs) // ALIKE))
            runs.append(Run(place, first, length, clean))
            if length == count:
                heapq.heappop(heap)
            else:
                first += length
                heapq.heapreplace(heap, (first * tokens[place], place, first, count - length))
    return runs


def _runs(pieces: Sequence[int], kind: Callable[[int], str]) -> Iterator[tuple[int, int, str]]:
    """(first, count, kind) of the neighbours of one kind, pieces ascending."""
    for (_, found), group in groupby(
        ((piece, kind(piece), index) for index, piece in enumerate(pieces)), lambda it: (it[0] - it[2], it[1])
    ):
        members = list(group)
        yield members[0][0], len(members), found


def available(device: Device) -> int:
    """Device pages that can be had from nobody."""
    numbers = device.snapshot()
    free: int = numbers["pages"]["free"] + device.budget // device.page_size - numbers["created"]
    return free
