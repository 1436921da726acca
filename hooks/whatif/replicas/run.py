"""The policies that replicas are compared by, and the figures of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ....allocator.errors import ManageError
from ....offload.policy.replicas.actions import Action
from ....offload.policy.replicas.chunk_cost import ChunkCost
from ...server.arrivals import Arrival
from ...server.load import summary
from .dropping import Drop
from .fleet import Fleet
from .fleet_run import FleetRun
from .keepers import Migrate, Queue, Recompute, Swap

POLICIES: Final[Mapping[str, type[Recompute]]] = {
    "queue": Queue,
    "recompute": Recompute,
    "swap": Swap,
    "migrate": Migrate,
    "drop": Drop,
}


def checked(policies: Sequence[str]) -> None:
    """ManageError where there is no such policy."""
    for each in policies:
        if each not in POLICIES:
            raise ManageError(f"no policy {each!r} of replicas: there are {', '.join(POLICIES)}")


def run(
    fleet: Fleet,
    cost: ChunkCost,
    arrivals: Sequence[Arrival],
    policy: str,
    slos: tuple[float | None, float | None] = (None, None),
    note: Callable[[int], None] = lambda done: None,
    log: list[tuple[float, Action]] | None = None,
) -> dict[str, Any]:
    """Returns the figures of `load`, and `policy`, `replicas`; `drops`, `restores`: epochs that were committed;
    `bytes_moved`: of KV and weights, between replicas and to the host; `bubble`: part of the time of pipelines' stages.
    `slos`: seconds to the first token, and of one, for the goodput; `log`: is given what the controller decided, and
    when. ManageError."""
    checked([policy])
    if not arrivals:
        raise ManageError("there are no requests")
    simulated = FleetRun(fleet, cost, arrivals)
    keeper = POLICIES[policy](simulated)
    answers = simulated.answers(keeper.arrive, note)
    drops = restores = 0
    if isinstance(keeper, Drop):
        drops, restores = keeper.drops, keeper.restores
        if log is not None:
            log += keeper.log
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
