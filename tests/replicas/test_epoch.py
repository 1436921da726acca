"""Epochs, their two phases, and who is alive: no store, no process, a clock of the test's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.hooks.replicas.epoch import Epoch, Fence, Phase, Preparation, Verdict
from ballonet.hooks.replicas.errors import StaleEpoch
from ballonet.hooks.replicas.liveness import Beat, Watch, limit
from ballonet.offload.policy.tuning import DEFAULT

from ..tuned import Clock

EPOCH = Epoch(3, ((2, 0, 5), (1,)), (((0, 4), (4, 8), (8, 12)), ((0, 12),)), beside=((5, 1),))
TUNING = replace(DEFAULT.replicas, silent=1.0, iterations=5)


def test_an_epoch_has_links_within_groups_and_beside_them() -> None:
    assert EPOCH.members == (0, 1, 2, 5)
    assert EPOCH.links == ((0, 2), (0, 5), (1, 5), (2, 5))
    assert [EPOCH.peers(member) for member in (0, 1, 2, 5, 7)] == [(2, 5), (5,), (0, 5), (0, 1, 2), ()]
    assert Epoch.decode(EPOCH.encode()) == EPOCH


@pytest.mark.parametrize(
    ("groups", "spans", "beside", "why"),
    [
        (((0, 1),), (((0, 4),),), (), "has spans"),
        (((0, 1), (1,)), (((0, 2), (2, 4)), ((0, 4),)), (), "twice"),
        (((0,),), (((0, 4),),), ((0, 9),), "a link to nobody"),
    ],
)
def test_what_is_no_epoch_is_refused(
    groups: tuple[tuple[int, ...], ...],
    spans: tuple[tuple[tuple[int, int], ...], ...],
    beside: tuple[tuple[int, int], ...],
    why: str,
) -> None:
    with pytest.raises(ValueError, match=why):
        Epoch(1, groups, spans, beside)


def test_a_fence_only_goes_forward() -> None:
    fence = Fence(4)
    assert [fence.judge(epoch) for epoch in (3, 4, 5)] == [Verdict.BEHIND, Verdict.CURRENT, Verdict.AHEAD]
    fence.advance(6)
    assert fence.judge(5) is Verdict.BEHIND
    for late in (5, 6):
        with pytest.raises(StaleEpoch, match=f"epoch {late} is over, epoch 6 is in force"):
            fence.advance(late)
    assert fence.now == 6


def test_an_epoch_is_committed_once_all_are_ready() -> None:
    preparation = Preparation(EPOCH, until=10.0)
    for member in (0, 1, 2, 2, 9):
        preparation.ready(member)
        assert preparation.decide(9.0) is Phase.WAITING
    preparation.ready(5)
    assert preparation.decide(11.0) is Phase.COMMIT
    preparation.failed(0, "is dead")
    assert preparation.decide(12.0) is Phase.COMMIT  # what is decided was told, and stays so


def test_an_epoch_is_discarded_if_one_fails_or_does_not_answer() -> None:
    preparation = Preparation(EPOCH, until=10.0)
    preparation.failed(9, "is no member")
    assert preparation.decide(0.0) is Phase.WAITING
    preparation.failed(2, "has no pages")
    assert preparation.decide(0.0) is Phase.DISCARD
    assert preparation.reason == "replica 2: has no pages"
    for member in EPOCH.members:
        preparation.ready(member)
    assert preparation.decide(0.0) is Phase.DISCARD

    late = Preparation(EPOCH, until=10.0)
    late.ready(0)
    late.ready(5)
    assert late.decide(9.9) is Phase.WAITING
    assert late.decide(10.0) is Phase.DISCARD
    assert late.reason == "no answer in time of replica 1, replica 2"


@given(st.floats(0, 1e6, allow_nan=False), st.floats(0, 1e6, allow_nan=False), st.integers(0, 2**60))
def test_a_beat_arrives_as_it_was_sent(longest: float, expected: float, count: int) -> None:
    beat = Beat(count, longest, expected)
    assert Beat.decode(beat.encode()) == beat


def test_the_limit_is_a_second_or_five_iterations() -> None:
    assert limit(Beat(3), TUNING) == 1.0
    assert limit(Beat(3, longest=0.1), TUNING) == 1.0
    assert limit(Beat(3, longest=0.5), TUNING) == 2.5
    assert limit(Beat(3, longest=0.1, expected=0.8), TUNING) == 4.0


def watched(clock: Clock) -> Watch:
    watch = Watch(clock, TUNING)
    for member in (1, 2):
        watch.add(member)
    return watch


def dies(watch: Watch, clock: Clock, beats: dict[int, Beat], every: float, until: float) -> float | None:
    """When a member is dead, looked at so often; None: not until then."""
    while clock.now < until:
        clock.now += every
        if watch.look(beats):
            return round(clock.now, 3)
    return None


def test_who_stands_still_is_dead_and_who_goes_on_is_not() -> None:
    clock = Clock()
    watch = watched(clock)
    dead = {}
    for count in range(1, 40):
        clock.now += 0.125
        for member in watch.look({1: Beat(count), 2: Beat(min(count, 5))}):
            dead.setdefault(member, round(clock.now, 3))
    assert dead == {2: 1.75}  # the last change was at 0.625, and 1.625 is not more than a second later
    watch.remove(2)
    assert watch.look({1: Beat(100), 2: Beat(5)}) == ()


def test_a_member_that_never_beats_is_dead() -> None:
    clock = Clock()
    watch = watched(clock)
    assert dies(watch, clock, {}, 0.125, 10.0) == 1.125


def test_a_long_iteration_that_was_announced_is_no_death() -> None:
    clock = Clock()
    watch = watched(clock)
    watch.remove(1)
    assert dies(watch, clock, {2: Beat(1, 0.1, expected=3.0)}, 0.125, 15.125) is None
    assert dies(watch, clock, {2: Beat(1, 0.1, expected=3.0)}, 0.125, 20.0) == 15.25


def test_time_in_which_the_watcher_stood_still_counts_for_nobody() -> None:
    clock = Clock()
    watch = watched(clock)
    clock.now += 100.0
    assert watch.look({}) == ()  # half a second counts
    assert watch.look({1: Beat(1)}) == ()
    clock.now += 0.4
    assert watch.look({1: Beat(1)}) == ()
    clock.now += 0.4
    assert watch.look({1: Beat(1)}) == (2,)


def test_a_watcher_that_always_looks_seldom_sees_deaths_too() -> None:
    clock = Clock()
    watch = watched(clock)
    assert dies(watch, clock, {}, 5.0, 100.0) == 15.0
