"""The performance record and the intervals that follow from it, against brute force."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.offload.interval import Costs, choose, fitting, meeting
from ballonet.offload.plan import at_interval
from ballonet.offload.record import Point, Record, Unusable, load, path_of, save

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
    found = record.time("prefill", batch, length)
    if found is None:
        assert not any(b >= batch and n >= length for b, n in listed)
        return
    assert all(found >= seconds for (b, n), seconds in listed.items() if b <= batch and n <= length)
    more = record.time("prefill", batch + data.draw(st.integers(0, 9)), length + data.draw(st.integers(0, 9)))
    assert more is None or more >= found


def test_a_record_is_kept_in_a_file(tmp_path: Path) -> None:
    path = path_of(tmp_path / "deep", KEY)
    save(RECORD, path)
    assert load(path, KEY) == RECORD
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert path_of(tmp_path, KEY | {"driver": "581"}) != path_of(tmp_path, KEY)


def change(content: dict[str, Any], **changes: Any) -> str:
    return json.dumps(content | changes)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (lambda it: "", "cannot be read"),
        (lambda it: "[1]", "another version"),
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


def test_a_record_for_something_else_is_not_used(tmp_path: Path) -> None:
    save(RECORD, tmp_path / "record")
    with pytest.raises(Unusable, match="another driver"):
        load(tmp_path / "record", KEY | {"driver": "581"})


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
def test_the_interval_chosen_is_the_smallest_that_meets_the_slo_and_fits(it: Costs, slo: float, available: int) -> None:
    every = range(1, it.none + 1)
    meets = [i for i in every if it.time(i) <= slo]
    fits = [i for i in every if it.plan(i).device_pages <= available]
    assert meeting(it, slo) == (meets[0] if meets else None)
    assert fitting(it, available) == (fits[-1] if fits else None)
    chosen = choose(it, slo, available)
    both = [i for i in meets if i in fits]
    if both:
        assert chosen.interval == both[0]
        assert chosen.slo <= slo
    else:
        assert chosen.interval is None
        if meets and fits and len(set(it.pages)) == 1:
            again = choose(it, chosen.slo, available)
            assert again.interval is not None, "the nearest SLO works"
            assert chosen.pages is not None
            assert choose(it, slo, chosen.pages).interval is not None, "and so does the nearest budget"


def test_time_at_an_interval_is_the_closed_form() -> None:
    it = Costs((10,) * 32, seconds=0.064, page_seconds=0.0008)  # a layer computes in 2 ms and is copied in 8
    assert it.time(it.none) == 0.064
    assert it.time(2) == pytest.approx(16 * 0.008)
    assert it.time(4) == pytest.approx(0.064)
    assert it.time(1) == pytest.approx(32 * 0.008)
    assert meeting(it, 0.064) == 4
    assert meeting(it, 0.0639) is None
    assert meeting(it, 0.2) == 2
    assert it.plan(40) == it.plan(it.none)
    assert at_interval(it.pages, 4).steady(Fraction(4)).time == 32
    with pytest.raises(ValueError, match="interval"):
        it.time(0)


def test_prefill_hides_more_than_decode() -> None:
    """i_prefill <= i_decode: more compute for the same copies (ACCEPTANCE, phases)."""
    decode, prefill = Costs((10,) * 32, 0.064, 0.0008), Costs((10,) * 32, 0.64, 0.0008)
    for looser in (1.0, 1.1, 1.5, 3.0):
        slower, faster = meeting(decode, 0.064 * looser), meeting(prefill, 0.64 * looser)
        assert slower is not None
        assert faster is not None
        assert faster <= slower
