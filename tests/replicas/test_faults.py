"""Faults in virtual time: row by row, what the controller decides and what becomes of requests; and at random moments,
where every accepted request ends once and memory is what it was.

Each run of the matrix is one burst on two replicas, or four: they drop, exchange KV, run as a pipeline and restore.
`quiet` is that run without a fault; a fault happens in one of its phases. What holds for all of them is checked in
virtual.py: every request is answered or told why not, once, and memory is what it was.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from typing import TypeVar

import pytest

from ballonet.hooks.server.arrivals import RecordedArrival
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
from ballonet.offload.policy.replicas import protocol
from ballonet.offload.policy.replicas.protocol import (
    Alone,
    Cancel,
    Commit,
    Damaged,
    Decline,
    Discard,
    Exchanged,
    Fence,
    Prepare,
    Reason,
    Recompute,
    StartRestore,
)

from .virtual import SLOWLY, Outcome, burst, fleet, outcome

E = TypeVar("E", bound=protocol.Event)


@cache
def quiet() -> Outcome:
    """The burst without a fault: one drop, epoch 3, and one restore, epoch 4."""
    calm = outcome()
    assert [commit.epoch for _, commit in calm.actions(Commit)] == [3, 4]
    assert calm.errors == {}
    return calm


def at(kind: type[E], epoch: int) -> float:
    """When it is told first in an epoch, without a fault."""
    return next(event.at for event in quiet().events(kind) if event.epoch == epoch)  # type: ignore[attr-defined]


def phase(name: str) -> float:
    """A moment in a phase of the burst."""
    begins, ends = {
        "alone": (1.0, 3.0),
        "prepare": (quiet().actions(Prepare)[0][0], at(protocol.Prepared, 3)),
        "turn": (quiet().actions(Commit)[0][0], at(protocol.Committed, 3)),
        "exchange": (at(protocol.Committed, 3), at(protocol.Exchanged, 3)),
        "pipeline": (at(protocol.Exchanged, 3) + 1, at(protocol.Exchanged, 3) + 3),
        "pull": (at(protocol.Prepared, 4), at(protocol.Restored, 4)),
    }[name]
    assert begins < ends
    return (begins + ends) / 2


PHASES = ("alone", "prepare", "turn", "exchange", "pipeline", "pull")


# SIGKILL


@pytest.mark.parametrize("name", PHASES)
@pytest.mark.parametrize("member", [0, 1])
def test_killed_replica_is_lost_and_the_other_computes_its_requests(name: str, member: int) -> None:
    played = outcome([Killed(phase(name), member)])
    assert played.errors == {}
    (lost,) = played.events(protocol.Lost)
    assert lost.member == member
    assert lost.at - phase(name) < 0.11, "its process is looked at once a period"
    assert played.groups == [(1 - member,)]
    again = [action for _, action in played.actions(Recompute)]
    assert all(action.members == (1 - member,) for action in again)
    assert bool(again) == (name != "pull"), "the load has calmed down, so nothing runs then"
    discarded = [action.reason for _, action in played.actions(Discard)]
    assert discarded == ([protocol.Reason.LOST] if name in ("prepare", "pull") else [])
    commits = [action.epoch for _, action in played.actions(Commit)]
    assert commits == ([] if name in ("alone", "prepare") else [3])


@pytest.mark.parametrize("name", ["turn", "exchange", "pipeline", "pull"])
def test_survivor_of_a_group_serves_at_once_and_pulls_from_its_backing(name: str) -> None:
    played = outcome([Killed(phase(name), 1)])
    (lost,) = played.events(protocol.Lost)
    answered = played.answer(lost)
    assert Alone(played.events(protocol.Committed)[-1].epoch, 0) in answered
    pulls = [action for action in answered if isinstance(action, StartRestore) and action.pulls[0].member == 0]
    assert [pull.source for action in pulls for pull in action.pulls] == [None] * 4
    assert [pull.layer for pull in pulls[0].pulls] == [4, 5, 6, 7], "the one that is needed next first"
    assert played.events(protocol.Restored)[-1].at - lost.at < 1.0


def test_layers_that_a_killed_source_was_to_send_come_from_the_backing() -> None:
    """One of four replicas in two pairs is killed, its survivor pulls from the other pair, and that one is killed."""
    four = fleet(4, 1600, network=SLOWLY)
    arrivals = burst(300, 0.05, 60, 150) + burst(12, 6.0, 20, 20, begin=60.0)
    calm = outcome([], arrivals, four)
    (lost, survivor), (source, _) = (group.members for group in calm.actions(Prepare)[0][1].groups)
    epoch = calm.actions(Commit)[0][1].epoch
    time = max(event.at for event in calm.events(protocol.Exchanged) if event.epoch == epoch) + 1
    played = outcome([Killed(time, lost), Killed(time + 0.4, source)], arrivals, four)
    assert played.errors == {}
    assert played.groups == sorted((member,) for member in range(4) if member not in (lost, source))
    assert survivor in [event.member for event in played.events(protocol.Restored)]


def test_requests_are_refused_once_they_were_lost_too_often() -> None:
    """A new replica joins in place of each that is killed; in time a request runs out of lives."""
    faults: list[PlayedFault] = []
    for n in range(14):
        faults += [NewReplica(1.5 + n, 2 + n), Killed(1.6 + n, n)]
    played = outcome(faults, burst(20, 0.01, 200, 5000), fleet(2, 12000, network=SLOWLY))
    assert {*played.errors.values()} == {f"no replicas can compute it: {protocol.Reason.LIVES.value}"}


def test_clients_are_told_where_no_replica_is_left() -> None:
    played = outcome([Killed(5.0, 0), Killed(6.0, 1)])
    assert all("no replica is left" in error for error in played.errors.values())
    assert all(client.number in played.errors for client in played.clients if client.arrival.at > 6.1)
    assert played.groups == []


def test_requests_wait_for_a_replica_that_is_to_join() -> None:
    played = outcome([Killed(5.0, 0), Killed(6.0, 1), NewReplica(9.0, 2)])
    assert played.errors == {}
    assert played.groups == [(2,)]


# SIGSTOP, a kernel that hangs


@pytest.mark.parametrize("seconds", [None, 4.0])
@pytest.mark.parametrize("name", PHASES)
def test_hung_replica_is_fenced_and_killed(name: str, seconds: float | None) -> None:
    """A process that would go on later is ended meanwhile."""
    played = outcome([Hung(phase(name), 1, seconds)])
    assert played.errors == {}
    ((fenced, fence),) = played.actions(Fence)
    assert fence == Fence(1, protocol.Reason.HUNG)
    assert 0.8 < fenced - phase(name) < 1.3, "a second after it spoke last"
    assert played.groups == [(0,)]
    assert [event.member for event in played.events(protocol.Lost)] == [1], "its process is ended"


@pytest.mark.parametrize("name", PHASES)
def test_hung_replica_that_is_back_before_it_is_missed_goes_on(name: str) -> None:
    played = outcome([Hung(phase(name), 1, 0.8)])
    assert played.errors == {}
    assert (played.actions(Fence), played.actions(Recompute), played.actions(Alone)[2:]) == ([], [], [])
    assert len(played.actions(Commit)) == 2


# A link is lost, and both live


@pytest.mark.parametrize("name", PHASES)
def test_lost_link_ends_the_group_and_both_ends_serve(name: str) -> None:
    played = outcome([LinkLost(phase(name), 0, 1)])
    assert played.errors == {}
    assert (played.actions(Fence), played.events(protocol.Lost)) == ([], [])
    assert played.groups == [(0,), (1,)]
    told = played.events(protocol.Suspected)
    if name == "alone":
        assert told == [], "there is none"
        return
    assert min(event.at for event in told) == pytest.approx(phase(name) + 0.05, abs=0.03)
    if name == "prepare":
        assert [action.reason for _, action in played.actions(Discard)] == [protocol.Reason.LINK]
        assert played.actions(Recompute) == [], "nothing was dropped"
        return
    answered = [action for event in told for action in played.answer(event)]
    assert [action.member for action in answered if isinstance(action, Alone)] == [0, 1]
    assert len([action for action in answered if isinstance(action, StartRestore)]) == 2, "both restore"


# The supervisor ends; Ctrl-C


@pytest.mark.parametrize("name", PHASES)
@pytest.mark.parametrize(
    ("kind", "error"), [(SupervisorFails, "the supervisor has ended"), (Shutdown, "the server shuts down")]
)
def test_end_of_the_supervisor_ends_all_replicas_and_requests(name: str, kind: type[PlayedFault], error: str) -> None:
    played = outcome([kind(phase(name))])
    assert {*played.errors.values()} == {error}
    late = [client.number for client in played.clients if client.arrival.at > phase(name)]
    assert {*late} <= {*played.errors}
    assert all(process.how is not None for process in played.run.processes.values())
    assert max(decision.event.at for decision in played.decisions) <= phase(name)


# No pages, no host memory, another file


@pytest.mark.parametrize("why", ["PAGES", "HOST_MEMORY"])
def test_drop_that_cannot_be_prepared_is_declined_and_tried_again(why: str) -> None:
    played = outcome([FaultRefused(1.0, 1, why)])  # type: ignore[arg-type]
    reason = protocol.Reason[why]
    assert played.errors == {}
    assert [action.reason for _, action in played.actions(Discard)] == [reason]
    assert Decline(reason) in [action for _, action in played.actions(Decline)]
    assert played.actions(Recompute) == [], "nothing was dropped"
    assert len(played.actions(Commit)) == 2, "the one after that is prepared"


def test_restore_that_cannot_be_prepared_is_tried_again() -> None:
    played = outcome([FaultRefused(phase("pipeline"), 1)])
    assert [action.epoch for _, action in played.actions(Discard)] == [4]
    assert [action.epoch for _, action in played.actions(Commit)] == [3, 5]


def test_replica_whose_file_has_changed_never_drops() -> None:
    played = outcome([FileChanged(1.0, 1)])
    assert [action.reason for _, action in played.actions(Discard)] == [protocol.Reason.FILE_CHANGED]
    assert played.actions(Commit) == [], "never again"
    assert played.errors == {}


def test_survivor_whose_file_has_changed_is_ended() -> None:
    """A survivor has no links to others than those of its group."""
    time = at(protocol.Exchanged, 3) + 1
    played = outcome([FileChanged(time, 0), Killed(time + 1, 1)])
    assert [event.reason for event in played.events(protocol.PullFailed)] == [protocol.Reason.FILE_CHANGED]
    assert [action for _, action in played.actions(Fence)] == [Fence(0, protocol.Reason.FILE_CHANGED)]
    assert all("no replica is left" in error for error in played.errors.values())


# A wrong checksum, clients, new replicas


@pytest.mark.parametrize("member", [0, 1])
def test_request_whose_kv_is_damaged_is_computed_again_and_others_go_on(member: int) -> None:
    played = outcome([DamagedKV(phase("alone"), member)])
    (damaged,) = played.events(protocol.Damaged)
    assert damaged.member == member
    assert at(protocol.Committed, 3) < damaged.at < at(protocol.Exchanged, 3)
    assert [action.requests for _, action in played.actions(Recompute)] == [(damaged.request,)]
    assert played.errors == {}
    assert len(played.actions(Commit)) == 2


@pytest.mark.parametrize("name", PHASES[:-1])
def test_client_that_leaves_is_cancelled_wherever_its_request_is(name: str) -> None:
    """Every client that is there in that moment leaves, one after the other."""
    time = phase(name)
    there = [client.number for client in quiet().clients if client.arrival.at < time < client.answer.ended]
    assert len(there) > 10
    played = outcome([ClientLeft(time, number) for number in there])
    assert {*played.errors} == {*there}
    assert {*played.errors.values()} == {"its client is gone"}
    assert all(token <= time for number in there for token in played.clients[number].answer.times), "nobody is there"
    assert [action.request for _, action in played.actions(Cancel)] == [str(number) for number in there]


def test_replica_that_joins_serves_in_an_epoch_of_its_own() -> None:
    played = outcome([NewReplica(5.0, 2)])
    assert played.errors == {}
    assert played.actions(Alone)[2][1] == Alone(3, 2)
    assert played.groups == [(0,), (1,), (2,)]
    ends = [max(client.answer.ended for client in some.clients[:240]) for some in (played, quiet())]
    assert ends[0] < ends[1], "it takes a part of the load"


# At random moments


KILLS = 100  # seeds
OTHERS = 80
REQUESTS = 44
ENDS = ("no replica is left", "its client is gone", Reason.LIVES.value)


def played(replicas: int, seed: int, faults: list[PlayedFault]) -> Outcome:
    """A burst that memory has no room for, and a few requests afterwards. A drop comes after 1 or 2 s, its exchange
    takes some tenths, and there is a restore after 15."""
    requests: list[RecordedArrival] = burst(REQUESTS, 0.06 / replicas, 60, 60, seed)
    requests += [RecordedArrival(8.0 + 6 * n, 10, 10) for n in range(4)]
    return outcome(faults, requests, fleet(replicas, 700, network=SLOWLY))


def moment(draw: random.Random) -> float:
    """A time of a burst, its drop, its pipeline or its restore."""
    return draw.uniform(0, 3) if draw.random() < 0.7 else draw.uniform(3, 18)


def test_replicas_are_killed_at_random_moments_and_every_request_is_answered_once() -> None:
    """All but one of two to four replicas, at most; a new one may join."""
    seen: Counter[str] = Counter()
    for seed in range(KILLS):
        draw = random.Random(seed)
        replicas = draw.randint(2, 4)
        faults: list[PlayedFault] = [
            Killed(moment(draw), member) for member in draw.sample(range(replicas), draw.randint(1, replicas - 1))
        ]
        if draw.random() < 0.3:
            faults.append(NewReplica(moment(draw), replicas))
        ended = played(replicas, seed, faults)
        assert ended.errors == {}, f"seed {seed}: {faults}"
        tally(ended, seen)
    assert seen["drops"] > KILLS / 3
    assert seen["exchanging"] > KILLS / 20, "killed before KV was there"
    assert seen["discarded"] > 0, "killed while an epoch was prepared"
    assert seen["recomputed"] > KILLS
    assert seen["alone"] > KILLS / 4, "lost its group, and pulled what it had dropped"


def test_every_request_ends_once_whatever_goes_wrong_at_random_moments() -> None:
    seen: Counter[str] = Counter()
    for seed in range(OTHERS):
        draw = random.Random(seed)
        replicas = draw.randint(2, 4)
        faults = [any_fault(draw, replicas) for _ in range(draw.randint(1, 6))]
        faults += [NewReplica(moment(draw), replicas + n) for n in range(draw.randint(0, 2))]
        ended = played(replicas, seed, faults)
        assert all(any(end in error for end in ENDS) for error in ended.errors.values()), f"seed {seed}: {faults}"
        tally(ended, seen)
    assert seen["fenced"] > OTHERS / 8
    assert seen["damaged"] > 0
    assert seen["discarded"] > 0


def any_fault(draw: random.Random, replicas: int) -> PlayedFault:
    """One of all kinds but those that end everything."""
    at, (member, other) = moment(draw), draw.sample(range(replicas), 2)
    kinds: list[PlayedFault] = [
        Killed(at, member),
        Hung(at, member, draw.choice([None, 0.3, 2.0, 15.0])),
        LinkLost(at, member, other),
        FaultRefused(at, member, draw.choice(["PAGES", "HOST_MEMORY"])),
        FileChanged(at, member),
        DamagedKV(at / 4, member),
        ClientLeft(at, draw.randrange(REQUESTS)),
    ]
    return draw.choice(kinds)


def tally(ended: Outcome, seen: Counter[str]) -> None:
    """Counts what happened, to see that faults came where they hurt."""
    exchanged = {event.epoch for event in ended.events(Exchanged)}
    seen["drops"] += ended.run.supervisor.state().drops
    seen["exchanging"] += sum(commit.epoch not in exchanged for _, commit in ended.actions(Commit))
    seen["discarded"] += len(ended.actions(Discard))
    seen["recomputed"] += sum(len(action.requests) for _, action in ended.actions(Recompute))
    seen["alone"] += sum(start.pulls[0].source is None for _, start in ended.actions(StartRestore))
    seen["fenced"] += len(ended.actions(Fence))
    seen["damaged"] += len(ended.events(Damaged))
