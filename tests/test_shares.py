"""Who has how much of a shared budget: never more than there is, no floor is broken, nobody starves, nothing flaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ballonet.offload.policy.shares import Sharer, Sharing, shares

TUNING = Sharing(dwell=2.0, margin=16)
TOTAL = 1600


@st.composite
def processes(draw: st.DrawFn, rested: bool = False) -> list[Sharer]:
    """Some whose parts and floors fit in the total."""
    count = draw(st.integers(1, 5))
    cuts = sorted(draw(st.lists(st.integers(0, TOTAL), min_size=count, max_size=count)))
    parts = [high - low for low, high in zip([0, *cuts], cuts, strict=False)]
    sizes, age = st.integers(0, 2 * TOTAL), st.just(10.0) if rested else st.floats(0, 10)
    return [
        Sharer(
            part,
            draw(st.integers(0, part)),
            draw(st.just(0) | sizes),
            draw(st.integers(0, min(part, TOTAL // count))),
            draw(st.integers(0, 2)),
            draw(age),
            tuple(zip(draw(st.lists(st.integers(0, TOTAL), max_size=3)), (0.0, 1.0, 4.0), strict=False)),
        )
        for part in parts
    ]


def after(members: Sequence[Sharer], parts: Sequence[int]) -> list[Sharer]:
    """The same processes with those parts, who use what they have use for as far as it goes."""
    sharers = list[Sharer]()
    for member, part in zip(members, parts, strict=True):
        needed = max(member.used, member.wanted)
        sharers.append(replace(member, part=part, used=min(part, needed), wanted=needed if needed > part else 0))
    return sharers


@given(processes(), st.integers(0, 2 * TOTAL))
def test_together_they_never_have_more_than_the_total_or_than_before(members: list[Sharer], total: int) -> None:
    before, parts = sum(member.part for member in members), shares(total, members, TUNING)
    assert sum(parts) <= max(total, before)
    if before > total:
        assert all(part <= member.part for part, member in zip(parts, members, strict=True)), "it is lowered first"
        floors = sum(member.floor for member in members)
        assert sum(parts) <= max(total, floors)


@given(processes())
def test_floors_are_kept_and_only_who_wants_is_raised(members: list[Sharer]) -> None:
    for part, member in zip(shares(TOTAL, members, TUNING), members, strict=True):
        assert part >= min(member.part, member.floor)
        assert part <= max(member.part, member.wanted)


@given(processes(rested=True))
def test_nobody_starves(members: list[Sharer]) -> None:
    """Who wants more has half of an equal share at the least, however little it lacks."""
    parts = shares(TOTAL, members, TUNING)
    half, floors = TOTAL // (2 * len(members)), sum(member.floor for member in members)
    for part, member in zip(parts, members, strict=True):
        if member.wanted > member.part and floors <= TOTAL // 2:
            assert part >= min(member.wanted, half) - len(members)


@given(processes(rested=True))
def test_shares_that_came_out_stay(members: list[Sharer]) -> None:
    """Two that are busy do not take from each other what the other took before."""
    first = after(members, shares(TOTAL, members, TUNING))
    second = after(first, shares(TOTAL, first, TUNING))
    assert list(shares(TOTAL, second, TUNING)) == [member.part for member in second]


def test_free_bytes_go_first_and_then_idle_ones() -> None:
    asks, idle, busy = Sharer(300, 300, 500), Sharer(500, 100), Sharer(600, 600)
    assert shares(TOTAL, [asks, idle, busy], TUNING) == (500, 500, 600), "200 are free"
    assert shares(1400, [asks, idle, busy], TUNING) == (500, 300, 600)
    low = replace(idle, part=400, priority=-1)
    assert shares(1600, [asks, replace(idle, part=500), low], TUNING) == (500, 500, 400)
    assert shares(1200, [asks, replace(idle, part=500), low], TUNING) == (500, 500, 200), "the lowest priority gives"


def test_of_equals_what_is_missed_least_is_given_first_whoever_has_it() -> None:
    asks = Sharer(400, 400, 700)
    one = Sharer(600, 100, prices=((50, 0.0), (200, 2.0), (250, 9.0)))
    two = Sharer(600, 300, prices=((100, 0.0), (200, 5.0)))
    assert shares(1600, [asks, one, two], TUNING) == (700, 400, 500), "all that costs nothing, then the cheapest"
    assert shares(1600, [asks, replace(one, priority=1), two], TUNING) == (700, 600, 300), "but priority goes first"
    silent = replace(one, prices=())
    assert shares(1600, [asks, silent, two], TUNING) == (700, 600, 300), "who says nothing gives last"


def test_a_part_that_was_just_raised_is_not_idle() -> None:
    asks, idle = Sharer(800, 800, 1000), Sharer(800, 0, rested=1.0)
    assert shares(TOTAL, [asks, idle], TUNING) == (800, 800)
    assert shares(TOTAL, [asks, replace(idle, rested=2.0)], TUNING) == (1000, 600)


def test_two_that_want_everything_have_half_each_and_nothing_moves_for_little() -> None:
    want = Sharer(1600, 1600, 3000)
    assert shares(TOTAL, [want, Sharer(0, 0, 3000)], TUNING) == (800, 800)
    assert shares(TOTAL, [replace(want, part=850), Sharer(750, 750, 3000)], TUNING) == (850, 750)
    assert shares(TOTAL, [replace(want, part=1590), Sharer(10, 10, 20)], TUNING) == (1580, 20), (
        "but who has next to none"
    )


def test_priority_has_what_others_are_not_due() -> None:
    want = Sharer(0, 0, 3000)
    assert shares(TOTAL, [want, replace(want, priority=1)], TUNING) == (400, 1200)
    assert shares(TOTAL, [replace(want, floor=700), replace(want, priority=1)], TUNING) == (700, 900)
