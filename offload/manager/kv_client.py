"""A KV cache as a client of the manager (client.py): what it has, what of it may be taken (`KVOffers`), and the copies
that make that clean (`KVSaving`). `KVTurns` tells in which order its layers append.

Note [Before it is copied]
    A draft of the reclaim list (device_view.py) may have a page as dirty while its backing gets one here. Published
    then, the core would take the backing for one that holds the bytes. So the manager is told between the two: the
    draft is void.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from heapq import merge
from itertools import count, islice, repeat
from threading import Lock
from typing import Any, Final

from ...allocator._native import Device, Group, Lease, Range, Transfer
from ...allocator.errors import BallonetError, PoolExhausted
from ...allocator.interrupts import if_free
from ..policy.kv_pages import mean_seconds
from ..policy.reclaim_order import PageSource
from ..residency.kv_extent import KVExtent, KVExtents, coldest
from ..residency.kv_slots import KVSlots, Slice
from ..residency.mover import Runs
from .client import INDICES_PER_SPLIT, Offer, PageClient
from .clients import Validity
from .kv_read_plan import KVReadPlan, Streamed
from .memory_manager import MemoryManager


class KVTurns:
    """The order of appends, used by the cache's thread. A layer is (number of its range, place in that).

    In a forward for which nothing is away or being restored, `KVRange.append_next` notes layers after the first itself,
    as each layer of each token pays for it."""

    def __init__(self) -> None:
        self.layers = 0  # number of layers that append in an iteration
        self.forward = 0  # the forward for which nothing is away or being restored; 0: there is none
        self.stream = 0  # the stream of the last append
        self.order: list[int] = []  # numbers of ranges, as their layers appended in the last iteration
        self.appended: list[int] = []  # the same, in this iteration
        self.first: tuple[int, int] | None = None  # the layer that began this iteration
        self.since = 0  # appends since the last one of `first`
        self.validity: Validity | None = None  # under what nothing has to be done for the next iterations
        self.left = 0  # how many they are
        self.skipped = False  # was nothing done for the last one?

    def begins(self, layer: tuple[int, int]) -> bool:
        """Notes that a layer is about to append. Is it the first one of an iteration?"""
        self.since += 1
        if layer != self.first and self.first is not None and self.since <= self.layers:
            self.appended.append(layer[0])
            return False
        self.first, self.since = layer, 0
        self.order, self.appended = self.appended, [layer[0]]
        return True

    @property
    def ran(self) -> frozenset[int]:
        """The ranges that were read in this iteration before the one that is read now."""
        return frozenset(self.appended[:-1])


_FIRST_SLICE: Final = 4  # index of the first offer that is of a slot: those before are of full pages


class KVOffers:
    """The offers of one cache. The manager calls on any thread: `all` under its lock, `parts` without."""

    def __init__(self, extents: KVExtents, turns: KVTurns, slots: KVSlots) -> None:
        self.prefills = False  # does the iteration have many rows?
        self._extents = extents
        self._turns = turns
        self._slots = slots
        self._next = count()
        self._full: list[list[tuple[int, Runs]]] = []  # pieces of ranges, by index of the offer, see `full`
        self._slices: dict[int, Slice] = {}  # by index of the offer

    def all(self) -> Sequence[Offer]:
        """Returns the offers in the order of taking: pages of slots that no layer reads; full pages, one offer for all
        layers (`full`); the other pages of slots. The number of full pages does not matter."""
        self._extents.look()
        self._full = self.full()
        sliced = self._sliced()
        offers = [
            Offer(index, slice_.pieces, True, slice_.readers) for index, slice_ in sliced.items() if not slice_.readers
        ]
        for index, of_extents in enumerate(self._full):
            if pages := sum([end - first for _, spans in of_extents for first, end in spans]):
                offers.append(Offer(index, pages, index % 2 == 0, divisible=True))
        offers += [
            Offer(index, slice_.pieces, True, slice_.readers) for index, slice_ in sliced.items() if slice_.readers
        ]
        return offers

    def parts(self, index: int) -> list[Any]:
        """Returns the parts of an offer for `Device.publish`; none where there is no such offer any more."""
        if (taken := self._slices.get(index)) is not None:
            return self._slots.parts(taken)
        full = self._full[index] if index < len(self._full) else []
        return [
            part
            for number, spans in full
            if (extent := self._extents.get(number)) is not None
            for run in spans
            if (part := extent.part(*run)) is not None
        ]

    def full(self) -> list[list[tuple[int, Runs]]]:
        """The full pages that may be taken, by number of the range, in this order: those of layers that were read in
        this iteration and are not read again in it, then those of the others; of each the clean ones, then the dirty
        ones. The core takes the oldest of each first, from all layers in turns."""
        ran = self._turns.ran if self.prefills else frozenset[int]()
        kinds: list[list[tuple[int, Runs]]] = [[], [], [], []]
        for number, extent in self._extents.numbered():
            first = 0 if number in ran else 2
            for kind, spans in zip((first, first + 1), extent.takable(), strict=True):
                if spans:
                    kinds[kind].append((number, spans))
        return kinds

    def _sliced(self) -> dict[int, Slice]:
        """Pages of slots, by index of the offer: an offer that was there before keeps its index."""
        known = {former[:3]: index for index, former in self._slices.items()}
        slices: dict[int, Slice] = {}
        for slice_ in self._slots.slices():
            index = known.get(slice_[:3])
            while index is None or index in slices:
                index = _FIRST_SLICE + next(self._next) % (INDICES_PER_SPLIT - _FIRST_SLICE)
                index = None if index in self._slices else index
            slices[index] = slice_
        self._slices = slices
        return slices


class KVSaving:
    """Background copies of one cache. Thread-safe. No call waits for the cache's lock, which the caller may hold."""

    def __init__(
        self,
        extents: KVExtents,
        offers: KVOffers,
        turns: KVTurns,
        transfer: Transfer,
        manager: MemoryManager,
        lock: Lock,
        name: str,
    ) -> None:
        """`transfer`: the stream of the copies; `lock`: held while they begin or end; `name`: of the cache in
        events."""
        self._extents = extents
        self._offers = offers
        self._turns = turns
        self._transfer = transfer
        self._manager = manager
        self._lock = lock
        self._name = name
        self._behind = Lock()  # held by the thread that is about to copy what is marked

    def write_behind(self, pages: int) -> None:
        """Starts to copy up to so many full pages to their backings, those first that would be taken first, and notes
        what was copied before. See Note [Before it is copied]. Does nothing where the driver refuses."""
        if (pages or self._extents.busy) and not self._lock.locked():  # perhaps by this very thread
            if_free(self._behind, partial(self._write_behind, pages))

    def notice(self) -> bool:
        """Notes what has been copied, unless copies are being submitted. Returns whether more is clean. DriverError."""
        with self._lock:
            return self._extents.busy and not self._behind.locked() and self._extents.saved()

    @property
    def busy(self) -> bool:
        """Is anything being copied to a backing?"""
        return self._extents.busy

    def demote(self, pages: int) -> None:
        """Starts to copy up to so many pages from the peer to the host, those first that are not read there; they take
        their places once they have arrived, when `write_behind` is called, or the next iteration begins. Returns at
        once; does nothing where the driver refuses."""
        self._extents.look()
        if not self._lock.locked():  # as in write_behind
            if_free(self._behind, partial(self._demote, pages))

    def _write_behind(self, pages: int) -> None:
        with self._lock:
            settled = self._extents.saved()
            chosen = self._dirty(pages)
            for extent, pieces in chosen.items():
                extent.mover.saving.mark(pieces)
        if settled or chosen:
            self._manager.copies_changed()
        with self._lock, suppress(BallonetError, PoolExhausted):
            self._copy_behind(chosen)

    def _copy_behind(self, chosen: dict[KVExtent, list[int]]) -> None:
        ready = {extent: extent.save(pieces) for extent, pieces in chosen.items()}
        copies = [copy for _, its in ready.values() for copy in its]
        if copies:
            stream = self._turns.stream
            for extent in ready:
                extent.mover.arrive(stream)  # some may have been restored just now
            done = self._transfer.copy(copies, after=stream, owner="kv", to="host")
            self._decided("write-behind", sum(len(mapped) for mapped, _ in ready.values()), self._sending(ready))
            for extent, (mapped, _) in ready.items():
                extent.mover.saving.submitted(mapped, done)

    def _demote(self, pages: int) -> None:
        with self._lock, suppress(BallonetError, PoolExhausted):
            self._extents.saved()
            ready: dict[KVExtent, list[int]] = {}
            copies: list[tuple[int, int, int]] = []
            for extent in self._extents.all():
                ready[extent], more = extent.demote(coldest(extent)[: max(0, pages - len(copies))])
                copies += more
            if copies:
                done = self._transfer.copy(copies, after=self._turns.stream, owner="kv", to="host")
                seconds = self._manager.link.page_seconds
                self._decided("demotion", len(copies), None if seconds is None else len(copies) * seconds)
                for extent, mapped in ready.items():
                    extent.backing.demoting(mapped, done)

    def _decided(self, source: str, pages: int, predicted: float | None) -> None:
        self._manager.events.decided(source, "reclaim", pages, what=self._name, predicted=predicted)

    def _sending(self, ready: Mapping[KVExtent, tuple[Sequence[int], Sequence[Any]]]) -> float | None:
        """Seconds that copies of these pages take; None where a link they need was not measured."""
        host, peer = self._manager.link.page_seconds, self._manager.link.peer_page_seconds
        places = Counter(extent.backing.pages.place(piece) for extent, (pieces, _) in ready.items() for piece in pieces)
        mean = mean_seconds(places["peer"], places["host"], peer, host)
        return None if mean is None else places.total() * mean

    def _dirty(self, pages: int) -> dict[KVExtent, list[int]]:
        """Returns so many full pages that are not clean, in the order in which they would be taken."""
        chosen: dict[KVExtent, list[int]] = {}
        full = self._offers.full() if pages > 0 else []
        for of_extents in full[1::2]:
            extents = {number: extent for number, _ in of_extents if (extent := self._extents.get(number)) is not None}
            runs = [
                zip(range(*span), repeat(number))
                for number, spans in of_extents
                if number in extents and not extents[number].restless
                for span in spans
            ]
            for piece, number in islice(merge(*runs), pages):
                chosen.setdefault(extents[number], []).append(piece)
                pages -= 1
        return chosen


class KVClient(PageClient):
    """The `PageClient` of one KV cache, which KVTier holds."""

    def __init__(
        self,
        device: Device,
        group: Group,
        manager: MemoryManager,
        extents: KVExtents,
        turns: KVTurns,
        transfer: Transfer,
        lock: Lock,
    ) -> None:
        """`group`: of all its ranges; `transfer`: the stream of its copies; `lock`: of its states."""
        self.name = "KV cache"
        self.used = manager.clock()  # when tokens were appended last
        self.goal = 0  # pages that it is to have in this iteration
        self.grows_by = 1  # ranges that it has, or will have
        self.way = KVReadPlan(device, group, transfer, manager.marks, manager.clock, manager.tuning.kv_reads)
        self.takable = KVOffers(extents, turns, self.way.kv_slots)
        self.saving = KVSaving(extents, self.takable, turns, transfer, manager, lock, self.name)
        self._group = group
        self._transfer = transfer
        self._extents = extents
        self._only_cached = False

    @property
    def running(self) -> bool:
        """Does any thread lease it?"""
        return self._group.leases > 0

    @property
    def displaced(self) -> int:
        """Pages that lie on the peer or the host and would be on the device if there were room, as far as known."""
        return self._extents.away

    @property
    def pages(self) -> int:
        """Pages under its tokens, wherever they are, and those that it is about to request."""
        return max(self.goal, self._extents.pieces)

    @property
    def device_pages(self) -> int:
        """Device pages that it has."""
        self._extents.look()
        return self._extents.pieces - self._extents.away

    @property
    def ranges(self) -> list[tuple[str, Range]]:
        """The ranges of its layers, with what lies in each."""
        return [(extent.contents, extent.range) for extent in self._extents.all()]

    @property
    def peer_pages(self) -> int:
        """Pages of the peer that could go to the host."""
        self._extents.look()
        return sum(len(coldest(extent)) for extent in self._extents.all())

    @property
    def leaving_peer(self) -> int:
        """The pages that are on their way there."""
        return sum(len(extent.backing.leaving) for extent in self._extents.all())

    @property
    def only_cached(self) -> bool:
        """Is it only there in case that a prompt begins with its tokens? Then it has no slots. Set while no other
        thread uses it."""
        return self._only_cached

    @only_cached.setter
    def only_cached(self, now: bool) -> None:
        self._only_cached, self.goal = now, 0
        if now:
            with suppress(BallonetError):  # where they cannot go back now `give_slots` gives them back later
                self.way.give()

    @property
    def streamed(self) -> Streamed:
        """How what is away is read."""
        return self.way.status(self.displaced)

    def offers(self) -> Sequence[Offer]:
        """Returns what may be taken, in this order. Clean pages that are only cached cost nothing to give."""
        offers = self.takable.all()
        if not self._only_cached:
            return offers
        return [replace(offer, idle=PageSource.PREFIX) if offer.clean else offer for offer in offers]

    def entry(self, index: int) -> tuple[Group, list[Any]] | None:
        """(group, parts) of an offer for `Device.publish`; None where there is no such offer any more."""
        parts = self.takable.parts(index)
        return (self._group, parts) if parts else None

    def give_slots(self) -> None:
        """Slots go back, unless somebody leases the cache now. The manager says when: a forward holds no lease on its
        cache before its first layer, and none between two iterations."""
        self.way.give_if_unused()

    def retreat(self) -> int:
        """Moves pages of tokens, full or not, and gives slots back."""
        if self.running:
            return self.device_pages
        lease = Lease()
        lease.enter(self._group)
        try:
            self.way.give()
            for extent in self._extents.all():
                extent.mover.evict(range(extent.first, extent.end), self._transfer, None, whole=True)
        finally:
            lease.close()
        return self.device_pages

    def write_behind(self, pages: int) -> None:
        """As `KVSaving.write_behind`."""
        self.saving.write_behind(pages)

    def demote(self, pages: int) -> None:
        """As `KVSaving.demote`."""
        self.saving.demote(pages)
