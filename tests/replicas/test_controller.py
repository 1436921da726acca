"""The controller through a burst: when replicas drop and restore, and what becomes of requests."""

from __future__ import annotations

from collections import Counter

import pytest

from ballonet.offload.policy.replicas.groups import Span
from ballonet.offload.policy.replicas.protocol import (
    Alone,
    Arrived,
    Cancel,
    Commit,
    Decline,
    Discard,
    Dispatch,
    Event,
    Exchanged,
    Finished,
    Hold,
    Left,
    Lost,
    Prepare,
    Prepared,
    Reason,
    Recompute,
    Refuse,
    StartRestore,
)

from .played import ONES, PAIRS, Cost, Played, dropped, preparing, pulling, restoring


def test_a_burst_drops_and_what_follows_restores() -> None:
    played = Played()
    prepare = played.the(Prepare, played.burst())
    assert {group.members for group in prepare.groups} == PAIRS
    assert {group.spans for group in prepare.groups} == {(Span(0, 6), Span(6, 12))}
    assert (prepare.pulls, played.groups()) == ((), ONES)  # nothing is dropped yet
    *others, last = [played.tell(Prepared, prepare.epoch, member) for member in (2, 0, 3, 1)]
    assert others == [[], [], []]
    assert last == [Commit(prepare.epoch)]
    assert played.groups() == PAIRS
    played.settled()

    restore = played.the(Prepare, played.calm())
    assert {group.members for group in restore.groups} == ONES
    start = played.all_prepared()
    assert [*map(type, start)] == [StartRestore]
    assert played.pulls(0, start) == [(layer, 1) for layer in range(6, 12)]
    assert played.pulls(3, start) == [(layer, 2) for layer in range(6)]
    assert played.groups() == PAIRS  # a pipeline, until all layers are there
    assert played.all_restored() == [Commit(restore.epoch)]
    assert played.groups() == ONES


def test_requests_that_run_go_into_the_new_group_and_new_ones_start_there_during_the_exchange() -> None:
    played = preparing()
    before = played.running(0) | played.running(1)
    played.all_prepared()
    assert played.running(0, 1) == before
    name = played.arrive(100, 10)
    assert played.where[name] in [(played.epoch(0), (0, 1)), (played.epoch(2), (2, 3))]


def test_a_second_level_merges_the_pairs() -> None:
    """In each pair a long request runs and one waits, which four replicas have room for."""
    played = dropped()
    played.flood()
    assert not played.of(Prepare, played.alive(9.8, used=600, free=5, pending=60))  # it settles first
    assert not played.of(Prepare, played.alive(5.0, used=600, free=5, pending=60))  # and nothing grows
    prepare = played.the(Prepare, played.alive(0.1, used=600, free=5, pending=63))
    assert [group.members for group in prepare.groups] == [(0, 2, 1, 3)]
    assert prepare.pulls == ()
    played.all_prepared()


def test_a_drop_that_does_not_help_is_declined_with_what_was_predicted() -> None:
    """The gate: prompts take long to compute, and what runs ends first."""
    played = Played(cost=Cost(token=1.0, step=1e-6))
    decline = played.the(Decline, played.burst())
    assert decline.reason is Reason.NO_GAIN
    assert decline.verdict is not None
    assert decline.verdict.dropped > decline.verdict.kept > 0
    assert not played.alive(4.8, used=600, free=5, pending=102)  # and is not asked again at each look
    assert played.alive(0.5, used=600, free=5, pending=102) == [decline]


def test_one_replica_declines_as_there_is_no_plan() -> None:
    assert Played(1).burst() == [Decline(Reason.NO_PLAN)]


def test_a_load_that_finds_room_does_not_drop() -> None:
    played = Played()
    played.load(used=690, free=10, pending=9)
    assert not played.tick()


def test_nobody_drops_before_all_have_told_their_load() -> None:
    played = Played()
    played.join(9)
    for _ in range(8):
        played.arrive(4600, 600)
    played.load(used=600, free=5, pending=102, members=range(4))
    assert not played.tick()
    played.load(used=600, free=5, pending=102)
    assert isinstance(played.tick()[0], Prepare | Decline)


def test_the_burst_goes_on_while_layers_are_pulled() -> None:
    """The restore is discarded, and the pairs stay; a drop need not wait for that."""
    played = pulling()
    played.alive(10.0)
    epoch = played.proposed
    found = [each for each in played.flood() if not isinstance(each, Dispatch)]
    assert [*map(type, found)] == [Discard, Prepare]
    assert found[0] == Discard(epoch, Reason.OVERLOAD)
    assert played.groups() == PAIRS


def test_groups_part_only_once_their_kv_is_exchanged() -> None:
    played = preparing()
    old = [played.epoch(member) for member in range(4)]
    played.all_prepared()
    played.finish_all()
    for member in range(4):
        played.tell(Exchanged, old[member], member)
    assert not played.alive(20.0)
    for member in range(4):
        played.tell(Exchanged, played.epoch(member), member)
    assert played.of(Prepare, played.alive(11.0))


def test_a_request_that_fits_no_replica_keeps_its_group() -> None:
    """6,000 tokens: more than a replica has when nothing is dropped."""
    played = dropped()
    played.finish_all()
    name = played.arrive(5900, 100)
    where = played.where[name]
    prepare = played.the(Prepare, played.alive(15.0))
    assert where is not None
    assert {member for group in prepare.groups for member in group.members}.isdisjoint(where[1])
    played.all_prepared()
    late = played.arrive(5900, 100)  # comes while the other group pulls, and goes there
    assert played.where[late] is not None
    (discard,) = played.all_restored()
    assert discard == Discard(prepare.epoch, Reason.NO_ROOM)


def test_kv_of_each_request_goes_home_with_it() -> None:
    played = restoring()
    names = [played.arrive(1000, 100) for _ in range(6)]
    played.all_prepared()
    commit = played.the(Commit, played.all_restored())
    assert {name for name, _ in commit.homes} == {*names}
    counts = Counter(member for _, member in commit.homes)
    assert sorted(counts.values()) == [1, 1, 2, 2]
    assert counts[0] + counts[1] == 3
    for name, member in commit.homes:
        assert played.where[name] == (commit.epoch, (member,))


def test_a_request_is_held_until_there_is_a_replica() -> None:
    played = Played(0)
    name = played.arrive(10, 5)
    assert played.log == [Hold(name)]
    played.log.clear()
    played.join(0)
    assert played.log == [Alone(1, 0), Dispatch(name, 1, (0,))]


def test_a_request_that_no_group_can_ever_hold_is_refused() -> None:
    played = Played()
    name = played.arrive(5600, 1)
    assert played.log[-1] == Refuse(name, Reason.TOO_LONG)
    fits = played.arrive(5599, 1)
    assert fits in played.where


def test_a_request_that_is_here_already_is_an_error() -> None:
    played = Played()
    name = played.arrive(10, 5)
    with pytest.raises(ValueError, match="has arrived already"):
        played.controller.on(Arrived(played.at, name, 10, 5))
    with pytest.raises(ValueError, match="a prompt of 0 tokens"):
        played.controller.on(Arrived(played.at, "empty", 0, 5))


def test_an_event_that_is_none_is_an_error() -> None:
    with pytest.raises(TypeError, match="no event"):
        Played().controller.on(Event(0.0))


def test_a_request_that_kills_its_replicas_is_refused() -> None:
    played = Played(1)
    name = played.arrive(10, 5)
    for _ in range(5):
        played.tell(Lost, 0)
        played.join(0)
        assert played.of(Recompute)[-1] == Recompute((name,), played.epoch(0), (0,))
    assert played.tell(Lost, 0) == [Refuse(name, Reason.LIVES)]


def test_a_client_that_leaves_has_its_request_cancelled_on_all_stages() -> None:
    played = dropped()
    name = min(played.running(0, 1))
    assert played.tell(Left, name) == [Cancel(name, played.epoch(0), (0, 1))]
    assert not played.tell(Left, name)
    assert not played.tell(Finished, name)
    held = Played(0)
    assert not held.on(Left(held.at, held.arrive(10, 5)))


def test_a_replica_that_joins_is_a_new_epoch_and_takes_requests() -> None:
    played = dropped()
    before = played.controller.epoch
    assert played.join(9)[0] == Alone(before + 1, 9)
    assert played.groups() == {*PAIRS, (9,)}
    assert played.arrive(1000, 10) in played.running(9)
