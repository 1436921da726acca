"""The timeline of a pipeline: no stage does two things at once, none begins what it has not been given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .pipeline_time import evenly, floor, pipeline_time

grids = st.integers(1, 4).flatmap(
    lambda stages: st.lists(st.lists(st.integers(0, 9), min_size=stages, max_size=stages), max_size=9)
)


@given(grids)
def test_every_stage_waits_for_what_it_needs_and_for_nothing_else(grid: list[list[int]]) -> None:
    found = pipeline_time(grid)
    for k, row in enumerate(grid):
        for s, took in enumerate(row):
            needed = [0.0]
            needed += [found.end[k - 1][s]] if k else []
            needed += [found.end[k][s - 1]] if s else []
            needed += [found.end[k - len(row)][-1]] if s == 0 and k >= len(row) else []
            assert found.begin[k][s] == max(needed)
            assert found.end[k][s] == found.begin[k][s] + took
    assert 0 <= found.bubble < 1
    assert found.seconds == (found.end[-1][-1] if grid else 0)


@given(st.integers(1, 30), st.integers(1, 6))
def test_equal_batches_have_the_floor(microbatches: int, stages: int) -> None:
    found = pipeline_time(evenly([3.0] * microbatches, stages))
    assert found.bubble == pytest.approx(floor(microbatches, stages))
    assert found.seconds == pytest.approx(3.0 / stages * (microbatches + stages - 1))


def test_a_long_batch_keeps_the_next_waiting() -> None:
    found = pipeline_time([(1, 1), (4, 4), (1, 1)])
    assert found.begin == ((0, 1), (1, 5), (5, 9))
    assert found.bubble == pytest.approx(1 - 12 / 20)


def test_as_many_microbatches_are_under_way_as_there_are_stages() -> None:
    found = pipeline_time([(1, 5), (1, 1), (1, 1)])
    assert [begin[0] for begin in found.begin] == [0, 1, 6]


def test_stages_have_to_match() -> None:
    for grid in ([(1, 2), (1,)], [()]):
        with pytest.raises(ValueError, match="the same number"):
            pipeline_time(grid)
