"""What a replica is made of, and the supervisor as it sees it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...offload.policy.tuning import DEFAULT, Replicas
from .forming import Form, by_tokens
from .held_layers import HeldLayers
from .link import Link
from .member import Member
from .messages import Message
from .notes import Notes


class Speaks(Protocol):
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
class Setup:
    """The same in all epochs. `me`: the number of this replica; `layers`: how many the model has; `connect`: (epoch,
    peer) begins to form a link; `clock`: in seconds; `form`: makes microbatches; `notes`: for a timeline."""

    me: int
    replica: Member
    layers: int
    holds: HeldLayers
    supervisor: Speaks
    connect: Callable[[int, int], Link]
    clock: Callable[[], float]
    form: Form = by_tokens
    tuning: Replicas = DEFAULT.replicas
    notes: Notes = field(default_factory=lambda: Notes(time.monotonic))
