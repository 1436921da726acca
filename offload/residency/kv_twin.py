"""The far side of a range of KV: twins of its pages, so that full ones may be taken while the cache is in use.

Words
    full       all layers of the range have their tokens in the page: appending writes to it no more
    dirty      only the device has its bytes; they are copied when it is taken
    clean      its twin, a page of the peer or the host, has them too
    away       its addresses lead to its twin: it is slower to use, and as valid as ever
    flying     its addresses lead to a buffer that it shares with other layers (kv_stream.py)

Note [What is known where]
    What a piece leads to the native core knows best: it takes pages at any moment, on any thread. Kept here is what it
    cannot know: which pages are full, and which twins have the bytes. To the core a twin with a page has them, and one
    without gets them when its piece is taken. So as long as no twin has a page and other bytes than the device, an
    entry is right, be it ever so old.

Note [Dirty again]
    Whoever is about to write to full pages, or to drop them, says so first (`lower`), holding a lease: their twins give
    up their pages, which voids what was published of them, and nothing is copied behind before they are said to be full
    again.

Note [Coming home]
    All pieces get pages first (`own`), as that waits for everything that was submitted, and then their bytes
    (`fetch`), range after range in the order in which layers compute. Whoever reads one waits for the copies of its own
    range alone (`arrive`): a stream waits, the host does not, and the layers before it compute meanwhile (SwiftCache
    §3.3). Until then its addresses do not show what the tokens are: `unsettled`.

Note [From the peer to the host]
    A twin gets a page of the peer while that has one, which is nearer, else of the host. Where the peer runs short a
    page of the host is filled beside it, at the same place of a third range (`demote`), and takes its place, under the
    twin's address and the home's, once the bytes are there (`settle`); until then everything is as it was. Only full
    pages go that way, as the others may be written to where they are, and those that are about to be written to do not
    go any more: what is known of them is given up with them (`_stays`).

Note [Interrupts]
    Ctrl-C comes between any two lines. So a piece is in `_copying` before its twin gets a page, and in `_coming` before
    it gets one of the device again; what is found there later with nobody at work was interrupted, and is undone, or
    done again (`settle`, `fetch`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, Final

from ...allocator._native import Device, Done, Group, Range, Transfer
from ...allocator.errors import DriverError, PoolExhausted
from .pieces import Pieces

if TYPE_CHECKING:
    from ...allocator._native import Part

Copies = list[tuple[int, int, int]]  # (to, from, bytes)
Spans = list[tuple[int, int]]  # [first, end) each, ascending

_NO_PAGE: Final = ("none", "retiring", "kept")
_FAR: Final = ("host", "peer")


class KVTwin:
    """The twin of the range `home`. Its thread, the one that uses the cache, calls everything; others `look`, `spans`,
    `part`, `copy_behind` and `settle`. What is done in each iteration goes by runs of pieces, of which there are few,
    however long the sequence is; what goes piece by piece is about pages that are moved."""

    def __init__(
        self, device: Device, group: Group, home: Range, lock: threading.Lock, alone: Callable[[], bool]
    ) -> None:
        """`lock`: held while pages are copied behind or get dirty again; of the cache. `alone`: does nobody hold a
        tensor over the range?"""
        self.home = home
        self.alone = alone
        self.layers = 0  # that have a place in the range
        self.flying = False  # may any of its pieces fly?
        self.full = 0  # pieces, from the start of the range
        self.first = 0  # pieces without a page, or without their bytes, from the start of the range
        self.extent = 0  # pieces that are in use: what lies behind them is not touched
        self.restless = False  # clean pages were written to lately: copying them behind is of no use
        self._device = device
        self._group = group
        self._page = device.page_size
        self._lock = lock
        self._made: dict[str, Range] = {}
        self._away = Pieces()  # as far as known
        self._clean = Pieces()
        self._copying: dict[int, Done | None] = {}
        self._coming = Pieces()
        self._going: dict[int, Done | None] = {}  # from the peer to the host
        self._arriving: Done | None = None
        self._most = 0  # pieces that were full at any time
        self._asked = -1  # the piece that was to be mapped ahead last

    @property
    def pages(self) -> Range:
        """The twin: addresses for as many pieces, on the peer or the host."""
        return self._range("pages")

    @property
    def _spare(self) -> Range:
        """See Note [From the peer to the host]."""
        return self._range("spare")

    def _range(self, name: str) -> Range:
        made = self._made.get(name)
        # Two threads may get here at once; they keep one.
        return made or self._made.setdefault(
            name, self._device.reserve(self.home.nbytes, "kv", self._group, reuse=False)
        )

    @property
    def dirty(self) -> int:
        """Full pieces of which only the device has the bytes, as far as known."""
        return max(0, self.full - self.first - self._clean.count - self._away.count)

    @property
    def away(self) -> int:
        """Pieces that lead to the peer or the host, as far as known."""
        return self._away.count

    @property
    def led_away(self) -> Spans | tuple[tuple[int, int], ...]:
        """The pieces that are led away; another object each time that they are others."""
        return self._away.runs

    @property
    def near(self) -> int:
        """The pieces of these that lead to the peer."""
        if self._device.peer is None:
            return 0
        return sum("peer" in (self.home.backing(piece), self.pages.backing(piece)) for piece in tuple(self._away))

    @property
    def unsettled(self) -> bool:
        """Is there anything that its addresses do not show, or not always?"""
        return self.flying or self._arriving is not None or bool(self._coming)

    @property
    def coming(self) -> bool:
        """Are there pieces with pages of their own again, and without their bytes? See `fetch`."""
        return bool(self._coming)

    @property
    def in_flight(self) -> bool:
        """Is anything being copied behind or from the peer, or was that interrupted? See `settle`."""
        return bool(self._copying or self._going)

    @property
    def leaving(self) -> int:
        """Pieces whose twins are on their way from the peer to the host."""
        return len(self._going)

    def resting(self) -> list[int]:
        """The full pieces that are away and have a twin that can be copied from."""
        found: list[int] = []
        for first, end in self._away.within(0, min(self.full, self.extent)):
            for at, count, backing in self.home.runs(first, end - first):
                if backing == "alias":
                    for there, pieces, place in self.pages.runs(at, count):
                        found += range(there, there + pieces) if place in _FAR else ()
        return found

    def lead(self, pieces: Sequence[int], to: Range, at: int) -> int:
        """Leads these pieces, ascending and at rest, to the pages of `to`, from `at` on. Returns how many: not all
        where addresses cannot be exchanged now. DriverError."""
        led = 0
        for first, count, _ in _runs(pieces, _alike):
            if not self.home.alias(first, to, at + led, count):
                break
            led += count
        return led

    def back(self, pieces: Iterable[int]) -> bool:
        """Leads those of them that lead elsewhere to their twins again. False where that cannot be now. DriverError."""
        runs = _runs(sorted(piece for piece in pieces if piece < self.extent), self.home.backing)
        return all(self.home.alias(first, self.pages, first, count) for first, count, kind in runs if kind == "alias")

    def runs(self, pieces: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """(place in the sequence, first, count) of neighbours among those that are away, whose twins lie in one
        place."""
        at = 0
        for first, count, away in _runs(
            pieces, lambda piece: f"in {self.pages.place(piece)}" if piece in self._away else ""
        ):
            if away:
                yield at, first, count
            at += count

    def touches(self, full: int) -> bool:
        """Is any piece from `full` on away, or on its way?"""
        return bool(
            self._away.within(full, sys.maxsize) or self._coming.within(full, sys.maxsize) or self._arriving is not None
        )

    def source(self, first: int, count: int) -> tuple[int, int]:
        """(address, bytes) of the twins of these pieces."""
        return self.pages.address + first * self._page, count * self._page

    @property
    def pieces(self) -> int:
        """The pieces in use that have a page, wherever it is."""
        return max(0, self.extent - self.first)

    @property
    def held(self) -> int:
        """Full pieces that have a page, wherever it is."""
        return self.full - self.first

    def look(self) -> None:
        """Finds out what was taken."""
        count = min(self.full, self.extent) - self.first
        for first, pieces, backing in self.home.runs(self.first, count) if count > 0 else ():
            if backing == "alias":
                self._away.add_run(first, first + pieces)

    def spans(self) -> tuple[Spans, Spans]:
        """The full pieces that have a page of the device and may be taken: those that are clean, and the dirty ones."""
        busy, clean = self._away.copy(), self._clean.copy()
        for first, end in self._coming.runs:
            busy.add_run(first, end)
        copying = tuple(self._copying.items())
        passed = [piece for piece, done in copying if done is not None and done.passed()]
        clean.update(passed)
        busy.update({piece for piece, _ in copying}.difference(passed))
        ready: Spans = []
        dirty: Spans = []
        for first, end in busy.gaps(self.first, self.full):
            ready += clean.within(first, end)
            dirty += clean.gaps(first, end)
        return ready, dirty

    def part(self, first: int, end: int) -> Part | None:
        """Returns the part of pieces that `spans` has told and that are still full, for `Device.publish`, which passes
        over what is not what it was. None where there are none. See Note [What is known where]."""
        end = min(end, self.full)
        return (self.home, first, end - first, self.pages, first, []) if first < end else None

    # -- full, and not

    def raise_to(self, full: int) -> None:
        """Notes that so many pieces are full now."""
        self.full = full
        if full > self._most:
            self._most, self.restless = full, False

    def lower(self, full: int, stream: int) -> None:
        """No more than these stay full: the others may be written by what `stream` is given from now on. The caller
        holds a lease. See Note [Dirty again]."""
        self.look()  # who is not full any more is not looked at again
        with self._lock:
            self.full = min(self.full, full)
            self._stays([piece for piece in self._going if piece >= full], stream)
            for first, end in self._forgotten(full, sys.maxsize, stream):
                self._release(first, end)
                self.restless = True

    def hollow(self, first: int, stream: int) -> None:
        """The pieces before that one are about to lose their pages, and the others not. The caller holds a lease."""
        with self._lock:
            self.first = first
            self._stays([piece for piece in self._going if piece < first], stream)
            self._forgotten(0, first, stream)
            self._coming.discard_run(0, first)

    def _forgotten(self, first: int, end: int, stream: int) -> Spans:
        """Pieces of [first, end) that were clean or being copied: what they are is not known any more. What `stream` is
        given from now on waits for the copies."""
        found = Pieces(self._clean.within(first, end))
        for piece in [piece for piece in self._copying if first <= piece < end]:
            done = self._copying.pop(piece)
            if done is not None:
                done.before(stream)
            found.add(piece)
        self._clean.discard_run(first, end)
        return list(found.runs)

    def _release(self, first: int, end: int) -> None:
        """Twins of [first, end) give up their pages, but for those that the addresses lead to."""
        for at, count, backing in self.home.runs(first, end - first):
            if backing != "alias":
                self.pages.retire(at, count)

    def filling(self, first: int) -> None:
        """The pieces before that one have pages again, of the device, or where it had none of the peer or the host.
        They are not offered before their bytes are there."""
        self._far(0, first)

    def _far(self, first: int, end: int) -> None:
        """Notes that the pieces of [first, end) with a page of the host or the peer are away."""
        for at, count, backing in self.home.runs(first, end - first):
            if backing in _FAR:
                self._away.add_run(at, at + count)

    def drop(self, first: int, end: int) -> None:
        """The pieces [first, end) lead nowhere now, or to new pages: what their twins have is of no use, but for those
        that a tensor still shows."""
        self._away.discard_run(first, end)
        for pages in self._made.values():
            for at, count, backing in pages.runs(first, end - first) if end > first else ():
                for here, pieces, shown in self.home.runs(at, count) if backing not in _NO_PAGE else ():
                    if shown != "alias":
                        pages.retire(here, pieces)

    def map_ahead(self) -> None:
        """The next piece may be mapped before it is needed."""
        if self._asked != self.extent < self.home.pieces:
            self._asked = self.extent
            self.home.map_ahead(self.extent, 1)

    def extended(self, first: int, end: int) -> None:
        """The pieces [first, end) have pages: of the device, or where it had none of the peer or the host."""
        self.drop(first, end)
        self.extent = end
        self._far(first, end)

    # -- to the peer or the host

    def mark(self, pieces: Iterable[int]) -> None:
        """Marks these as about to be copied behind, and not offered from now on. The caller holds the lock."""
        self._copying.update(dict.fromkeys(pieces))

    def copy_behind(self, pieces: Iterable[int]) -> tuple[list[int], Copies]:
        """Twins of those that are still marked get pages, as many as there are: which, and what brings their bytes
        there. The caller holds the lock, and says when they have been submitted (`copied`)."""
        ready: list[int] = []
        for piece in pieces:
            known = piece in self._copying and piece < self.full
            if not known or self.home.backing(piece) != "device" or self.pages.backing(piece) not in _NO_PAGE:
                continue
            try:
                self._map_twin(piece)
            except PoolExhausted:
                break
            ready.append(piece)
        return ready, [self._behind(piece) for piece in ready]

    def _map_twin(self, piece: int) -> None:
        """Maps a page for the twin: of the peer, else of the host. PoolExhausted, DriverError."""
        if self._device.peer is not None:
            with suppress(PoolExhausted, DriverError):  # a peer that fails is as one that is full
                self.pages.map_peer(piece, 1)
                return
        self.pages.map_host(piece, 1)

    def copied(self, pieces: Iterable[int], done: Done) -> None:
        """The copies of these have been submitted. The caller holds the lock."""
        self._copying.update(dict.fromkeys(pieces, done))

    def copied_behind(self) -> bool:
        """Waits for those that are being copied. The caller holds the lock. Were there any? DriverError."""
        going = [done for done in self._copying.values() if done is not None]
        for done in going:
            done.wait()
        return bool(going) and self.settle()

    def settle(self) -> bool:
        """Pages whose copies have passed are clean, or leave the peer if that can be now, and what was interrupted is
        undone. The caller holds the lock. Are more clean, or fewer on their way? DriverError."""
        self._settle_down()
        before, passed = len(self._copying), list[int]()
        for piece, done in tuple(self._copying.items()):
            if done is None:
                if self.home.backing(piece) != "alias":
                    self.pages.retire(piece, 1)
                del self._copying[piece]
            elif done.passed():
                passed.append(piece)
        self._clean.update(passed)  # first: they are offered once they are nowhere else
        for piece in passed:
            del self._copying[piece]
        return len(self._copying) != before

    def displace(self, pieces: Iterable[int], transfer: Transfer, stream: int) -> int:
        """Leads these to their twins, which get their bytes if they do not have them. Returns how many: not
        those for which that cannot be now. The caller holds a lease. DriverError."""
        with self._lock:
            chosen, dirty = [], []
            for piece in sorted(pieces):
                here = piece < self.extent and self.home.backing(piece) == "device"
                if not here or piece in self._coming:
                    continue
                if piece in self._copying:
                    if (done := self._copying[piece]) is None:
                        continue
                    done.wait()
                    self._clean.add(piece)
                    del self._copying[piece]
                if piece not in self._clean or self.pages.backing(piece) not in _FAR:
                    self._copying[piece] = None
                    try:
                        self.pages.retire(piece, 1)
                        self._map_twin(piece)
                    except PoolExhausted:
                        del self._copying[piece]
                        break
                    dirty.append(piece)
                chosen.append(piece)
            if dirty:
                copies = [self._behind(piece) for piece in dirty]
                self.arrive(stream)  # some may have come home just now
                transfer.copy(copies, after=stream, owner="kv", to="host")
            led = 0  # `alias` waits for all that was submitted, the copies too
            for first, count, _ in _runs(chosen, _alike):
                if not self.home.alias(first, self.pages, first, count):
                    break
                self._away.add_run(first, first + count)
                led += count
            for piece in dirty:
                if piece not in self._away:
                    self.pages.retire(piece, 1)
                del self._copying[piece]
        return led

    # -- from the peer to the host; see the Note

    def coldest(self) -> list[int]:
        """The full pieces whose twins lie on the peer and have their bytes: first those that are read elsewhere, then
        the others, the oldest tokens first."""
        if self._device.peer is None:
            return []
        busy = {*self._copying, *self._coming, *self._going}
        found = [piece for piece in sorted({*self._clean, *self._away} - busy) if piece < self.full]
        there = [piece for piece in found if self.pages.backing(piece) == "peer"]
        return sorted(there, key=lambda piece: piece in self._away)

    def demote(self, pieces: Iterable[int]) -> tuple[list[int], Copies]:
        """Pages of the host beside the twins of these, as many as there are: which, and what brings their bytes there.
        The caller holds the lock, and says when they have been submitted (`demoting`). DriverError."""
        ready: list[int] = []
        for piece in pieces:
            if piece >= self.full or piece in self._copying or piece in self._going:
                continue
            if self.pages.backing(piece) != "peer":
                continue
            self._going[piece] = None
            try:
                self._spare.map_host(piece, 1)
            except PoolExhausted:
                del self._going[piece]
                break
            ready.append(piece)
        return ready, [
            (self._spare.address + piece * self._page, self.pages.address + piece * self._page, self._page)
            for piece in ready
        ]

    def demoting(self, pieces: Iterable[int], done: Done) -> None:
        """The copies of these have been submitted. The caller holds the lock."""
        self._going.update(dict.fromkeys(pieces, done))

    def _settle_down(self) -> None:
        """The caller holds the lock. DriverError."""
        if not self._going:
            return
        self._stays([piece for piece, done in self._going.items() if done is None or not self._goes(piece)])
        passed = [piece for piece, done in self._going.items() if done is not None and done.passed()]
        for first, count, _ in _runs(sorted(passed), _alike):
            if self.pages.take_over(first, self._spare, first, count, self.home):
                for piece in range(first, first + count):
                    del self._going[piece]

    def _goes(self, piece: int) -> bool:
        return self.pages.backing(piece) == "peer" and self._spare.backing(piece) == "host"

    def _stays(self, pieces: Iterable[int], stream: int | None = None) -> None:
        """Keeps these from going to the host; what `stream` is given from now on may write where they are. The caller
        holds the lock."""
        for piece in pieces:
            if (done := self._going[piece]) is not None and stream is not None:
                done.before(stream)
            self._spare.retire(piece, 1)
            del self._going[piece]

    def oldest(self, count: int) -> list[int]:
        """Returns so many full pieces that have pages of the device, or as many as there are, the oldest tokens
        first."""
        found: list[int] = []
        for first, end in self._away.gaps(self.first, self.full):
            found += range(first, min(end, first + max(0, count - len(found))))
        return found

    # -- and back

    def own(self, limit: int, chosen: Iterable[int] | None = None) -> int:
        """Up to so many pieces that are away get pages of the device again, those on the host first, which cost more
        there, and of each the newest tokens; their bytes follow (`fetch`). Takes nothing from anyone. Returns how many.
        The caller holds a lease. DriverError."""
        self._device.reap()  # what was given back and has passed is free
        limit = min(limit, available(self._device))
        found = sorted(self._away if chosen is None else [each for each in chosen if each in self._away], reverse=True)
        if self._device.peer is not None:
            found.sort(key=lambda piece: self.home.place(piece) == "peer")
        wanted = [piece for piece in found if piece < self.extent][: max(0, limit)]
        back = 0
        for first, count, backing in _runs(sorted(wanted), self.home.backing):
            pieces = range(first, first + count)
            if backing in _FAR:
                back += sum(self.home.move(piece, "device") for piece in pieces)
            elif backing == "alias":
                self._coming.add_run(first, first + count)  # see Note [Interrupts]
                back += count * self._owned(first, count)
            for piece in pieces:
                if self.home.backing(piece) not in ("alias", *_FAR):
                    self._away.discard(piece)
        return back

    def _owned(self, first: int, count: int) -> bool:
        try:
            owned = self.home.own(first, count)
        except PoolExhausted:
            owned = False
        if not owned:
            self._coming.discard_run(first, first + count)
        return owned

    def fetch(self, transfer: Transfer, stream: int) -> None:
        """What has pages of its own again gets its bytes, once what `stream` was given so far has passed. The caller
        holds a lease. DriverError."""
        pieces = self._lacking()
        runs = [(first, count) for first, count, _ in _runs(pieces, self.pages.place)]
        if runs:
            copies = [(self.home.address + first * self._page, *self.source(first, count)) for first, count in runs]
            self._arriving = transfer.copy(copies, after=stream, owner="kv", to="device")
            self._arrived(pieces)
        self._coming.clear()

    def recall(self) -> None:
        """What has pages of its own again and not its bytes leads to its twin, if that can be now. DriverError."""
        for first, count, _ in _runs(self._lacking(), _alike):
            if not self.home.alias(first, self.pages, first, count):
                return
        self._coming.clear()
        self.look()

    def _lacking(self) -> list[int]:
        """Pieces that have pages of their own again, whose bytes are with their twins."""
        return [
            piece
            for piece in sorted(self._coming)
            if self.home.backing(piece) == "device" and self.pages.backing(piece) in _FAR
        ]

    def arrive(self, stream: int | None) -> None:
        """What `stream` is given from now on, on None the host, finds the bytes of what came home. On any thread."""
        done = self._arriving
        if done is not None:
            done.wait() if stream is None else done.before(stream)
            if done.passed() and self._arriving is done:
                self._arriving = None

    def _arrived(self, pieces: Iterable[int]) -> None:
        """Notes that they have pages of the device again, and their bytes."""
        with self._lock:
            for piece in pieces:
                self._away.discard(piece)
                if piece < self.full:
                    self._clean.add(piece)
                else:  # it may be written to at any time
                    self.pages.retire(piece, 1)

    def _behind(self, piece: int) -> tuple[int, int, int]:
        """What brings a piece to its twin."""
        return self.pages.address + piece * self._page, self.home.address + piece * self._page, self._page


def _alike(piece: int) -> str:
    return ""


def _runs(pieces: Sequence[int], kind: Callable[[int], str]) -> Iterator[tuple[int, int, str]]:
    """(first, count, kind) of the neighbours of one kind, pieces ascending."""
    for (_, found), group in groupby(
        ((piece, kind(piece), index) for index, piece in enumerate(pieces)), lambda it: (it[0] - it[2], it[1])
    ):
        members = list(group)
        yield members[0][0], len(members), found


def available(device: Device) -> int:
    """Device pages that can be had from nobody."""
    return device.available
