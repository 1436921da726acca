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
    `make_resident` makes a layer resident again, which gives up the copy on the host: the pages of its slot come to its
    addresses in one step. A failure leaves every layer resident or on the host, and the ring usable: it says what
    streams.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

from ...allocator._native import Device, Group, Range, Transfer
from ...allocator.errors import DriverError
from .backing import not_now
from .layer_parts import StreamedLayer, spans
from .own_slots import OwnSlots, is_taken
from .shared_slots import SharedSlots
from .slots import Copies, Filler, Slot


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
        self._transfer = Transfer(device)
        self._filler = Filler[int](self._transfer, "weights", waiting)
        # Called before a layer is copied to its slot: is it the first one there, whose copy may be for the next pass?
        self.loading: Callable[[int, bool], None] = lambda layer, first: None
        self.shared = SharedSlots(device, group)
        self._layers: dict[int, StreamedLayer] = {}  # those that stream
        self.own = OwnSlots()  # of those that have come back
        self._runs: Callable[[int], bool] = lambda layer: True

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
        """Bytes that came to slots so far."""
        return self._filler.copied

    @property
    def streamed(self) -> tuple[int, ...]:
        """The layers that stream, ascending."""
        return tuple(sorted(self._layers))

    def layer(self, layer: int) -> StreamedLayer | None:
        """A layer that streams or has come back; None where it does neither."""
        found = self._layers.get(layer) or self.own.get(layer)
        return found[0] if isinstance(found, tuple) else found

    def slot(self, layer: int) -> Slot[int] | None:
        """What a layer on the host is read from; None where memory was too short for a slot: it is read on the host."""
        each = self._layers.get(layer)
        if each is None:
            own = self.own.get(layer)
            return own and own[1]
        slots = self.shared.slots
        if each.slot < len(slots) and each.pages <= (slot := slots[each.slot]).range.backed:
            return slot
        return None

    def arrange(
        self, slot_pages: Sequence[int], layers: Sequence[StreamedLayer], others: Iterable[StreamedLayer] = ()
    ) -> None:
        """From now on `layers` stream, in the order in which they compute, and no others. `others`: those on the host
        that come back; who is not among them keeps its own slot. Nobody shows what is in slots. See Note [Leaving and
        coming back]. PoolExhausted; ManageError where addresses cannot be exchanged now; WeightsFileChanged,
        DriverError."""
        wanted, coming = ({each.layer: each for each in given} for given in (layers, others))
        self._close_own({*wanted, *coming, *(each.layer for each, _ in self.own.members if not each.whole)})
        self._layers.update({layer: wanted[layer] for layer in wanted.keys() & self._layers.keys()})
        try:
            for layer, each in (wanted | coming).items():
                if each.hidden:
                    self._layers[layer] = each  # as soon as some of it does not show what it is
                each.leave(self._transfer)  # a failure may have left some of it resident
                self._layers[layer] = each
            self.shared.make(slot_pages)
            for layer in self._layers.keys() - wanted.keys() - coming.keys():
                del self._layers[layer]  # nothing is left of it
            self.shared.shrink(len(slot_pages))  # whose pages are those of layers that come back
            for layer in sorted(coming):
                self.own.add(self._layers[layer], self.shared.open(self._layers[layer].pages))
                del self._layers[layer]
        finally:
            self._share()

    def share(self, runs: Callable[[int], bool]) -> None:
        """From now on only the layers that `runs` says take turns in slots: no others are copied to one. No pass
        runs."""
        self._runs = runs
        self._share()

    def begin(self, stream: int, unchanged: Callable[[int], bool] = lambda layer: False) -> None:
        """A pass begins on `stream`: the copies of the first layers are on their way. `unchanged`: is a layer what it
        was when its copy began, before this pass? DriverError."""
        for slot in (*self.shared.slots, *(slot for _, slot in self.own.members)):
            first = slot.turns[0] if slot.turns else None
            if slot.holds != first or first is None or not unchanged(first):
                slot.holds = None
            if first is not None:
                self._filler.fill(self, slot, first, stream)

    def enter(self, layer: int, stream: int) -> Range | None:
        """`stream` is about to compute the layer from its slot, which is returned; None where it has none.
        WeightsFileChanged, DriverError."""
        slot = self.slot(layer)
        if slot is None:
            return None
        try:
            self._filler.read(self, slot, layer, stream)
        except DriverError:
            if (each := self.layer(layer)) is not None:
                each.check()
            raise
        return slot.range

    def forget(self, layer: int) -> None:
        """What the layer's slot holds are not its weights any more."""
        slot = self.slot(layer)
        if slot is not None and slot.holds == layer:
            slot.holds = None

    def leave(self, layer: int, ahead: Callable[[int], bool] = lambda layer: False) -> None:
        """The streams that entered were given all that computes the layer. The copy of the next one begins, if it is
        one of this pass, or `ahead` allows it. DriverError."""
        slot = self.slot(layer)
        if slot is None:
            return
        turns = slot.turns
        following = turns[(turns.index(layer) + 1) % len(turns)]
        if turns[-1] != layer or (following != layer and ahead(following)):
            self._filler.fill(self, slot, following)

    def give_away(self, layer: int) -> None:
        """Someone holds what the layer showed of its slot: those addresses lead to its backing from now on, and the
        slot gets others. PoolExhausted: its layers have no slot then; DriverError."""
        each, slot = self.layer(layer), self.slot(layer)
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
        checked = set()
        layers = [*self._layers.values()]
        for each, _ in self.own.members:
            layers.append(each)
        for each in layers:  # in one call: this is done for each token
            for part in each.parts:
                if (backed := part.mover.backing.file) is None:
                    continue
                for file in backed.files:
                    if id(file) not in checked:
                        checked.add(id(file))
                        file.check()

    def reveal(self, layer: int) -> None:
        """Someone else may look at the layer: its addresses lead to its weights, also where its backing was a file.
        Raises as `Backing.reveal`."""
        each = self.layer(layer)
        for part in each.parts if each is not None else ():
            part.backing.reveal(spans(part))

    def make_resident(self, layer: int) -> None:
        """A layer that has come back is resident again, and its copy on the host is given up. Nobody shows what is in
        slots. ManageError where addresses cannot be exchanged now; WeightsFileChanged, DriverError."""
        found = self.own.get(layer)
        assert found is not None
        each, slot = found
        with ExitStack() as undo:
            undo.callback(self._share)
            undo.callback(lambda: self._close_own([layer] if is_taken(slot) else []))  # what is left is no slot
            slot.holds = None
            try:
                self._filler.copy(each.copies(slot.range), None).wait()  # somebody may have written on the host
            finally:
                each.check()
            _adopt(each, slot.range)
            undo.pop_all()
        self.own.forget(layer)

    def adopt(self, layer: int, filled: Range) -> None:
        """A layer that streams is resident with the pages of `filled`, which hold its weights as a slot does. Nobody
        shows what is in slots. ManageError where addresses cannot be exchanged now, DriverError: it streams then."""
        _adopt(self._layers[layer], filled)
        del self._layers[layer]
        self._share()

    def close(self) -> None:
        """Gives the slots back. No layer streams any more; those on the host stay there."""
        self._close_own()
        self._layers.clear()
        self.shared.shrink(0)

    def release_layers(self) -> None:
        """No layer streams, and those on the host may have other numbers from now on. The shared slots stay."""
        self._close_own()
        self._layers.clear()
        self._share()

    def _close_own(self, layers: Collection[int] | None = None) -> None:
        """Own slots of these layers go, with None all; the layers are on the host."""
        for each in self.own.remove(layers):
            self._layers[each.layer] = each

    def _share(self) -> None:
        """Whose turn it is in which slot, after layers have come and gone."""
        for index, slot in enumerate(self.shared.slots):
            turns = [layer for layer, each in sorted(self._layers.items()) if each.slot == index]
            slot.turns = [layer for layer in turns if self.slot(layer) is not None and self._runs(layer)]
            slot.holds = None
        for each, slot in self.own.members:
            if bool(slot.turns) != self._runs(each.layer):
                slot.turns, slot.holds = [each.layer] if self._runs(each.layer) else [], None

    # -- for the filler of slots

    def copies(self, member: int, slot: Slot[int]) -> Copies:
        """What fills the slot with the layer."""
        if (each := self._layers.get(member)) is not None:  # as `layer`, in one call
            return each.copies(slot.range)
        found = self.own.get(member)
        assert found is not None
        led = is_taken(slot)  # to the host copy: it would be copied onto itself
        return [] if led else found[0].copies(slot.range)

    def filling(self, member: int, slot: Slot[int]) -> None:
        self.loading(member, member == slot.turns[0])


def _adopt(each: StreamedLayer, filled: Range) -> None:
    """The ranges of a layer on the host get the pages of `filled`, all or none. ManageError, DriverError."""
    with ExitStack() as undo:
        for part in each.parts:
            for first, count in spans(part):
                if not part.range.adopt(first, filled, part.offset + first - part.first, count):
                    raise not_now()
                undo.callback(part.backing.lead, first, count)
        undo.pop_all()
