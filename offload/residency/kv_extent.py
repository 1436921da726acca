"""A range of KV whose pages may be taken while the cache is in use: which of them are full, and where those that are
away lie. A cache has one for each range that its layers lie in (`KVExtents`).

Only full pages may be taken, or go from the peer to the host: what is not full is written to where it is. What becomes
of each is in pieces.py; what moves it, in mover.py.

Words
    full    all layers of the range have their tokens in the page: appending writes to it no more
    dirty   only the device has its bytes; they are copied when it is taken
    clean   its backing, a page of the peer or the host, has them too
    away    its addresses lead to its backing, or to a slot: it is slower to use, and as valid as ever

Note [Dirty again]
    The forward thread calls `lower`, holding a lease, before it writes to full pages or drops them: their backings give
    up their pages, which voids what was published of them, and nothing is saved before they are said to be full again.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from ...allocator._native import Device, Group, Range, Transfer
from .backing import FAR, Backing
from .mover import Mover, Runs
from .pieces import PieceEvent, Pieces, PieceState, runs_of
from .slots import Copies

if TYPE_CHECKING:
    from ...allocator._native import Part


class KVExtent:
    """The pages of the range `range_`. The thread that uses the cache calls everything; others `look`, `takable`,
    `part`, and what saves pages."""

    def __init__(
        self, device: Device, group: Group, range_: Range, lock: threading.Lock, alone: Callable[[], bool]
    ) -> None:
        """`lock`: held while pages are saved or get dirty again; of the cache. `alone`: does no tensor lie over the
        range?"""
        self.range = range_
        self.alone = alone
        self.backing = Backing(device, group, range_, "kv")
        self.mover = Mover(device, range_, self.backing, lock)
        self.layers = 0  # that have a place in the range
        self.numbers: list[int] = []  # of these in their model
        self.kind = "keys and values"  # what lies there, for readers
        self.full = 0  # pieces, from the start of the range
        self.first = 0  # pieces without a page, or without their bytes, from the start of the range
        self.end = 0  # pieces that are in use: what lies behind them is not touched
        self.restless = False  # clean pages were written to lately: saving them is of no use
        self.device = device
        self._lock = lock
        self._most = 0  # pieces that were full at any time
        self._asked = -1  # the piece that was to be mapped ahead last

    # -- what there is

    @property
    def contents(self) -> str:
        """The contents of the range, for readers: "keys and values of layers 0 to 3, 6"."""
        runs = [range(first, end) for first, end in runs_of(self.numbers)]
        told = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
        layers = "layer" if len(self.numbers) == 1 else "layers"
        return f"{self.kind} of {layers} {', '.join(told)}" if told else self.kind

    @property
    def pieces(self) -> int:
        """The pieces in use that have a page, wherever it is."""
        return max(0, self.end - self.first)

    @property
    def held(self) -> int:
        """Full pieces that have a page, wherever it is."""
        return self.full - self.first

    @property
    def dirty(self) -> int:
        """Full pieces of which only the device has the bytes, as far as known."""
        return max(0, self.held - self.mover.states[PieceState.CLEAN].count - self.mover.away)

    @property
    def away(self) -> int:
        """Pieces that lead to the peer or the host, or to a slot, as far as known."""
        return self.mover.away

    def touches(self, full: int) -> bool:
        """Is any piece from `full` on away, or any on its way to the device?"""
        away = self.mover.states.within(full, sys.maxsize, PieceState.OFFLOADED, PieceState.IN_SLOT)
        return bool(away) or self.mover.lacks_bytes_or_copying

    def host_mapped(self) -> list[int]:
        """The full pieces whose addresses lead to their backings."""
        return [
            piece
            for first, end in self.mover.states.within(0, min(self.full, self.end), PieceState.OFFLOADED)
            for at, count, backing in self.range.runs(first, end - first)
            if backing == "alias"
            for there, pieces, place in self.backing.pages.runs(at, count)
            if place in FAR
            for piece in range(there, there + pieces)
        ]

    def oldest(self, count: int) -> list[int]:
        """Returns so many full pieces that have pages of the device, or as many as there are, the oldest tokens
        first."""
        pieces: list[int] = []
        for first, end in Pieces(self.away_runs()).gaps(self.first, self.full):
            pieces += range(first, min(end, first + max(0, count - len(pieces))))
        return pieces

    def look(self) -> None:
        """Finds out what was taken."""
        self.mover.look(self.first, min(self.full, self.end))

    def takable(self) -> tuple[Runs, Runs]:
        """The full pieces that may be taken: those that are clean, and the dirty ones."""
        return self.mover.takable(self.first, self.full)

    def part(self, first: int, end: int) -> Part | None:
        """Returns, for `Device.publish`, the pieces of [first, end), of a run of `takable`, that are still full; None
        where there are none. The core passes over pieces that have changed. See mover.py, Note [What is known
        where]."""
        end = min(end, self.full)
        return (self.range, first, end - first, self.backing.pages, first, []) if first < end else None

    def away_runs(self) -> Runs:
        """The pieces that are away, as (first, end)."""
        return self.mover.states.within(0, sys.maxsize, PieceState.OFFLOADED, PieceState.IN_SLOT)

    # -- calls of the cache

    def raise_to(self, full: int) -> None:
        """Notes that so many pieces are full now."""
        self.full = full
        if full > self._most:
            self._most, self.restless = full, False

    def lower(self, full: int, stream: int) -> None:
        """Lowers the number of full pieces: the others may be written by what `stream` is given from now on. The caller
        holds a lease. See Note [Dirty again]."""
        self.look()  # a piece that is not full any more is not looked at again
        with self._lock:
            self.full = min(self.full, full)
            self.mover.saving.stay(full, sys.maxsize, stream)
            for run in self.mover.saving.dirty(full, sys.maxsize, stream):
                self.backing.release(*run)
                self.restless = True

    def release_prefix(self, first: int, stream: int) -> None:
        """Prepares the pieces before `first` to lose their pages. The caller holds a lease."""
        with self._lock:
            self.first = first
            self.mover.saving.stay(0, first, stream)
            self.mover.saving.dirty(0, first, stream)
            self.mover.states.move_run(PieceEvent.RECALL, 0, first)

    def prefix_mapped(self, first: int) -> None:
        """Notes that the pieces before `first` have pages again, of the device, or where it had none of the peer or the
        host. They are not offered before their bytes are there."""
        self.mover.look_for_host_pages(0, first)

    def drop(self, first: int, end: int) -> None:
        """Notes that [first, end) leads nowhere now, or to new pages: drops what their backings have, but for pieces
        that a tensor still shows."""
        self.mover.states.move_run(PieceEvent.DROP, first, end)
        self.backing.release(first, end)

    def extended(self, first: int, end: int) -> None:
        """Notes that [first, end) has pages: of the device, or where it had none of the peer or the host."""
        self.drop(first, end)
        self.end = end
        self.mover.look_for_host_pages(first, end)

    def map_ahead(self) -> None:
        """Asks the core to map the next piece before it is needed."""
        if self._asked != self.end < self.range.pieces:
            self._asked = self.end
            self.range.map_ahead(self.end, 1)

    # -- moving them

    def save(self, pieces: Iterable[int]) -> tuple[list[int], Copies]:
        """Saves pieces that are still full, as `Saving.save`."""
        return self.mover.saving.save(pieces, self.full)

    def evict(self, pieces: Iterable[int], transfer: Transfer, stream: int) -> int:
        """Evicts pieces, as `Mover.evict`."""
        return self.mover.evict([piece for piece in pieces if piece < self.end], transfer, stream)

    def own(self, limit: int, chosen: Iterable[int] | None = None) -> int:
        """Gives pieces device pages again, as `Mover.own`."""
        return self.mover.own(limit, self.end, chosen)

    def fetch(self, transfer: Transfer, stream: int) -> None:
        """Starts the copies to them, as `Mover.fetch`."""
        self.mover.fetch(transfer, stream, self.full)

    def demote(self, pieces: Iterable[int]) -> tuple[list[int], Copies]:
        """Demotes pieces that are still full, as `Backing.demote`. The caller holds the lock."""
        saving = self.mover.states[PieceState.SAVING]
        return self.backing.demote(piece for piece in pieces if piece < self.full and piece not in saving)


def on_peer(extent: KVExtent) -> int:
    """The pieces that are away and lie on the peer."""
    if extent.device.peer is None:
        return 0
    shown, pages = extent.range, extent.backing.pages
    return sum("peer" in (shown.leads_to(n), pages.leads_to(n)) for run in extent.away_runs() for n in range(*run))


def coldest(extent: KVExtent) -> list[int]:
    """The full pieces whose backings lie on the peer and have their bytes: first those that are not read there, then
    the others, the oldest tokens first."""
    if extent.device.peer is None:
        return []
    away, leaving = extent.away_runs(), extent.backing.leaving
    clean = extent.mover.states.within(0, extent.full, PieceState.CLEAN)
    of_away = [piece for first, end in away for piece in range(first, min(end, extent.full))]
    pieces = [*(piece for run in clean for piece in range(*run)), *of_away]
    return [piece for piece in pieces if piece not in leaving and extent.backing.pages.leads_to(piece) == "peer"]


def by_place(extent: KVExtent, pieces: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(place in the sequence `pieces`, first, count) of neighbours among those that are away, whose backings lie in one
    place."""
    place_of = extent.backing.pages.place
    for at, first, count in _within(pieces, extent.away_runs()):
        if extent.device.peer is None:
            yield at, first, count
            continue
        for _, neighbours in groupby(range(first, first + count), place_of):
            here, *others = neighbours
            yield at + here - first, here, 1 + len(others)


def _within(pieces: Sequence[int], runs: Runs) -> Iterator[tuple[int, int, int]]:
    """(place in the sequence, first, count) of neighbours in the sequence that follow each other and lie in `runs`."""
    inside = {piece for first, end in runs for piece in range(first, end)}
    start = 0
    for at in range(1, len(pieces) + 1):
        last = pieces[at - 1]
        if at == len(pieces) or pieces[at] != last + 1 or (pieces[at] in inside) != (last in inside):
            if pieces[start] in inside:
                yield start, pieces[start], at - start
            start = at


class KVExtents:
    """The extents of a cache, by weak reference: a range goes with its layers. One thread adds; any may ask."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._refs: list[weakref.ref[KVExtent]] = []
        self._reclaimed = 0  # what the device had reclaimed when it was looked last

    def __len__(self) -> int:
        return len(self._refs)

    def add(self, extent: KVExtent) -> int:
        """Adds an extent and returns its number."""
        self._refs.append(weakref.ref(extent))
        return len(self._refs) - 1

    def get(self, number: int) -> KVExtent | None:
        """The extent of that number; None where it is gone."""
        return self._refs[number]()

    def all(self) -> list[KVExtent]:
        """The extents that are there, by number."""
        return [extent for ref in tuple(self._refs) if (extent := ref()) is not None]

    def numbered(self) -> list[tuple[int, KVExtent]]:
        """The extents that are there, with their numbers."""
        return [(number, extent) for number, ref in enumerate(tuple(self._refs)) if (extent := ref()) is not None]

    def first(self, numbers: Iterable[int]) -> list[KVExtent]:
        """The extents with `numbers`, in this order, then the others."""
        order = dict.fromkeys((*numbers, *range(len(self._refs))))
        return [extent for number in order if (extent := self.get(number)) is not None]

    def look(self) -> None:
        """Finds out what was taken, if the core took anything on the device since the last look."""
        reclaimed = self._device.reclaimed
        if reclaimed != self._reclaimed:
            self.look_anew()
            self._reclaimed = reclaimed

    def look_anew(self) -> None:
        """Finds out what was taken."""
        for extent in self.all():
            extent.look()

    def saved(self) -> bool:
        """Calls `Saving.saved` for all. The caller holds the cache's lock. DriverError."""
        return sum([extent.mover.saving.saved() for extent in self.all()]) > 0

    @property
    def busy(self) -> bool:
        """Is anything being copied to a backing? See `Saving.busy`."""
        busy = False
        for ref in tuple(self._refs):  # in one call, as `away`: this is asked for each token
            busy |= (extent := ref()) is not None and extent.mover.saving.busy
        return busy

    @property
    def lacks_bytes_or_copying(self) -> bool:
        """Is anything on its way to the device? See `Mover.lacks_bytes_or_copying`."""
        return True in [extent.mover.lacks_bytes_or_copying for extent in self.all()]

    @property
    def away(self) -> int:
        """Pieces that lead to a backing or a slot, as far as known."""
        pieces = 0
        for ref in tuple(self._refs):
            if (extent := ref()) is not None:
                pieces += extent.mover.away
        return pieces

    @property
    def pieces(self) -> int:
        """Pieces in use that have a page, wherever it is."""
        return sum([extent.pieces for extent in self.all()])

    @property
    def near(self) -> int:
        """Pieces that are away and lie on the peer."""
        return 0 if self._device.peer is None else sum(map(on_peer, self.all()))
