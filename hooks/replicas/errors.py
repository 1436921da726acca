"""What can go wrong between replicas. Each message says what failed, why, and what to do."""

from __future__ import annotations

from ...allocator.errors import BallonetError, ConfigError, PortInUse
from ...allocator.units import format_time


class ReplicaError(BallonetError):
    """Base of every error between replicas."""


class LinkError(ReplicaError):
    """A link is lost, and with it what was on its way; other links are as they were. `epoch`: of the link; `peer`: the
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
    """A link was closed, by this end or by the other, and nothing is wrong with either."""

    def __str__(self) -> str:
        return f"the link to replica {self.peer} in epoch {self.epoch} is closed: {self.reason}"


class ChecksumError(ReplicaError):
    """The bytes of one message are not those that were sent. The link and all other messages are good. `tag`: of the
    message."""

    def __init__(self, epoch: int, peer: int, tag: str) -> None:
        super().__init__(epoch, peer, tag)
        self.epoch = epoch
        self.peer = peer
        self.tag = tag

    def __str__(self) -> str:
        return (
            f"message {self.tag!r} of replica {self.peer} in epoch {self.epoch} arrived with other bytes than it was "
            "sent with: compute it again, or have it sent again"
        )


class NoAnswer(ReplicaError):
    """Somebody was waited for until a deadline. `what` was waited for; `seconds`: how long."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(what, seconds)
        self.what = what
        self.seconds = seconds

    def __str__(self) -> str:
        return f"{self.what} did not come within {format_time(self.seconds)}"


class Interrupted(ReplicaError):
    """Who waited for `what` was called away by the control plane; nothing is lost, and it may wait again."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return f"the control plane has news for who waits for {self.what}: take the mail, then wait again"


class SupervisorLost(ReplicaError):
    """The supervisor's store does not answer any more: its process has ended, or the network between."""


class PlacementError(ReplicaError, ConfigError):
    """What says where the supervisor is cannot be understood."""


class SupervisorPortInUse(ReplicaError, PortInUse):
    """The supervisor cannot listen where it was told to."""


class JoinRefused(ReplicaError):
    """The supervisor does not admit this replica."""


class SecretRefused(JoinRefused):
    """The secret is missing, or another than the supervisor's; or what answered is not the supervisor."""


class OtherModel(JoinRefused):
    """The replica runs something else than the supervisor serves. `differences`: one line each."""

    def __init__(self, differences: tuple[str, ...]) -> None:
        super().__init__(differences)
        self.differences = differences

    def __str__(self) -> str:
        return (
            "a replica has to run what the others run, and this one differs: "
            f"{'; '.join(self.differences)}. Start it with the same model and versions"
        )
