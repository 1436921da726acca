"""The layers of one model that stream: which they are, and the slots that they are read from (slots.py).

Words
    resident  a layer's addresses lead to device pages of its own
    on the host  they lead to its backing: slow to compute with, valid for everything
    in a slot  besides, from `enter` to `leave`, a slot holds its weights: what its own forward reads
    own slot  one that a single layer has, which is on the host and does not stream: it has come back

Note [A pass]
    The last layers of a pass start the copies for the next one. Between two passes anybody may write to a layer on the
    host: so what a slot holds by then is kept only where the caller says that nobody can have, and else is copied
    again.

Note [Leaving and coming back]
    Which layers stream changes between passes (`arrange`). A layer that begins to stream gives its pages first and the
    slots are made of what is free then: where memory is short there may be no other. A layer that comes back stays on
    the host and gets a slot of its own. So its weights go to the host once, however often it leaves and comes back;
    what is written meanwhile is written on the host and copied to the slot as to any other, and its addresses are not
    touched. The core may take an own slot as it takes a resident layer, and need not copy anything for it. Only
    `settle` makes a layer resident again, which gives up the copy on the host: the pages of its slot come to its
    addresses in one step. A failure leaves every layer resident or on the host, and the ring usable: it says what
    streams.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import groupby

from ...allocator._native import Device, Group, Range, Transfer
from ...allocator.errors import DriverError
from .backing import Backing, not_now
from .mover import Mover
from .slots import Copies, Filler, Slot


@dataclass(frozen=True, slots=True)
class Part:
    """Pieces of one range of a layer: all, or as many as are left; what moves them, and where in the slot they
    lie, in pages."""

    home: Range
    mover: Mover
    offset: int
    first: int
    count: int

    @property
    def backing(self) -> Backing:
        return self.mover.backing


@dataclass(frozen=True, slots=True)
class Streamed:
    """A streamed layer: its number in the model, its slot, and its ranges."""

    layer: int
    slot: int
    parts: tuple[Part, ...]
    pages: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pages", sum(part.count for part in self.parts))


def live(opened: Range, first: int, count: int) -> list[tuple[int, int]]:
    """(first, count) of the runs of pieces that still lead to a page, those that tensors lie on."""
    if opened.backed == opened.pieces:
        return [(first, count)]
    pieces = groupby(range(first, first + count), lambda piece: opened.backing(piece) not in ("none", "retiring"))
    runs = [list(run) for led, run in pieces if led]
    return [(run[0], len(run)) for run in runs]


def spans(part: Part) -> list[tuple[int, int]]:
    """The spans of the part; none where its range is gone."""
    return [] if part.home.closed else live(part.home, part.first, part.count)


def _whole(each: Streamed) -> bool:
    """Is all of it there that was?"""
    return all(spans(part) == [(part.first, part.count)] for part in each.parts)


def _is_taken(slot: Slot[int]) -> bool:
    """Has the core taken the pages of an own slot? Its addresses lead to the host then."""
    return slot.range.backing(0) != "device"


class Ring:
    """The slots of one model and the layers that stream through them, at first none. Not thread-safe: whoever runs a
    pass over the model holds a lock."""

    def __init__(
        self,
        device: Device,
        group: Group,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`waiting()` is entered around each wait of a stream for a copy. DriverError."""
        self._device = device
        self._group = group
        self._page = device.page_size
        self._transfer = Transfer(device)
        self._filler = Filler[int](self._transfer, "weights", waiting)
        # Called before a layer is copied to its slot: is it the first one there, whose copy may be for the next pass?
        self.loading: Callable[[int, bool], None] = lambda layer, first: None
        self._slots: list[Slot[int]] = []
        self._layers: dict[int, Streamed] = {}  # those that stream
        self._back: dict[int, tuple[Streamed, Slot[int]]] = {}  # those that have come back, with their own slots

    @property
    def pages(self) -> int:
        """Device pages of all slots."""
        own = sum(slot.range.pieces for _, slot in list(self._back.values()) if not _is_taken(slot))
        return sum(slot.range.pieces for slot in self._slots) + own

    @property
    def copied(self) -> int:
        """Bytes that came to slots so far."""
        return self._filler.copied

    @property
    def slots(self) -> int:
        """How many there are."""
        return len(self._slots)

    @property
    def streamed(self) -> tuple[int, ...]:
        """The layers that stream, ascending."""
        return tuple(sorted(self._layers))

    @property
    def back(self) -> tuple[int, ...]:
        """The layers that have come back and have slots of their own, ascending."""
        return tuple(sorted(layer for layer, (_, slot) in list(self._back.items()) if not _is_taken(slot)))

    @property
    def host_pages(self) -> int:
        """Host pages of those."""
        return sum(part.backing.backed for each, _ in list(self._back.values()) for part in each.parts)

    def slot_of(self, layer: int) -> int:
        """In which of them a streamed layer takes its turns."""
        return self._layers[layer].slot

    def sharing(self, layer: int) -> list[int]:
        """The layers that are read from the same slot, this one too."""
        found = self._found(layer)
        return [] if found is None else list(found[1].turns)

    def place(self, layer: int) -> Range | None:
        """What a layer on the host is read from; None where memory was too short for a slot: it is read on the host."""
        found = self._found(layer)
        return None if found is None else found[1].range

    def parts(self, layer: int) -> tuple[Part, ...]:
        """Parts of a layer that streams or has come back."""
        each = self._layers.get(layer)
        return each.parts if each is not None else self._back[layer][0].parts

    def offer(self, layer: int) -> list[tuple[Range, int, int, Range, int, Copies]]:
        """The pages of an own slot, for `Device.publish`; none where the layer has none."""
        if layer not in self._back:
            return []
        each, slot = self._back[layer]
        found = []
        for part in each.parts:
            backing = part.backing
            sources = backing.copies(part.first, part.count, 0) if backing.file is not None else []
            found.append((slot.range, part.offset, part.count, backing.pages, part.first, sources))
        return found

    def make(self, slot_pages: Sequence[int]) -> None:
        """The first slots, before there are layers. PoolExhausted, DriverError: there are none then."""
        try:
            for pages in slot_pages:
                self._slots.append(Slot(self._reserve(pages)))
        except BaseException:
            self.close()
            raise

    def arrange(self, slot_pages: Sequence[int], layers: Sequence[Streamed], others: Iterable[Streamed] = ()) -> None:
        """From now on `layers` stream, in the order in which they compute, and no others. `others`: those on the host
        that come back; who is not among them keeps its own slot. Nobody shows what is in slots. See Note [Leaving and
        coming back]. PoolExhausted; ManageError where addresses cannot be exchanged now; WeightsFileChanged,
        DriverError."""
        wanted, coming = ({each.layer: each for each in given} for given in (layers, others))
        self._close_own({*wanted, *coming, *(layer for layer, (each, _) in self._back.items() if not _whole(each))})
        self._layers.update({layer: wanted[layer] for layer in wanted.keys() & self._layers.keys()})
        try:
            for layer, each in (wanted | coming).items():
                if layer in coming or layer not in self._layers:
                    self._depart(each)  # a failure may have left some of it resident
            self._enlarge(slot_pages)
            for layer in self._layers.keys() - wanted.keys() - coming.keys():
                del self._layers[layer]  # nothing is left of it
            while len(self._slots) > len(slot_pages):  # whose pages are those of layers that come back
                self._slots.pop().range.close()
            for layer in sorted(coming):
                self._come_back(self._layers[layer])
        finally:
            self._share()

    def begin(self, stream: int, unchanged: Callable[[int], bool] = lambda layer: False) -> None:
        """A pass begins on `stream`: the copies of the first layers are on their way. `unchanged`: is a layer what it
        was when its copy began, before this pass? DriverError."""
        for slot in (*self._slots, *(slot for _, slot in self._back.values())):
            first = slot.turns[0] if slot.turns else None
            if slot.holds != first or first is None or not unchanged(first):
                slot.holds = None
            if first is not None:
                self._filler.fill(self, slot, first, stream)

    def enter(self, layer: int, stream: int) -> Range | None:
        """`stream` is about to compute the layer from its slot, which is returned; None where it has none.
        WeightsFileChanged, DriverError."""
        found = self._found(layer)
        if found is None:
            return None
        try:
            self._filler.read(self, found[1], layer, stream)
        except DriverError:
            self._check(found[0])
            raise
        return found[1].range

    def forget(self, layer: int) -> None:
        """What the layer's slot holds are not its weights any more."""
        found = self._found(layer)
        if found is not None and found[1].holds == layer:
            found[1].holds = None

    def leave(self, layer: int, ahead: Callable[[int], bool] = lambda layer: False) -> None:
        """The streams that entered were given all that computes the layer. The copy of the next one begins, if it is
        one of this pass, or `ahead` allows it. DriverError."""
        found = self._found(layer)
        if found is None:
            return
        slot = found[1]
        following = slot.after(layer)
        if slot.turns[-1] != layer or (following != layer and ahead(following)):
            self._filler.fill(self, slot, following)

    def give_away(self, layer: int) -> None:
        """Someone holds what the layer showed of its slot: those addresses lead to its backing from now on, and the
        slot gets others. PoolExhausted: its layers have no slot then; DriverError."""
        each, slot = self._found(layer) or (None, None)
        if each is None or slot is None:
            return
        held, slot.holds = slot.range, None
        for part in each.parts:
            for first, count in spans(part):
                held.alias(part.offset + first - part.first, part.backing.pages, first, count)
        slot.range = self._device.reserve(held.nbytes, "weights", self._group)
        slot.range.map(0, held.pieces)

    def check(self) -> None:
        """WeightsFileChanged unless the files of all backings are what they were; each is looked at once. After a pass:
        what was copied was right."""
        parts = [part for each in self._on_host() for part in each.parts]
        files = [part.backing.file for part in parts if part.backing.file is not None]
        for file in {file: None for each in files for file in each.files}:
            file.check()

    def reveal(self, layer: int) -> None:
        """Someone else may look at the layer: its addresses lead to its weights, also where its backing was a file.
        Raises as `Backing.reveal`."""
        for each in self._on_host():
            if each.layer == layer:
                for part in each.parts:
                    part.backing.reveal(spans(part))

    def settle(self, layer: int) -> None:
        """A layer that has come back is resident again, and its copy on the host is given up. Nobody shows what is in
        slots. ManageError where addresses cannot be exchanged now; WeightsFileChanged, DriverError."""
        each, slot = self._back[layer]
        with ExitStack() as undo:
            undo.callback(self._share)
            undo.callback(lambda: self._close_own([layer] if _is_taken(slot) else []))  # what is left is no slot
            slot.holds = None
            try:
                self._filler.copy(self._bytes(each, slot), None).wait()  # somebody may have written on the host
            finally:
                self._check(each)
            for part in each.parts:
                for first, count in spans(part):
                    if not part.home.adopt(first, slot.range, part.offset + first - part.first, count):
                        raise not_now()
                    undo.callback(part.backing.lead, first, count)
            undo.pop_all()
        del self._back[layer]
        slot.range.close()
        for part in each.parts:
            part.backing.close()

    def close(self) -> None:
        """Gives the slots back. No layer streams any more; those on the host stay there."""
        self._close_own()
        self._layers.clear()
        while self._slots:
            self._slots.pop().range.close()

    def release_layers(self) -> None:
        """No layer streams, and those on the host may have other numbers from now on. The shared slots stay."""
        self._close_own()
        self._layers.clear()
        self._share()

    def _on_host(self) -> list[Streamed]:
        return [*list(self._layers.values()), *(each for each, _ in list(self._back.values()))]

    def _found(self, layer: int) -> tuple[Streamed, Slot[int]] | None:
        """The layer and its slot; None where memory was too short for one."""
        each = self._layers.get(layer)
        if each is None:
            return self._back.get(layer)
        if each.slot < len(self._slots) and each.pages <= (slot := self._slots[each.slot]).range.backed:
            return each, slot
        return None

    def _close_own(self, layers: Collection[int] | None = None) -> None:
        """Own slots of these layers go, with None all; the layers are on the host."""
        for layer in self._back.keys() & (self._back if layers is None else layers):
            each, slot = self._back.pop(layer)
            slot.range.close()
            for part in each.parts:
                if part.backing.file is not None:  # what the core filled from it when it took the slot
                    part.backing.drop()
            self._layers[layer] = each

    def _reserve(self, pages: int) -> Range:
        with ExitStack() as undo:
            opened = self._device.reserve(pages * self._page, "weights", self._group)
            undo.callback(opened.close)
            opened.map(0, pages)
            undo.pop_all()
        return opened

    def _enlarge(self, slot_pages: Sequence[int]) -> None:
        """As many slots, and each as large, as wanted."""
        for index, pages in enumerate(slot_pages):
            if index == len(self._slots):
                self._slots.append(Slot(self._reserve(pages)))
            elif self._slots[index].range.pieces < pages:
                slot = self._slots[index]
                made = self._reserve(pages)
                slot.range.close()
                slot.range, slot.holds = made, None

    def _depart(self, each: Streamed) -> None:
        """Moves the layer to the host, if it is not there."""
        for part in each.parts:
            runs = [run for run in spans(part) if part.home.backing(run[0]) != "alias"]
            here = [piece for first, count in runs for piece in range(first, first + count)]
            if part.mover.evict(here, self._transfer, None, whole=True) < len(here):
                raise not_now()
        self._layers[each.layer] = each

    def _come_back(self, each: Streamed) -> None:
        """Gives the layer a slot of its own, which is filled when a pass begins."""
        self._back[each.layer] = each, Slot(self._reserve(sum(part.count for part in each.parts)), [each.layer])
        del self._layers[each.layer]

    def _share(self) -> None:
        """Whose turn it is in which slot, after layers have come and gone."""
        for index, slot in enumerate(self._slots):
            turns = [layer for layer, each in sorted(self._layers.items()) if each.slot == index]
            slot.turns = [layer for layer in turns if self._found(layer) is not None]
            slot.holds = None

    # -- for the filler of slots

    def copies(self, member: int, slot: Slot[int]) -> Copies:
        """What fills the slot with the layer."""
        each = self._layers[member] if member in self._layers else self._back[member][0]
        led = member in self._back and _is_taken(slot)  # to the host copy: it would be copied onto itself
        return [] if led else self._bytes(each, slot)

    def filling(self, member: int, slot: Slot[int]) -> None:
        self.loading(member, member == slot.turns[0])

    def _bytes(self, each: Streamed, slot: Slot[int]) -> Copies:
        copies: Copies = []
        for part in each.parts:
            to = slot.range.address + part.offset * self._page
            copies += part.mover.backing.copies(part.first, part.count, to)
        return copies

    def _check(self, each: Streamed) -> None:
        for part in each.parts:
            part.backing.check()
