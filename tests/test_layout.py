"""The layout of weights, against brute force."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.offload.policy.layout import ALIGNMENT, Block, Layout, place
from ballonet.offload.policy.tuning import DEFAULT

LARGE = DEFAULT.weights.large

PAGES = st.sampled_from([4096, 65536, 2**21])
SIZES = st.one_of(
    st.integers(1, 4 * ALIGNMENT),
    st.integers(LARGE - 2, LARGE + 2),
    st.integers(1, 5 * LARGE),
)
BLOCKS = st.lists(st.tuples(SIZES, st.one_of(st.none(), st.integers(0, 4))), max_size=14).map(
    lambda drawn: [Block(key, nbytes, layer) for key, (nbytes, layer) in enumerate(drawn)]
)


def spots(layout: Layout) -> dict[int, tuple[int, int, int]]:
    """key -> (index of the range, first byte, end)"""
    return {
        spot.block.key: (index, spot.offset, spot.end)
        for index, range_ in enumerate(layout.ranges)
        for spot in range_.placements
    }


@given(BLOCKS, PAGES)
def test_every_block_lies_once_aligned_in_its_range_and_over_nothing_else(blocks: list[Block], page: int) -> None:
    layout = place(blocks, page)
    places = spots(layout)
    assert sum(len(range_.placements) for range_ in layout.ranges) == len(blocks)
    assert places.keys() == {block.key for block in blocks}
    for block in blocks:
        index, first, end = places[block.key]
        lies_in = layout.ranges[index].layer
        assert lies_in == (block.layer if block.nbytes >= LARGE else None)
        assert first % ALIGNMENT == 0
        assert end - first == block.nbytes
        assert 0 <= first < end <= layout.ranges[index].pages * page
    for one, other in itertools.combinations(places.values(), 2):
        assert one[0] != other[0] or one[2] <= other[1] or other[2] <= one[1]


@given(BLOCKS, PAGES)
def test_no_page_more_than_packing_at_the_alignment_takes(blocks: list[Block], page: int) -> None:
    layout = place(blocks, page)
    for range_ in layout.ranges:
        packed = 0  # byte by byte as a reader would do it: the next free multiple of the alignment
        for spot in range_.placements:
            while packed % ALIGNMENT:
                packed += 1
            packed += spot.block.nbytes
        assert range_.nbytes == packed
        assert (range_.pages - 1) * page < packed <= range_.pages * page
    assert layout.pages == sum(range_.pages for range_ in layout.ranges)


@given(BLOCKS, PAGES)
def test_steps_move_every_block_once_and_map_every_page_once(blocks: list[Block], page: int) -> None:
    layout = place(blocks, page)
    steps = list(layout.steps())
    moved = [(index, spot.block.key) for step in steps for index, spot in step.moves]
    assert sorted(key for _, key in moved) == sorted(block.key for block in blocks)
    assert all(spots(layout)[key][0] == index for index, key in moved)
    assert sum(step.pages for step in steps) == layout.pages
    for step in steps:
        layers = {spot.block.layer for _, spot in step.moves}
        assert len(layers) == 1
        assert len(step.moves) == 1 or layers != {None}
    for index in range(len(layout.ranges)):  # each range is filled from its start, as pages are mapped from there
        offsets = [spot.offset for step in steps for at, spot in step.moves if at == index]
        assert offsets == sorted(offsets)


@given(BLOCKS, PAGES, st.integers(0, 5), st.booleans(), st.integers(0, 9))
def test_the_smallest_budget_is_what_a_walk_through_the_move_needs(
    blocks: list[Block], page: int, others: int, sources: bool, working: int
) -> None:
    layout = place(blocks, page)
    smallest = (others + layout.pages + layout.spare(sources=sources, working=working)) * page
    assert smallest % page == 0
    in_use, peak = others, others
    left = layout.pages if sources else 0  # pages of sources not yet given up
    for step in layout.steps():
        in_use += step.pages
        peak = max(peak, in_use + left)
        left -= step.pages if sources else 0
    needed = max(peak, in_use + working)
    assert needed <= smallest // page <= needed + 1 if sources else smallest // page == needed


@pytest.mark.parametrize("page", [0, -4096, 1000])
def test_a_page_that_cannot_hold_aligned_blocks_is_refused(page: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        place([Block(0, 1)], page)


@pytest.mark.parametrize("blocks", [[Block(0, 0)], [Block(0, 5), Block(0, 5)]])
def test_a_block_without_bytes_or_given_twice_is_refused(blocks: list[Block]) -> None:
    with pytest.raises(ValueError, match=r"no bytes|twice"):
        place(blocks, 4096)


def test_layout_of_no_blocks_takes_no_page() -> None:
    layout = place([], 4096)
    assert (layout.pages, list(layout.steps())) == (0, [])
    assert layout.spare(sources=True, working=3) == 3
    assert layout.layer_pages(2) == (0, 0)
