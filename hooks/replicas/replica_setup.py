"""What a replica is made of, and the supervisor as it sees it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...offload.policy.tuning import DEFAULT, Replicas
from .held_layers import HeldLayers
from .link import Link
from .messages import Message
from .microbatch_split import SplitPolicy, split_by_tokens
from .notes import Notes
from .replica_model import ReplicaModel


class SupervisorChannel(Protocol):
    """The supervisor, as a replica sees it."""

    def take(self) -> Message | None:
        """What it says next; None where nothing is here. SupervisorLost."""

    def has(self) -> bool:
        """Is anything here?"""

    def waits(self, kinds: tuple[type[Any], ...]) -> bool:
        """Is a message of one of these kinds here? SupervisorLost."""

    def post(self, *messages: Message) -> None:
        """Tells it something. Several at once cost little more than one."""


@dataclass(frozen=True, slots=True)
class ReplicaSetup:
    """The same in all epochs. `me`: the number of this replica; `layers`: how many the model has; `connect`: (epoch,
    peer) begins to form a link; `clock`: in seconds; `form`: makes microbatches; `notes`: for a timeline."""

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
