"""The policies that replicas are compared by, and the figures of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ....allocator.errors import ManageError
from ....offload.policy.replicas.chunk_cost import ChunkCost
from ....offload.policy.replicas.decisions import Note
from ....offload.policy.tuning import DEFAULT, Replicas
from ...server.arrivals import RecordedArrival
from ...server.load import summary
from .drop_policy import DropPolicy
from .fault_player import play_faults
from .faults import PlayedFault
from .fleet import VirtualFleet
from .fleet_run import FleetRun
from .memory_policies import MigratePolicy, QueuePolicy, RecomputePolicy, SwapPolicy

POLICIES: Final[Mapping[str, type[RecomputePolicy]]] = {
    "queue": QueuePolicy,
    "recompute": RecomputePolicy,
    "swap": SwapPolicy,
    "migrate": MigratePolicy,
    "drop": DropPolicy,
}


def checked(policies: Sequence[str]) -> None:
    """ManageError where there is no such policy."""
    for each in policies:
        if each not in POLICIES:
            raise ManageError(f"no policy {each!r} of replicas: there are {', '.join(POLICIES)}")


def run(
    fleet: VirtualFleet,
    cost: ChunkCost,
    arrivals: Sequence[RecordedArrival],
    policy: str,
    slos: tuple[float | None, float | None] = (None, None),
    note: Callable[[int], None] = lambda done: None,
    log: Note = lambda entry: None,
    faults: Sequence[PlayedFault] = (),
    tuning: Replicas = DEFAULT.replicas,
) -> dict[str, Any]:
    """Returns the figures of `load`, and `policy`, `replicas`; `drops`, `restores`: epochs that were committed;
    `bytes_moved`: of KV and weights, between replicas and to the host; `bubble`: part of the time of pipelines' stages.
    `slos`: seconds to the first token, and of one, for the goodput; of the policy that has a controller: `log` is given
    its decisions, `faults` happen, and it has this `tuning`. ManageError."""
    checked([policy])
    if not arrivals:
        raise ManageError("there are no requests")
    if faults and policy != "drop":
        raise ManageError(f"faults are played with policy drop: {policy} has no controller that would notice them")
    simulated = FleetRun(fleet, cost, arrivals, tuning, log)
    memory = POLICIES[policy](simulated)
    if isinstance(memory, DropPolicy):
        play_faults(memory, faults)
    answers = simulated.answers(memory.arrive, note)
    drops = restores = 0
    if isinstance(memory, DropPolicy):
        drops, restores = memory.changes.drops, memory.changes.restores
    return {
        "policy": policy,
        "replicas": fleet.replicas,
        **summary(answers, *slos),
        "drops": drops,
        "restores": restores,
        "bytes_moved": simulated.bytes_moved,
        "bubble": simulated.bubble,
        "time": "simulated",
    }
