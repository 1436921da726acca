"""Streaming itself: the slots that streamed layers take turns in, and the copies that fill them.

Words
    at home  a layer has device pages of its own
    at rest  a layer's addresses lead to its twin's pages: slow to compute with, valid for everything
    flying   they lead to its slot, which holds its weights from `enter` to `leave` only

Note [A pass]
    When a layer has computed, its slot is free, and the copy of the next layer that uses this slot begins, behind the
    copies that were submitted before. So with two slots the copy of a streamed layer starts when the layers before it
    start to compute (Select-N §4.3), and the last layers of a pass start the copies for the next one. Who waits are
    streams, for events; the host does not.

Note [What a slot holds]
    is written down slot by slot, and not derived from an index: a pass may end anywhere, by an exception or because a
    model leaves out layers, and the next one finds what is really there. While a copy is submitted a slot is nobody's.

Note [Leaving and coming home]
    Which layers stream changes between passes (`arrange`). A layer that begins to stream gives its pages first and the
    slots are made of what is free then: where memory is short there may be no other. A layer that comes home gets new
    pages, and its copy is on its way while the layers before it compute; who enters it waits for that. A failure leaves
    every layer in one of the three states, and the ring usable: it says what streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import groupby

from ...allocator._native import Device, Done, Group, Range, Transfer
from ...allocator.errors import DriverError, ManageError, PoolExhausted
from .twins import Copies, Twin


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


class Ring:
    """The slots of one model and the layers that stream through them, at first none. Not thread-safe: whoever runs a
    pass over the model holds a lock."""

    def __init__(
        self,
        device: Device,
        group: Group,
        unchanged: Callable[[Twin], bool] = lambda twin: False,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`unchanged`: do the pages of a file twin hold what the file does? `waiting()` is entered around each wait of
        a stream for a copy. DriverError."""
        self._device = device
        self._group = group
        self._page = device.page_size
        self._transfer = Transfer(device)
        self._unchanged = unchanged
        self._waiting = waiting
        self.copied = 0  # bytes that came from twins so far
        self._slots: list[_Slot] = []
        self._layers: dict[int, Streamed] = {}
        self._aloft = False  # do all layers fly, each to its slot?
        self._flying: set[int] = set()  # those that may: an interrupt leaves too many here, never too few
        self._arriving: dict[int, tuple[Done, Streamed]] = {}  # layers at home whose weights are on their way

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

    @property
    def flying(self) -> frozenset[int]:
        """The layers whose addresses lead to slots."""
        return frozenset(self._flying)

    def slot_of(self, layer: int) -> int:
        """In which of them a streamed layer takes its turns."""
        return self._layers[layer].slot

    def make(self, slot_pages: Sequence[int]) -> None:
        """The first slots, before there are layers. PoolExhausted, DriverError: there are none then."""
        try:
            for pages in slot_pages:
                self._slots.append(self._new_slot(pages))
        except BaseException:
            self.close()
            raise

    def slot(self, index: int) -> Range:
        """The pages of a slot, for what is to fly from the beginning."""
        return self._slots[index].range

    def arrange(
        self,
        slot_pages: Sequence[int],
        layers: Sequence[Streamed],
        stream: int,
        aloft: Iterable[int] = (),
        resting: Iterable[Streamed] = (),
    ) -> None:
        """From now on `layers` stream, in the order in which they compute, and no others. Those of them that lead to
        their slot already are `aloft`; `resting`: others that were led to their twins. See Note [Leaving and coming
        home]. PoolExhausted; ManageError where addresses cannot be exchanged now; WeightsFileChanged, DriverError."""
        wanted = {each.layer: each for each in layers}
        coming = [each for each in layers if each.layer not in self._layers]
        for slot in self._slots:
            slot.holds = None  # what it holds may be of another layer by now
        self._flying.update(aloft)
        self._layers.update((each.layer, each) for each in resting)
        self._layers.update({layer: wanted[layer] for layer in wanted.keys() & self._layers.keys()})
        self._aloft = False
        for each in coming:
            self._arrive(each.layer)  # it may have come home just now
        try:
            self._enlarge(slot_pages, coming)
            while coming:
                self._depart(coming.pop(0))
            for layer in sorted(self._layers.keys() - wanted.keys()):
                self._bring_home(self._layers[layer], stream)
            for slot in self._slots[len(slot_pages) :]:
                slot.range.close()
            del self._slots[len(slot_pages) :]
        finally:
            self._share()

    def begin(self, stream: int) -> None:
        """A pass begins on `stream`: all layers fly, and the copies of the first ones are on their way. Those that
        cannot now stay at rest, or at home. WeightsFileChanged, DriverError."""
        if not self._aloft:
            flying = [self._take_off(each) for each in self._layers.values()]  # as many as can
            self._aloft = all(flying)
        for slot in self._slots:
            if slot.turns:
                self._load(slot.turns[0], stream)

    def enter(self, layer: int, stream: int) -> None:
        """`stream` is about to compute the layer. WeightsFileChanged, DriverError."""
        arriving = self._arriving.get(layer)
        if arriving is not None:
            done, home = arriving
            self._before(done, home, stream)
            if done.passed():
                self._arriving.pop(layer, None)
        elif layer in self._flying:
            self._load(layer, stream)
            found = self._layers[layer]
            done_ = self._slots[found.slot].done
            if done_ is not None:
                self._before(done_, found, stream)

    def join(self, layer: int, stream: int) -> None:
        """Another stream computes it, too, before its `leave`. On any thread. WeightsFileChanged, DriverError."""
        each = self._layers.get(layer)
        done = self._slots[each.slot].done if each is not None and layer in self._flying else None
        if each is not None and done is not None:
            self._before(done, each, stream)

    def leave(self, layer: int, stream: int) -> None:
        """`stream` was given all that computes the layer. WeightsFileChanged, DriverError."""
        if layer in self._flying:
            turns = self._slots[self._layers[layer].slot].turns
            self._load(turns[(turns.index(layer) + 1) % len(turns)], stream)

    def check(self) -> None:
        """WeightsFileChanged unless the files of all twins are what they were. After a pass: what was copied was
        right."""
        for each in self._layers.values():
            for part in each.parts:
                part.twin.check()

    def show(self, layer: int) -> bool:
        """Someone looks at the layer and may write it. On any thread. False where it does not stream any more."""
        each = self._layers.get(layer)
        for part in () if each is None else each.parts:
            part.twin.shown = True
        return each is not None

    def rest(self) -> None:
        """Someone may look: every layer is at rest or at home. PoolExhausted where the host has no room for the twins,
        ManageError where that cannot be now, DriverError."""
        for layer in sorted(self._arriving):
            self._arrive(layer)
        for layer in sorted(self._flying):
            self.ground(layer)
        for layer in self._layers:
            self.show(layer)

    def settle(self, layer: int) -> None:
        """The weights of a layer that came home are there. On any thread. WeightsFileChanged, DriverError."""
        arriving = self._arriving.get(layer)
        if arriving is not None:
            done, each = arriving
            try:
                done.wait()
            except DriverError:
                for part in each.parts:
                    part.twin.check()
                raise

    def ground(self, layer: int) -> None:
        """One layer is at rest, if it was flying; at home, if it was on its way."""
        self._arrive(layer)
        if layer not in self._flying:
            return
        self._aloft = False
        for slot in self._slots:
            slot.holds = None  # twins may be written from now on
        each = self._layers[layer]
        for part in each.parts:
            part.twin.ground(spans(part), self._transfer, 0)
        if not self._lead(each, to_slot=False):
            raise _not_now()
        self._flying.discard(layer)

    def forget(self) -> None:
        """No layer streams: all are at rest, or at home, and may have other numbers from now on. The slots stay. Raises
        as `rest`."""
        self.rest()
        self._layers.clear()
        self._share()

    def close(self) -> None:
        """Gives the slots back. All layers are at rest, or their ranges gone."""
        self._layers.clear()
        self._flying.clear()
        self._arriving.clear()
        while self._slots:
            self._slots.pop().range.close()

    def _new_slot(self, pages: int) -> _Slot:
        with ExitStack() as undo:
            opened = self._device.reserve(pages * self._page, "weights", self._group)
            undo.callback(opened.close)
            opened.map(0, pages)
            undo.pop_all()
        return _Slot(opened)

    def _enlarge(self, slot_pages: Sequence[int], coming: list[Streamed]) -> None:
        """As many slots, and each as large, as wanted. Layers of `coming` are removed that gave their pages for it."""
        for index, pages in enumerate(slot_pages):
            if index < len(self._slots) and self._slots[index].range.pieces >= pages:
                continue
            while True:
                try:
                    made = self._new_slot(pages)
                    break
                except PoolExhausted:
                    if not coming:
                        raise
                    each = coming.pop(0)
                    self._to_rest(each)
            if index < len(self._slots):
                old, self._slots[index] = self._slots[index], made
                self._lead_away(index)
                old.range.close()
            else:
                self._slots.append(made)

    def _lead_away(self, index: int) -> None:
        """The layers of a slot that was replaced go to the new one."""
        for each in self._layers.values():
            if each.slot == index and each.layer in self._flying and not self._lead(each, to_slot=True):
                raise _not_now()

    def _arrive(self, layer: int) -> None:
        """It is at home, if it was on its way."""
        self.settle(layer)
        self._arriving.pop(layer, None)

    def _to_rest(self, each: Streamed) -> None:
        self._layers[each.layer] = each
        for part in each.parts:
            part.twin.ground(spans(part), self._transfer, 0)
        if not self._lead(each, to_slot=False):
            raise _not_now()

    def _take_off(self, each: Streamed) -> bool:
        """It flies, if there is a slot for it and it can now."""
        if not self._fits(each):
            return False
        self._flying.add(each.layer)
        if self._lead(each, to_slot=True):
            for part in each.parts:
                part.twin.lift(self._unchanged)
            return True
        return False

    def _depart(self, each: Streamed) -> None:
        """It streams from now on: at rest, but where that would fill host memory."""
        if each.layer in self._flying:  # from the beginning
            self._layers[each.layer] = each
        elif self._fits(each) and any(part.twin.file for part in each.parts):
            self._layers[each.layer] = each
            self._flying.add(each.layer)
            if not self._lead(each, to_slot=True):
                raise _not_now()
        else:
            self._to_rest(each)

    def _bring_home(self, each: Streamed, stream: int) -> None:
        with ExitStack() as undo:
            copies = []
            for part in each.parts:
                for first, count in spans(part):
                    if not part.home.own(first, count):
                        raise _not_now()
                    undo.callback(self._lead, each, each.layer in self._flying)
                    copies += part.twin.copies(first, count, part.home.address + first * self._page)
            done = self._copy(copies, stream)
            undo.pop_all()
        self._arriving[each.layer] = done, each
        self._flying.discard(each.layer)
        del self._layers[each.layer]
        if any(part.twin.file is not None and part.twin.pages.backed for part in each.parts):
            self.settle(each.layer)  # somebody has looked: what the file does not have is in those pages
            for part in each.parts:
                part.twin.lift(self._unchanged)

    def _share(self) -> None:
        """Whose turn it is in which slot, after layers have come and gone."""
        for index, slot in enumerate(self._slots):
            turns = (each for _, each in sorted(self._layers.items()) if each.slot == index and self._fits(each))
            slot.turns = [each.layer for each in turns]
            if slot.holds not in slot.turns:
                slot.holds = None

    def _load(self, layer: int, after: int) -> None:
        """Has the slot of the layer hold it, once what `after` was given so far has passed."""
        found = self._layers[layer]
        slot = self._slots[found.slot]
        if slot.holds == layer:
            return
        slot.holds = None
        copies = [
            copy
            for part in found.parts
            for copy in part.twin.copies(part.first, part.count, slot.range.address + part.offset * self._page)
        ]
        slot.done = self._copy(copies, after)
        slot.holds = layer

    def _copy(self, copies: Copies, after: int) -> Done:
        done = self._transfer.copy(copies, after=after, owner="weights", to="device")
        self.copied += sum(nbytes for _, _, nbytes in copies)
        return done

    def _before(self, done: Done, each: Streamed, stream: int) -> None:
        try:
            with self._waiting():
                done.before(stream)
        except DriverError:
            for part in each.parts:
                part.twin.check()
            raise

    def _fits(self, each: Streamed) -> bool:
        """Is there a slot for it? Where memory was too short for one the layer stays at rest."""
        pages = sum(part.count for part in each.parts)
        return each.slot < len(self._slots) and pages <= self._slots[each.slot].range.pieces

    def _lead(self, each: Streamed, to_slot: bool) -> bool:
        """Leads the layer's addresses to its slot, or to its twin. False where that cannot be now; half way both are
        valid, the slot because the layer is among those that fly."""
        for part in each.parts:
            for first, count in spans(part):
                to, at = part.twin.pages, first
                if to_slot:
                    to, at = self._slots[each.slot].range, part.offset + first - part.first
                if not part.home.alias(first, to, at, count):
                    return False
        return True


def _not_now() -> ManageError:
    return ManageError(
        "streamed layers cannot be exchanged while another thread runs the model or a CUDA graph is being captured: "
        "run the model once before the capture, and do not capture its streamed layers"
    )
