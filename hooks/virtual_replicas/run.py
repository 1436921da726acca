"""Runs recorded requests on simulated replicas with a policy, and returns the figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from ...allocator.errors import ManageError
from ...offload.policy.replicas.pipeline import ChunkCost
from ...offload.policy.replicas.protocol import Note
from ...offload.policy.replicas.tuning import DEFAULT, ReplicaTuning
from ..server.arrivals import RecordedArrival
from ..server.load import summary
from .faults import PlayedFault
from .fleet import VirtualFleet
from .fleet_run import FleetRun, PeerRun
from .memory_policies import Peers

POLICIES: Final = (*Peers.POLICIES, "drop")


def checked(policies: Sequence[str]) -> None:
    """Raises ManageError where there is no such policy."""
    for policy in policies:
        if policy not in POLICIES:
            raise ManageError(f"no policy {policy!r} of replicas: there are {', '.join(POLICIES)}")


def run(
    fleet: VirtualFleet,
    cost: ChunkCost,
    arrivals: Sequence[RecordedArrival],
    policy: str,
    slos: tuple[float | None, float | None] = (None, None),
    note: Callable[[int], None] = lambda done: None,
    log: Note = lambda entry: None,
    faults: Sequence[PlayedFault] = (),
    tuning: ReplicaTuning = DEFAULT,
) -> dict[str, Any]:
    """Returns the figures of `load`, and `policy`, `replicas`; `drops`, `restores`: epochs committed; `bytes_moved`: of
    KV and weights, between replicas and hosts; `bubble`: fraction of the pipeline stages' time. `slos`: TTFT and TPOT
    in seconds, for the goodput; `note`: called with the number of requests that have ended. For policy drop only:
    `log`: called with the controller's decisions; `faults`: to play; `tuning`: of the controller. ManageError."""
    checked([policy])
    if not arrivals:
        raise ManageError("there are no requests")
    if faults and policy != "drop":
        raise ManageError(f"faults are played with policy drop: {policy} has no controller that would notice them")
    drops, restores, bubble = 0, 0, 0.0
    if policy == "drop":
        simulated = FleetRun(fleet, cost, arrivals, tuning, log, faults, note)
        try:
            answers, moved = simulated.answers(), simulated.bytes_moved
            state, bubble = simulated.supervisor.state(), simulated.bubble
            drops, restores = state.drops, state.restores
        finally:
            simulated.close()
    else:
        peers = PeerRun(fleet, cost, arrivals, policy, note)
        answers, moved = peers.answers(), peers.bytes_moved
    return {
        "policy": policy,
        "replicas": fleet.replicas,
        **summary(answers, *slos),
        "drops": drops,
        "restores": restores,
        "bytes_moved": moved,
        "bubble": bubble,
        "time": "simulated",
    }
