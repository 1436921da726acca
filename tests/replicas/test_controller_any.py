"""The controller after any sequence of events: `Played` checks after each that nothing is lost, doubled or incomplete;
and its work grows as N log N with the replicas."""

from __future__ import annotations

import sys
from math import log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ballonet.offload.policy.replicas import protocol
from ballonet.offload.policy.replicas.protocol import Alone, Commit, Discard, Prepare, Recompute, StartRestore

from .played import MEMORY, Played

MOVES = [
    "tick",
    "alive",
    "busy",
    "burst",
    "flood",
    "calm",
    "prepared",
    "restored",
    "settled",
    "arrive",
    "finish",
    "leave",
    "join",
    "lost",
    "suspect",
    "damaged",
    "failed",
    "one",
    "old",
]
STEPS = st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 11), st.integers(0, 7)), max_size=40)
# What has happened before: fresh, preparing, exchanging, pipelines, a second level, restoring, pulling, KV going home
SCRIPT = [
    "burst",
    "prepared",
    "settled",
    "alive",
    "flood",
    "prepared",
    "settled",
    "calm",
    "arrive",
    "arrive",
    "prepared",
    "arrive",
    "restored",
]
PAIRS_ONLY = [
    "burst",
    "prepared",
    "settled",
    "calm",
    "arrive",
    "arrive",
    "arrive",
    "prepared",
    "arrive",
    "restored",
    "settled",
]
STARTS = [script[:length] for script in (SCRIPT, PAIRS_ONLY) for length in range(len(script) + 1)]
ANSWERS = (protocol.Prepared, protocol.Committed, protocol.Exchanged, protocol.Restored)


def pick(items: object, number: int) -> str | None:
    """One of the requests."""
    names = sorted(items)  # type: ignore[call-overload]
    return names[number % len(names)] if names else None


def move(played: Played, what: str, a: int, b: int) -> None:
    """What happens next: `a` and `b` say to whom, and how much."""
    members = [*played.controller.cluster.replicas]
    member = members[a % len(members)] if members else a
    other = members[b % len(members)] if members else b
    epoch = played.epoch(member) if members else 0
    proposed = played.prepared.epoch if played.prepared else epoch
    at = played.at
    match what:
        case "tick":
            played.tick(0.1 * (1 + a))
        case "alive":
            played.alive(1.5 * b, used=10 + 60 * (a % 3))
        case "busy":
            played.alive(6.0, used=600, free=5, pending=102)
        case "burst":
            if len(played.where) < 40:
                played.burst()
        case "flood":
            if len(played.where) < 40:
                played.flood()
        case "calm":
            played.finish_all()
            played.alive(10.5)
        case "prepared":
            if played.prepared:
                played.all_prepared()
        case "restored":
            if played.prepared:
                played.all_restored()
        case "settled":
            played.settled()
            played.load()
        case "arrive":
            played.arrive(1 + 700 * a, 1 + 100 * b)
        case "finish" | "leave":
            if name := pick(played.where, a):
                played.on(protocol.Finished(at, name) if what == "finish" else protocol.Left(at, name))
        case "join":
            played.on(protocol.Joined(at, a, MEMORY if b else 310))
        case "lost":
            played.on(protocol.Lost(at, member))
        case "suspect":
            placement = played.controller.cluster.placement(member)
            peers = placement.group.members if placement and b < 6 else (other,)
            played.on(protocol.Suspected(at, proposed if b % 2 else epoch, member, peers[b % len(peers)]))
        case "damaged":
            if name := pick(played.where, b):
                played.on(protocol.Damaged(at, epoch, member, name))
        case "failed":
            reason = [*protocol.Reason][b % 5]
            kind = protocol.PrepareFailed if a % 2 else protocol.PullFailed
            played.on(kind(at, proposed if b % 2 else epoch, member, reason))
        case "one":
            played.on(ANSWERS[b % 4](at, proposed if b < 4 else epoch, member))
        case "old":
            old = max(0, epoch - 1 - b)
            possible: list[protocol.Event] = [kind(at, old, member) for kind in ANSWERS]
            possible += [
                protocol.Load(at, member, old, 1, 1, 1, 1),
                protocol.Suspected(at, old, member, other),
                protocol.Tick(at),
            ]
            played.on(possible[a % len(possible)])


@settings(max_examples=100)
@given(st.integers(0, 6), st.sampled_from(STARTS), STEPS)
def test_after_any_events_nothing_is_lost_doubled_or_incomplete(
    members: int, start: list[str], steps: list[tuple[str, int, int]]
) -> None:
    """As `Played` says; and in the end, when replicas are there and all is quiet, every request is computed."""
    played = Played(members)
    for what in start:
        move(played, what, 1, 7)
    for what, a, b in steps:
        epoch = played.controller.epoch
        move(played, what, a, b)
        assert played.controller.epoch >= epoch
    for member in range(3):
        played.join(member)
    played.settled()
    played.alive(1.0)
    assert None not in played.where.values()
    names = {f"r{number}" for number in range(1, played.names + 1)}
    assert names == {*played.where, *played.ended}


def test_the_moves_reach_every_phase() -> None:
    """Else the test above would show little: levels, restores, and losses in each."""
    played = Played(6)
    for what in (*SCRIPT, "settled", "burst", "prepared"):
        move(played, what, 1, 7)
    homes = [len(each.homes) for each in played.of(Commit) if isinstance(each, Commit)]
    assert homes == [0, 0, 3, 0]
    assert [len(each.groups) for each in played.of(Prepare) if isinstance(each, Prepare)] == [3, 1, 6, 3]
    assert len(played.of(Commit)) == 4
    for what in ("lost", "suspect", "settled", "calm", "prepared"):
        move(played, what, 1, 0)
    move(played, "lost", 2, 0)  # one that pulls
    assert {Prepare, Commit, Discard, StartRestore, Recompute, Alone} <= {*map(type, played.log)}


# Work


def calls(run: object) -> int:
    """Functions called, of Python and of C."""
    count = 0

    def profile(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        run()  # type: ignore[operator]
    finally:
        sys.setprofile(None)
    return count


class Crowd(Played):
    """Without the checks after each event, which take longer than what is counted."""

    def _check(self) -> None:
        pass


@pytest.mark.parametrize("what", ["tick", "drop", "commit", "arrive", "lost"])
def test_a_decision_takes_n_log_n_calls(what: str) -> None:
    counts = {}
    for replicas in (250, 1000, 2000):
        played = Crowd(replicas)
        if what == "tick":
            counts[replicas] = calls(played.tick)
            continue
        for _ in range(replicas):
            played.arrive(4600, 600)
        if what == "arrive":
            counts[replicas] = calls(lambda played=played: [played.arrive(400, 100) for _ in range(100)])
            continue
        for _ in range(2 * replicas):
            played.arrive(400, 100)
        played.load(used=600, free=5, pending=102)
        count = calls(played.tick)
        assert played.prepared is not None
        assert len(played.prepared.groups) > replicas // 3
        if what == "commit":
            count = calls(played.all_prepared)
            assert len(played.controller.cluster.groups) < replicas
        if what == "lost":
            played.all_prepared()
            played.settled()
            count = calls(lambda played=played: played.on(protocol.Lost(played.at, 1)))
        counts[replicas] = count
    small = counts[250] / (250 * log2(250))
    assert all(count <= 1.5 * small * replicas * log2(replicas) for replicas, count in counts.items()), counts
    if what == "arrive":
        assert counts[2000] <= 1.5 * counts[250], counts
