"""Actions of the controller, for replicas and the front end."""

from __future__ import annotations

from dataclasses import dataclass

from .drop_gate import Verdict
from .events import Reason
from .groups import Group
from .restore_plan import Pull


@dataclass(frozen=True, slots=True)
class Action:
    """Base of all actions."""


@dataclass(frozen=True, slots=True)
class Dispatch(Action):
    """The request starts in a group."""

    request: str
    epoch: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hold(Action):
    """The request waits at the supervisor: no group takes requests now."""

    request: str


@dataclass(frozen=True, slots=True)
class Refuse(Action):
    """The request ends with an error."""

    request: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class Cancel(Action):
    """The group ends the request with its next plan of an iteration, on all stages."""

    request: str
    epoch: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Recompute(Action):
    """The requests start anew in a group, from what the ledger has: prompt and delivered tokens."""

    requests: tuple[str, ...]
    epoch: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prepare(Action):
    """Members of the groups prepare an epoch while they serve. `pulls`: layers needed for spans that do not lie inside
    the old ones."""

    epoch: int
    groups: tuple[Group, ...]
    pulls: tuple[Pull, ...] = ()


@dataclass(frozen=True, slots=True)
class Commit(Action):
    """Members enter the epoch between two iterations: drop layers, exchange KV, and run as a pipeline; or, after a
    restore, each alone. `homes`: the member that the KV of each request goes to, where groups end."""

    epoch: int
    homes: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Discard(Action):
    """The prepared epoch is given up. Nothing was dropped."""

    epoch: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Alone(Action):
    """The replica is alone in a new epoch at once, without KV: layers that it lacks stream from their backing."""

    epoch: int
    member: int


@dataclass(frozen=True, slots=True)
class StartRestore(Action):
    """Members pull layers, in this order, behind activations. Layers that have arrived are skipped."""

    epoch: int
    pulls: tuple[Pull, ...]


@dataclass(frozen=True, slots=True)
class Fence(Action):
    """The replica's messages are ignored from now on; its process is ended if it can be reached."""

    member: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Rejoin(Action):
    """The replica, which is no member any more, drops all KV and requests and joins as a new one."""

    member: int


@dataclass(frozen=True, slots=True)
class Decline(Action):
    """No drop: the next rung of the ladder has to find memory. `verdict`: the prediction, for NO_GAIN."""

    reason: Reason
    verdict: Verdict | None = None
