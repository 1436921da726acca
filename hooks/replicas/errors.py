"""Errors between replicas. Each message says what failed, why, and what to do."""

from __future__ import annotations

from ...allocator.errors import BallonetError
from ...allocator.units import format_time


class ReplicaError(BallonetError):
    """Base of every error between replicas."""


class LinkError(ReplicaError):
    """A link is lost, with the messages on their way; other links are unaffected. `epoch`: of the link; `peer`: the
    member at its other end."""

    def __init__(self, epoch: int, peer: int, reason: str) -> None:
        super().__init__(epoch, peer, reason)
        self.epoch = epoch
        self.peer = peer
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"the link to replica {self.peer} in epoch {self.epoch} is lost: {self.reason}. The next epoch is formed "
            "without it, or anew with it; what was on its way has to be sent again"
        )


class LinkClosed(LinkError):
    """A link was closed, by this end or by the other, without a fault."""

    def __str__(self) -> str:
        return f"the link to replica {self.peer} in epoch {self.epoch} is closed: {self.reason}"


class NoAnswer(ReplicaError):
    """A wait for `what` has timed out after `seconds`."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(what, seconds)
        self.what = what
        self.seconds = seconds

    def __str__(self) -> str:
        return f"{self.what} did not come within {format_time(self.seconds)}"


class Interrupted(ReplicaError):
    """A wait for `what` was interrupted by a control message; nothing is lost, and the wait may be repeated."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return f"a control message interrupts the wait for {self.what}: handle it, then wait again"


class SupervisorLost(ReplicaError):
    """The supervisor no longer answers: its process has ended, or the network is down."""


class JoinRefused(ReplicaError):
    """The supervisor does not admit this replica."""


class SecretRefused(JoinRefused):
    """The token of a Ray is missing, or that Ray asks for none."""


class OtherModel(JoinRefused):
    """The replica has another model or other versions than the supervisor serves. `differences`: one line each."""

    def __init__(self, differences: tuple[str, ...]) -> None:
        super().__init__(differences)
        self.differences = differences

    def __str__(self) -> str:
        return (
            "a replica has to run what the others run, and this one differs: "
            f"{'; '.join(self.differences)}. Start it with the same model and versions"
        )
