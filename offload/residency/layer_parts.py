"""The parts of a streamed layer: pieces of its ranges, what moves them, and where they lie in a slot."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

from ...allocator._native import Range, Transfer
from .backing import Backing, not_now
from .mover import Mover
from .slots import Copies


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
    pieces = groupby(range(first, first + count), lambda piece: opened.leads_to(piece) not in ("none", "retiring"))
    runs = [list(run) for led, run in pieces if led]
    return [(run[0], len(run)) for run in runs]


def spans(part: LayerPart) -> list[tuple[int, int]]:
    """The spans of the part; none where its range is gone."""
    return [] if part.range.closed else live(part.range, part.first, part.count)
