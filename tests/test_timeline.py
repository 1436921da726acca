"""Owners of pages over time, against a reading of every nanosecond; what is kept of long runs."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.allocator.events import LoggedEvent
from ballonet.offload.timeline.file import OWNERS, Row, fewer, resample, thinned

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


@pytest.mark.parametrize(("start", "stop", "points"), [(5, 5, 3), (6, 5, 3), (0, 9, 0)])
def test_an_interval_that_is_none_is_refused(start: int, stop: int, points: int) -> None:
    with pytest.raises(ValueError, match="end must come after"):
        resample([], start, stop, points)


@pytest.mark.parametrize("seed", range(5))
def test_thinned_rows_keep_every_peak_and_the_end(seed: int) -> None:
    chance = random.Random(seed)
    limit = chance.randint(16, 40)
    rows: list[Row] = sorted(
        (chance.randint(0, 60), *(chance.randint(0, 99) for _ in range(5)))  # type: ignore[misc]
        for _ in range(chance.randint(1, 70))
    )
    kept = thinned(rows, limit)
    if len(rows) <= limit:
        assert kept == rows
        return
    assert len(kept) <= limit // 2
    remaining = iter(rows)
    assert all(row in remaining for row in kept), "rows of the recording, in their order"
    assert (kept[0], kept[-1]) == (rows[0], rows[-1])
    for owner in range(1, 6):
        assert max(row[owner] for row in kept) == max(row[owner] for row in rows)
    assert max(sum(row[2:]) for row in kept) == max(sum(row[2:]) for row in rows)


def test_thinning_again_and_again_keeps_peaks_of_the_first_hour() -> None:
    kept: list[Row] = []
    for time in range(5000):
        kept = thinned([*kept, (time, 0, 0, 0, 99 if time == 17 else 1, 0)], 100)
        assert len(kept) <= 100
    assert max(kept, key=lambda row: row[4])[0] == 17
    assert kept[-1][0] == 4999
    times = [row[0] for row in kept]
    assert max(after - before for before, after in pairwise(times)) <= 5000 // (100 // 2 // 8 // 2)


def test_too_few_rows_to_thin_to_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        thinned([(time, 0, 0, 0, 0, 0) for time in range(20)], 15)


EVENTS = st.lists(
    st.builds(LoggedEvent, st.integers(0, 99), st.sampled_from("abc"), st.sampled_from("xy"), st.integers(0, 9)),
    max_size=40,
)


@given(EVENTS, st.integers(2, 30))
def test_too_many_events_keep_rare_kinds(events: list[LoggedEvent], limit: int) -> None:
    kept = fewer(events, limit)
    if len(events) <= limit:
        assert kept == events
        return
    assert len(kept) <= limit // 2
    remaining = iter(events)
    assert all(any(event is other for other in remaining) for event in kept), "in their order"
    of = Counter((event.source, event.verb) for event in events)
    left = Counter((event.source, event.verb) for event in kept)
    cut = {name: count for name, count in left.items() if count < of[name]} | {name: 0 for name in of if not left[name]}
    # a kind that lost some keeps as many as any other keeps, up to one
    assert all(left[other] <= least + 1 for least in cut.values() for other in of)
    assert len(kept) > limit // 2 - len(of)
    for name in cut:
        dropped = [e.pages for e in events if (e.source, e.verb) == name and not any(e is k for k in kept)]
        assert all(e.pages >= max(dropped) for e in kept if (e.source, e.verb) == name)
