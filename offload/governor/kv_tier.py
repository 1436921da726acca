"""A KV cache as the governor of its device knows it: what of it may be taken, what is copied behind, and what comes
home.

Note [Who calls]
    The thread that uses the cache calls `iteration`, `grown`, `look` and `bring_back`; the governor everything else, on
    any thread, `offers` even under its lock, or in a finalizer, in the middle of anything. So nobody waits here for the
    lock that may have been called so, and nobody who holds it calls the governor.

Note [Before it is copied]
    A draft of the reclaim list (published.py) may have a page as dirty while its backing gets one here. Published then,
    it would mean a backing that holds the bytes. So the governor is told between the two: what is drafted is void.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from heapq import heapify, heappop, heapreplace
from itertools import count
from threading import Lock
from typing import Any, Final, Protocol

from ...allocator._native import Device, Group, Transfer
from ...allocator.errors import BallonetError, PoolExhausted
from ...allocator.events import Events
from ...allocator.interrupts import Finalizer, if_free
from ..policy.ahead import ahead, window
from ..policy.ladder import Rung
from ..policy.peer import mean_seconds
from ..policy.tuning import Tuning
from ..residency.kv_extent import KVExtent
from ..residency.kv_slots import Slice
from ..residency.mover import Runs
from .activity import Marks
from .kv_read_plan import KVReadPlan, Streamed
from .seat import SPLIT, Offer

_FIRST_SLICE: Final = 4  # index of the first offer that is of a slot: those before are of full pages


class Host(Protocol):
    """What of the governor a cache uses."""

    @property
    def tuning(self) -> Tuning: ...
    @property
    def spill(self) -> bool: ...
    @property
    def clock(self) -> Callable[[], float]: ...
    @property
    def events(self) -> Events: ...
    @property
    def marks(self) -> Marks | None: ...
    @property
    def page_seconds(self) -> float | None: ...
    @property
    def peer_page_seconds(self) -> float | None: ...
    @property
    def scarce(self) -> bool: ...
    def add_cache(self, cache: Any) -> int: ...
    def remove_cache(self, number: int) -> None: ...
    def cache_changed(self, number: int) -> None: ...
    def copies_changed(self) -> None: ...
    def taken_of(self, number: int) -> frozenset[int]: ...
    def restorable_pages(self, number: int) -> int: ...
    def needs(self, number: int, pages: int) -> None: ...
    def publish_now(self) -> None: ...
    def wait_for_pages(self, timeout: float) -> bool: ...


class KVTier:
    """The ranges of one cache; refers to them weakly, and the governor to it."""

    def __init__(self, device: Device, group: Group, governor: Host) -> None:
        """`group`: of all its ranges."""
        self.name = "KV cache"
        self.lock = Lock()
        self.used = governor.clock()  # when tokens were appended last
        self.layers = 0  # that append in an iteration
        self.patient = True  # did others give what they lease when they were waited for last?
        self._device = device
        self._group = group
        self.governor = governor
        self._tuning = governor.tuning.kv_growth
        self._extents: list[weakref.ref[KVExtent]] = []
        self._transfers: dict[str, Transfer] = {}
        self._homing = Lock()  # held while pages come home
        self._kept = False
        self._goal = 0  # pages that it is to have in this iteration
        self.block = 1  # ranges that it has, or will have
        self.forward = 0  # see `follows`
        self._arrives = False  # are there bytes on their way home, as far as known?
        self.way = KVReadPlan(device, group, self.transfer, governor.marks, governor.clock, governor.tuning.kv_reads)
        self.prefills = False  # does the iteration have many rows?
        self._order: list[int] = []  # numbers of ranges, as their layers appended in the last iteration
        self._turns: list[int] = []  # in this one
        self._stream = 0  # that tokens were appended on last
        self._reclaimed = 0
        self._leader: tuple[int, int] | None = None
        self._since = 0  # appends since its last
        self._unsaid = 0  # pages that are full, which the governor does not know
        self._behind = Lock()  # of whoever is about to copy what is marked
        self._next = count()
        self._full: list[list[tuple[int, Runs]]] = []  # pieces of ranges, by index of the offer, see `_sorted`
        self._slices: dict[int, Slice] = {}  # by index of the offer
        self._slot_changes = 0  # changes of slots that the governor was told of
        self.number = governor.add_cache(self)
        Finalizer(self, partial(governor.remove_cache, self.number))

    @property
    def running(self) -> bool:
        """Does any thread lease it?"""
        return self._group.leases > 0

    @property
    def displaced(self) -> int:
        """Pages that lie on the peer or the host and would be on the device if there were room, as far as known."""
        return sum([extent.mover.away for extent in self._there()])

    @property
    def held(self) -> int:
        """Pages under its tokens, wherever they are, and those that it is about to have beside them."""
        return max(self._goal, sum(extent.pieces for extent in self._there()))

    @property
    def here(self) -> int:
        """Pages of the device that it has."""
        self.look()
        return sum(extent.pieces - extent.away for extent in self._there())

    @property
    def near(self) -> int:
        """The pages of these that lie on the peer."""
        return 0 if self._device.peer is None else sum([extent.near for extent in self._there()])

    @property
    def on_peer(self) -> int:
        """Pages of the peer that could go to the host."""
        self.look()
        return sum(len(extent.coldest()) for extent in self._there())

    @property
    def leaving(self) -> int:
        """The pages that are on their way there."""
        return sum(len(extent.backing.leaving) for extent in self._there())

    @property
    def kept(self) -> bool:
        """Is it only there in case that a prompt begins with its tokens? Then it has no slots. Set while no other
        thread uses it."""
        return self._kept

    @kept.setter
    def kept(self, now: bool) -> None:
        self._kept, self._goal = now, 0
        if now:
            with suppress(BallonetError):  # where they cannot go back now `write_behind` gives them back later
                self.way.give()

    @property
    def streamed(self) -> Streamed:
        """How what is away is read."""
        return self.way.said(self.displaced)

    # -- for the thread that uses it

    def add(self, extent: KVExtent) -> int:
        """One more range. Returns its number."""
        self._extents.append(weakref.ref(extent))
        return len(self._extents) - 1

    def follows(self, who: tuple[int, int], forward: int, stream: int) -> bool:
        """A layer, (range, place in it), is about to append a token on `stream`, in the `forward` of that number. Is it
        one of the later ones of an iteration for which nothing is away, nor on its way? Then there is nothing else to
        do (`begins`, `enter`)."""
        if forward != self.forward or who == self._leader or self._since >= self.layers:
            return False
        self._since += 1
        self._turns.append(who[0])
        self._stream = stream
        return True

    def begins(self, who: tuple[int, int]) -> bool:
        """A layer, (range, place in it), is about to append: is it the first one of an iteration?"""
        self._since += 1
        if who != self._leader and self._leader is not None and self._since <= self.layers:
            self._turns.append(who[0])
            return False
        self._leader, self._since = who, 0
        self._order, self._turns = self._turns, [who[0]]
        return True

    def enter(self, extent: KVExtent, stream: int) -> None:
        """A layer of this range is about to append and to be read, on `stream`. BallonetError, DriverError."""
        self._stream = stream
        if extent.mover.comes:
            self._arrive(extent, stream)
        self.way.enter(extent, stream)

    def wrote(self, stream: int) -> None:
        """What is full from now on was written by what `stream` was given so far. What is copied behind waits for
        that."""
        self._stream = stream

    def prefilling(self, pages: int) -> None:
        """A layer is about to get so many pages at once, and so will those after it. Where there are not enough for
        the next ones, as many pages of the layers that have run are copied to the host meanwhile, so that they can be
        given up at once (eLLM §4.3.2). DriverError."""
        wanted = self._tuning.layers * pages
        if self._device.available < wanted:
            self.write_behind(wanted)
            self.governor.publish_now()

    def copied_behind(self) -> bool:
        """What is being copied to the host has been, so that it may be taken. False where nothing was. DriverError."""
        with self.lock:
            waited = sum(extent.mover.wait_saved() for extent in self._there())
        if waited:
            self.governor.publish_now()
        return waited > 0

    def settle(self, extent: KVExtent, stream: int | None) -> None:
        """What `stream` is given from now on, on None the host, finds the tokens of this range at its addresses, until
        a layer enters. On any thread. BallonetError, DriverError."""
        self._arrive(extent, stream)
        if extent.mover.in_slot:
            self.way.map_to_host(extent)

    def _arrive(self, extent: KVExtent, stream: int | None) -> None:
        if extent.mover.coming:
            with self._homing:
                extent.fetch(self.transfer, stream or 0)
        extent.mover.arrive(stream)

    def iteration(self, stream: int, rows: int = 1, more: int = 0, forward: int = 0) -> None:
        """Before the first layer appends `rows` tokens, on `stream`, for which its range gets so many pages `more`, and
        the others as many. `forward`: the number of its lease, 0 outside of one. DriverError."""
        if self.governor.taken_of(self.number):
            self._see()
        with self.lock:
            settled = self._in_flight and not self._behind.locked() and self._settle()
        if settled or self._unsaid:
            self._unsaid = 0
            self.governor.cache_changed(self.number)
        away = self.displaced
        pages = self.governor.restorable_pages(self.number) if away else 0
        self.used, self._stream, self.prefills = self.governor.clock(), stream, rows > 1
        if pages:
            self.bring_back(pages, stream)
            away = self.displaced
        self._goal = 0
        if more:
            self._goal = self.held + more * self.block
            self.governor.needs(self.number, more * self.block)
        if away or self.way.slots:
            self._arrange(stream, rows, away)
        else:
            self.way.nothing_away(rows)
        if self._arrives:
            self._arrives = any(extent.mover.comes for extent in self._there())
        self.forward = 0 if away or self.way.slots or self._arrives else forward
        if self.way.changes != self._slot_changes:
            self._slot_changes = self.way.changes
            self.governor.cache_changed(self.number)

    def grown(self, pages: int, soon: bool) -> None:
        """Notes that so many more pages are full. `soon`: where pages are scarce the governor is told before the next
        iteration, once they are a part of the budget that is worth a new list."""
        self._unsaid += pages
        part = self._tuning.tell
        if soon and self.governor.scarce and self._unsaid * self._device.page_size * part >= self._device.budget:
            self._unsaid = 0
            self.governor.cache_changed(self.number)

    def appended(self, number: int, *, took: bool, next_takes: bool) -> None:
        """A token came to the range of this number; see `ahead`."""
        width = window(self._device.page_size, self._tuning.ahead)
        for each in ahead(number, len(self._extents), width, took=took, next_takes=next_takes):
            if (extent := self._extents[each]()) is not None:
                extent.map_ahead()

    def look(self) -> None:
        """Finds out what was taken."""
        reclaimed = self._device.reclaimed
        if reclaimed != self._reclaimed:
            self._see()
            self._reclaimed = reclaimed

    def _see(self) -> None:
        for extent in self._there():
            extent.look()

    def bring_back(self, pages: int, stream: int) -> int:
        """Brings home so many pages that are away, if there is room, and their bytes range after range; returns how
        many. DriverError."""
        self.look()
        began, reading = self.governor.clock(), self._reading(self.displaced)
        extents = [extent for extent in self._there() if extent.away]
        shown = [extent for extent in extents if not extent.alone()]  # and those have no tensors of their own by now
        self.forward, self._arrives = 0, True
        with self._homing:
            back = _bring(extents, pages, shown, self.transfer, stream)
        if back:
            predicted = None if reading is None else back * reading
            self.decided(Rung.RUNNING_KV.label, "revert", back, predicted, self.governor.clock() - began)
            self.governor.cache_changed(self.number)
        return back

    def bring_one_back(self, extent: KVExtent, piece: int, stream: int) -> bool:
        """Brings this piece of the range home, if it is away and there is room. DriverError."""
        self.forward, self._arrives = 0, True
        with self._homing:
            return _bring([extent], 1, [extent], self.transfer, stream, (piece,)) > 0

    def decided(
        self, lever: str, verb: str, pages: int, predicted: float | None = None, measured: float | None = None
    ) -> None:
        """Something about its pages, by this thread. Times are in seconds."""
        self.governor.events.decided(lever, verb, pages, what=self.name, predicted=predicted, measured=measured)

    def _arrange(self, stream: int, rows: int, away: int) -> None:
        """How are the pages read that stay away? An event where slots come or go."""
        seconds = self._reading(away)
        link = None if seconds is None else self._device.page_size / seconds
        began = self.governor.clock()
        chosen = self.way.arrange(self._in_order(), rows, link, stream)
        if chosen is not None:
            now = self.streamed
            verb, pages = "pull" if now.slots else "revert", now.slots * now.slot_pages
            self.decided("layer stream", verb, pages, chosen.exposed, self.governor.clock() - began)

    def _in_order(self) -> list[KVExtent]:
        """The ranges as their layers appended in the last iteration, then those that did not."""
        numbers = dict.fromkeys((*self._order, *range(len(self._extents))))
        return [extent for number in numbers if (extent := self._extents[number]()) is not None]

    @property
    def transfer(self) -> Transfer:
        """The stream of its copies."""
        made = self._transfers.get("copies")
        return made or self._transfers.setdefault("copies", Transfer(self._device))

    # -- for the governor

    def offers(self) -> Sequence[Offer]:
        """What may be taken, in this order: pages of slots that no layer reads; full pages, one offer for all layers
        (`_sorted`); the other pages of slots. The number of full pages does not matter."""
        self.look()
        self._full = self._sorted()
        sliced = self._sliced()
        found = [Offer(index, each.pieces, True, each.readers) for index, each in sliced.items() if not each.readers]
        for index, of_extents in enumerate(self._full):
            if pages := sum([end - first for _, spans in of_extents for first, end in spans]):
                found.append(Offer(index, pages, index % 2 == 0, divisible=True))
        found += [Offer(index, each.pieces, True, each.readers) for index, each in sliced.items() if each.readers]
        return found

    def entry(self, index: int) -> tuple[Group, list[Any]] | None:
        """(group, parts) of an offer for `Device.publish`; None where there is no such offer any more."""
        if (taken := self._slices.get(index)) is not None:
            parts = self.way.parts(taken)
        else:
            full = self._full[index] if index < len(self._full) else []
            parts = [
                part
                for number, spans in full
                if (extent := self._extents[number]()) is not None
                for run in spans
                if (part := extent.part(*run)) is not None
            ]
        return (self._group, parts) if parts else None

    def _sorted(self) -> list[list[tuple[int, Runs]]]:
        """The full pages that may be taken, by number of the range, in this order: those of layers that were read in
        this iteration and are not read again in it, then those of the others; of each the clean ones, then the dirty
        ones. The core takes the oldest of each first, from all layers in turns."""
        ran = frozenset(self._turns[:-1]) if self.prefills else frozenset()
        found: list[list[tuple[int, Runs]]] = [[], [], [], []]
        for number, ref in enumerate(tuple(self._extents)):
            if (extent := ref()) is not None:
                first = 0 if number in ran else 2
                for kind, spans in zip((first, first + 1), extent.takable(), strict=True):
                    if spans:
                        found[kind].append((number, spans))
        return found

    def _sliced(self) -> dict[int, Slice]:
        """Pages of slots, by index of the offer: what was offered before has the index that it had."""
        known = {each[:3]: index for index, each in self._slices.items()}
        found: dict[int, Slice] = {}
        for each in self.way.slices():
            index = known.get(each[:3])
            while index is None or index in found:
                index = _FIRST_SLICE + next(self._next) % (SPLIT - _FIRST_SLICE)
                index = None if index in self._slices else index
            found[index] = each
        self._slices = found
        return found

    def give_slots(self) -> None:
        """Slots go back, unless somebody leases the cache now. The governor says when: a forward holds no lease on
        its cache before its first layer, and none between two iterations."""
        self.way.give_if_unused()

    def write_behind(self, pages: int) -> None:
        """Starts to copy up to so many full pages to the host, those first that would be taken first, and notices what
        was copied before. See Note [Before it is copied]. Does nothing where the driver will not."""
        if (pages or self._in_flight) and not self.lock.locked():  # perhaps by this very thread
            if_free(self._behind, partial(self._write_behind, pages))

    @property
    def _in_flight(self) -> bool:
        return True in [extent.mover.busy for extent in self._there()]

    def _write_behind(self, pages: int) -> None:
        with self.lock:
            settled = self._settle()
            chosen = self._dirty(pages)
            for extent, pieces in chosen.items():
                extent.mover.mark(pieces)
        if settled or chosen:
            self.governor.copies_changed()
        with self.lock, suppress(BallonetError, PoolExhausted):
            self._copy_behind(chosen)

    def _copy_behind(self, chosen: dict[KVExtent, list[int]]) -> None:
        ready = {extent: extent.save(pieces) for extent, pieces in chosen.items()}
        copies = [copy for _, found in ready.values() for copy in found]
        if copies:
            for extent in ready:
                extent.mover.arrive(self._stream)  # some may have come home just now
            done = self.transfer.copy(copies, after=self._stream, owner="kv", to="host")
            self.decided("write-behind", "pull", sum(len(mapped) for mapped, _ in ready.values()), self._sending(ready))
            for extent, (mapped, _) in ready.items():
                extent.mover.saving(mapped, done)

    def demote(self, pages: int) -> None:
        """Starts to copy up to so many pages from the peer to the host, those first that nobody reads there; they take
        their places once they have arrived, when `write_behind` is called, or the next iteration begins. Returns at
        once; does nothing where the driver will not."""
        self.look()
        if not self.lock.locked():  # as in write_behind
            if_free(self._behind, partial(self._demote, pages))

    def _demote(self, pages: int) -> None:
        with self.lock, suppress(BallonetError, PoolExhausted):
            self._settle()
            ready: dict[KVExtent, list[int]] = {}
            copies: list[tuple[int, int, int]] = []
            for extent in self._there():
                ready[extent], found = extent.demote(extent.coldest()[: max(0, pages - len(copies))])
                copies += found
            if copies:
                done = self.transfer.copy(copies, after=self._stream, owner="kv", to="host")
                self.decided("demotion", "pull", len(copies), self._copying(len(copies)))
                for extent, mapped in ready.items():
                    extent.backing.demoting(mapped, done)

    def demote_one(self, extent: KVExtent, piece: int, stream: int) -> bool:
        """Moves this page from the peer to the host, if it lies there and can go now. DriverError."""
        with self.lock:
            ready, copies = extent.demote([each for each in extent.coldest() if each == piece])
            if not ready:
                return False
            done = self.transfer.copy(copies, after=stream, owner="kv", to="host")
            extent.backing.demoting(ready, done)
            done.wait()
            extent.mover.saved()
            return extent.backing.pages.backing(piece) == "host"

    def _reading(self, away: int) -> float | None:
        """Seconds for a page of those that are away, as they lie; None where a link was not measured that matters."""
        near = self.near
        return mean_seconds(near, away - near, self.governor.peer_page_seconds, self.governor.page_seconds)

    def _sending(self, ready: Mapping[KVExtent, tuple[Sequence[int], Sequence[Any]]]) -> float | None:
        """Seconds for what is copied behind."""
        host, peer = self.governor.page_seconds, self.governor.peer_page_seconds
        places = Counter(extent.backing.pages.place(piece) for extent, (pieces, _) in ready.items() for piece in pieces)
        mean = mean_seconds(places["peer"], places["host"], peer, host)
        return None if mean is None else places.total() * mean

    def _copying(self, pages: int) -> float | None:
        """Seconds for so many pages of the host, None where the link was not measured."""
        seconds = self.governor.page_seconds
        return None if seconds is None else pages * seconds

    def _dirty(self, pages: int) -> dict[KVExtent, list[int]]:
        """Returns so many full pages that are not clean, in the order in which they would be taken."""
        chosen: dict[KVExtent, list[int]] = {}
        full = self._sorted() if pages > 0 else []
        for of_extents in full[1::2]:
            extents = {number: extent for number, _ in of_extents if (extent := self._extents[number]()) is not None}
            runs = [
                (first, number, end)
                for number, spans in of_extents
                if number in extents and not extents[number].restless
                for first, end in spans
            ]
            heapify(runs)
            while runs and pages > 0:
                piece, number, end = runs[0]
                chosen.setdefault(extents[number], []).append(piece)
                pages -= 1
                if piece + 1 < end:
                    heapreplace(runs, (piece + 1, number, end))
                else:
                    heappop(runs)
        return chosen

    def _settle(self) -> bool:
        return sum([extent.mover.saved() for extent in self._there()]) > 0

    def _there(self) -> list[KVExtent]:
        return [extent for ref in tuple(self._extents) if (extent := ref()) is not None]


def _bring(
    extents: Sequence[KVExtent],
    pages: int,
    shown: Sequence[KVExtent],
    transfer: Transfer,
    stream: int,
    chosen: Sequence[int] | None = None,
) -> int:
    """Brings home so many pages of these, if there is room: of each those of `chosen`, if that is not None. `shown`: to
    whose tensors somebody refers, who may read them on any stream: the host waits for those. See mover.py,
    Note [Coming home]."""
    back = 0
    try:
        for extent in extents:
            if back < pages:
                back += extent.own(pages - back, chosen)
        for extent in extents:
            extent.fetch(transfer, stream)
        for extent in shown:
            extent.mover.arrive(None)
    except BaseException:
        for extent in extents:
            extent.mover.recall()
            extent.mover.arrive(None)
        raise
    return back
