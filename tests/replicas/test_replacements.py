"""When lost replicas are replaced."""

from __future__ import annotations

from ballonet.offload.policy.replicas.processes import Replacements
from ballonet.offload.policy.tuning import Replicas

TUNING = Replicas(starts=3, steady=60.0, start_wait=0.5, longest_wait=4.0)


def test_who_is_lost_is_replaced_at_once() -> None:
    ranks = Replacements(2, TUNING)
    assert ranks.due(0.0) == []  # those are started by whoever made this
    ranks.joined(1, 10.0)
    assert ranks.ended(1, 100.0) == 0.0
    assert ranks.due(100.0) == [1]
    assert ranks.due(100.0) == []


def test_who_ended_while_it_joined_is_no_member() -> None:
    ranks = Replacements(2, TUNING)
    assert ranks.ended(0, 1.0) is None
    assert not ranks.joined(0, 1.1)
    assert ranks.joined(1, 1.2)
    assert not ranks.joined(1, 1.3), "it has joined"
    assert ranks.ended(1, 2.0) == 0.0
    assert not ranks.joined(1, 2.1), "its process has ended"
    assert ranks.due(2.2) == [1]
    assert ranks.joined(1, 2.3)


def test_who_is_lost_soon_again_and_again_is_replaced_later_each_time() -> None:
    ranks, at, waits = Replacements(1, TUNING), 0.0, []
    for _ in range(5):
        ranks.joined(0, at)
        at += 1.0
        wait = ranks.ended(0, at)
        assert wait is not None
        waits.append(wait)
        if wait:
            assert ranks.due(at + wait - 0.01) == []
        at += wait
        assert ranks.due(at) == [0]
    assert waits == [0.0, 2.0, 4.0, 4.0, 4.0]
    ranks.joined(0, at)
    assert ranks.ended(0, at + 60.0) == 0.0  # it has served for a while
    assert ranks.due(at + 60.0) == [0]


def test_a_rank_that_never_had_a_replica_stays_empty() -> None:
    ranks = Replacements(2, TUNING)
    ranks.joined(1, 1.0)
    assert ranks.ended(0, 2.0) is None
    assert ranks.due(1000.0) == []
    assert ranks.ended(1, 3.0) == 0.0
    assert ranks.due(3.0) == [1]


def test_a_rank_that_had_one_is_tried_again_a_few_times() -> None:
    ranks, at = Replacements(1, TUNING), 0.0
    ranks.joined(0, at)
    assert ranks.ended(0, 100.0) == 0.0
    assert ranks.due(100.0) == [0]
    assert ranks.ended(0, 101.0) == 1.0
    assert (ranks.due(101.0), ranks.due(102.0), ranks.expected) == ([], [0], True)
    assert ranks.ended(0, 103.0) == 2.0
    assert ranks.due(105.0) == [0]
    assert (ranks.ended(0, 106.0), ranks.due(1000.0), ranks.expected) == (None, [], False)


def test_starts_that_failed_do_not_count_once_one_has_joined() -> None:
    ranks = Replacements(1, TUNING)
    ranks.joined(0, 0.0)
    for at in (100.0, 300.0):
        assert ranks.ended(0, at) == 0.0
        for failed in (1, 2):
            assert ranks.due(at + 20.0 * failed) == [0]
            assert ranks.ended(0, at + 20.0 * failed) == float(failed)
        assert ranks.due(at + 60.0) == [0]
        ranks.joined(0, at + 60.0)


def test_without_ranks_nothing_is_replaced() -> None:
    assert Replacements(0, TUNING).ended(3, 0.0) is None
    assert not Replacements(0, TUNING).expected
