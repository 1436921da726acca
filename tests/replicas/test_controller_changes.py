"""The controller where a drop, an exchange or a restore fails on its way: rows of the fault matrix."""

from __future__ import annotations

import pytest

from ballonet.offload.policy.replicas.actions import (
    Cancel,
    Commit,
    Decline,
    Discard,
    Fence,
    Prepare,
    Recompute,
    Refuse,
    StartRestore,
)
from ballonet.offload.policy.replicas.events import (
    Committed,
    Damaged,
    Event,
    Exchanged,
    Joined,
    Load,
    Lost,
    Prepared,
    PrepareFailed,
    PullFailed,
    Reason,
    Restored,
    Suspected,
)

from .played import MEMORY, ONES, PAIRS, TUNING, Played, dropped, exchanging, preparing, pulling, restoring


@pytest.mark.parametrize(
    ("what", "told", "reason"),
    [
        *((Lost, (member,), Reason.LOST) for member in range(4)),
        (Suspected, (0, 1), Reason.LINK),
        *((PrepareFailed, (1,), why) for why in (Reason.PAGES, Reason.HOST_MEMORY, Reason.FILE_CHANGED)),
    ],
)
def test_whatever_fails_in_prepare_discards_the_epoch(what: type[Event], told: tuple[int, ...], reason: Reason) -> None:
    """Nothing was dropped: a typed refusal, and the next rung."""
    played = preparing()
    epoch = played.proposed
    played.tell(Prepared, epoch, 0)
    asked = {Lost: told, Suspected: (epoch, *told), PrepareFailed: (epoch, *told, reason)}[what]
    assert played.tell(what, *asked)[:2] == [Discard(epoch, reason), Decline(reason)]
    assert played.groups() == ONES - ({told} if what is Lost else set())
    assert played.controller.freed == 0
    assert not played.tell(Prepared, epoch, 0)  # its epoch is no more


def test_a_refused_drop_is_tried_again_after_a_while() -> None:
    played = preparing()
    epoch = played.proposed
    played.tell(PrepareFailed, epoch, 1, Reason.PAGES)
    assert not played.alive(4.8, used=600, free=5, pending=102)
    assert played.the(Prepare, played.alive(0.5, used=600, free=5, pending=102)).epoch > epoch


def test_who_does_not_answer_in_prepare_has_the_epoch_discarded() -> None:
    played = preparing()
    epoch = played.proposed
    for member in (0, 1, 2):
        played.tell(Prepared, epoch, member)
    assert not played.alive(9.9, used=600, free=100, pending=0)
    assert played.alive(0.3, used=600, free=100, pending=0) == [
        Discard(epoch, Reason.TIMEOUT),
        Decline(Reason.TIMEOUT),
    ]
    assert played.groups() == ONES
    assert not played.tell(Prepared, epoch, 3)


def test_a_replica_whose_file_changed_takes_no_part_in_drops() -> None:
    played = preparing()
    epoch = played.proposed
    actions = played.tell(PrepareFailed, epoch, 1, Reason.FILE_CHANGED)
    assert actions[0] == Discard(epoch, Reason.FILE_CHANGED)
    prepare = played.the(Prepare, played.alive(5.5, used=600, free=5, pending=102))
    assert sorted(member for group in prepare.groups for member in group.members) == [0, 2, 3]


def test_answers_to_an_epoch_that_was_discarded_do_not_count_for_the_next() -> None:
    played = preparing()
    old = played.proposed
    played.tell(PrepareFailed, old, 0, Reason.PAGES)
    played.alive(5.5, used=600, free=5, pending=102)
    assert played.prepared is not None
    assert [played.tell(Prepared, old, member) for member in range(4)] == [[]] * 4
    assert not played.tell(PrepareFailed, old, 0, Reason.PAGES)
    assert played.groups() == ONES
    played.all_prepared()
    played.settled()
    played.calm()
    played.all_prepared()
    assert [played.tell(Restored, old, member) for member in range(4)] == [[]] * 4
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
    assert played.tell(Load, 77, epoch, 0, 0, 0, 1) == []


def test_an_exchange_that_does_not_end_dissolves_its_group() -> None:
    played = exchanging()
    for member in (1, 2, 3):
        played.tell(Exchanged, played.epoch(member), member)
    lost = played.running(0, 1)
    assert not played.alive(59.8, used=600, free=100)
    played.broke(played.alive(0.4, used=600, free=100), lost)


def test_kv_with_a_wrong_checksum_has_that_request_computed_anew() -> None:
    played = exchanging()
    name = min(played.running(2, 3))
    epoch = played.epoch(2)
    assert not played.tell(Damaged, epoch - 1, 2, name)
    assert not played.tell(Damaged, epoch, 0, name)  # none of its group's
    for _ in range(5):
        assert played.tell(Damaged, epoch, 2, name) == [Recompute((name,), epoch, (2, 3))]
    assert played.tell(Damaged, epoch, 2, name) == [
        Refuse(name, Reason.LIVES),
        Cancel(name, epoch, (2, 3)),
    ]


def test_kv_that_does_not_come_home_is_computed_anew() -> None:
    """The link fails after the commit of a restore: both are on their own, those who have all their KV go on."""
    played = restoring()
    for _ in range(8):
        played.arrive(1000, 100)
    played.all_prepared()
    commit = played.the(Commit, played.all_restored())
    for member in (1, 2, 3):
        played.tell(Exchanged, commit.epoch, member)
    lost, kept = played.running(0), played.running(1)
    actions = played.tell(Suspected, commit.epoch, 0, 1)
    assert played.recomputed(actions) == lost
    assert kept <= played.running(1)
    assert not played.of(StartRestore, actions)  # all hold all layers


def test_a_source_that_dies_is_replaced() -> None:
    """0 pulls from the pair of 2 and 3, and then from its backing."""
    played = dropped()
    played.tell(Lost, 1)
    assert played.pulls(0, played.tell(Lost, 3)) == [(layer, None) for layer in range(6, 12)]


def test_a_source_that_drops_layers_is_replaced() -> None:
    """0 pulls from 2; then 2, 3 and 4 become a group, and other members hold what it needs."""
    played = dropped(3)
    for member in (3, 4, 5):
        played.join(member)
    played.settled()
    assert {source for _, source in played.pulls(0, played.tell(Lost, 1))} == {3}
    played.finish_all()
    played.alive(10.0)
    prepare = played.the(Prepare, played.burst())
    (dropping,) = [group for group in prepare.groups if 3 in group.members]
    actions = played.all_prepared()
    again = played.pulls(0, actions)
    assert again, "nobody told 0 to ask others"
    assert all(source is None or layer in played.held(source) for layer, source in again)
    assert dropping.size > 1


def test_nobody_pulls_from_a_replica_that_has_only_just_joined() -> None:
    played = dropped(2)
    played.tell(Joined, 9, MEMORY)
    assert {source for _, source in played.pulls(0, played.tell(Lost, 1))} == {None}


def test_a_survivor_whose_file_changed_pulls_from_a_peer_or_ends() -> None:
    played = dropped()
    played.tell(Lost, 1)
    played.tell(Lost, 3)  # 0 and 2 are left, and read from their backing
    played.join(7)
    played.tell(Committed, played.epoch(0), 0)
    actions = played.tell(PullFailed, played.epoch(0), 0, Reason.FILE_CHANGED)
    assert {source for _, source in played.pulls(0, actions)} == {7}
    played.finish_all()
    for _ in range(20):
        played.arrive(1000, 10)
    assert not played.running(0)  # layers that it lacks can be read from nowhere yet
    assert played.tell(PullFailed, played.epoch(0), 0, Reason.LINK)[0] == Fence(0, Reason.LINK)
    fenced = played.tell(Lost, 7) + played.tell(PullFailed, played.epoch(2), 2, Reason.FILE_CHANGED)
    assert Fence(2, Reason.FILE_CHANGED) in fenced


def test_a_pull_that_fails_comes_from_the_backing() -> None:
    played = dropped()
    played.tell(Lost, 1)
    actions = played.tell(PullFailed, played.epoch(0), 0, Reason.LINK)
    assert {source for _, source in played.pulls(0, actions)} == {None}


def test_a_pull_that_finds_no_pages_is_tried_again_after_a_while() -> None:
    """Not at once, and again and again."""
    played = dropped()
    played.tell(Lost, 1)
    assert not played.pulls(0, played.tell(PullFailed, played.epoch(0), 0, Reason.PAGES))
    assert not played.pulls(0, played.alive(TUNING.again - 0.2))
    [again] = [each for each in played.alive(1.0) if isinstance(each, StartRestore)]
    assert {source for _, source in played.pulls(0, [again])} == {None}


def test_a_pull_that_fails_in_preparation_discards_the_restore() -> None:
    played = pulling()
    epoch = played.proposed
    assert played.tell(PullFailed, epoch, 2, Reason.LINK) == [Discard(epoch, Reason.LINK)]
    assert played.groups() == PAIRS
