"""The controller, a function of events: when replicas drop and restore, what becomes of requests, and who is believed.

What replicas do with its actions, and which faults end how, is in test_faults.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from ballonet.offload.policy.replicas import protocol
from ballonet.offload.policy.replicas.groups import Span
from ballonet.offload.policy.replicas.protocol import (
    Alone,
    Cancel,
    Commit,
    Committed,
    Damaged,
    Decline,
    Discard,
    Dispatch,
    Exchanged,
    Fence,
    Finished,
    Hold,
    Joined,
    Left,
    Load,
    Lost,
    Prepare,
    Prepared,
    PrepareFailed,
    PullFailed,
    Reason,
    Recompute,
    Refuse,
    Restored,
    StartRestore,
    Suspected,
)

from .controller_scene import (
    FULL,
    MEMORY,
    ONES,
    PAIRS,
    TUNING,
    ControllerScene,
    Cost,
    dropped,
    exchanging,
    of_kind,
    preparing,
    pulling,
    pulls,
    recomputed,
    restoring,
    the_only,
)

# Drops and restores


def test_burst_is_answered_by_a_drop_and_calm_by_a_restore() -> None:
    scene = ControllerScene()
    prepare = the_only(Prepare, scene.burst())
    assert {group.members for group in prepare.groups} == PAIRS
    assert {group.spans for group in prepare.groups} == {(Span(0, 6), Span(6, 12))}
    assert (prepare.pulls, scene.groups) == ((), ONES), "nothing is dropped yet"
    *others, last = [scene.tell(Prepared, prepare.epoch, member) for member in (2, 0, 3, 1)]
    assert others == [[], [], []]
    assert last == [Commit(prepare.epoch)]
    assert scene.groups == PAIRS
    scene.settle()

    restore = the_only(Prepare, scene.calm())
    assert {group.members for group in restore.groups} == ONES
    start = scene.answer(Prepared)
    assert [*map(type, start)] == [StartRestore]
    assert pulls(0, start) == [(layer, 1) for layer in range(6, 12)]
    assert pulls(3, start) == [(layer, 2) for layer in range(6)]
    assert scene.groups == PAIRS, "a pipeline, until all layers are there"
    assert scene.answer(Restored) == [Commit(restore.epoch)]
    assert scene.groups == ONES


def test_running_requests_go_into_the_new_group_and_new_ones_start_there_during_the_exchange() -> None:
    scene = preparing()
    before = scene.running(0) | scene.running(1)
    scene.answer(Prepared)
    assert scene.running(0, 1) == before
    name = scene.arrive(100, 10)
    assert scene.where[name] in [(scene.epoch(0), (0, 1)), (scene.epoch(2), (2, 3))]


def test_pairs_merge_on_a_second_level_once_settled_and_while_demand_grows() -> None:
    """In each pair a long request runs and one waits, which four replicas have room for."""
    scene = dropped()
    scene.flood()
    assert not of_kind(Prepare, scene.alive(5.0, used=600, free=5, pending=60))
    assert not of_kind(Prepare, scene.alive(4.6, used=600, free=5, pending=63)), "it settles first"
    assert not of_kind(Prepare, scene.alive(5.0, used=600, free=5, pending=60)), "nothing grows"
    prepare = the_only(Prepare, scene.alive(0.1, used=600, free=5, pending=63))
    assert [group.members for group in prepare.groups] == [(0, 2, 1, 3)]
    assert prepare.pulls == ()


def test_drop_that_does_not_help_is_declined_with_its_prediction_and_put_off() -> None:
    """The gate: prompts take long to compute, and what runs ends first."""
    scene = ControllerScene(cost=Cost(token=1.0, step=1e-6))
    decline = the_only(Decline, scene.burst())
    assert decline.reason is Reason.NO_GAIN
    assert decline.verdict is not None
    assert decline.verdict.dropped > decline.verdict.kept > 0
    assert not scene.alive(4.8, **FULL)
    assert scene.alive(0.5, **FULL) == [decline]


def test_single_replica_declines_as_there_is_no_plan() -> None:
    assert ControllerScene(1).burst() == [Decline(Reason.NO_PLAN)]


def test_load_with_room_for_all_that_waits_drops_nothing() -> None:
    scene = ControllerScene()
    scene.load(used=690, free=10, pending=9)
    assert not scene.tick()


def test_drop_waits_until_all_replicas_have_told_their_load() -> None:
    scene = ControllerScene()
    scene.join(9)
    for _ in range(8):
        scene.arrive(4600, 600)
    scene.load(**FULL, members=range(4))
    assert not scene.tick()
    scene.load(**FULL)
    assert isinstance(scene.tick()[0], Prepare | Decline)


def test_burst_that_goes_on_while_layers_are_pulled_discards_the_restore_and_drops_at_once() -> None:
    scene = pulling()
    scene.alive(10.0)
    epoch = scene.proposed
    changes = [action for action in scene.flood() if not isinstance(action, Dispatch)]
    assert [*map(type, changes)] == [Discard, Prepare]
    assert changes[0] == Discard(epoch, Reason.OVERLOAD)
    assert scene.groups == PAIRS


def test_groups_part_only_once_their_kv_is_exchanged() -> None:
    scene = preparing()
    old = [scene.epoch(member) for member in range(4)]
    scene.answer(Prepared)
    scene.finish_all()
    for member in range(4):
        scene.tell(Exchanged, old[member], member)
    assert not scene.alive(20.0)
    for member in range(4):
        scene.tell(Exchanged, scene.epoch(member), member)
    assert of_kind(Prepare, scene.alive(11.0))


def test_group_with_a_request_that_fits_no_replica_is_not_restored() -> None:
    """6,000 tokens: more than a replica has when nothing is dropped."""
    scene = dropped()
    scene.finish_all()
    name = scene.arrive(5900, 100)
    place = scene.where[name]
    prepare = the_only(Prepare, scene.alive(15.0))
    assert place is not None
    assert {member for group in prepare.groups for member in group.members}.isdisjoint(place[1])
    scene.answer(Prepared)
    late = scene.arrive(5900, 100)  # comes while the other group pulls, and goes there
    assert scene.where[late] is not None
    assert scene.answer(Restored) == [Discard(prepare.epoch, Reason.NO_ROOM)]


def test_requests_of_a_group_that_ends_are_spread_over_its_members() -> None:
    scene = restoring()
    names = [scene.arrive(1000, 100) for _ in range(6)]
    scene.answer(Prepared)
    commit = the_only(Commit, scene.answer(Restored))
    assert {name for name, _ in commit.homes} == {*names}
    counts = Counter(member for _, member in commit.homes)
    assert sorted(counts.values()) == [1, 1, 2, 2]
    assert counts[0] + counts[1] == 3
    for name, member in commit.homes:
        assert scene.where[name] == (commit.epoch, (member,))


# Requests


def test_request_is_held_until_there_is_a_replica() -> None:
    scene = ControllerScene(0)
    name = scene.arrive(10, 5)
    assert scene.log == [Hold(name)]
    assert scene.join(0) == [Alone(1, 0), Dispatch(name, 1, (0,))]


def test_request_that_no_group_can_ever_hold_is_refused() -> None:
    scene = ControllerScene()
    name = scene.arrive(5600, 1)
    assert scene.log[-1] == Refuse(name, Reason.TOO_LONG)
    assert scene.arrive(5599, 1) in scene.where


def test_request_that_is_there_already_or_has_no_prompt_and_unknown_event_are_errors() -> None:
    scene = ControllerScene()
    name = scene.arrive(10, 5)
    with pytest.raises(ValueError, match="has arrived already"):
        scene.tell(protocol.Arrived, name, 10, 5)
    with pytest.raises(ValueError, match="a prompt of 0 tokens"):
        scene.tell(protocol.Arrived, "empty", 0, 5)
    with pytest.raises(TypeError, match="no event"):
        scene.tell(protocol.Event)


def test_request_that_loses_its_replica_too_often_is_refused() -> None:
    scene = ControllerScene(1)
    name = scene.arrive(10, 5)
    for _ in range(5):
        scene.tell(Lost, 0)
        scene.join(0)
        assert scene.log[-1] == Recompute((name,), scene.epoch(0), (0,))
    assert scene.tell(Lost, 0) == [Refuse(name, Reason.LIVES)]


def test_client_that_leaves_has_its_request_cancelled_on_all_stages_once() -> None:
    scene = dropped()
    name = min(scene.running(0, 1))
    assert scene.tell(Left, name) == [Cancel(name, scene.epoch(0), (0, 1))]
    assert not scene.tell(Left, name)
    assert not scene.tell(Finished, name)
    empty = ControllerScene(0)
    assert not empty.tell(Left, empty.arrive(10, 5))


def test_replica_that_joins_is_in_a_new_epoch_and_takes_requests() -> None:
    scene = dropped()
    before = scene.controller.epoch
    assert scene.join(9)[0] == Alone(before + 1, 9)
    assert scene.groups == {*PAIRS, (9,)}
    assert scene.arrive(1000, 10) in scene.running(9)


# Who does not answer, and whose words no longer count


def test_epoch_that_a_member_does_not_prepare_in_time_is_discarded() -> None:
    scene = preparing()
    epoch = scene.proposed
    for member in (0, 1, 2):
        scene.tell(Prepared, epoch, member)
    assert not scene.alive(9.9, used=600, free=100)
    assert scene.alive(0.3, used=600, free=100) == [Discard(epoch, Reason.TIMEOUT), Decline(Reason.TIMEOUT)]
    assert scene.groups == ONES
    assert not scene.tell(Prepared, epoch, 3)


def test_answers_to_a_discarded_epoch_do_not_count_for_the_next() -> None:
    scene = preparing()
    old = scene.proposed
    scene.tell(PrepareFailed, old, 0, Reason.PAGES)
    scene.alive(5.5, **FULL)
    assert scene.prepared is not None
    assert [scene.tell(Prepared, old, member) for member in range(4)] == [[]] * 4
    assert not scene.tell(PrepareFailed, old, 0, Reason.PAGES)
    assert scene.groups == ONES
    scene.answer(Prepared)
    scene.settle()
    scene.calm()
    scene.answer(Prepared)
    assert [scene.tell(Restored, old, member) for member in range(4)] == [[]] * 4
    assert scene.groups == PAIRS


def test_messages_of_an_old_epoch_change_nothing_and_strangers_are_told_to_rejoin() -> None:
    scene = ControllerScene()
    old = scene.epoch(0)
    scene.burst()
    scene.answer(Prepared)
    scene.settle()
    scene.load()
    epoch = scene.epoch(0)
    for kind, *fields in (
        (Load, 0, old, 700, 0, 700, 10**6),
        (Committed, old, 0),
        (Exchanged, old, 0),
        (Restored, old, 0),
        (Prepared, epoch, 0),
        (PrepareFailed, epoch, 0, Reason.PAGES),
        (PullFailed, old, 0, Reason.LINK),
        (Suspected, old, 0, 1),
        (Suspected, epoch, 0, 0),
        (Lost, 77),
        (PullFailed, old, 77, Reason.LINK),
        (Suspected, epoch, 77, 0),
    ):
        assert scene.tell(kind, *fields) == [], (kind, fields)
        load = scene.controller.cluster.replicas[0].load
        assert load is not None
        assert load.pending == 0
    assert scene.groups == PAIRS
    assert scene.tell(Load, 77, epoch, 0, 0, 0, 1) == []


def test_replica_whose_count_stands_still_is_fenced_while_it_speaks_and_not_heard_until_it_joins_anew() -> None:
    scene = ControllerScene()
    names = {scene.arrive(100, 10) for _ in range(8)}
    lost, epoch = scene.running(3), scene.epoch(3)
    actions = []
    for _ in range(14):
        scene.load(members=(0, 1, 2))
        actions += scene.tell(Load, 3, epoch, 10, 690, 0, 1) + scene.tick()
    assert actions[0] == Fence(3, Reason.HUNG)
    assert recomputed(actions) == lost
    assert len(actions) == len(of_kind(Recompute, actions)) + 1
    assert scene.groups == ONES - {(3,)}
    before = scene.controller.epoch
    assert scene.tell(Joined, 3, MEMORY)[0] == Alone(before + 1, 3)
    assert not scene.running(3)
    assert {*scene.where} == names


def test_replica_that_does_not_enter_its_epoch_is_fenced_though_its_count_moves() -> None:
    scene = preparing()
    old = scene.epoch(0)
    scene.answer(Prepared)
    actions = []
    for member in (1, 2, 3):
        scene.tell(Committed, scene.epoch(member), member)
    for _ in range(102):
        scene.load(members=(1, 2, 3))
        actions += scene.tell(Load, 0, old, 600, 5, 0, scene.progress + 1) + scene.tick()
    assert actions[0] == Fence(0, Reason.BEHIND)


@pytest.mark.parametrize("phase", [preparing, exchanging])
def test_controller_that_stood_still_blames_nobody(phase: Callable[[], ControllerScene]) -> None:
    scene = phase()
    groups, prepared = scene.groups, scene.prepared
    scene.at += 100.0
    assert not scene.tell(protocol.Tick)
    assert (scene.groups, scene.prepared) == (groups, prepared)
    assert Fence(0, Reason.HUNG) in scene.tick(1.2)


def test_replica_that_joins_again_unannounced_was_lost_in_between() -> None:
    scene = dropped()
    lost = scene.running(0, 1)
    actions = scene.tell(Joined, 1, MEMORY)
    assert recomputed(actions) == lost
    assert actions.index(Alone(scene.epoch(1), 1)) > actions.index(Alone(scene.epoch(0), 0))
    assert scene.held(1) == Span(0, 12)


# Groups that end


def test_suspected_replica_gets_nothing_until_it_is_heard_and_the_other_pair_goes_on() -> None:
    """Both ends read what they dropped from their backing, and pull it from the other pair, from different members."""
    scene = dropped()
    lost, kept, epoch = scene.running(0, 1), scene.running(2, 3), scene.epoch(0)
    actions = scene.tell(Suspected, epoch, 0, 1)
    assert actions[:2] == [Alone(scene.epoch(0), 0), Alone(scene.epoch(0), 1)]
    assert recomputed(actions) == lost
    assert kept <= scene.running(2, 3)
    assert pulls(0, actions) == [(layer, 3) for layer in range(6, 12)]
    assert pulls(1, actions) == [(layer, 2) for layer in range(6)]
    assert not scene.tell(Suspected, epoch, 1, 0), "it is of an epoch that is no more"
    scene.finish_all()
    for _ in range(20):
        scene.arrive(1000, 100)
    assert not scene.running(1)
    scene.settle()
    assert [scene.held(member) for member in (0, 1)] == [Span(0, 12)] * 2
    assert scene.arrive(4000, 100) in scene.running(1)


def test_member_lost_in_the_pull_discards_the_restore_and_the_other_pair_is_pulled_from() -> None:
    scene = pulling()
    epoch = scene.proposed
    actions = scene.tell(Lost, 1)
    assert actions[0] == Discard(epoch, Reason.LOST)
    assert {source for _, source in pulls(0, actions)} == {3}
    assert not scene.tell(Restored, epoch, 0)
    assert scene.held(0) == Span(0, 6)
    scene.tell(Restored, scene.epoch(0), 0)
    assert scene.held(0) == Span(0, 12)


def test_requests_are_held_and_told_so_once_where_every_replica_is_suspected() -> None:
    scene = dropped(3)
    scene.tell(Suspected, scene.epoch(0), 0, 1)
    for member in (0, 2):
        scene.tell(Lost, member)
    scene.tell(PullFailed, scene.epoch(1), 1, Reason.LINK)
    assert {*scene.where.values()} == {None}
    assert sorted(action.request for action in of_kind(Hold, scene.log)) == sorted(scene.where)
    scene.tell(Committed, scene.epoch(1), 1)
    assert None not in scene.where.values()


def test_exchange_that_does_not_end_dissolves_its_group() -> None:
    scene = exchanging()
    for member in (1, 2, 3):
        scene.tell(Exchanged, scene.epoch(member), member)
    lost = scene.running(0, 1)
    assert not scene.alive(59.8, used=600, free=100)
    assert recomputed(scene.alive(0.4, used=600, free=100)) == lost
    assert scene.groups == {(0,), (1,), (2, 3)}


def test_request_whose_kv_is_damaged_again_and_again_is_refused() -> None:
    scene = exchanging()
    name, epoch = min(scene.running(2, 3)), scene.epoch(2)
    assert not scene.tell(Damaged, epoch - 1, 2, name)
    assert not scene.tell(Damaged, epoch, 0, name), "it is none of that group's"
    for _ in range(5):
        assert scene.tell(Damaged, epoch, 2, name) == [Recompute((name,), epoch, (2, 3))]
    assert scene.tell(Damaged, epoch, 2, name) == [Refuse(name, Reason.LIVES), Cancel(name, epoch, (2, 3))]


def test_link_lost_after_a_restore_has_only_requests_without_their_kv_computed_anew() -> None:
    scene = restoring()
    for _ in range(8):
        scene.arrive(1000, 100)
    scene.answer(Prepared)
    commit = the_only(Commit, scene.answer(Restored))
    for member in (1, 2, 3):
        scene.tell(Exchanged, commit.epoch, member)
    lost, kept = scene.running(0), scene.running(1)
    actions = scene.tell(Suspected, commit.epoch, 0, 1)
    assert recomputed(actions) == lost
    assert kept <= scene.running(1)
    assert not of_kind(StartRestore, actions), "all hold all layers"


# Pulls


def test_source_that_is_lost_is_replaced_by_the_backing() -> None:
    scene = dropped()
    assert {source for _, source in pulls(0, scene.tell(Lost, 1))} == {3}
    assert pulls(0, scene.tell(Lost, 3)) == [(layer, None) for layer in range(6, 12)]


def test_source_that_drops_its_layers_is_replaced_by_members_that_hold_them() -> None:
    """0 pulls from 3; then 3 and others become a group."""
    scene = dropped(3)
    for member in (3, 4, 5):
        scene.join(member)
    scene.settle()
    assert {source for _, source in pulls(0, scene.tell(Lost, 1))} == {3}
    scene.finish_all()
    scene.alive(10.0)
    prepare = the_only(Prepare, scene.burst())
    (dropping,) = [group for group in prepare.groups if 3 in group.members]
    again = pulls(0, scene.answer(Prepared))
    assert again, "nobody told 0 to ask others"
    assert all(source is None or layer in scene.held(source) for layer, source in again)
    assert dropping.size > 1


def test_replica_that_has_only_just_joined_is_no_source() -> None:
    scene = dropped(2)
    scene.tell(Joined, 9, MEMORY)
    assert {source for _, source in pulls(0, scene.tell(Lost, 1))} == {None}


def test_survivor_whose_file_changed_pulls_from_a_peer_takes_no_requests_and_is_fenced_without_one() -> None:
    scene = dropped()
    scene.tell(Lost, 1)
    scene.tell(Lost, 3)  # 0 and 2 are left, and read from their backing
    scene.join(7)
    scene.tell(Committed, scene.epoch(0), 0)
    actions = scene.tell(PullFailed, scene.epoch(0), 0, Reason.FILE_CHANGED)
    assert {source for _, source in pulls(0, actions)} == {7}
    scene.finish_all()
    for _ in range(20):
        scene.arrive(1000, 10)
    assert not scene.running(0), "layers that it lacks can be read from nowhere yet"
    assert scene.tell(PullFailed, scene.epoch(0), 0, Reason.LINK)[0] == Fence(0, Reason.LINK)
    actions = scene.tell(Lost, 7) + scene.tell(PullFailed, scene.epoch(2), 2, Reason.FILE_CHANGED)
    assert Fence(2, Reason.FILE_CHANGED) in actions


def test_pull_that_fails_is_made_from_the_backing_and_one_without_pages_later() -> None:
    scene = dropped()
    scene.tell(Lost, 1)
    actions = scene.tell(PullFailed, scene.epoch(0), 0, Reason.LINK)
    assert {source for _, source in pulls(0, actions)} == {None}
    assert not pulls(0, scene.tell(PullFailed, scene.epoch(0), 0, Reason.PAGES))
    assert not pulls(0, scene.alive(TUNING.again - 0.2))
    assert {source for _, source in pulls(0, [the_only(StartRestore, scene.alive(1.0))])} == {None}


def test_pull_that_fails_in_preparation_discards_the_restore() -> None:
    scene = pulling()
    epoch = scene.proposed
    assert scene.tell(PullFailed, epoch, 2, Reason.LINK) == [Discard(epoch, Reason.LINK)]
    assert scene.groups == PAIRS
