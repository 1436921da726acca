"""The performance record and the intervals that follow from it, against brute force."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ballonet.offload.policy.plan import Costs, at_interval, fitting, meeting
from ballonet.offload.record.record import (
    GRID,
    WINDOW,
    Point,
    Record,
    Unusable,
    intervals,
    load,
    on_grid,
    path_of,
    save,
)

KEY = {"model": "abc", "device": "H200", "driver": "580"}
POINTS = {Point("decode", 1, 128): 0.02, Point("decode", 4, 128): 0.03, Point("decode", 1, 512): 0.025}
RECORD = Record(KEY, 5e10, POINTS)
powers = st.integers(0, 5).map(lambda power: 2**power)


def test_a_listed_point_is_its_own_time() -> None:
    for point, seconds in POINTS.items():
        assert RECORD.time(*point) == seconds
    assert RECORD.time("decode", 2, 100) == 0.03
    assert RECORD.time("decode", 4, 512) is None
    assert RECORD.time("prefill", 1, 1) is None


@given(st.dictionaries(st.tuples(powers, powers), st.floats(0.001, 1), min_size=1), st.data())
def test_a_looked_up_time_is_never_below_that_of_less_work(listed: dict[tuple[int, int], float], data: Any) -> None:
    record = Record(KEY, 1.0, {Point("prefill", *point): seconds for point, seconds in listed.items()})
    batch, length = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    time = record.time("prefill", batch, length)
    if time is None:
        assert not any(b >= batch and n >= length for b, n in listed)
        return
    assert all(time >= seconds for (b, n), seconds in listed.items() if b <= batch and n <= length)
    more = record.time("prefill", batch + data.draw(st.integers(0, 9)), length + data.draw(st.integers(0, 9)))
    assert more is None or more >= time


def test_a_record_is_kept_in_a_file(tmp_path: Path) -> None:
    path = path_of(tmp_path / "deep", KEY)
    save(RECORD.learned(Point("decode", 8, 8), 3.0), path)
    assert load(path, KEY) == RECORD, "what was learned is not kept"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    pieces = Record(KEY, 5e10, {**POINTS, Point("pieces", 1, 128): 0.007})
    save(pieces, path)
    assert load(path, KEY) == pieces
    assert path_of(tmp_path, KEY | {"driver": "581"}) == path_of(tmp_path, KEY), "found, and found to be another's"
    assert len({path_of(tmp_path, KEY | {name: "other"}) for name in ("model", "device", "driver")}) == 3


# -- what runs teaches


def taught(*times: tuple[Point, float], record: Record = RECORD) -> Record:
    for point, seconds in times:
        record = record.learned(point, seconds)
    return record


def test_a_time_counts_for_the_powers_of_two_above() -> None:
    record = taught((Point("prefill", 3, 65), 0.5))
    assert record.time("prefill", 4, 128) == record.time("prefill", 1, 1) == 0.5
    assert record.time("prefill", 5, 128) is record.time("prefill", 4, 129) is None
    assert taught((Point("prefill", 4, 128), 0.5)).points == record.points == {*POINTS, Point("prefill", 4, 128)}
    assert RECORD.time("prefill", 1, 1) is None, "the first one is as it was"
    assert record.with_bandwidth(7.0) == Record(KEY, 7.0, POINTS, record.lessons, record.recent)


def test_time_below_the_measured_one_is_not_believed() -> None:
    record = taught(*[(Point("decode", 1, 100), 0.001)] * 40)
    assert record.time("decode", 1, 128) == 0.02
    assert taught(*[(Point("decode", 1, 100), 0.5)] * 3).time("decode", 1, 128) == 0.5


def test_short_prompts_do_not_stand_for_long_ones() -> None:
    """Prompts of 520 and of 1,000 tokens count for the same point."""
    long, short = Point("prefill", 1, 1000), Point("prefill", 1, 520)
    record = taught(*[(long, 0.8)] * 2, *[(short, 0.4)] * 40)
    assert record.time(*long) == 0.8
    assert taught(*[(Point("prefill", 1, 1024), 0.7)] * WINDOW, record=record).time(*long) == 0.7
    record = taught(*[(long, 0.8), (short, 0.4)] * 5)
    assert (record.typical(*long), record.typical(*short)) == (0.8, 0.4)
    assert taught(*[(long, 0.8)] * WINDOW, *[(short, 0.4)] * 3).typical(*short) == 0.4
    assert len(taught(*[(long, 0.8)] * 99).recent[long.corner]) == WINDOW


def test_typical_time_is_the_median_of_the_last_five() -> None:
    """The first one loads kernels; at most it takes as long, as a rule it does not."""
    there = Point("decode", 1, 1000)
    assert RECORD.typical(*there) is None
    assert RECORD.typical("decode", 1, 100) == RECORD.time("decode", 1, 100), "where nothing ran, at most"
    assert taught((there, 0.022), (there, 0.0099)).typical(*there) == 0.0099
    noisy = taught((there, 0.022), *[(there, time) for time in (0.010, 0.011, 0.009, 0.030, 0.010)])
    assert noisy.typical(*there) == 0.010, "the median of the last five"
    assert noisy.time(*there) == 0.025, "that does not change: a point of less work was measured at so much"


works = st.tuples(powers, powers, st.sampled_from([0.1, 0.2, 0.3, 0.9]))


@given(st.lists(works, min_size=1, max_size=60), st.integers(1, 32), st.integers(1, 32))
@example([(1, 1, 0.1), (1, 1, 0.2)], 1, 1)
def test_learned_time_is_believed_once_two_say_so(seen: list[tuple[int, int, float]], batch: int, length: int) -> None:
    """The second longest of the last `WINDOW` of a point, all of as much work; and it grows with work."""
    record = taught(*((Point("prefill", b, n), seconds) for b, n, seconds in seen))
    times: dict[tuple[int, int], list[float]] = {}
    for b, n, seconds in seen:
        times.setdefault((b, n), []).append(seconds)
    believed = {at: sorted(time_[-WINDOW:])[-2:][0] for at, time_ in times.items()}
    time = record.time("prefill", batch, length)
    if time is None:
        assert not any(b >= batch and n >= length for b, n in believed)
        return
    assert all(time >= seconds for (b, n), seconds in believed.items() if b <= batch and n <= length)
    assert time in believed.values()
    more = record.time("prefill", batch + 1, length + 1)
    assert more is None or more >= time


def test_number_that_is_no_time_is_not_learned() -> None:
    for seconds in (0.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="positive"):
            RECORD.learned(Point("decode", 1, 1), seconds)


# -- the table of the paper


def test_the_slo_is_listed_every_2_ms() -> None:
    assert on_grid(0.0799) == pytest.approx(0.078)
    assert on_grid(0.0019) == 0
    for step in range(1, 1000):
        assert on_grid(step * GRID) == pytest.approx(step * GRID)
        assert on_grid(step * 0.0005) <= step * 0.0005 * (1 + 1e-9)


def test_the_table_holds_the_smallest_interval_that_meets_the_slo() -> None:
    times = {Point("decode", b, n): 0.00105 * b * n for b in (1, 2, 4) for n in (8, 16)}
    record, pages, page = Record(KEY, 1e6, {**times, Point("prefill", 1, 8): 1.0}), (2,) * 8, 1000
    table = intervals(record, "decode", pages, page, 0.0339)
    assert set(table) == {(b, n) for b in (1, 2, 4) for n in (8, 16)}
    for (batch, length), interval in table.items():
        it = Costs(pages, 0.00105 * batch * length, page / 1e6)
        meets = [i for i in range(1, it.none + 1) if it.time(i) <= 0.032]
        assert interval == (meets[0] if meets else None)
    assert table[2, 16] is None, "33.6 ms meet 33.9, but not what is listed for it"
    assert len(set(table.values())) >= 2


# -- the file


def change(content: dict[str, Any], **changes: Any) -> str:
    return json.dumps(content | changes)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (lambda it: "", "cannot be read"),
        (lambda it: "[1]", "holds no object"),
        (lambda it: change(it, format=0), "another version"),
        (lambda it: change(it, bandwidth=1e9), "checksum"),
        (lambda it: json.dumps(it)[:-20], "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, text: Any, reason: str) -> None:
    path = path_of(tmp_path, KEY)
    with pytest.raises(Unusable, match="none yet"):
        load(path, KEY)
    save(RECORD, path)
    path.write_text(text(json.loads(path.read_text())))
    with pytest.raises(Unusable, match=reason):
        load(path, KEY)


def test_a_file_with_a_right_checksum_may_still_make_no_sense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Record(KEY, 1.0, {Point("decode", 1, 1): 1.0})
    object.__setattr__(broken, "seconds", {Point("decode", 1, 1): -1.0})
    save(broken, tmp_path / "record")
    with pytest.raises(Unusable, match="damaged: a bandwidth or a time"):
        load(tmp_path / "record", KEY)
    for wrong in ({Point("decode", 0, 1): 1.0}, {Point("sleep", 1, 1): 1.0}):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="point"):
            Record(KEY, 1.0, wrong)


costs = st.builds(
    Costs,
    st.lists(st.integers(0, 5), min_size=1, max_size=9).map(tuple),
    st.sampled_from([0.5, 1.0, 3.0]),
    st.sampled_from([0.01, 0.1, 1.0]),
)


@given(costs, st.floats(0.1, 30), st.integers(0, 50))
def test_the_smallest_interval_that_meets_the_slo_and_the_largest_that_fits(
    it: Costs, slo: float, available: int
) -> None:
    every = range(1, it.none + 1)
    meets = [i for i in every if it.time(i) <= slo]
    fits = [i for i in every if it.plan(i).device_pages <= available]
    assert meeting(it, slo) == (meets[0] if meets else None)
    assert fitting(it, available) == (fits[-1] if fits else None)


def test_time_at_an_interval_is_the_closed_form() -> None:
    it = Costs((10,) * 32, seconds=0.064, page_seconds=0.0008)  # a layer computes in 2 ms and is copied in 8
    assert [it.time(interval) for interval in (it.none, 4, 2, 1)] == pytest.approx([0.064, 0.064, 0.128, 0.256])
    assert meeting(it, 0.064) == 4
    assert it.plan(40) == it.plan(it.none)
    assert at_interval(it.pages, 4).steady(Fraction(4)) == 32
    with pytest.raises(ValueError, match="interval"):
        it.time(0)


def test_file_with_and_without_the_host_time_of_a_streamed_layer_is_read(tmp_path: Path) -> None:
    """Files that were written before it was measured have none."""
    path = path_of(tmp_path, KEY)
    save(RECORD, path)
    assert "entering" not in path.read_text()
    assert load(path, KEY) == RECORD
    measured = Record(KEY, 5e10, POINTS, entering=2.5e-4)
    save(measured, path)
    assert load(path, KEY) == measured
    assert load(path, KEY).entering == 2.5e-4
    without = intervals(RECORD, "decode", (5,) * 8, 10**6, 0.0205)
    assert intervals(measured, "decode", (5,) * 8, 10**6, 0.0205) != without, "the table counts it"
    path.write_text(path.read_text().replace("0.00025", "0.00026"))
    with pytest.raises(Unusable, match="checksum"):
        load(path, KEY)
