"""The parts of a replica, and its interface to the supervisor."""

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
    """Messages to and from the supervisor."""

    def take(self) -> Message | None:
        """Removes and returns the next message; None where none has come. SupervisorLost."""

    def has(self) -> bool:
        """Returns whether a message has come, or the supervisor is lost."""

    def has_kind(self, kinds: tuple[type[Any], ...]) -> bool:
        """Returns whether a message of one of these kinds has come. SupervisorLost."""

    def post(self, *messages: Message) -> None:
        """Sends messages. Several in one call cost little more than one. SupervisorLost."""


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
