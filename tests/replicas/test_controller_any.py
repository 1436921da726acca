"""The controller after any sequence of events: nothing is lost, doubled or incomplete after any of them; and its work
grows as N log N with the replicas."""

from __future__ import annotations

import sys
from math import log2
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ballonet.offload.policy.replicas import protocol
from ballonet.offload.policy.replicas.protocol import Alone, Commit, Discard, Prepare, Recompute, StartRestore

from .controller_scene import FULL, MEMORY, ControllerScene, of_kind

MOVES = (
    *("tick", "alive", "busy", "burst", "flood", "calm", "prepared", "restored", "settled", "arrive", "finish"),
    *("leave", "join", "lost", "suspect", "damaged", "failed", "one", "old"),
)
STEPS = st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 11), st.integers(0, 7)), max_size=40)
# What has happened before: fresh, preparing, exchanging, pipelines, a second level, restoring, pulling, KV going home
SCRIPT = [
    *("burst", "prepared", "settled", "alive", "flood", "prepared", "settled"),
    *("calm", "arrive", "arrive", "prepared", "arrive", "restored"),
]
PAIRS_ONLY = [*SCRIPT[:3], "calm", "arrive", "arrive", "arrive", "prepared", "arrive", "restored", "settled"]
STARTS = [script[:length] for script in (SCRIPT, PAIRS_ONLY) for length in range(len(script) + 1)]
ANSWERS = (protocol.Prepared, protocol.Committed, protocol.Exchanged, protocol.Restored)


def pick(items: object, number: int) -> str | None:
    """One of the requests."""
    names = sorted(items)  # type: ignore[call-overload]
    return names[number % len(names)] if names else None


def move(scene: ControllerScene, what: str, a: int, b: int) -> None:
    """What happens next: `a` and `b` say to whom, and how much."""
    members = [*scene.controller.cluster.replicas]
    member = members[a % len(members)] if members else a
    other = members[b % len(members)] if members else b
    epoch = scene.epoch(member) if members else 0
    proposed = scene.prepared.epoch if scene.prepared else epoch
    match what:
        case "tick":
            scene.tick(0.1 * (1 + a))
        case "alive":
            scene.alive(1.5 * b, used=10 + 60 * (a % 3))
        case "busy":
            scene.alive(6.0, **FULL)
        case "burst":
            if len(scene.where) < 40:
                scene.burst()
        case "flood":
            if len(scene.where) < 40:
                scene.flood()
        case "calm":
            scene.finish_all()
            scene.alive(10.5)
        case "prepared":
            if scene.prepared:
                scene.answer(protocol.Prepared)
        case "restored":
            if scene.prepared:
                scene.answer(protocol.Restored)
        case "settled":
            scene.settle()
            scene.load()
        case "arrive":
            scene.arrive(1 + 700 * a, 1 + 100 * b)
        case "finish" | "leave":
            if name := pick(scene.where, a):
                scene.tell(protocol.Finished if what == "finish" else protocol.Left, name)
        case "join":
            scene.tell(protocol.Joined, a, MEMORY if b else 310)
        case "lost":
            scene.tell(protocol.Lost, member)
        case "suspect":
            placement = scene.controller.cluster.placement(member)
            peers = placement.group.members if placement and b < 6 else (other,)
            scene.tell(protocol.Suspected, proposed if b % 2 else epoch, member, peers[b % len(peers)])
        case "damaged":
            if name := pick(scene.where, b):
                scene.tell(protocol.Damaged, epoch, member, name)
        case "failed":
            reason = [*protocol.Reason][b % 5]
            kind = protocol.PrepareFailed if a % 2 else protocol.PullFailed
            scene.tell(kind, proposed if b % 2 else epoch, member, reason)
        case "one":
            scene.tell(ANSWERS[b % 4], proposed if b < 4 else epoch, member)
        case "old":
            old = max(0, epoch - 1 - b)
            said: list[tuple[Any, ...]] = [
                *((kind, old, member) for kind in ANSWERS),
                (protocol.Load, member, old, 1, 1, 1, 1),
                (protocol.Suspected, old, member, other),
                (protocol.Tick,),
            ]
            scene.tell(*said[a % len(said)])


@settings(max_examples=100)
@given(st.integers(0, 6), st.sampled_from(STARTS), STEPS)
def test_no_request_or_layer_is_lost_or_doubled_by_any_events(
    members: int, start: list[str], steps: list[tuple[str, int, int]]
) -> None:
    """As `ControllerScene` checks; in the end, when replicas are there and all is quiet, every request is computed."""
    scene = ControllerScene(members)
    for what in start:
        move(scene, what, 1, 7)
    for what, a, b in steps:
        epoch = scene.controller.epoch
        move(scene, what, a, b)
        assert scene.controller.epoch >= epoch
    for member in range(3):
        scene.join(member)
    scene.settle()
    scene.alive(1.0)
    assert None not in scene.where.values()


def test_moves_of_the_test_above_reach_every_phase() -> None:
    """Levels, restores, and losses in each."""
    scene = ControllerScene(6)
    for what in (*SCRIPT, "settled", "burst", "prepared"):
        move(scene, what, 1, 7)
    assert [len(commit.homes) for commit in of_kind(Commit, scene.log)] == [0, 0, 3, 0]
    assert [len(prepare.groups) for prepare in of_kind(Prepare, scene.log)] == [3, 1, 6, 3]
    for what in ("lost", "suspect", "settled", "calm", "prepared"):
        move(scene, what, 1, 0)
    move(scene, "lost", 2, 0)  # one that pulls
    assert {Prepare, Commit, Discard, StartRestore, Recompute, Alone} <= {*map(type, scene.log)}


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


@pytest.mark.parametrize("what", ["tick", "drop", "commit", "arrive", "lost"])
def test_decision_for_n_replicas_takes_n_log_n_calls(what: str) -> None:
    counts = {}
    for replicas in (250, 1000, 2000):
        scene = ControllerScene(replicas, is_checked=False)  # which takes longer than what is counted
        if what == "tick":
            counts[replicas] = calls(scene.tick)
            continue
        for _ in range(replicas):
            scene.arrive(4600, 600)
        if what == "arrive":
            counts[replicas] = calls(lambda scene=scene: [scene.arrive(400, 100) for _ in range(100)])
            continue
        for _ in range(2 * replicas):
            scene.arrive(400, 100)
        scene.load(**FULL)
        count = calls(scene.tick)
        assert scene.prepared is not None
        assert len(scene.prepared.groups) > replicas // 3
        if what == "commit":
            count = calls(lambda scene=scene: scene.answer(protocol.Prepared))
            assert len(scene.controller.cluster.groups) < replicas
        if what == "lost":
            scene.answer(protocol.Prepared)
            scene.settle()
            count = calls(lambda scene=scene: scene.tell(protocol.Lost, 1))
        counts[replicas] = count
    small = counts[250] / (250 * log2(250))
    assert all(count <= 1.5 * small * replicas * log2(replicas) for replicas, count in counts.items()), counts
    if what == "arrive":
        assert counts[2000] <= 1.5 * counts[250], counts
