"""The layers of one model that stream, and the slots that they are read from (slots.py).

A layer that stopped streaming stays on the host and is read from a slot of its own, which takes part in no turns. The
core may take its pages as those of a resident layer, and copies nothing then: the slot's addresses lead to the layer's
copy on the host.

Words
    resident     a layer's addresses lead to device pages of its own
    on the host  they lead to its backing: slow to compute with, valid for everything
    in a slot    besides, from `enter` to `leave`, a slot holds its weights: what its own forward reads
    own slot     one that a single layer has, which is on the host and has stopped streaming
    comes        stops streaming, and gets its own slot as the next pass reaches it

Note [A pass]
    The last layers of a pass start the copies for the next one. Between two passes any thread may write to a layer on
    the host: so what a slot holds by then is kept only where the caller says that none can have, and else is copied
    again.

Note [Starting and stopping to stream]
    Which layers stream changes between passes (`arrange`). A layer that starts to stream gives its pages first and the
    slots are made of what is free then: where memory is short there may be no other. A layer that stops stays on the
    host and gets a slot of its own: a pass opens the slot of one layer while the one before computes, and the
    background maps pages of two more, so that a first token waits for no page table. So its weights go to the host
    once, however often it starts and stops; what is written meanwhile is written on the host and copied to the slot as
    to any other, and its addresses are not touched. The core may take an own slot as it takes a resident layer, and
    need not copy anything for it. Only `make_resident` makes a layer resident again, which gives up the copy on the
    host: the pages of its slot come to its addresses in one step. A failure leaves every layer resident or on the host,
    and the ring usable: `streamed` is right.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import groupby, islice

from ...allocator._native import Device, Group, Range, Transfer
from ...allocator.errors import DriverError, PoolExhausted
from .backing import Backing, not_now
from .mover import Mover
from .slots import Copies, Filler, Slot, open_pages


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Pieces of one range of a layer: all, or as many as are left; what moves them, and where in the slot they
    lie, in pages."""

    range: Range
    mover: Mover
    offset: int
    first: int
    count: int

    @property
    def backing(self) -> Backing:
        return self.mover.backing


@dataclass(frozen=True, slots=True)
class StreamedLayer:
    """A streamed layer: its number in the model, its slot, and its ranges."""

    layer: int
    slot: int
    parts: tuple[LayerPart, ...]
    pages: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pages", sum(part.count for part in self.parts))

    @property
    def whole(self) -> bool:
        """Are all its pieces still there?"""
        return all(spans(part) == [(part.first, part.count)] for part in self.parts)

    def leave(self, transfer: Transfer) -> None:
        """Moves the parts that are not on the host yet to it. ManageError where addresses cannot be exchanged now;
        DriverError."""
        for part in self.parts:
            runs = [run for first, count in spans(part) for run in part.range.runs(first, count) if run[2] != "alias"]
            here = [piece for first, count, _ in runs for piece in range(first, first + count)]
            mover = part.mover
            left = mover.lead(here) if part.backing.ready else mover.evict(here, transfer, None, whole=True)
            if left < len(here):
                raise not_now()

    def copies(self, slot: Range) -> Copies:
        """Returns the copies that bring a layer on the host to the slot."""
        copies: Copies = []
        for part in self.parts:
            to = slot.address + part.offset * (slot.nbytes // slot.pieces)
            copies += part.mover.backing.copies(part.first, part.count, to)
        return copies

    @property
    def hidden(self) -> bool:
        """Does a part lie in a file, so that its addresses do not show the bytes?"""
        return any(part.backing.file is not None for part in self.parts)

    def check(self) -> None:
        """Raises WeightsFileChanged unless the files of its backings are what they were."""
        for part in self.parts:
            part.backing.check()


def live(opened: Range, first: int, count: int) -> list[tuple[int, int]]:
    """(first, count) of the runs of pieces that still lead to a page, those that tensors lie on."""
    if opened.backed == opened.pieces:
        return [(first, count)]
    pieces = groupby(range(first, first + count), lambda piece: opened.leads_to(piece) not in ("none", "pending_free"))
    runs = [list(run) for led, run in pieces if led]
    return [(run[0], len(run)) for run in runs]


def spans(part: LayerPart) -> list[tuple[int, int]]:
    """The spans of the part; none where its range is gone."""
    return [] if part.range.closed else live(part.range, part.first, part.count)


class SharedSlots:
    """The shared slots of one model, at first none; their ranges belong to `group`. Not thread-safe."""

    def __init__(self, device: Device, group: Group) -> None:
        self.slots: list[Slot[int]] = []
        self._device = device
        self._group = group

    @property
    def pages(self) -> int:
        """Device pages of all shared slots."""
        return sum(slot.range.pieces for slot in self.slots)

    def open(self, pages: int) -> Range:
        """Returns a new range with so many device pages. PoolExhausted, DriverError."""
        return open_pages(self._device, self._group, "weights", pages)

    def make(self, slot_pages: Sequence[int]) -> None:
        """Makes slots, each as large as wanted. PoolExhausted, DriverError: there may be fewer then."""
        for index, pages in enumerate(slot_pages):
            if index == len(self.slots):
                self.slots.append(Slot(self.open(pages)))
            elif self.slots[index].range.pieces < pages:
                slot = self.slots[index]
                made = self.open(pages)
                slot.range.close()
                slot.range, slot.holds = made, None

    def shrink(self, slots: int) -> None:
        """Closes all but the first so many."""
        while len(self.slots) > slots:
            self.slots.pop().range.close()


class OwnSlots:
    """The own slots of one model, at first none. Not thread-safe, but for what may be asked on any thread."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[StreamedLayer, Slot[int]]] = {}
        self.coming: dict[int, Range] = {}  # layers that come, in their order -> addresses, without pages yet

    # -- on any thread

    @property
    def back(self) -> frozenset[int]:
        """The layers that have such a slot, or come."""
        return frozenset((*self.layers, *self.coming))

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose slots have their pages, ascending."""
        slots = self._slots and list(self._slots.items())
        return tuple(sorted(layer for layer, (_, slot) in slots if not is_taken(slot))) if slots else ()

    @property
    def pages(self) -> int:
        """Device pages of all own slots."""
        return sum(slot.range.pieces for _, slot in list(self._slots.values()) if not is_taken(slot))

    @property
    def host_pages(self) -> int:
        """Host pages of these layers."""
        return sum(part.backing.backed for streamed, _ in list(self._slots.values()) for part in streamed.parts)

    def offer(self, layer: int) -> list[tuple[Range, int, int, Range, int, Copies]]:
        """The pages of the layer's slot, for `Device.publish`; none where it has none."""
        if layer not in self._slots:
            return []
        streamed, slot = self._slots[layer]
        offered = []
        for part in streamed.parts:
            backing = part.backing
            if backing.mixed:  # it becomes resident at the next forward
                return []
            sources = backing.copies(part.first, part.count, 0) if backing.file is not None else []
            offered.append((slot.range, part.offset, part.count, backing.pages, part.first, sources))
        return offered

    # -- for the ring

    @property
    def members(self) -> list[tuple[StreamedLayer, Slot[int]]]:
        """The layers, and their slots."""
        return list(self._slots.values())

    def get(self, layer: int) -> tuple[StreamedLayer, Slot[int]] | None:
        """The layer and its slot, None where it has none."""
        return self._slots.get(layer)

    def open(self, streamed: StreamedLayer) -> Slot[int]:
        """Opens the slot of a layer that comes; it is to be filled. PoolExhausted, DriverError: it comes no more."""
        opened = self.coming.pop(streamed.layer)
        try:
            opened.map(0, opened.pieces)
        except BaseException:
            opened.close()
            raise
        slot = Slot(opened, [streamed.layer])
        self._slots[streamed.layer] = streamed, slot
        return slot

    def forget_coming(self) -> None:
        """Has no layer come any more."""
        while self.coming:
            self.coming.popitem()[1].close()

    def remove(self, layers: Collection[int] | None = None) -> Iterable[StreamedLayer]:
        """Closes the slots of these layers, with None of all, and returns those that had one, one after the other. They
        are on the host."""
        for layer in self._slots.keys() & (self._slots if layers is None else layers):
            streamed, slot = self._slots.pop(layer)
            slot.range.close()
            for part in streamed.parts:
                if (
                    part.backing.file is not None and not part.backing.mixed
                ):  # the core filled host pages from it when it took the slot
                    part.backing.drop()
            yield streamed

    def forget(self, layer: int) -> None:
        """Closes the slot of a layer that is resident again, and its copy on the host."""
        streamed, slot = self._slots.pop(layer)
        slot.range.close()
        for part in streamed.parts:
            part.backing.close()


def is_taken(slot: Slot[int]) -> bool:
    """Has the core taken the pages of an own slot? Its addresses lead to the host then."""
    return slot.range.leads_to(0) != "device"


class Ring:
    """The slots of one model and the layers that stream through them, at first none. Not thread-safe: the forward
    thread holds a lock."""

    def __init__(
        self,
        device: Device,
        group: Group,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`waiting()` is entered around each wait of a stream for a copy. DriverError."""
        self._device = device
        self._group = group
        self._transfer = Transfer(device)
        self._filler = Filler[int](self._transfer, "weights", waiting)
        # Called before a layer is copied to its slot: is it the first one there, whose copy may be for the next pass?
        self.loading: Callable[[int, bool], None] = lambda layer, first: None
        self.shared = SharedSlots(device, group)
        self._layers: dict[int, StreamedLayer] = {}  # those that stream
        self.own = OwnSlots()  # of those that have stopped streaming
        self.opened: Callable[[int], None] = lambda layer: None  # is told that a pass has opened a layer's own slot
        self._runs: Callable[[int], bool] = lambda layer: True
        self._without: set[int] = set()  # layers for whose slots a pass has found no pages

    @property
    def pages(self) -> int:
        """Device pages of all slots."""
        return self.shared.pages + self.own.pages

    @property
    def ranges(self) -> list[Range]:
        """The ranges of all slots. On any thread."""
        return [slot.range for slot in (*self.shared.slots, *(slot for _, slot in self.own.members))]

    @property
    def copied(self) -> int:
        """Bytes copied to slots so far."""
        return self._filler.copied

    @property
    def streamed(self) -> tuple[int, ...]:
        """The layers that stream, ascending."""
        return tuple(sorted(self._layers))

    def layer(self, layer: int) -> StreamedLayer | None:
        """A layer that streams or has an own slot; None for others."""
        entry = self._layers.get(layer) or self.own.get(layer)
        return entry[0] if isinstance(entry, tuple) else entry

    def slot(self, layer: int) -> Slot[int] | None:
        """The slot that a layer on the host is read from; None where memory was too short for one: it is read on the
        host."""
        streamed = self._layers.get(layer)
        if streamed is None:
            own = self.own.get(layer)
            return own and own[1]
        if layer in self.own.coming or layer in self._without:
            return None
        slots = self.shared.slots
        if streamed.slot < len(slots) and streamed.pages <= (slot := slots[streamed.slot]).range.backed:
            return slot
        return None

    def arrange(
        self, slot_pages: Sequence[int], layers: Sequence[StreamedLayer], others: Iterable[StreamedLayer] = ()
    ) -> None:
        """Has `layers` stream, in the order in which they compute, and no others. `others`: those on the host that stop
        streaming; a layer not among them keeps its own slot. No tensor lies over a slot. See Note [Starting and
        stopping to stream]. PoolExhausted; ManageError where addresses cannot be exchanged now; WeightsFileChanged,
        DriverError."""
        wanted, coming = ({member.layer: member for member in given} for given in (layers, others))
        self.own.forget_coming()
        self._close_own({*wanted, *coming, *(member.layer for member, _ in self.own.members if not member.whole)})
        self._layers.update({layer: wanted[layer] for layer in wanted.keys() & self._layers.keys()})
        try:
            for layer, streamed in (wanted | coming).items():
                if streamed.hidden:
                    self._layers[layer] = streamed  # before any of its addresses is changed
                streamed.leave(self._transfer)  # a failure may have left some of it resident
                self._layers[layer] = streamed
            self.shared.make(slot_pages)
            for layer in self._layers.keys() - wanted.keys() - coming.keys():
                del self._layers[layer]  # nothing is left of it
            self.shared.shrink(len(slot_pages))  # their pages serve layers that stop streaming
            for layer in sorted(coming):
                pages = self._layers[layer].pages
                self.own.coming[layer] = self._device.reserve(pages * self._device.page_size, "weights", self._group)
        finally:
            self._share()

    def share(self, runs: Callable[[int], bool]) -> None:
        """Has only the layers for which `runs` is true take turns in slots: no others are copied to one. No pass
        runs."""
        self._runs = runs
        self._share()

    def begin(self, stream: int, unchanged: Callable[[int], bool] = lambda layer: False) -> None:
        """Begins a pass on `stream`: starts the copies of the first layers. `unchanged`: is a layer what it was when
        its copy began, before this pass? DriverError."""
        for slot in (*self.shared.slots, *(slot for _, slot in self.own.members)):
            first = slot.turns[0] if slot.turns else None
            if slot.holds != first or first is None or not unchanged(first):
                slot.holds = None
            if first is not None:
                self._filler.fill(self, slot, first, stream)
        self.bring(-1, stream)

    def bring(self, layer: int, stream: int) -> None:
        """Opens the own slots of a layer that `stream` is about to reach and of the next one, of those that come, and
        starts their copies. A layer for which there are no pages is read on the host. DriverError."""
        if not (coming := self.own.coming):
            return
        for member in layer, _following(coming, layer, self._runs):
            if member in coming:
                try:
                    slot = self.own.open(self._layers[member])
                except PoolExhausted:
                    self._without.add(member)
                    continue
                del self._layers[member]
                self.opened(member)
                self._filler.fill(self, slot, member, stream)
        for after in islice((other for other in coming if other > layer and self._runs(other)), 2):
            coming[after].map_ahead(0, coming[after].pieces)

    def enter(self, layer: int, stream: int) -> Range | None:
        """Has `stream` wait for the layer's slot, before it computes, and returns the slot's range; None where it has
        none. WeightsFileChanged, DriverError."""
        slot = self.slot(layer)
        if slot is None:
            return None
        try:
            self._filler.read(self, slot, layer, stream)
        except DriverError:
            if (streamed := self.layer(layer)) is not None:
                streamed.check()
            raise
        return slot.range

    def forget(self, layer: int) -> None:
        """Notes that the layer's slot does not hold its weights any more."""
        slot = self.slot(layer)
        if slot is not None and slot.holds == layer:
            slot.holds = None

    def leave(self, layer: int, ahead: Callable[[int], bool] = lambda layer: False) -> None:
        """Frees the layer's slot, as the streams that entered were given all that computes it: starts the copy of the
        next layer, if it is one of this pass, or `ahead` allows it. DriverError."""
        slot = self.slot(layer)
        if slot is None:
            return
        turns = slot.turns
        following = turns[(turns.index(layer) + 1) % len(turns)]
        if turns[-1] != layer or (following != layer and ahead(following)):
            self._filler.fill(self, slot, following)

    def give_away(self, layer: int) -> None:
        """Leads addresses of the slot that a tensor still shows to the layer's backing, and gives the slot others.
        PoolExhausted: its layers have no slot then; DriverError."""
        streamed, slot = self.layer(layer), self.slot(layer)
        if streamed is None or slot is None:
            return
        held, slot.holds = slot.range, None
        for part in streamed.parts:
            for first, count in spans(part):
                held.alias(part.offset + first - part.first, part.backing.pages, first, count)
        slot.range = self._device.reserve(held.nbytes, "weights", self._group)
        slot.range.map(0, held.pieces)

    def check(self) -> None:
        """Raises WeightsFileChanged unless the files of all backings are what they were, so that what a pass copied was
        right. Looks at each once."""
        checked = set()
        layers = [*self._layers.values()]
        for streamed, _ in self.own.members:
            layers.append(streamed)
        for layer in layers:  # in one call: this is done for each token
            for part in layer.parts:
                if (backed := part.mover.backing.file) is None:
                    continue
                for file in backed.files:
                    if id(file) not in checked:
                        checked.add(id(file))
                        file.check()

    def reveal(self, layer: int) -> None:
        """Leads the layer's addresses to its weights, also where its backing was a file, before anyone else looks at
        them. Raises as `Backing.reveal`."""
        streamed = self.layer(layer)
        for part in streamed.parts if streamed is not None else ():
            part.backing.reveal(spans(part))

    def make_resident(self, layer: int, unchanged: bool = False) -> None:
        """Makes a layer resident that has its own slot or comes, and gives up its copy on the host. No tensor lies over
        a slot. `unchanged`: is the layer what it was when it was copied to its slot? PoolExhausted; ManageError where
        addresses cannot be exchanged now; WeightsFileChanged, DriverError."""
        if layer in self.own.coming:
            self.own.open(self._layers[layer])
            del self._layers[layer]
        entry = self.own.get(layer)
        assert entry is not None
        streamed, slot = entry
        with ExitStack() as undo:
            undo.callback(self._share)
            undo.callback(lambda: self._close_own([layer] if is_taken(slot) else []))  # a taken slot is none
            held, slot.holds = slot.holds == layer and unchanged and not is_taken(slot), None
            try:
                done = slot.done if held else self._filler.copy(streamed.copies(slot.range), None)
                assert done is not None  # of what a slot holds
                done.wait()
            finally:
                streamed.check()
            _adopt(streamed, slot.range)
            undo.pop_all()
        self.own.forget(layer)

    def adopt(self, layer: int, filled: Range) -> None:
        """Makes a streamed layer resident with the pages of `filled`, which hold its weights as a slot does. No tensor
        lies over a slot. ManageError where addresses cannot be exchanged now, DriverError: it streams then."""
        _adopt(self._layers[layer], filled)
        del self._layers[layer]
        self._share()

    def close(self) -> None:
        """Gives all slots back. No layer streams any more; those on the host stay there."""
        self.own.forget_coming()
        self._close_own()
        self._layers.clear()
        self.shared.shrink(0)

    def release_layers(self) -> None:
        """Ends streaming; layer indices may change after this. The shared slots stay."""
        self.own.forget_coming()
        self._close_own()
        self._layers.clear()
        self._share()

    def _close_own(self, layers: Collection[int] | None = None) -> None:
        """Closes own slots of `layers`, with None all; the layers are on the host."""
        for streamed in self.own.remove(layers):
            self._layers[streamed.layer] = streamed

    def _share(self) -> None:
        """Assigns layers to slots anew, after others stream."""
        self._without.clear()
        for index, slot in enumerate(self.shared.slots):
            turns = [layer for layer, member in sorted(self._layers.items()) if member.slot == index]
            slot.turns = [layer for layer in turns if self.slot(layer) is not None and self._runs(layer)]
            slot.holds = None
        for streamed, slot in self.own.members:
            if bool(slot.turns) != self._runs(streamed.layer):
                slot.turns, slot.holds = [streamed.layer] if self._runs(streamed.layer) else [], None

    # -- for the filler of slots

    def copies(self, member: int, slot: Slot[int]) -> Copies:
        """Returns the copies that fill the slot with the layer."""
        if (streamed := self._layers.get(member)) is not None:  # as `layer`, in one call
            return streamed.copies(slot.range)
        entry = self.own.get(member)
        assert entry is not None
        led = is_taken(slot)  # the slot leads to the host copy, which would be copied onto itself
        return [] if led else entry[0].copies(slot.range)

    def filling(self, member: int, slot: Slot[int]) -> None:
        self.loading(member, member == slot.turns[0])


def _following(coming: Iterable[int], layer: int, runs: Callable[[int], bool]) -> int:
    """The next layer after `layer` that comes and runs; -1 where there is none."""
    return next((other for other in coming if other > layer and runs(other)), -1)


def bring_back(device: Device, group: Group, transfer: Transfer, streamed: StreamedLayer) -> None:
    """Gives weights on the host that are in no ring pages of the device at their own addresses, and gives up the copy
    on the host. PoolExhausted; ManageError where addresses cannot be exchanged now; WeightsFileChanged, DriverError:
    they are on the host then."""
    if not streamed.pages:
        return
    filled = open_pages(device, group, "weights", streamed.pages)
    try:
        try:
            transfer.copy(streamed.copies(filled), after=None, owner="weights", to="device").wait()
        finally:
            streamed.check()
        _adopt(streamed, filled)
    finally:
        filled.close()
    for part in streamed.parts:
        part.backing.close()


def _adopt(streamed: StreamedLayer, filled: Range) -> None:
    """Gives the ranges of a layer on the host the pages of `filled`, all or none. ManageError, DriverError."""
    with ExitStack() as undo:
        for part in streamed.parts:
            for first, count in spans(part):
                if not part.range.adopt(first, filled, part.offset + first - part.first, count):
                    raise not_now()
                undo.callback(part.backing.lead, first, count)
        undo.pop_all()
