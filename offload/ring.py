"""Streaming itself: the slots that streamed layers take turns in, and the copies that fill them.

Words
    twin     a layer's weights on the host, in host pages: what is copied into a slot
    at rest  a layer's addresses lead to its twin: slow to compute with, valid for everything
    flying   they lead to its slot, which holds its weights from `enter` to `leave` only

Note [A pass]
    When a layer has computed, its slot is free, and the copy of the next layer that uses this slot begins, behind the
    copies that were submitted before. So with two slots the copy of a streamed layer starts when the layers before it
    start to compute (Select-N §4.3), and the last layers of a pass start the copies for the next one. Who waits are
    streams, for events; the host does not.

Note [What a slot holds]
    is written down slot by slot, and not derived from an index: a pass may end anywhere, by an exception or because a
    model leaves out layers, and the next one finds what is really there. While a copy is submitted a slot is nobody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby

from ..allocator._native import Device, Done, Group, Range, Transfer
from ..allocator.errors import ManageError


@dataclass(frozen=True, slots=True)
class Part:
    """Pieces of one range of a layer: all, or as many as are left; its twin, and where in the slot they lie, in
    pages."""

    home: Range
    twin: Range
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


class Ring:
    """The slots of one model. Not thread-safe: whoever runs a pass over the model holds a lock."""

    def __init__(self, device: Device, group: Group, slot_pages: Sequence[int], layers: Sequence[Streamed]) -> None:
        """Maps the slots; every layer is at rest. `layers`: in the order in which they compute. PoolExhausted,
        DriverError."""
        self._page = device.page_size
        self._slots: list[Range] = []
        with ExitStack() as undo:
            for pages in slot_pages:
                slot = device.reserve(pages * self._page, "weights", group)
                undo.callback(slot.close)
                slot.map(0, pages)
                self._slots.append(slot)
            self._transfer = Transfer(device)
            undo.pop_all()
        self._layers = {each.layer: each for each in layers}
        self._turns: list[list[int]] = [
            [each.layer for each in layers if each.slot == n] for n in range(len(slot_pages))
        ]
        self._aloft = False  # do all layers fly?
        self._flying: set[int] = set()  # those that may: an interrupt leaves too many here, never too few
        self._holds: list[int | None] = [None] * len(slot_pages)
        self._done: list[Done | None] = [None] * len(slot_pages)

    @property
    def pages(self) -> int:
        """Pages of all slots."""
        return sum(slot.pieces for slot in self._slots)

    @property
    def flying(self) -> frozenset[int]:
        """The layers whose addresses lead to slots."""
        return frozenset(self._flying)

    def begin(self, stream: int) -> None:
        """A pass begins on `stream`: all layers fly, and the copies of the first ones are on their way. ManageError
        where they cannot now, DriverError."""
        if not self._aloft:
            for each in self._layers.values():
                self._flying.add(each.layer)
                self._lead(each, to_slot=True)
            self._aloft = True
        for turns in self._turns:
            self._load(turns[0], stream)

    def enter(self, layer: int, stream: int) -> None:
        """`stream` is about to compute the layer. DriverError."""
        if layer in self._flying:
            self._load(layer, stream)
            done = self._done[self._layers[layer].slot]
            if done is not None:
                done.before(stream)

    def leave(self, layer: int, stream: int) -> None:
        """`stream` was given all that computes the layer. DriverError."""
        if layer in self._flying:
            turns = self._turns[self._layers[layer].slot]
            self._load(turns[(turns.index(layer) + 1) % len(turns)], stream)

    def rest(self) -> None:
        """Every layer is at rest. ManageError where that cannot be now, DriverError."""
        self._aloft = False
        self._holds = [None] * len(self._slots)  # twins may be written from now on
        for layer in sorted(self._flying):
            self._lead(self._layers[layer], to_slot=False)
            self._flying.discard(layer)

    def close(self) -> None:
        """Gives the slots back. All layers are at rest, or their ranges gone."""
        self._done.clear()
        for slot in self._slots:
            slot.close()

    def _load(self, layer: int, after: int) -> None:
        """Has the slot of the layer hold it, once what `after` was given so far has passed."""
        found = self._layers[layer]
        if self._holds[found.slot] == layer:
            return
        self._holds[found.slot] = None
        base = self._slots[found.slot].address
        self._done[found.slot] = self._transfer.copy(
            [
                (
                    base + part.offset * self._page,
                    part.twin.address + part.first * self._page,
                    part.count * self._page,
                )
                for part in found.parts
            ],
            after=after,
            owner="weights",
            to="device",
        )
        self._holds[found.slot] = layer

    def _lead(self, layer: Streamed, to_slot: bool) -> None:
        """Leads the layer's addresses to its slot, or to its twin; all of its ranges or none."""
        with ExitStack() as undo:
            for part in layer.parts:
                for first, count in live(part.home, part.first, part.count):
                    there = self._slots[layer.slot], part.offset + first - part.first
                    back = part.twin, first
                    if not to_slot:
                        there, back = back, there
                    if not part.home.alias(first, *there, count):
                        raise ManageError(
                            "streamed layers cannot be exchanged while another thread runs the model or a CUDA graph "
                            "is being captured: run the model once before the capture, and do not capture its streamed "
                            "layers"
                        )
                    undo.callback(part.home.alias, first, *back, count)
            undo.pop_all()
