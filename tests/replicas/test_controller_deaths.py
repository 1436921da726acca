"""The controller where replicas die, hang or lose each other: rows of the fault matrix."""

from __future__ import annotations

import pytest

from ballonet.offload.policy.replicas import events
from ballonet.offload.policy.replicas.actions import Action, Alone, Discard, Fence, Hold, Recompute
from ballonet.offload.policy.replicas.groups import Span

from .played import MEMORY, ONES, PHASES, Played, dropped, exchanging, preparing, pulling


def test_sigkill_is_heard_by_the_link_and_then_by_the_store() -> None:
    """In decode or prefill: whoever is suspected gets nothing; the other reads what it dropped from its backing, and
    pulls it from the other pair."""
    played = dropped()
    lost, epoch = played.running(0, 1), played.epoch(0)
    actions = played.tell(events.Suspected, epoch, 0, 1)
    played.broke(actions, lost)
    new = played.epoch(0)
    assert actions[:2] == [Alone(new, 0), Alone(new, 1)]
    assert played.pulls(0, actions) == [(layer, 3) for layer in range(6, 12)]
    assert played.pulls(1, actions) == [(layer, 2) for layer in range(6)]
    assert not played.running(1)
    assert not played.tell(events.Suspected, epoch, 1, 0)  # of an epoch that is no more
    assert not played.tell(events.Lost, 1)  # it had nothing any more
    assert played.groups() == {(0,), (2, 3)}


def test_sigkill_is_heard_by_the_store_first() -> None:
    played = dropped()
    lost, epoch = played.running(0, 1), played.epoch(0)
    actions = played.tell(events.Lost, 1)
    played.broke(actions, lost)
    assert played.groups() == {(0,), (2, 3)}
    assert not played.tell(events.Suspected, epoch, 0, 1)


def test_sigkill_of_a_replica_on_its_own() -> None:
    played = Played()
    names = {played.arrive(100, 10) for _ in range(8)}
    lost = played.running(2)
    actions = played.tell(events.Lost, 2)
    assert played.recomputed(actions) == lost
    assert all(2 not in each.members for each in played.of(Recompute, actions))
    assert {*played.where} == names


def test_sigkill_in_the_exchange() -> None:
    """The requests of that group are computed anew, the other goes on."""
    played = exchanging()
    lost, other = played.running(0, 1), played.running(2, 3)
    played.broke(played.tell(events.Lost, 1), lost)
    assert other <= played.running(2, 3)


@pytest.mark.parametrize(("members", "source"), [(4, 3), (2, None)])
@pytest.mark.parametrize("event", [events.Suspected, events.Lost])
def test_sigkill_in_the_pull(event: type[events.Event], members: int, source: int | None) -> None:
    """The epoch is discarded; what the dead one held comes from the other pair, or from the backing."""
    played = pulling(members)
    epoch = played.proposed
    actions = (
        played.tell(events.Suspected, played.epoch(0), 0, 1)
        if event is events.Suspected
        else played.tell(events.Lost, 1)
    )
    assert actions[0] == Discard(epoch, events.Reason.LINK if event is events.Suspected else events.Reason.LOST)
    assert {source for _, source in played.pulls(0, actions)} == {source}
    assert not played.tell(events.Restored, epoch, 0)
    assert played.held(0) == Span(0, 6)
    played.tell(events.Restored, played.epoch(0), 0)
    assert played.held(0) == Span(0, 12)


def test_sigstop_is_seen_by_the_count_of_iterations() -> None:
    """A replica that speaks while its count stands still is fenced, and not heard until it joins anew."""
    played = Played()
    names = {played.arrive(100, 10) for _ in range(8)}
    lost, epoch = played.running(3), played.epoch(3)
    found: list[Action] = []
    for _ in range(14):
        played.load(members=(0, 1, 2))
        found += played.tell(events.Load, 3, epoch, 10, 690, 0, 1) + played.tick()
    assert found[0] == Fence(3, events.Reason.HUNG)
    assert played.recomputed(found) == lost
    assert len(found) == len(played.of(Recompute, found)) + 1
    assert played.groups() == ONES - {(3,)}
    before = played.controller.epoch
    (alone, *_) = played.tell(events.Joined, 3, MEMORY)
    assert alone == Alone(before + 1, 3)
    assert not played.running(3)
    assert {*played.where} == names


def test_a_replica_that_says_nothing_is_dead_after_a_second() -> None:
    played = Played(2)
    found = []
    for _ in range(10):
        played.load(members=(0,))
        found += played.tick()
    assert found == []
    played.load(members=(0,))
    assert Fence(1, events.Reason.HUNG) in played.tick(0.2)


def test_a_hang_in_a_group_is_as_a_death() -> None:
    played = dropped()
    lost, found = played.running(0, 1), []
    for _ in range(12):
        played.load(members=(0, 2, 3) if not found else (2, 3))
        found += played.tick()
    assert found[0] == Fence(1, events.Reason.HUNG)
    played.broke(found, lost)


def test_a_long_iteration_is_no_death() -> None:
    played = Played(1)
    played.load()
    for _ in range(9):
        played.tick()
    played.load()  # 0.9 s for one
    assert not played.tick(4.4)
    assert played.tick(0.3) == [Fence(0, events.Reason.HUNG)]


def test_a_controller_that_stood_still_blames_nobody() -> None:
    played = preparing()
    played.at += 30.0
    assert not played.tell(events.Tick)
    assert played.groups() == ONES
    assert played.prepared is not None
    assert Fence(0, events.Reason.HUNG) in played.tick(1.2)


def test_who_does_not_take_up_its_epoch_is_fenced() -> None:
    """A replica whose count moves in the epoch before."""
    played = preparing()
    old = played.epoch(0)
    played.all_prepared()
    found = []
    for member in (1, 2, 3):
        played.tell(events.Committed, played.epoch(member), member)
    for _ in range(102):
        played.load(members=(1, 2, 3))
        played.progress += 1
        found += played.tell(events.Load, 0, old, 600, 5, 0, played.progress) + played.tick()
    assert found[0] == Fence(0, events.Reason.BEHIND)


def test_a_link_lost_with_both_alive_dissolves_the_group_once() -> None:
    played = dropped()
    lost, epoch = played.running(0, 1), played.epoch(0)
    played.broke(played.tell(events.Suspected, epoch, 1, 0), lost)
    assert not played.tell(events.Suspected, epoch, 0, 1)
    assert not played.running(0)  # doubted
    played.settled()
    for member in (0, 1):
        assert played.held(member) == Span(0, 12)
        assert not played.controller.cluster.replicas[member].suspected
    names = {played.arrive(4000, 100) for _ in range(2)}
    assert played.running(0) & names


def test_requests_wait_where_everybody_is_doubted() -> None:
    played = dropped(2)
    epoch = played.epoch(0)
    played.tell(events.Suspected, epoch, 0, 1)
    played.tell(events.Lost, 0)
    assert {*played.where.values()} == {None}
    assert {each.request for each in played.of(Hold)} == {*played.where}
    played.tell(events.Committed, played.epoch(1), 1)
    assert None not in played.where.values()


def test_the_front_end_is_told_once_that_a_request_is_held() -> None:
    played = dropped(3)
    played.tell(events.Suspected, played.epoch(0), 0, 1)
    for member in (0, 2):
        played.tell(events.Lost, member)
    played.tell(events.PullFailed, played.epoch(1), 1, events.Reason.LINK)
    holds = [each.request for each in played.of(Hold)]
    assert {*played.where.values()} == {None}
    assert sorted(holds) == sorted(played.where)


def test_a_replica_that_joins_twice_was_lost_between() -> None:
    played = dropped()
    lost = played.running(0, 1)
    actions = played.tell(events.Joined, 1, MEMORY)
    played.broke(actions, lost)
    assert actions.index(Alone(played.epoch(1), 1)) > actions.index(Alone(played.epoch(0), 0))
    assert played.held(1) == Span(0, 12)


@pytest.mark.parametrize("phase", PHASES)
def test_all_replicas_die_in_every_phase_and_come_back(phase: str) -> None:
    played = PHASES[phase]()
    names = [played.arrive(500, 10) for _ in range(5)]
    for member in range(4):
        played.tell(events.Lost, member)
    assert {*played.where.values()} == {None}
    assert played.prepared is None
    for member in range(4):
        played.join(member)
    assert None not in played.where.values()
    assert {*names} <= {*played.where}
