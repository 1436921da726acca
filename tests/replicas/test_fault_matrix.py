"""The fault matrix in simulation, row by row: what the controller decides, and what becomes of requests.

Each run is one burst on two replicas, or four: they drop, exchange KV, run as a pipeline and restore. `quiet` is that
run without a fault; a fault happens in one of its phases. What holds for all of them is checked in faulty.py: every
request is answered or told why not, once, and memory is what it was.
"""

from __future__ import annotations

from functools import cache
from typing import TypeVar

import pytest

from ballonet.hooks.virtual_replicas.faults import (
    ClientLeft,
    DamagedKV,
    FaultRefused,
    FileChanged,
    Hung,
    Killed,
    LinkLost,
    NewReplica,
    PlayedFault,
    Shutdown,
    SupervisorFails,
)
from ballonet.offload.policy.replicas import events
from ballonet.offload.policy.replicas.actions import (
    Alone,
    Cancel,
    Commit,
    Decline,
    Discard,
    Fence,
    Prepare,
    Recompute,
    Rejoin,
    StartRestore,
)

from .faulty import SLOWLY, Outcome, outcome
from .fleets import burst, fleet

E = TypeVar("E", bound=events.Event)


@cache
def quiet() -> Outcome:
    """The burst without a fault: one drop, epoch 3, and one restore, epoch 4."""
    found = outcome()
    assert [each.epoch for _, each in found.actions(Commit)] == [3, 4]
    assert found.errors == {}
    return found


def at(kind: type[E], epoch: int) -> float:
    """When it is told first in an epoch, without a fault."""
    return next(each.at for each in quiet().events(kind) if each.epoch == epoch)  # type: ignore[attr-defined]


def phase(name: str) -> float:
    """A moment in a phase of the burst."""
    begins, ends = {
        "alone": (1.0, 3.0),
        "prepare": (quiet().actions(Prepare)[0][0], at(events.Prepared, 3)),
        "turn": (at(events.Prepared, 3), at(events.Committed, 3)),
        "exchange": (at(events.Committed, 3), at(events.Exchanged, 3)),
        "pipeline": (at(events.Exchanged, 3) + 1, at(events.Exchanged, 3) + 3),
        "pull": (at(events.Prepared, 4), at(events.Restored, 4)),
    }[name]
    assert begins < ends
    return (begins + ends) / 2


PHASES = ("alone", "prepare", "turn", "exchange", "pipeline", "pull")


# SIGKILL


@pytest.mark.parametrize("name", PHASES)
@pytest.mark.parametrize("member", [0, 1])
def test_a_replica_is_killed(name: str, member: int) -> None:
    found = outcome([Killed(phase(name), member)])
    assert found.errors == {}
    assert [each.member for each in found.events(events.Lost)] == [member]
    assert [*found.run.pipes] == [(1 - member,)]
    told = found.events(events.Suspected)
    assert [each.of for each in told] == ([] if name == "alone" else [member])
    if told:
        assert told[0].at == pytest.approx(phase(name) + 0.05)
    again = [action for _, action in found.actions(Recompute)]
    assert all(each.members == (1 - member,) for each in again)
    assert bool(again) == (name != "pull"), "the load has calmed down, so nothing runs then"
    discarded = [each.reason for _, each in found.actions(Discard)]
    assert discarded == ([events.Reason.LINK] if name in ("prepare", "pull") else [])
    commits = [each.epoch for _, each in found.actions(Commit)]
    assert commits == ([] if name in ("alone", "prepare") else [3])


@pytest.mark.parametrize("name", ["turn", "exchange", "pipeline", "pull"])
def test_who_lost_its_group_is_valid_at_once_and_pulls_from_its_backing(name: str) -> None:
    found = outcome([Killed(phase(name), 1)])
    (suspected,) = found.events(events.Suspected)
    answered = found.answer(suspected)
    assert Alone(found.events(events.Committed)[-1].epoch, 0) in answered
    pulls = [each for each in answered if isinstance(each, StartRestore) and each.pulls[0].member == 0]
    assert [pull.source for each in pulls for pull in each.pulls] == [None] * 4
    assert [each.layer for each in pulls[0].pulls] == [4, 5, 6, 7], "the one that is needed next first"
    assert found.events(events.Restored)[-1].at - suspected.at < 0.01


def test_what_a_replica_that_is_killed_was_to_send_comes_from_the_backing() -> None:
    """One of four replicas in two pairs is killed, its survivor pulls from the other pair, and that one is killed."""
    four = fleet(4, 1600, network=SLOWLY)
    arrivals = burst(300, 0.05, 60, 150) + burst(12, 6.0, 20, 20, begin=60.0)
    calm = outcome([], arrivals, four)
    (lost, survivor), (source, _) = (group.members for group in calm.actions(Prepare)[0][1].groups)
    time = max(each.at for each in calm.events(events.Exchanged) if each.epoch == calm.actions(Commit)[0][1].epoch) + 1
    found = outcome([Killed(time, lost), Killed(time + 0.4, source)], arrivals, four)
    pulls, *_ = [action.pulls for _, action in found.actions(StartRestore) if action.pulls[0].member == survivor]
    assert [each.source for each in pulls] == [source] * 4
    restored = next(each for each in found.events(events.Restored) if each.member == survivor)
    assert 0.4 < restored.at - time < 0.42, "a layer takes 0.26 s from a peer, and 1 ms from the backing"
    assert found.errors == {}
    assert sorted(found.run.pipes) == sorted((each,) for each in range(4) if each not in (lost, source))


def test_requests_are_refused_once_they_were_lost_too_often() -> None:
    """A new replica joins in place of each that is killed; in time a request runs out of lives."""
    faults: list[PlayedFault] = []
    for n in range(14):
        faults += [NewReplica(1.5 + n, 2 + n), Killed(1.6 + n, n)]
    found = outcome(faults, burst(20, 0.01, 200, 5000), fleet(2, 12000, network=SLOWLY))
    assert {*found.errors.values()} <= {events.Reason.LIVES.value}
    assert found.errors


def test_where_no_replica_is_left_clients_are_told_and_a_new_one_serves_again() -> None:
    found = outcome([Killed(5.0, 0), Killed(6.0, 1), NewReplica(9.0, 2)])
    assert {*found.errors.values()} == {"no replica is left"}
    late = [number for number in found.errors if found.run.jobs[number].arrival.at > 6.1]
    assert late
    assert all(found.run.jobs[number].arrival.at < 9 for number in found.errors)
    assert [*found.run.pipes] == [(2,)]
    assert sum(1 for job in found.run.jobs if not job.answer.error) > 150


# SIGSTOP, a kernel that hangs


@pytest.mark.parametrize("name", PHASES)
def test_a_replica_that_hangs_is_as_dead(name: str) -> None:
    found = outcome([Hung(phase(name), 1)])
    assert found.errors == {}
    ((fenced, fence),) = found.actions(Fence)
    assert fence == Fence(1, events.Reason.HUNG)
    assert 0.85 < fenced - phase(name) < 1.3, "a second after it spoke last"
    assert [*found.run.pipes] == [(0,)]
    assert [each.member for each in found.events(events.Lost)] == [1], "its process is ended"


@pytest.mark.parametrize("name", PHASES)
def test_a_replica_that_is_back_before_it_is_missed_goes_on(name: str) -> None:
    found = outcome([Hung(phase(name), 1, 0.8)])
    assert found.errors == {}
    assert (found.actions(Fence), found.actions(Recompute), found.actions(Alone)[2:]) == ([], [], [])
    assert len(found.actions(Commit)) == 2


@pytest.mark.parametrize("name", PHASES)
def test_a_replica_that_is_back_after_it_was_fenced_joins_anew(name: str) -> None:
    found = outcome([Hung(phase(name), 1, 4.0)])
    assert found.errors == {}
    assert [each for _, each in found.actions(Fence)] == [Fence(1, events.Reason.HUNG)]
    assert [each for _, each in found.actions(Rejoin)] == [Rejoin(1)]
    assert [each.member for each in found.events(events.Joined)] == [0, 1, 1]
    assert sorted(found.run.pipes) == [(0,), (1,)]
    begun = found.events(events.Joined)[-1].at
    late = [
        each
        for each in found.decisions
        if each.event.at == begun and isinstance(each.event, events.Prepared | events.Restored)
    ]
    assert all(each.actions == () for each in late), "what it says before it knows"


# A link is lost, and both live


@pytest.mark.parametrize("name", PHASES)
def test_a_link_is_lost_and_both_ends_live(name: str) -> None:
    found = outcome([LinkLost(phase(name), 0, 1)])
    assert found.errors == {}
    assert (found.actions(Fence), found.events(events.Lost)) == ([], [])
    assert sorted(found.run.pipes) == [(0,), (1,)]
    told = found.events(events.Suspected)
    if name == "alone":
        assert told == [], "there is none"
        return
    if name == "prepare":
        assert [each.reason for _, each in found.actions(Discard)] == [events.Reason.LINK]
        assert found.actions(Recompute) == [], "nothing was dropped"
        return
    answered = found.answer(told[0])
    assert [each.member for each in answered if isinstance(each, Alone)] == [0, 1]
    assert len([each for each in answered if isinstance(each, StartRestore)]) == 2, "both restore"
    assert found.run.bytes_moved > 0


# The supervisor ends; Ctrl-C


@pytest.mark.parametrize("name", PHASES)
@pytest.mark.parametrize(
    ("kind", "error"), [(SupervisorFails, "the supervisor has ended"), (Shutdown, "the server shuts down")]
)
def test_the_supervisor_ends(name: str, kind: type[PlayedFault], error: str) -> None:
    found = outcome([kind(phase(name))])
    assert {*found.errors.values()} == {error}
    late = [job for job in found.run.jobs if job.arrival.at > phase(name)]
    assert {job.number for job in late} <= {*found.errors}
    assert found.run.pipes == {}
    assert found.keeper.processes.ended == {0, 1}
    assert max(each.event.at for each in found.decisions) <= phase(name)


# No pages, no host memory, another file


@pytest.mark.parametrize("why", [events.Reason.PAGES, events.Reason.HOST_MEMORY])
def test_who_cannot_prepare_refuses_and_the_next_rung_is_asked(why: events.Reason) -> None:
    found = outcome([FaultRefused(1.0, 1, why)])
    assert found.errors == {}
    assert [each.reason for _, each in found.actions(Discard)] == [why]
    assert found.actions(Decline)[0][1] == Decline(why)
    assert found.actions(Recompute) == [], "nothing was dropped"
    assert [each.epoch for _, each in found.actions(Commit)] == [4, 5], "the one after that is prepared"


def test_a_restore_that_cannot_be_prepared_is_tried_again() -> None:
    found = outcome([FaultRefused(phase("pipeline"), 1)])
    assert [each.epoch for _, each in found.actions(Discard)] == [4]
    assert [each.epoch for _, each in found.actions(Commit)] == [3, 5]


def test_who_has_another_file_refuses_to_drop() -> None:
    found = outcome([FileChanged(1.0, 1)])
    assert [each.reason for _, each in found.actions(Discard)] == [events.Reason.FILE_CHANGED]
    assert found.actions(Commit) == [], "never again"
    assert found.errors == {}


def test_who_lost_its_group_and_its_file_pulls_from_a_peer_or_is_ended() -> None:
    found = outcome([FileChanged(5.0, 0), Killed(6.0, 1), NewReplica(6.0, 2)])
    assert found.errors == {}
    pulls = [action.pulls for _, action in found.actions(StartRestore) if action.pulls[0].member == 0]
    assert [{each.source for each in one} for one in pulls] == [{2}]
    assert sorted(found.run.pipes) == [(0,), (2,)]
    none = outcome([FileChanged(5.0, 0), Killed(6.0, 1)])
    assert [each.reason for each in none.events(events.PullFailed)] == [events.Reason.FILE_CHANGED]
    assert [each for _, each in none.actions(Fence)] == [Fence(0, events.Reason.FILE_CHANGED)]
    assert {*none.errors.values()} == {"no replica is left"}


# A wrong checksum, clients, new replicas


@pytest.mark.parametrize("member", [0, 1])
def test_a_request_whose_kv_is_damaged_is_computed_again_and_others_go_on(member: int) -> None:
    found = outcome([DamagedKV(phase("alone"), member)])
    (damaged,) = found.events(events.Damaged)
    assert (damaged.member, damaged.at) == (member, at(events.Exchanged, 3))
    assert [each.requests for _, each in found.actions(Recompute)] == [(damaged.request,)]
    assert found.errors == {}
    assert len(found.actions(Commit)) == 2


@pytest.mark.parametrize("name", PHASES[:-1])
def test_a_client_that_leaves_is_cancelled_wherever_its_request_is(name: str) -> None:
    """Every client that is there in that moment leaves, one after the other."""
    time = phase(name)
    there = [job.number for job in quiet().run.jobs if job.arrival.at < time < (job.answer.times or [time])[-1]]
    assert len(there) > 10
    found = outcome([ClientLeft(time, each) for each in there])
    assert {*found.errors} == {*there}
    assert {*found.errors.values()} == {"its client is gone"}
    assert all(token <= time for each in there for token in found.run.jobs[each].answer.times), "nobody is there"
    assert [each.request for _, each in found.actions(Cancel)] == [str(each) for each in there]


def test_a_replica_that_joins_serves_in_an_epoch_of_its_own() -> None:
    found = outcome([NewReplica(5.0, 2)])
    assert found.errors == {}
    assert [each for _, each in found.actions(Alone)][2:] == [Alone(4, 2)]
    assert sorted(found.run.pipes) == [(0,), (1,), (2,)]
    assert len(found.run.jobs) == len(quiet().run.jobs)
    assert max(job.answer.ended for job in found.run.jobs[:240]) < max(
        job.answer.ended for job in quiet().run.jobs[:240]
    ), "it takes a part of the load"
