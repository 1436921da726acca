"""When a place gets a new replica."""

from __future__ import annotations

from ballonet.offload.policy.replicas.replacing import Replacements
from ballonet.offload.policy.tuning import Replicas

TUNING = Replicas(starts=3, steady=60.0, start_wait=0.5, longest_wait=4.0)


def test_who_is_lost_is_replaced_at_once() -> None:
    places = Replacements(2, TUNING)
    assert places.due(0.0) == []  # those are started by whoever made this
    places.joined(1, 10.0)
    assert places.ended(1, 100.0) == 0.0
    assert places.due(100.0) == [1]
    assert places.due(100.0) == []


def test_who_is_lost_soon_again_and_again_is_replaced_later_each_time() -> None:
    places, at, waits = Replacements(1, TUNING), 0.0, []
    for _ in range(5):
        places.joined(0, at)
        at += 1.0
        wait = places.ended(0, at)
        assert wait is not None
        waits.append(wait)
        if wait:
            assert places.due(at + wait - 0.01) == []
        at += wait
        assert places.due(at) == [0]
    assert waits == [0.0, 2.0, 4.0, 4.0, 4.0]
    places.joined(0, at)
    assert places.ended(0, at + 60.0) == 0.0  # it has served for a while
    assert places.due(at + 60.0) == [0]


def test_a_place_that_never_had_a_replica_stays_empty() -> None:
    places = Replacements(2, TUNING)
    places.joined(1, 1.0)
    assert places.ended(0, 2.0) is None
    assert places.due(1000.0) == []
    assert places.ended(1, 3.0) == 0.0
    assert places.due(3.0) == [1]


def test_a_place_that_had_one_is_tried_again_a_few_times() -> None:
    places, at = Replacements(1, TUNING), 0.0
    places.joined(0, at)
    assert places.ended(0, 100.0) == 0.0
    assert places.due(100.0) == [0]
    assert places.ended(0, 101.0) == 1.0
    assert (places.due(101.0), places.due(102.0), places.expected) == ([], [0], True)
    assert places.ended(0, 103.0) == 2.0
    assert places.due(105.0) == [0]
    assert (places.ended(0, 106.0), places.due(1000.0), places.expected) == (None, [], False)


def test_starts_that_failed_do_not_count_once_one_has_joined() -> None:
    places = Replacements(1, TUNING)
    places.joined(0, 0.0)
    for at in (100.0, 300.0):
        assert places.ended(0, at) == 0.0
        for failed in (1, 2):
            assert places.due(at + 20.0 * failed) == [0]
            assert places.ended(0, at + 20.0 * failed) == float(failed)
        assert places.due(at + 60.0) == [0]
        places.joined(0, at + 60.0)


def test_what_no_place_is_is_nothing() -> None:
    assert Replacements(0, TUNING).ended(3, 0.0) is None
    assert not Replacements(0, TUNING).expected
