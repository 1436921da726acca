"""Small fleets, traces and costs for tests of the simulation of replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

from ballonet.hooks.server.load import RecordedArrival
from ballonet.hooks.virtual_replicas.fleet import Shape, VirtualFleet
from ballonet.hooks.virtual_replicas.fleet_run import FleetRun
from ballonet.hooks.virtual_replicas.memory_policies import RecomputePolicy
from ballonet.hooks.virtual_replicas.run import POLICIES
from ballonet.offload.policy.replicas.actions import Action, Dispatch
from ballonet.offload.policy.replicas.chunk_cost import ChunkCost
from ballonet.offload.policy.replicas.decisions import Decision, Entry

PAGE = 2**16
KV = 2**12  # bytes of a token, so a page has 16
SHAPE = Shape((16 * PAGE,) * 8, 2 * PAGE, KV, 256)
# a step of 1 ms, and 20 us of each new token; a request of 300 tokens then decodes for a second
COST = ChunkCost(1e-9, 2e-5, 1e-3, decode=ChunkCost(0.0, 2e-5, 1e-3, prefix=1e-8))

SLOW = ChunkCost(1e-9, 2e-5, 2e-2, decode=ChunkCost(0.0, 2e-5, 2e-2, prefix=1e-8))  # weights are what takes time


def fleet(replicas: int, tokens: int, shape: Shape = SHAPE, host: int = 2**30, network: float = 1e9) -> VirtualFleet:
    """Replicas that have room for about so many tokens of KV beside all layers."""
    weights = sum(shape.layers) + shape.rest
    return VirtualFleet(shape, replicas, weights + tokens * shape.kv, PAGE, host, 1e9, network, batch=256)


def burst(count: int, every: float, prompt: int, new: int, seed: int = 0, begin: float = 0.0) -> list[RecordedArrival]:
    """Requests at random times, `every` seconds on average; lengths are up to twice as long as their mean."""
    random, at, found = Random(seed), begin, list[RecordedArrival]()
    for _ in range(count):
        at += random.expovariate(1 / every)
        found.append(RecordedArrival(at, random.randrange(1, 2 * prompt), random.randrange(1, 2 * new)))
    return found


def played(
    policy: str,
    at: VirtualFleet,
    arrivals: list[RecordedArrival],
    cost: ChunkCost = COST,
    watch: Callable[[FleetRun], None] | None = None,
    log: Callable[[Entry], object] = lambda entry: None,
) -> tuple[FleetRun, RecomputePolicy]:
    """A run to its end. `watch`: is called whenever requests have ended."""
    run = FleetRun(at, cost, arrivals, log=log)
    keeper = POLICIES[policy](run)
    run.answers(keeper.arrive, lambda done: watch(run) if watch is not None else None)
    return run, keeper


def decided(log: Iterable[Entry]) -> list[tuple[float, Action]]:
    """What a controller decided, and when, but for where requests go."""
    return [
        (each.event.at, action)
        for each in log
        if isinstance(each, Decision)
        for action in each.actions
        if not isinstance(action, Dispatch)
    ]
