"""The slot ring: the slots that streamed layers take turns in, and the copies that fill them.

Words
    resident  a layer's addresses lead to device pages of its own
    on the host  they lead to its twin's pages, for as long as it streams: slow to compute with, valid for everything
    in a slot  besides, from `enter` to `leave`, a slot holds its weights: what its own forward reads

Note [A pass]
    When a layer has computed, its slot is free, and the copy of the next layer that uses this slot begins, behind the
    copies that were submitted before. So with two slots the copy of a streamed layer starts when the layers before it
    start to compute (Select-N §4.3), and the last layers of a pass start the copies for the next one. Who waits are
    streams, for events; the host does not. Between two passes anybody may write to a layer on the host: so what a slot
    holds by then is kept only where the caller says that nobody can have, and else is copied again.

Note [Overwriting a slot]
    A slot is overwritten once every stream has passed that computed the layer which was there. Streams are noted when
    the layer enters: so this holds as well where it never left, and where the next pass runs on another stream.

Note [What a slot holds]
    is written down slot by slot, and not derived from an index: a pass may end anywhere, by an exception or because a
    model leaves out layers, and the next one finds what is really there. While a copy is submitted a slot is nobody's.

Note [Leaving and coming home]
    Which layers stream changes between passes (`arrange`). A layer that begins to stream gives its pages first and the
    slots are made of what is free then: where memory is short there may be no other. A layer that comes home gets new
    pages. A failure leaves every layer resident or on the host, and the ring usable: it says what streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import groupby

from ...allocator._native import Device, Done, Group, Range, Transfer
from ...allocator.errors import DriverError
from .twins import Copies, Twin, not_now


@dataclass(frozen=True, slots=True)
class Part:
    """Pieces of one range of a layer: all, or as many as are left; its twin, and where in the slot they lie, in
    pages."""

    home: Range
    twin: Twin
    offset: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Streamed:
    """A streamed layer: its number in the model, its slot, and its ranges."""

    layer: int
    slot: int
    parts: tuple[Part, ...]


def live(opened: Range, first: int, count: int) -> list[tuple[int, int]]:
    """(first, count) of the runs of pieces that still lead to a page, those that tensors lie on."""
    if opened.backed == opened.pieces:
        return [(first, count)]
    pieces = groupby(range(first, first + count), lambda piece: opened.backing(piece) not in ("none", "retiring"))
    runs = [list(run) for led, run in pieces if led]
    return [(run[0], len(run)) for run in runs]


def spans(part: Part) -> list[tuple[int, int]]:
    """Those of the part; none where its range is gone."""
    return [] if part.home.closed else live(part.home, part.first, part.count)


class _Slot:
    def __init__(self, opened: Range) -> None:
        self.range = opened
        self.turns: list[int] = []  # the layers that use it, in the order in which they compute
        self.holds: int | None = None
        self.done: Done | None = None
        self.readers: set[int] = set()  # streams that compute a layer from it, until copies are ordered behind them


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
        self._waiting = waiting
        self.copied = 0  # bytes that came from twins so far
        # Called before a layer is copied to its slot: is it the first one there, whose copy may be for the next pass?
        self.loading: Callable[[int, bool], None] = lambda layer, first: None
        self._slots: list[_Slot] = []
        self._layers: dict[int, Streamed] = {}

    @property
    def pages(self) -> int:
        """Pages of all slots."""
        return sum(slot.range.pieces for slot in self._slots)

    @property
    def slots(self) -> int:
        """How many there are."""
        return len(self._slots)

    @property
    def streamed(self) -> tuple[int, ...]:
        """The layers that stream, ascending."""
        return tuple(sorted(self._layers))

    def slot_of(self, layer: int) -> int:
        """In which of them a streamed layer takes its turns."""
        return self._layers[layer].slot

    def place(self, layer: int) -> Range | None:
        """The slot of a streamed layer; None where memory was too short for one, and the layer is read on the host."""
        each = self._layers.get(layer)
        return self._slots[each.slot].range if each is not None and self._fits(each) else None

    def make(self, slot_pages: Sequence[int]) -> None:
        """The first slots, before there are layers. PoolExhausted, DriverError: there are none then."""
        try:
            for pages in slot_pages:
                self._slots.append(_Slot(self._reserve(pages)))
        except BaseException:
            self.close()
            raise

    def arrange(self, slot_pages: Sequence[int], layers: Sequence[Streamed], others: Iterable[Streamed] = ()) -> None:
        """From now on `layers` stream, in the order in which they compute, and no others. `others`: those that are on
        the host and were none of the ring's so far. Nobody shows what is in slots. See Note [Leaving and coming home].
        PoolExhausted; ManageError where addresses cannot be exchanged now; WeightsFileChanged, DriverError."""
        wanted = {each.layer: each for each in layers}
        self._layers.update((each.layer, each) for each in others)
        self._layers.update({layer: wanted[layer] for layer in wanted.keys() & self._layers.keys()})
        try:
            for each in layers:
                if each.layer not in self._layers:
                    self._depart(each)
            self._enlarge(slot_pages)
            self._bring_home([self._layers[layer] for layer in sorted(self._layers.keys() - wanted.keys())])
            while len(self._slots) > len(slot_pages):
                self._slots.pop().range.close()
        finally:
            self._share()

    def begin(self, stream: int, unchanged: Callable[[int], bool] = lambda layer: False) -> None:
        """A pass begins on `stream`: the copies of the first layers are on their way. `unchanged`: is a layer what it
        was when its copy began, before this pass? DriverError."""
        for slot in self._slots:
            first = slot.turns[0] if slot.turns else None
            if slot.holds != first or first is None or not unchanged(first):
                slot.holds = None
            if first is not None and slot.holds is None:
                self._load(first, stream)

    def enter(self, layer: int, stream: int) -> bool:
        """`stream` is about to compute the layer from its slot. False where it has none. WeightsFileChanged,
        DriverError."""
        found = self._layers.get(layer)
        if found is None or not self._fits(found):
            return False
        self._load(layer, stream)
        slot = self._slots[found.slot]
        slot.readers.add(stream)
        assert slot.done is not None
        try:
            with self._waiting():
                slot.done.before(stream)
        except DriverError:
            self._check(found)
            raise
        return True

    def forget(self, layer: int) -> None:
        """What the layer's slot holds are not its weights any more."""
        slot = self._slots[self._layers[layer].slot]
        if slot.holds == layer:
            slot.holds = None

    def leave(self, layer: int, ahead: Callable[[int], bool] = lambda layer: False) -> None:
        """The streams that entered were given all that computes the layer. The copy of the next one begins, if it is
        one of this pass, or `ahead` allows it. DriverError."""
        slot = self._slots[self._layers[layer].slot]
        after = slot.turns[slot.turns.index(layer) + 1 :]
        following = after[0] if after else slot.turns[0]
        if after or ahead(following):
            self._load(following)

    def give_away(self, layer: int) -> None:
        """Someone holds what the layer showed of its slot: those addresses lead to its twin from now on, and the slot
        gets others. PoolExhausted: its layers have no slot then; DriverError."""
        each = self._layers[layer]
        slot = self._slots[each.slot]
        held, slot.holds = slot.range, None
        for part in each.parts:
            for first, count in spans(part):
                held.alias(part.offset + first - part.first, part.twin.pages, first, count)
        slot.range = self._device.reserve(held.nbytes, "weights", self._group)
        slot.range.map(0, held.pieces)

    def check(self) -> None:
        """WeightsFileChanged unless the files of all twins are what they were; each is looked at once. After a pass:
        what was copied was right."""
        files = [part.twin.file for each in self._layers.values() for part in each.parts if part.twin.file is not None]
        for file in {file: None for twin in files for file in twin.files}:
            file.check()

    def reveal(self, layer: int) -> None:
        """Someone else may look at the layer: its addresses lead to its weights, also where its twin was a file. Raises
        as `Twin.reveal`."""
        each = self._layers.get(layer)
        for part in () if each is None else each.parts:
            part.twin.reveal(spans(part))

    def close(self) -> None:
        """Gives the slots back. No layer streams any more; those on the host stay there."""
        self._layers.clear()
        while self._slots:
            self._slots.pop().range.close()

    def release_layers(self) -> None:
        """No layer streams, and those on the host may have other numbers from now on. The slots stay."""
        self._layers.clear()
        self._share()

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
                self._slots.append(_Slot(self._reserve(pages)))
            elif self._slots[index].range.pieces < pages:
                slot = self._slots[index]
                made = self._reserve(pages)
                slot.range.close()
                slot.range, slot.holds = made, None

    def _depart(self, each: Streamed) -> None:
        """It is on the host from now on, if it was not."""
        for part in each.parts:
            here = [span for span in spans(part) if part.home.backing(span[0]) != "alias"]
            if here:
                part.twin.copy_home(here)
            with ExitStack() as undo:
                undo.callback(self._drop_unused, part, here)
                if not all(part.twin.lead(first, count) for first, count in here):
                    raise not_now()
                undo.pop_all()
        self._layers[each.layer] = each

    def _drop_unused(self, part: Part, spans: Sequence[tuple[int, int]]) -> None:
        if all(part.home.backing(first) != "alias" for first, _ in spans):
            part.twin.drop()

    def _bring_home(self, coming: Sequence[Streamed]) -> None:
        """They get pages of their own, all of a layer's or none, and their weights are there when this returns."""
        for each in coming:
            with ExitStack() as undo:
                copies: Copies = []
                for part in each.parts:
                    for first, count in spans(part):
                        if part.home.backing(first) != "alias":
                            continue
                        if not part.home.own(first, count):
                            raise not_now()
                        undo.callback(part.twin.lead, first, count)
                        copies += part.twin.copies(first, count, part.home.address + first * self._page)
                try:
                    self._copy(copies, None).wait()
                finally:
                    self._check(each)
                undo.pop_all()
            del self._layers[each.layer]
            for part in each.parts:
                part.twin.close()

    def _share(self) -> None:
        """Whose turn it is in which slot, after layers have come and gone."""
        for index, slot in enumerate(self._slots):
            turns = (each for _, each in sorted(self._layers.items()) if each.slot == index and self._fits(each))
            slot.turns = [each.layer for each in turns]
            slot.holds = None

    def _load(self, layer: int, after: int | None = None) -> None:
        """Has the slot of the layer hold it, once its readers have passed, and what `after` was given so far. See Note
        [Overwriting a slot]."""
        found = self._layers[layer]
        slot = self._slots[found.slot]
        if slot.holds == layer:
            return
        slot.holds = None
        self.loading(layer, layer == slot.turns[0])
        streams = sorted(slot.readers if after is None else {*slot.readers, after})
        for stream in streams[:-1]:
            self._copy([], stream)  # copies are made in the order of their submission
        copies = [
            copy
            for part in found.parts
            for copy in part.twin.copies(part.first, part.count, slot.range.address + part.offset * self._page)
        ]
        slot.done = self._copy(copies, streams[-1])
        slot.holds = layer
        slot.readers.clear()

    def _copy(self, copies: Copies, after: int | None) -> Done:
        done = self._transfer.copy(copies, after=after, owner="weights", to="device")
        self.copied += sum(nbytes for _, _, nbytes in copies)
        return done

    def _check(self, each: Streamed) -> None:
        for part in each.parts:
            part.twin.check()

    def _fits(self, each: Streamed) -> bool:
        """Is there a slot for it? Where memory was too short for one the layer is read on the host."""
        pages = sum(part.count for part in each.parts)
        return each.slot < len(self._slots) and pages <= self._slots[each.slot].range.backed
