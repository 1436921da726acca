"""Owners of pages over time, against a reading of every nanosecond."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.offload.timeline import OWNERS, Recorder, Row, resample

ROWS = st.lists(st.tuples(st.integers(0, 60), *[st.integers(0, 9)] * 5), max_size=20).map(
    lambda rows: sorted(rows, key=lambda row: row[0])
)


@given(ROWS, st.integers(0, 30), st.integers(1, 30), st.integers(1, 40))
def test_each_point_shows_the_fullest_moment_of_its_interval(
    rows: list[Row], start: int, length: int, points: int
) -> None:
    stop = start + length
    series = resample(rows, start, stop, points)
    assert len(series.seconds) == points
    for point in range(points):
        begin = start + length * point // points
        end = start + length * (point + 1) // points
        in_force = [row for row in rows if row[0] <= begin][-1:] or [(0, 0, 0, 0, 0, 0)]
        during = in_force + [row for row in rows if begin < row[0] < end]
        shown = tuple(series.pages[owner][point] for owner in OWNERS)
        assert shown in {row[1:] for row in during}
        assert series.in_use()[point] == max(sum(row[2:]) for row in during)


def test_a_peak_between_two_points_is_not_lost() -> None:
    rows: list[Row] = [(0, 4, 0, 0, 0, 0), (501, 1, 0, 0, 3, 0), (502, 4, 0, 0, 0, 0)]
    series = resample(rows, 0, 1000, 10)
    assert series.pages["kv"] == (0, 0, 0, 0, 0, 3, 0, 0, 0, 0)
    assert series.pages["free"] == (4, 4, 4, 4, 4, 1, 4, 4, 4, 4)
    assert series.seconds[5] == pytest.approx(5e-7)


@pytest.mark.parametrize(("start", "stop", "points"), [(5, 5, 3), (6, 5, 3), (0, 9, 0)])
def test_an_interval_that_is_none_is_refused(start: int, stop: int, points: int) -> None:
    with pytest.raises(ValueError, match="end must come after"):
        resample([], start, stop, points)


class Drained:
    """Rows that come at each call until they run out, as a device hands them over."""

    def __init__(self, batches: list[list[Row]]) -> None:
        self.batches = batches
        self.calls = 0

    def timeline(self) -> list[Row]:
        self.calls += 1
        return self.batches.pop(0) if self.batches else []


def test_the_recorder_keeps_every_row_in_order_and_collects_the_rest_at_the_end() -> None:
    batches: list[list[Row]] = [[(n, n, 0, 0, 0, 0)] for n in range(20)]
    source = Drained([*batches])
    with Recorder(source, interval=0.001) as recorder:
        deadline = time.monotonic() + 10
        while source.calls < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
    assert source.calls >= 3
    source.batches.clear()
    assert list(recorder.rows) == [row for batch in batches for row in batch][: source.calls]

    late = Drained([[(7, 1, 0, 0, 0, 0)]])
    assert Recorder(late, interval=60).stop() == ((7, 1, 0, 0, 0, 0),)


def test_an_error_of_the_device_is_raised_by_stop() -> None:
    class Broken:
        def timeline(self) -> list[Row]:
            raise RuntimeError("closed")

    recorder = Recorder(Broken(), interval=0.001)
    with pytest.raises(RuntimeError, match="closed"):
        recorder.stop()
