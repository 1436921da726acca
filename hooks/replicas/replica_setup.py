"""The parts of a replica."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ...offload.policy.tuning import DEFAULT, Replicas
from .channel import SupervisorChannel
from .held_layers import HeldLayers
from .link import Link
from .microbatch_plan import SplitPolicy, split_by_tokens
from .recording import Notes
from .replica_model import ReplicaModel


@dataclass(frozen=True, slots=True)
class ReplicaSetup:
    """The parts of a replica, the same in all epochs. `me`: its number; `layers`: of the model; `connect(epoch, peer)`:
    starts to form a link; `clock`: in seconds; `split`: makes microbatches; `notes`: bars of a timeline."""

    me: int
    replica: ReplicaModel
    layers: int
    holds: HeldLayers
    supervisor: SupervisorChannel
    connect: Callable[[int, int], Link]
    clock: Callable[[], float]
    split: SplitPolicy = split_by_tokens
    tuning: Replicas = DEFAULT.replicas
    notes: Notes = field(default_factory=lambda: Notes(time.monotonic))
