"""The offers of a KV cache: its full pages, and the pages of the slots that it is read through."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, Final

from ..residency.kv_extents import KVExtents
from ..residency.kv_slots import Slice
from ..residency.saving import Runs
from .client import INDICES_PER_SPLIT, Offer
from .kv_read_plan import KVReadPlan
from .kv_turns import KVTurns

_FIRST_SLICE: Final = 4  # index of the first offer that is of a slot: those before are of full pages


class KVOffers:
    """The offers of one cache. The governor calls on any thread: `all` under its lock, `parts` without."""

    def __init__(self, extents: KVExtents, turns: KVTurns, way: KVReadPlan) -> None:
        self.prefills = False  # does the iteration have many rows?
        self._extents = extents
        self._turns = turns
        self._way = way
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
            return self._way.parts(taken)
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
        for slice_ in self._way.slices():
            index = known.get(slice_[:3])
            while index is None or index in slices:
                index = _FIRST_SLICE + next(self._next) % (INDICES_PER_SPLIT - _FIRST_SLICE)
                index = None if index in self._slices else index
            slices[index] = slice_
        self._slices = slices
        return slices
