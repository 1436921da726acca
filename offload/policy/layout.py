"""The layout of weights: one range per decoder layer for its large tensors, one resident range for everything else.

Pure arithmetic: sizes in, a frozen layout out. A layer's range holds nothing but that layer, so that it can be
streamed, lent or dropped alone; weights in no decoder layer, and blocks too small to be worth a copy of their own, lie
in the resident range, which never streams. Blocks are packed at 512 bytes in the order given: kernels are chosen by the
alignment of their pointers (cuBLASLt up to 256 bytes), so a closer packing could change results. `fitting` chooses the
page size where none was set, from the sizes of ranges.

Note [What rounding costs]
    Each layer of weights and each region of a cache ends in the middle of a page, so on small models what is lost to
    rounding can be more than what elasticity gains: 23 of 240 MiB for a model of 12 layers and 155 MiB in pages of
    2 MiB. Larger pages cost fewer driver calls. So the largest page counts whose rounding takes no more than a small
    part of what the weights leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from .tuning import DEFAULT

ALIGNMENT = 512  # bytes
# Rounding to pages may take 1/32 of what the weights leave: pages of 256 KiB for the model of the benchmark, where 2
# MiB took twice as many steps as 256 KiB. A cache has about so many pages that are used in part: its guard, and where
# requests end. Chosen.
ROUNDING: Final = 1 / 32
ENDS: Final = 4


@dataclass(frozen=True, slots=True)
class Block:
    """A tensor, or several that share a storage: moved as a whole. `layer` is None where it belongs to no layer
    alone."""

    key: int
    nbytes: int
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class BlockPlacement:
    """A block at `offset` bytes into its range."""

    block: Block
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.block.nbytes


@dataclass(frozen=True, slots=True)
class RangeLayout:
    """One range: what lies in it, in order of address. `layer` is None for the resident range."""

    layer: int | None
    placements: tuple[BlockPlacement, ...]
    page_size: int

    @property
    def nbytes(self) -> int:
        return self.placements[-1].end

    @property
    def pages(self) -> int:
        return -(-self.nbytes // self.page_size)


@dataclass(frozen=True, slots=True)
class LayoutStep:
    """The blocks moved before their sources are given up: one layer, or one block of no layer. `moves`: (index of the
    range, placement)."""

    moves: tuple[tuple[int, BlockPlacement], ...]
    pages: int  # that the step maps


@dataclass(frozen=True, slots=True)
class Layout:
    """The place of every block of a model. The resident range comes first, then the layers in their order."""

    ranges: tuple[RangeLayout, ...]
    page_size: int

    @property
    def pages(self) -> int:
        return sum(range_.pages for range_ in self.ranges)

    def layer_pages(self, layers: int) -> tuple[int, ...]:
        """Pages of the range of each of so many decoder layers, 0 where a layer has none."""
        pages = {range_.layer: range_.pages for range_ in self.ranges}
        return tuple(pages.get(layer, 0) for layer in range(layers))

    def spare(self, *, sources: bool, working: int) -> int:
        """Returns the pages needed beside those of the ranges.

        `sources`: whether the weights to be moved lie in the same pool, so that moving needs the pages of one more
        step. `working`: pages that using the model needs. Moving ends before use begins, so the larger of the two
        counts.
        """
        moving = max((step.pages for step in self.steps()), default=0) + 1 if sources else 0
        return max(moving, working)

    def steps(self) -> Iterator[LayoutStep]:
        """Iterates over the steps in which the model is moved, so that sources and ranges overlap by one step and no
        more.

        Each range is filled from its start, so a step maps the pages up to its last block that no step before it
        mapped.
        """
        mapped = [0] * len(self.ranges)
        for moves in self._moves():
            before = sum(mapped)
            for index, placement in moves:
                mapped[index] = max(mapped[index], -(-placement.end // self.page_size))
            yield LayoutStep(moves, sum(mapped) - before)

    def _moves(self) -> Iterator[tuple[tuple[int, BlockPlacement], ...]]:
        layers: dict[int, list[tuple[int, BlockPlacement]]] = {}
        for index, range_ in enumerate(self.ranges):
            for placement in range_.placements:
                if placement.block.layer is None:
                    yield ((index, placement),)
                else:
                    layers.setdefault(placement.block.layer, []).append((index, placement))
        for layer in sorted(layers):
            yield tuple(layers[layer])


def place(blocks: Iterable[Block], page_size: int, large: int = DEFAULT.weights.large) -> Layout:
    """Returns the layout of `blocks`, each of at least one byte, over pages of `page_size` bytes (a multiple of 512). A
    block of fewer than `large` bytes stays in the resident range.

    Ranges that would be empty are left out. ValueError for a block without bytes, a key given twice, or a page size
    that no block can be aligned in.
    """
    if page_size <= 0 or page_size % ALIGNMENT:
        raise ValueError(
            f"pages of {page_size} bytes: blocks are aligned at {ALIGNMENT}, so pages are a multiple of that"
        )
    seen: set[int] = set()
    resident: list[Block] = []
    layers: dict[int, list[Block]] = {}
    for block in blocks:
        if block.nbytes < 1 or block.key in seen:
            raise ValueError(f"{block} has no bytes or was given twice")
        seen.add(block.key)
        if block.layer is not None and block.nbytes >= large:
            layers.setdefault(block.layer, []).append(block)
        else:
            resident.append(block)
    # Blocks of no layer first, then the small ones layer by layer: the order in which `steps` fills the range.
    resident.sort(key=lambda block: -1 if block.layer is None else block.layer)
    ranges = [_pack(layer, layers[layer], page_size) for layer in sorted(layers)]
    if resident:
        ranges.insert(0, _pack(None, resident, page_size))
    return Layout(tuple(ranges), page_size)


def _pack(layer: int | None, blocks: Iterable[Block], page_size: int) -> RangeLayout:
    placements: list[BlockPlacement] = []
    for block in blocks:
        end = placements[-1].end if placements else 0
        placements.append(BlockPlacement(block, -(-end // ALIGNMENT) * ALIGNMENT))
    return RangeLayout(layer, tuple(placements), page_size)


@dataclass(frozen=True, slots=True)
class Rounding:
    """A page size in bytes. `lost`: bytes lost by rounding to it; `left`: those that the weights leave of the budget;
    `most`: the part of these that may be lost."""

    page: int
    lost: int
    left: int
    most: float

    @property
    def share(self) -> float:
        """The part that is lost; 1 where the weights leave nothing."""
        return min(1.0, self.lost / self.left) if self.left > 0 else 1.0


def fitting(ranges: Sequence[int], caches: int, budget: int, usual: int, smallest: int) -> Rounding:
    """Returns the largest page size, of `usual` and its halves down to `smallest`, that loses little enough; where none
    does, the smallest of them. `ranges`: bytes of each range of weights; `caches`: paged caches on the budget, each of
    which ends in a few pages of its own."""
    page = usual
    while (rounding := _rounding(ranges, caches, budget, page)).share > rounding.most and page // 2 >= smallest:
        page //= 2
    return rounding


def _rounding(ranges: Sequence[int], caches: int, budget: int, page: int) -> Rounding:
    lost = sum(-nbytes % page for nbytes in ranges) + caches * ENDS * page
    return Rounding(page, lost, budget - sum(ranges), ROUNDING)
