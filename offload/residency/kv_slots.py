"""The slots of one KV cache: its layers take turns in them with what of their pages lies on the host (slots.py).

Words
    host-mapped   what is offloaded leads to its host copy: valid for everything, slow to read
    in slot       a piece leads to a slot, which holds its bytes from `enter` until another layer has the slot

Note [When a slot is free]
    No call tells when a layer has been read. So a slot is filled for the next layer when another layer enters, once no
    tensor lies over the layer that had it before: all that reads it has been launched by then. Where one still does,
    that layer is host-mapped first.

Note [Its own tail]
    In a slot are full pages that are offloaded. The others are the layer's own: tokens are appended there, and read
    there. A page leaves for the host once it is full, as those of any cache (kv_extent.py), and comes to a slot by a
    later `bind`.

Note [Taken]
    An allocation in the middle of an operator takes pages of slots too, as the host has the bytes: the core leads all
    addresses that lead to a page to their host copies, at once (takes.h, Note [Buffers]). So a slot may have lost
    pages whenever a layer enters, and that is looked for before anything is copied. What led there is host-mapped from
    then on. No other thread takes any while the thread that uses the cache leases it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from ...allocator._native import Device, Group, Range, Transfer
from ...allocator.errors import BallonetError, PoolExhausted
from .kv_extent import KVExtent, by_place
from .pieces import PieceEvent
from .slots import Copies, Filler, Slot, open_pages

if TYPE_CHECKING:
    from ...allocator._native import Part

_TAKEN: Final = -1  # in the place of a piece


class Slice(NamedTuple):
    """Pages of the slot number `slot` that may be taken together. `readers`: layers that read them."""

    slot: int
    first: int
    pieces: int
    readers: int


class _Slot(Slot["_Bound"]):
    """A slot that may lose pages. `pages`: those from its start on that it has; `backed`: all that it has."""

    def __init__(self, opened: Range) -> None:
        super().__init__(opened)
        self.pages = self.backed = opened.pieces


@dataclass(eq=False, slots=True)
class _Bound:
    """A layer with pages that lead to a slot. `pieces`: in the order in which they lie there, `_TAKEN` where the slot
    has no page."""

    extent: weakref.ref[KVExtent]
    slot: _Slot
    pieces: list[int] = field(default_factory=list)  # see `lead`
    copies: Copies | None = None  # those that fill the slot; None where they are to be worked out
    away: object = None  # what `Mover.led_away` was then
    seen: object = None  # the same at the last look for pieces that lead elsewhere
    runs: list[tuple[int, int, int]] = field(default_factory=list)  # (place in the slot, first, count)
    led: int = 0  # pieces that lead there

    def lead(self, now: list[int]) -> None:
        """Notes which pieces lead there from now on."""
        self.pieces, self.copies, self.away, self.seen = now, None, None, None
        self.runs = list(_neighbours(now))
        self.led = sum([count for _, _, count in self.runs])

    @property
    def there(self) -> list[int]:
        """The pieces that lead to the slot."""
        return [piece for piece in self.pieces if piece != _TAKEN]


class KVSlots:
    """The slots of one cache, at first none. Not thread-safe, but for `slices` and `parts`, called on any thread."""

    def __init__(self, device: Device, group: Group, transfer: Transfer) -> None:
        """`group`: of all ranges of the cache; `transfer`: the stream of its copies."""
        self.changes = 0  # how often the set of pieces that lead to slots changed
        self._device = device
        self._group = group
        self._page = device.page_size
        self._filler = Filler[_Bound](transfer, "kv")
        self._slots: list[_Slot] = []
        self._bound: list[_Bound] = []  # in the order in which they compute
        self._last: _Bound | None = None  # that entered last

    @property
    def copied(self) -> int:
        """Bytes copied to slots so far."""
        return self._filler.copied

    @property
    def pages(self) -> int:
        """Pages of each slot; 0 where there is none."""
        return min((slot.pages for slot in self._slots), default=0)

    @property
    def slots(self) -> int:
        """The number of slots."""
        return len(self._slots)

    @property
    def pieces(self) -> int:
        """The pieces that are in a slot."""
        count = 0
        for layer in self._bound:
            count += layer.led
        return count

    def open(self, count: int, pages: int) -> int:
        """Replaces the slots by up to `count` of so many pages each, as many as there are pages for. Returns how many.
        Raises as `close`."""
        self.close()
        while len(self._slots) < count:
            try:
                self._slots.append(_Slot(open_pages(self._device, self._group, "kv", pages, reuse=False)))
            except PoolExhausted:
                break
        self.changes += 1
        return len(self._slots)

    def bind(self, extents: Sequence[KVExtent]) -> None:
        """Leads offloaded pages of layers to slots, as far as those have room, no tensor lies over the layer, and
        addresses can be exchanged now. `extents`: in the order in which they compute. DriverError."""
        self._see()  # `open` may have taken pages of the first slot for the second
        bound = [self._bound_of(extent) or self._new(extent, n) for n, extent in enumerate(extents)]
        self._bound = [*bound, *(other for other in self._bound if other not in bound)]
        for extent, layer in zip(extents, bound, strict=True):
            self._lead(layer, extent)

    def enter(self, extent: KVExtent, stream: int) -> None:
        """Prepares the layer's slot before it appends and is read, on `stream`. BallonetError, DriverError."""
        self._see()
        last, self._last = self._last, self._bound_of(extent)
        if last is not None and last is not self._last:
            self._leave(last)
        if self._last is not None and self._last.pieces:
            self._filler.read(self, self._last.slot, self._last, stream)

    def map_to_host(self, extent: KVExtent) -> None:
        """Leads pieces of the layer that are in a slot to their host copies again. BallonetError where that cannot be
        now, as another thread uses the cache or a graph is being captured; DriverError."""
        layer = self._bound_of(extent)
        if layer is not None:
            if layer.slot.holds is layer:
                layer.slot.holds = None
            if not extent.mover.unbind(layer.there, extent.end):
                raise BallonetError(_IN_USE)
            self.changes += bool(layer.pieces)
            layer.lead([])

    def look(self) -> None:
        """Finds out which pieces do not lead to their slots any more, under a lease: the core took pages, or some are
        on the device again."""
        self._see()
        for layer in self._bound:
            extent = layer.extent()
            if extent is not None and layer.pieces and layer.seen != extent.mover.led_away:
                layer.seen = extent.mover.led_away
                away = {at + n for at, _, count in by_place(extent, layer.pieces) for n in range(count)}
                self._gone(layer, [place for place in range(len(layer.pieces)) if place not in away])

    def _see(self) -> None:
        """Finds out what the core took. See Note [Taken]."""
        for slot in self._slots:
            if slot.range.backed != slot.backed:
                lost = [place for place in range(slot.range.pieces) if slot.range.leads_to(place) != "device"]
                slot.backed, slot.pages = slot.range.pieces - len(lost), lost[0]
                self.changes += 1
                for layer in self._bound:
                    if layer.slot is slot:
                        self._gone(layer, [place for place in lost if place < len(layer.pieces)])

    def _gone(self, layer: _Bound, places: Sequence[int]) -> None:
        gone = frozenset(places)
        pieces = [_TAKEN if place in gone else piece for place, piece in enumerate(layer.pieces)]
        while pieces and pieces[-1] == _TAKEN:
            pieces.pop()
        if pieces == layer.pieces:
            return
        if (extent := layer.extent()) is not None:
            extent.mover.states.move(PieceEvent.UNBIND, {*layer.pieces} - {*pieces})
        layer.lead(pieces)
        self.changes += 1
        if not pieces and layer.slot.holds is layer:
            layer.slot.holds = None

    # -- for the reclaim list, on any thread: the core finds out what has changed since

    def slices(self) -> list[Slice]:
        """Returns slices of all slots, from their ends on, where the fewest layers have pages; each is larger than the
        one before."""
        slices = []
        for number, slot in enumerate(tuple(self._slots)):
            used = [len(layer.pieces) for layer in tuple(self._bound) if layer.slot is slot]
            end, count = slot.pages, 1
            while end:
                first = max(0, end - count)
                slices.append(Slice(number, first, end - first, sum(length > first for length in used)))
                end, count = first, 2 * count
        return sorted(slices, key=lambda slice_: (slice_.readers, slice_.pieces))

    def parts(self, taken: Slice) -> list[Part]:
        """Returns the parts of a slice, for `Device.publish`."""
        slot = dict(enumerate(self._slots)).get(taken.slot)
        if slot is None:
            return []
        parts: list[Part] = [(slot.range, taken.first, taken.pieces, None, 0, [])]
        for layer in tuple(self._bound):
            extent = layer.extent()
            if layer.slot is slot and extent is not None:
                for at, first, count in layer.runs:
                    low, high = max(at, taken.first), min(at + count, taken.first + taken.pieces)
                    for here, pieces, backing in extent.range.runs(first + low - at, high - low) if low < high else ():
                        if backing == "alias":
                            parts.append((extent.range, here, pieces, extent.backing.pages, here, []))
        return parts

    def close(self) -> None:
        """Maps every layer to the host and gives the slots back. Raises as `map_to_host`."""
        for layer in self._bound:
            if (extent := layer.extent()) is not None:
                self.map_to_host(extent)
        self._bound = []
        self._last = None
        while self._slots:
            self.changes += 1
            self._slots.pop().range.close()

    # -- for the filler of slots

    def copies(self, member: _Bound, slot: Slot[_Bound]) -> Copies:
        """Returns the copies that fill the slot with the layer. They are kept while the same pieces lead there, except
        with a peer, where host copies may move."""
        extent = member.extent()
        if extent is None:
            return []
        if member.copies is None or member.away != extent.mover.led_away or self._device.peer is not None:
            member.away = extent.mover.led_away
            member.copies = []
            for at, first, count in by_place(extent, member.pieces):
                member.copies += extent.backing.copies(first, count, slot.range.address + at * self._page)
        return member.copies

    def filling(self, member: _Bound, slot: Slot[_Bound]) -> None:
        """Maps the layer that is still in the slot to the host if a tensor lies over it."""
        extent = None if slot.holds is None else slot.holds.extent()
        if extent is not None and not extent.alone():
            self.map_to_host(extent)

    def _bound_of(self, extent: KVExtent) -> _Bound | None:
        for layer in self._bound:
            if layer.extent() is extent:
                return layer
        return None

    def _new(self, extent: KVExtent, index: int) -> _Bound:
        """Binds a layer; neighbours use different slots."""
        return _Bound(weakref.ref(extent), self._slots[index % len(self._slots)])

    def _lead(self, layer: _Bound, extent: KVExtent) -> None:
        """Leads offloaded pieces that are in no slot to the slot."""
        at = len(layer.pieces)
        room = max(0, layer.slot.pages - at)
        there = {*layer.pieces}
        new = [piece for piece in extent.host_mapped() if piece not in there][:room] if room else []
        if not new or not extent.alone():
            return
        if layer.slot.holds is layer:
            layer.slot.holds = None
        self.changes += 1
        layer.lead([*layer.pieces, *new])  # first: what is host-mapped may be among them, what is in the slot must be
        layer.lead(layer.pieces[: at + extent.mover.bind(new, layer.slot.range, at)])

    def _leave(self, last: _Bound) -> None:
        """Fills the slot for the next layer, as all that reads this one has been launched."""
        slot = last.slot
        if slot.holds is last and slot.readers:
            slot.turns = turns = [layer for layer in self._bound if layer.slot is slot and layer.pieces]
            following = turns[(turns.index(last) + 1) % len(turns)]
            if following is last:
                self.filling(last, slot)
            else:
                self._filler.fill(self, slot, following)


def _neighbours(pieces: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(place in the sequence, first, count) of those that follow each other."""
    at = 0
    for place, piece in enumerate(pieces, 1):
        if place == len(pieces) or piece == _TAKEN or pieces[place] != piece + 1:
            if pieces[at] != _TAKEN:
                yield at, pieces[at], place - at
            at = place


_IN_USE: Final = (
    "a KV cache that is streamed from the host is looked at while another thread uses it, or while a CUDA graph is "
    "being captured: look at it between two forwards"
)
