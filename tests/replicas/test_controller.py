"""The controller through a burst, and every row of the fault matrix that it sees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from ballonet.offload.policy.replicas.actions import (
    Action,
    Alone,
    Cancel,
    Commit,
    Decline,
    Discard,
    Dispatch,
    Fence,
    Hold,
    Prepare,
    Recompute,
    Refuse,
    Rejoin,
    StartRestore,
)
from ballonet.offload.policy.replicas.events import (
    Arrived,
    Committed,
    Damaged,
    Event,
    Exchanged,
    Finished,
    Joined,
    Left,
    Load,
    Lost,
    Prepared,
    PrepareFailed,
    PullFailed,
    Reason,
    Restored,
    Suspected,
    Tick,
)
from ballonet.offload.policy.replicas.groups import Span

from .played import MEMORY, Cost, Played

PAIRS = {(0, 1), (2, 3)}
ONES = {(0,), (1,), (2,), (3,)}


def names_of(played: Played, *members: int) -> set[str]:
    return {each.name for each in played.controller.book.of(members)}


# A burst


def test_a_burst_drops_and_what_follows_restores() -> None:
    played = Played()
    (prepare,) = played.of(Prepare, played.burst())
    assert isinstance(prepare, Prepare)
    assert {group.members for group in prepare.groups} == PAIRS
    assert {group.spans for group in prepare.groups} == {(Span(0, 6), Span(6, 12))}
    assert (prepare.pulls, played.groups()) == ((), ONES)  # nothing is dropped yet
    *others, last = [played.on(Prepared(played.at, prepare.epoch, member)) for member in (2, 0, 3, 1)]
    assert others == [[], [], []]
    assert last == [Commit(prepare.epoch)]
    assert played.groups() == PAIRS
    assert played.controller.freed == 2 * 300 - 4 * 25
    played.settled()

    (restore,) = played.of(Prepare, played.calm())
    assert isinstance(restore, Prepare)
    assert {group.members for group in restore.groups} == ONES
    (start,) = played.all_prepared()
    assert isinstance(start, StartRestore)
    by_member = {member: [each for each in start.pulls if each.member == member] for member in range(4)}
    assert [(each.layer, each.source) for each in by_member[0]] == [(layer, 1) for layer in range(6, 12)]
    assert [(each.layer, each.source) for each in by_member[3]] == [(layer, 2) for layer in range(6)]
    assert played.groups() == PAIRS  # a pipeline, until all layers are there
    assert played.all_restored() == [Commit(restore.epoch)]
    assert played.groups() == ONES
    assert played.controller.freed == 0


def test_requests_that_run_go_into_the_new_group_and_new_ones_start_there_during_the_exchange() -> None:
    played = Played()
    played.burst()
    before = names_of(played, 0) | names_of(played, 1)
    played.all_prepared()
    assert names_of(played, 0, 1) == before
    name = played.arrive(100, 10)
    assert played.where[name] in [(played.epoch(0), (0, 1)), (played.epoch(2), (2, 3))]


def test_a_second_level_merges_the_pairs() -> None:
    """In each pair a long request runs and one waits, which four replicas have room for."""
    played = Played()
    played.drop()
    played.flood()
    assert not played.of(Prepare, played.alive(9.8, used=600, free=5, pending=60))  # it settles first
    assert not played.of(Prepare, played.alive(5.0, used=600, free=5, pending=60))  # and nothing grows
    (prepare,) = played.of(Prepare, played.alive(0.1, used=600, free=5, pending=63))
    assert isinstance(prepare, Prepare)
    assert [group.members for group in prepare.groups] == [(0, 2, 1, 3)]
    assert prepare.pulls == ()
    played.all_prepared()
    assert played.controller.freed == 3 * 300 - 4 * 25


def test_a_drop_that_does_not_help_is_declined_with_what_was_predicted() -> None:
    """The gate: prompts take long to compute, and what runs ends first."""
    played = Played(cost=Cost(token=1.0, step=1e-6))
    (decline,) = played.of(Decline, played.burst())
    assert isinstance(decline, Decline)
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


def test_the_burst_goes_on_while_layers_are_pulled() -> None:
    """The restore is discarded, and the pairs stay; a drop need not wait for that."""
    played = Played()
    played.drop()
    played.calm()
    played.all_prepared()
    played.alive(10.0)
    assert isinstance(played.prepared, Prepare)
    epoch = played.prepared.epoch
    discard, prepare = [each for each in played.flood() if not isinstance(each, Dispatch)]
    assert discard == Discard(epoch, Reason.OVERLOAD)
    assert isinstance(prepare, Prepare)
    assert played.groups() == PAIRS


def test_a_request_that_fits_no_replica_keeps_its_group() -> None:
    """6,000 tokens: more than a replica has when nothing is dropped."""
    played = Played()
    played.drop()
    played.finish_all()
    name = played.arrive(5900, 100)
    where = played.where[name]
    (prepare,) = played.of(Prepare, played.alive(15.0))
    assert isinstance(prepare, Prepare)
    assert where is not None
    assert {member for group in prepare.groups for member in group.members}.isdisjoint(where[1])
    played.all_prepared()
    late = played.arrive(5900, 100)  # comes while the other group pulls, and goes there
    assert played.where[late] is not None
    (discard,) = played.all_restored()
    assert discard == Discard(prepare.epoch, Reason.NO_ROOM)


def test_kv_of_each_request_goes_home_with_it() -> None:
    played = Played()
    played.drop()
    played.calm()
    names = [played.arrive(1000, 100) for _ in range(6)]
    played.all_prepared()
    (commit,) = played.all_restored()
    assert isinstance(commit, Commit)
    assert {name for name, _ in commit.homes} == {*names}
    counts = Counter(member for _, member in commit.homes)
    assert sorted(counts.values()) == [1, 1, 2, 2]
    assert counts[0] + counts[1] == 3
    for name, member in commit.homes:
        assert played.where[name] == (commit.epoch, (member,))


# Requests


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
        played.on(Lost(played.at, 0))
        played.join(0)
        assert played.of(Recompute)[-1] == Recompute((name,), played.epoch(0), (0,))
    assert played.on(Lost(played.at, 0)) == [Refuse(name, Reason.LIVES)]


# The fault matrix


def broken(played: Played, actions: list[Action], lost: set[str]) -> None:
    """The pair of 0 and 1 is no more: its requests are computed anew, the other pair goes on as it was."""
    assert {
        name for each in played.of(Recompute, actions) if isinstance(each, Recompute) for name in each.requests
    } == lost
    assert (2, 3) in played.groups()
    assert (0, 1) not in played.groups()


def test_sigkill_is_heard_by_the_link_and_then_by_the_store() -> None:
    """In decode or prefill: whoever is suspected gets nothing; the other reads what it dropped from its backing, and
    pulls it from the other pair."""
    played = Played()
    played.drop()
    lost, epoch = names_of(played, 0, 1), played.epoch(0)
    actions = played.on(Suspected(played.at, epoch, 0, 1))
    broken(played, actions, lost)
    new = played.epoch(0)
    assert actions[:2] == [Alone(new, 0), Alone(new, 1)]
    starts = [each for each in actions if isinstance(each, StartRestore)]
    assert [[(pull.member, pull.layer, pull.source) for pull in each.pulls] for each in starts] == [
        [(0, layer, 3) for layer in range(6, 12)],
        [(1, layer, 2) for layer in range(6)],
    ]
    assert not names_of(played, 1)
    assert not played.on(Suspected(played.at, epoch, 1, 0))  # of an epoch that is no more
    assert not played.on(Lost(played.at, 1))  # it had nothing any more
    assert played.groups() == {(0,), (2, 3)}


def test_sigkill_is_heard_by_the_store_first() -> None:
    played = Played()
    played.drop()
    lost, epoch = names_of(played, 0, 1), played.epoch(0)
    actions = played.on(Lost(played.at, 1))
    broken(played, actions, lost)
    assert played.groups() == {(0,), (2, 3)}
    assert not played.on(Suspected(played.at, epoch, 0, 1))


def test_sigkill_of_a_replica_on_its_own() -> None:
    played = Played()
    names = {played.arrive(100, 10) for _ in range(8)}
    lost = names_of(played, 2)
    actions = played.on(Lost(played.at, 2))
    assert {name for each in actions if isinstance(each, Recompute) for name in each.requests} == lost
    assert all(2 not in each.members for each in actions if isinstance(each, Recompute))
    assert {*played.where} == names


@pytest.mark.parametrize("member", range(4))
def test_sigkill_in_prepare_discards_the_epoch(member: int) -> None:
    played = Played()
    played.burst()
    assert isinstance(played.prepared, Prepare)
    epoch = played.prepared.epoch
    actions = played.on(Lost(played.at, member))
    assert actions[:2] == [Discard(epoch, Reason.LOST), Decline(Reason.LOST)]
    assert played.groups() == ONES - {(member,)}
    assert played.controller.freed == 0
    assert not played.on(Prepared(played.at, epoch, 0))  # fenced: its epoch is no more


def test_who_does_not_answer_in_prepare_has_the_epoch_discarded() -> None:
    played = Played()
    played.burst()
    assert isinstance(played.prepared, Prepare)
    epoch = played.prepared.epoch
    for member in (0, 1, 2):
        played.on(Prepared(played.at, epoch, member))
    assert not played.alive(9.9, used=600, free=100, pending=0)
    assert played.alive(0.3, used=600, free=100, pending=0) == [
        Discard(epoch, Reason.TIMEOUT),
        Decline(Reason.TIMEOUT),
    ]
    assert played.groups() == ONES
    assert not played.on(Prepared(played.at, epoch, 3))


def test_a_link_that_cannot_be_formed_discards_the_epoch() -> None:
    played = Played()
    played.burst()
    assert isinstance(played.prepared, Prepare)
    epoch = played.prepared.epoch
    assert played.on(Suspected(played.at, epoch, 0, 1)) == [Discard(epoch, Reason.LINK), Decline(Reason.LINK)]
    assert played.groups() == ONES


def test_sigkill_in_the_exchange() -> None:
    """The requests of that group are computed anew, the other goes on."""
    played = Played()
    played.burst()
    played.all_prepared()
    lost, other = names_of(played, 0, 1), names_of(played, 2, 3)
    broken(played, played.on(Lost(played.at, 1)), lost)
    assert other <= names_of(played, 2, 3)


@pytest.mark.parametrize("event", [Suspected, Lost])
def test_sigkill_in_the_pull(event: type[Event]) -> None:
    """The epoch is discarded; what the dead one held comes from the other pair, or from the backing."""
    for members, sources in ((4, {3}), (2, {None})):
        played = Played(members)
        played.drop()
        played.calm()
        played.all_prepared()
        assert isinstance(played.prepared, Prepare)
        epoch = played.prepared.epoch
        if event is Suspected:
            actions = played.on(Suspected(played.at, played.epoch(0), 0, 1))
        else:
            actions = played.on(Lost(played.at, 1))
        assert actions[0] == Discard(epoch, Reason.LINK if event is Suspected else Reason.LOST)
        pulls = [pull for each in actions if isinstance(each, StartRestore) for pull in each.pulls if pull.member == 0]
        assert {pull.source for pull in pulls} == sources
        assert not played.on(Restored(played.at, epoch, 0))
        assert played.controller.cluster.replicas[0].held == Span(0, 6)
        played.on(Restored(played.at, played.epoch(0), 0))
        assert played.controller.cluster.replicas[0].held == Span(0, 12)


def test_a_source_that_dies_is_replaced() -> None:
    """0 pulls from the pair of 2 and 3, and then from its backing."""
    played = Played()
    played.drop()
    played.on(Lost(played.at, 1))
    actions = played.on(Lost(played.at, 3))
    pulls = [pull for each in actions if isinstance(each, StartRestore) for pull in each.pulls if pull.member == 0]
    assert [(pull.layer, pull.source) for pull in pulls] == [(layer, None) for layer in range(6, 12)]


def test_a_source_that_drops_layers_is_replaced() -> None:
    """0 pulls from 2; then 2, 3 and 4 become a group, and other members hold what it needs."""
    played = Played(3)
    played.drop()
    played.join(3)
    played.join(4)
    played.join(5)
    played.settled()
    (start,) = [
        each for each in played.on(Lost(played.at, 1)) if isinstance(each, StartRestore) and each.pulls[0].member == 0
    ]
    assert {pull.source for pull in start.pulls} == {3}
    played.finish_all()
    played.alive(10.0)
    (prepare,) = played.of(Prepare, played.burst())
    assert isinstance(prepare, Prepare)
    (dropping,) = [group for group in prepare.groups if 3 in group.members]
    actions = played.all_prepared()
    again = [each for each in actions if isinstance(each, StartRestore)]
    assert again, "nobody told 0 to ask others"
    for each in again:
        for pull in each.pulls:
            assert pull.source is None or pull.layer in played.controller.cluster.replicas[pull.source].held
    assert dropping.size > 1


def test_sigstop_is_seen_by_the_count_of_iterations() -> None:
    """A replica that speaks while its count stands still is fenced; when it speaks again it joins empty."""
    played = Played()
    names = {played.arrive(100, 10) for _ in range(8)}
    lost, epoch = names_of(played, 3), played.epoch(3)
    found: list[Action] = []
    for _ in range(14):
        played.load(members=(0, 1, 2))
        found += played.on(Load(played.at, 3, epoch, 10, 690, 0, 1)) + played.tick()
    assert found[0] == Fence(3, Reason.HUNG)
    assert {name for each in found if isinstance(each, Recompute) for name in each.requests} == lost
    assert found.count(Rejoin(3)) == len(found) - len(played.of(Recompute, found)) - 1 > 0
    assert played.groups() == ONES - {(3,)}
    before = played.controller.epoch
    (alone, *_) = played.on(Joined(played.at, 3, MEMORY))
    assert alone == Alone(before + 1, 3)
    assert not names_of(played, 3)
    assert {*played.where} == names


def test_a_replica_that_says_nothing_is_dead_after_a_second() -> None:
    played = Played(2)
    found = []
    for _ in range(10):
        played.load(members=(0,))
        found += played.tick()
    assert found == []
    played.load(members=(0,))
    assert Fence(1, Reason.HUNG) in played.tick(0.2)


def test_a_hang_in_a_group_is_as_a_death() -> None:
    played = Played()
    played.drop()
    lost, found = names_of(played, 0, 1), []
    for _ in range(12):
        played.load(members=(0, 2, 3) if not found else (2, 3))
        found += played.tick()
    assert found[0] == Fence(1, Reason.HUNG)
    broken(played, found, lost)


def test_a_long_iteration_is_no_death() -> None:
    played = Played(1)
    played.load()
    for _ in range(9):
        played.tick()
    played.load()  # 0.9 s for one
    assert not played.tick(4.4)
    assert played.tick(0.3) == [Fence(0, Reason.HUNG)]


def test_a_controller_that_stood_still_blames_nobody() -> None:
    played = Played()
    played.burst()
    played.at += 30.0
    assert not played.on(Tick(played.at))
    assert played.groups() == ONES
    assert played.prepared is not None
    assert Fence(0, Reason.HUNG) in played.tick(1.2)


def test_a_link_lost_with_both_alive_dissolves_the_group_once() -> None:
    played = Played()
    played.drop()
    lost, epoch = names_of(played, 0, 1), played.epoch(0)
    broken(played, played.on(Suspected(played.at, epoch, 1, 0)), lost)
    assert not played.on(Suspected(played.at, epoch, 0, 1))
    assert not names_of(played, 0)  # doubted
    played.settled()
    for member in (0, 1):
        assert played.controller.cluster.replicas[member].held == Span(0, 12)
        assert not played.controller.cluster.replicas[member].doubted
    names = {played.arrive(4000, 100) for _ in range(2)}
    assert names_of(played, 0) & names


def test_requests_wait_where_everybody_is_doubted() -> None:
    played = Played(2)
    played.drop()
    epoch = played.epoch(0)
    played.on(Suspected(played.at, epoch, 0, 1))
    played.on(Lost(played.at, 0))
    assert {*played.where.values()} == {None}
    assert {each.request for each in played.log if isinstance(each, Hold)} == {*played.where}
    played.on(Committed(played.at, played.epoch(1), 1))
    assert None not in played.where.values()


def test_the_front_end_is_told_once_that_a_request_is_held() -> None:
    played = Played(3)
    played.drop()
    played.on(Suspected(played.at, played.epoch(0), 0, 1))
    for member in (0, 2):
        played.on(Lost(played.at, member))
    played.on(PullFailed(played.at, played.epoch(1), 1, Reason.LINK))
    holds = [each.request for each in played.log if isinstance(each, Hold)]
    assert {*played.where.values()} == {None}
    assert sorted(holds) == sorted(played.where)


@pytest.mark.parametrize("reason", [Reason.PAGES, Reason.HOST_MEMORY])
def test_no_pages_or_host_memory_is_a_typed_refusal_and_the_next_rung(reason: Reason) -> None:
    played = Played()
    played.burst()
    assert isinstance(played.prepared, Prepare)
    epoch = played.prepared.epoch
    played.on(Prepared(played.at, epoch, 0))
    assert played.on(PrepareFailed(played.at, epoch, 1, reason)) == [Discard(epoch, reason), Decline(reason)]
    assert played.groups() == ONES
    assert not played.alive(4.8, used=600, free=5, pending=102)
    (prepare,) = played.alive(0.5, used=600, free=5, pending=102)
    assert isinstance(prepare, Prepare)
    assert prepare.epoch > epoch


def test_a_replica_whose_file_changed_takes_no_part_in_drops() -> None:
    played = Played()
    played.burst()
    assert isinstance(played.prepared, Prepare)
    epoch = played.prepared.epoch
    actions = played.on(PrepareFailed(played.at, epoch, 1, Reason.FILE_CHANGED))
    assert actions[0] == Discard(epoch, Reason.FILE_CHANGED)
    (prepare,) = played.of(Prepare, played.alive(5.5, used=600, free=5, pending=102))
    assert isinstance(prepare, Prepare)
    assert sorted(member for group in prepare.groups for member in group.members) == [0, 2, 3]


def test_a_survivor_whose_file_changed_pulls_from_a_peer_or_ends() -> None:
    played = Played()
    played.drop()
    played.on(Lost(played.at, 1))
    played.on(Lost(played.at, 3))  # 0 and 2 are left, and read from their backing
    played.join(7)
    played.on(Committed(played.at, played.epoch(0), 0))
    (start,) = played.on(PullFailed(played.at, played.epoch(0), 0, Reason.FILE_CHANGED))
    assert isinstance(start, StartRestore)
    assert {pull.source for pull in start.pulls} == {7}
    played.finish_all()
    for _ in range(20):
        played.arrive(1000, 10)
    assert not names_of(played, 0)  # layers that it lacks can be read from nowhere yet
    assert played.on(PullFailed(played.at, played.epoch(0), 0, Reason.LINK))[0] == Fence(0, Reason.LINK)
    fenced = played.on(Lost(played.at, 7)) + played.on(PullFailed(played.at, played.epoch(2), 2, Reason.FILE_CHANGED))
    assert Fence(2, Reason.FILE_CHANGED) in fenced


def test_a_pull_that_fails_comes_from_the_backing() -> None:
    played = Played()
    played.drop()
    played.on(Lost(played.at, 1))
    (start,) = played.on(PullFailed(played.at, played.epoch(0), 0, Reason.LINK))
    assert isinstance(start, StartRestore)
    assert {pull.source for pull in start.pulls} == {None}


def test_a_pull_that_fails_in_preparation_discards_the_restore() -> None:
    played = Played()
    played.drop()
    played.calm()
    played.all_prepared()
    assert isinstance(played.prepared, Prepare)
    epoch = played.prepared.epoch
    assert played.on(PullFailed(played.at, epoch, 2, Reason.LINK)) == [Discard(epoch, Reason.LINK)]
    assert played.groups() == PAIRS


def test_kv_with_a_wrong_checksum_has_that_request_computed_anew() -> None:
    played = Played()
    played.burst()
    played.all_prepared()
    name = min(names_of(played, 2, 3))
    epoch = played.epoch(2)
    assert not played.on(Damaged(played.at, epoch - 1, 2, name))
    assert not played.on(Damaged(played.at, epoch, 0, name))  # none of its group's
    for _ in range(5):
        assert played.on(Damaged(played.at, epoch, 2, name)) == [Recompute((name,), epoch, (2, 3))]
    assert played.on(Damaged(played.at, epoch, 2, name)) == [
        Refuse(name, Reason.LIVES),
        Cancel(name, epoch, (2, 3)),
    ]


def test_a_client_that_leaves_has_its_request_cancelled_on_all_stages() -> None:
    played = Played()
    played.drop()
    name = min(names_of(played, 0, 1))
    assert played.on(Left(played.at, name)) == [Cancel(name, played.epoch(0), (0, 1))]
    assert not played.on(Left(played.at, name))
    assert not played.on(Finished(played.at, name))
    held = Played(0)
    assert not held.on(Left(held.at, held.arrive(10, 5)))


def test_a_replica_that_joins_is_a_new_epoch_and_takes_requests() -> None:
    played = Played()
    played.drop()
    before = played.controller.epoch
    assert played.join(9)[0] == Alone(before + 1, 9)
    assert played.groups() == {*PAIRS, (9,)}
    assert played.arrive(1000, 10) in names_of(played, 9)


def test_a_replica_that_joins_twice_was_lost_between() -> None:
    played = Played()
    played.drop()
    lost = names_of(played, 0, 1)
    actions = played.on(Joined(played.at, 1, MEMORY))
    broken(played, actions, lost)
    assert actions.index(Alone(played.epoch(1), 1)) > actions.index(Alone(played.epoch(0), 0))
    assert played.controller.cluster.replicas[1].held == Span(0, 12)


def test_who_does_not_take_up_its_epoch_is_fenced() -> None:
    """A replica whose count moves in the epoch before."""
    played = Played()
    played.burst()
    old = played.epoch(0)
    played.all_prepared()
    found = []
    for member in (1, 2, 3):
        played.on(Committed(played.at, played.epoch(member), member))
    for _ in range(102):
        played.load(members=(1, 2, 3))
        played.progress += 1
        found += played.on(Load(played.at, 0, old, 600, 5, 0, played.progress)) + played.tick()
    assert found[0] == Fence(0, Reason.BEHIND)


def test_nobody_drops_before_all_have_told_their_load() -> None:
    played = Played()
    played.join(9)
    for _ in range(8):
        played.arrive(4600, 600)
    played.load(used=600, free=5, pending=102, members=range(4))
    assert not played.tick()
    played.load(used=600, free=5, pending=102)
    assert isinstance(played.tick()[0], Prepare | Decline)


def test_nobody_pulls_from_a_replica_that_has_only_just_joined() -> None:
    played = Played(2)
    played.drop()
    played.on(Joined(played.at, 9, MEMORY))
    (start,) = [each for each in played.on(Lost(played.at, 1)) if isinstance(each, StartRestore)]
    assert {pull.source for pull in start.pulls} == {None}


def test_groups_part_only_once_their_kv_is_exchanged() -> None:
    played = Played()
    played.burst()
    old = [played.epoch(member) for member in range(4)]
    played.all_prepared()
    played.finish_all()
    for member in range(4):
        played.on(Exchanged(played.at, old[member], member))
    assert not played.alive(20.0)
    for member in range(4):
        played.on(Exchanged(played.at, played.epoch(member), member))
    assert played.of(Prepare, played.alive(11.0))


def test_answers_to_an_epoch_that_was_discarded_do_not_count_for_the_next() -> None:
    played = Played()
    played.burst()
    assert isinstance(played.prepared, Prepare)
    old = played.prepared.epoch
    played.on(PrepareFailed(played.at, old, 0, Reason.PAGES))
    played.alive(5.5, used=600, free=5, pending=102)
    assert played.prepared is not None
    assert [played.on(Prepared(played.at, old, member)) for member in range(4)] == [[]] * 4
    assert not played.on(PrepareFailed(played.at, old, 0, Reason.PAGES))
    assert played.groups() == ONES
    played.all_prepared()
    played.settled()
    played.calm()
    played.all_prepared()
    assert [played.on(Restored(played.at, old, member)) for member in range(4)] == [[]] * 4
    assert played.groups() == PAIRS


def test_what_was_said_in_an_old_epoch_changes_nothing() -> None:
    played = Played()
    old = played.epoch(0)
    played.drop()
    epoch = played.epoch(0)
    for event in (
        Load(played.at, 0, old, 700, 0, 700, 10**6),
        Committed(played.at, old, 0),
        Exchanged(played.at, old, 0),
        Restored(played.at, old, 0),
        Prepared(played.at, epoch, 0),
        PrepareFailed(played.at, epoch, 0, Reason.PAGES),
        PullFailed(played.at, old, 0, Reason.LINK),
        Suspected(played.at, old, 0, 1),
        Suspected(played.at, epoch, 0, 0),
        Lost(played.at, 77),
        PullFailed(played.at, old, 77, Reason.LINK),
        Suspected(played.at, epoch, 77, 0),
    ):
        assert played.on(event) == [], event
        load = played.controller.cluster.replicas[0].load
        assert load is not None
        assert load.pending == 0
    assert played.groups() == PAIRS
    assert played.on(Load(played.at, 77, epoch, 0, 0, 0, 1)) == [Rejoin(77)]


def test_an_exchange_that_does_not_end_dissolves_its_group() -> None:
    played = Played()
    played.burst()
    played.all_prepared()
    for member in (1, 2, 3):
        played.on(Exchanged(played.at, played.epoch(member), member))
    lost = names_of(played, 0, 1)
    assert not played.alive(59.8, used=600, free=100)
    broken(played, played.alive(0.4, used=600, free=100), lost)


def test_kv_that_does_not_come_home_is_computed_anew() -> None:
    """The link fails after the commit of a restore: both are on their own, those who have all their KV go on."""
    played = Played()
    played.drop()
    played.calm()
    for _ in range(8):
        played.arrive(1000, 100)
    played.all_prepared()
    (commit,) = played.all_restored()
    assert isinstance(commit, Commit)
    for member in (1, 2, 3):
        played.on(Exchanged(played.at, commit.epoch, member))
    lost, kept = names_of(played, 0), names_of(played, 1)
    actions = played.on(Suspected(played.at, commit.epoch, 0, 1))
    assert {name for each in actions if isinstance(each, Recompute) for name in each.requests} == lost
    assert kept <= names_of(played, 1)
    assert not [each for each in actions if isinstance(each, StartRestore)]  # all hold all layers


@pytest.mark.parametrize(
    "until",
    [
        lambda played: played.burst(),
        lambda played: (played.burst(), played.all_prepared()),
        lambda played: played.drop(),
        lambda played: (played.drop(), played.calm()),
        lambda played: (played.drop(), played.calm(), played.all_prepared()),
        lambda played: (played.drop(), played.calm(), played.all_prepared(), played.all_restored()),
    ],
    ids=["prepare", "exchange", "pipeline", "restore", "pull", "home"],
)
def test_all_replicas_die_in_every_phase_and_come_back(until: Callable[[Played], object]) -> None:
    played = Played()
    until(played)
    names = [played.arrive(500, 10) for _ in range(5)]
    for member in range(4):
        played.on(Lost(played.at, member))
    assert {*played.where.values()} == {None}
    assert played.prepared is None
    for member in range(4):
        played.join(member)
    assert None not in played.where.values()
    assert {*names} <= {*played.where}
