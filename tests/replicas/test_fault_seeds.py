"""Whatever goes wrong, and whenever: every accepted request ends once, and memory is what it was."""

from __future__ import annotations

import random
from collections import Counter

from ballonet.hooks.server.load import RecordedArrival
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
)
from ballonet.offload.policy.replicas.protocol import (
    Commit,
    Damaged,
    Discard,
    Exchanged,
    Fence,
    Reason,
    Recompute,
    StartRestore,
)

from .virtual import SLOWLY, Outcome, burst, fleet, outcome

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
        found = played(replicas, seed, faults)
        assert found.errors == {}, f"seed {seed}: {faults}"
        tally(found, seen)
    assert seen["drops"] > KILLS / 3
    assert seen["exchanging"] > KILLS / 20, "killed before KV was there"
    assert seen["discarded"] > 0, "killed while an epoch was prepared"
    assert seen["recomputed"] > KILLS
    assert seen["alone"] > KILLS / 4, "lost its group, and pulled what it had dropped"


def test_anything_goes_wrong_at_random_moments_and_every_request_ends_once() -> None:
    seen: Counter[str] = Counter()
    for seed in range(OTHERS):
        draw = random.Random(seed)
        replicas = draw.randint(2, 4)
        faults = [any_fault(draw, replicas) for _ in range(draw.randint(1, 6))]
        faults += [NewReplica(moment(draw), replicas + n) for n in range(draw.randint(0, 2))]
        found = played(replicas, seed, faults)
        assert all(any(end in error for end in ENDS) for error in found.errors.values()), f"seed {seed}: {faults}"
        tally(found, seen)
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


def tally(found: Outcome, seen: Counter[str]) -> None:
    """Counts what happened, to see that faults came where they hurt."""
    exchanged = {each.epoch for each in found.events(Exchanged)}
    seen["drops"] += found.run.supervisor.state().drops
    seen["exchanging"] += sum(each.epoch not in exchanged for _, each in found.actions(Commit))
    seen["discarded"] += len(found.actions(Discard))
    seen["recomputed"] += sum(len(each.requests) for _, each in found.actions(Recompute))
    seen["alone"] += sum(each.pulls[0].source is None for _, each in found.actions(StartRestore))
    seen["fenced"] += len(found.actions(Fence))
    seen["damaged"] += len(found.events(Damaged))
