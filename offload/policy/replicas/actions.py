"""Actions of the controller, for replicas and the front end."""

from __future__ import annotations

from msgspec import Struct

from .drop_gate import Verdict
from .events import Reason
from .groups import Group
from .restore_plan import Pull


class Action(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all actions."""


class Dispatch(Action, frozen=True):
    """The request starts in a group."""

    request: str
    epoch: int
    members: tuple[int, ...]


class Hold(Action, frozen=True):
    """The request waits at the supervisor: no group takes requests now."""

    request: str


class Refuse(Action, frozen=True):
    """The request ends with an error."""

    request: str
    reason: Reason


class Cancel(Action, frozen=True):
    """The group ends the request with its next plan of an iteration, on all stages."""

    request: str
    epoch: int
    members: tuple[int, ...]


class Recompute(Action, frozen=True):
    """The requests start anew in a group, from what the ledger has: prompt and delivered tokens."""

    requests: tuple[str, ...]
    epoch: int
    members: tuple[int, ...]


class Prepare(Action, frozen=True):
    """Members of the groups prepare an epoch while they serve. `pulls`: layers needed for spans that do not lie inside
    the old ones; `old`: members of the groups that end."""

    epoch: int
    groups: tuple[Group, ...]
    pulls: tuple[Pull, ...] = ()
    old: tuple[tuple[int, ...], ...] = ()


class Commit(Action, frozen=True):
    """Members enter the epoch between two iterations: drop layers, exchange KV, and run as a pipeline; or, after a
    restore, each alone. `homes`: the member that the KV of each request goes to, where groups end."""

    epoch: int
    homes: tuple[tuple[str, int], ...] = ()


class Discard(Action, frozen=True):
    """The prepared epoch is given up. Nothing was dropped."""

    epoch: int
    reason: Reason


class Alone(Action, frozen=True):
    """The replica is alone in a new epoch at once, without KV: layers that it lacks stream from their backing."""

    epoch: int
    member: int


class StartRestore(Action, frozen=True):
    """Members pull layers, in this order, behind activations. Layers that have arrived are skipped."""

    epoch: int
    pulls: tuple[Pull, ...]


class Fence(Action, frozen=True):
    """The replica's messages are ignored from now on; its process is ended."""

    member: int
    reason: Reason


class Decline(Action, frozen=True):
    """No drop: the next rung of the ladder has to find memory. `verdict`: the prediction, for NO_GAIN."""

    reason: Reason
    verdict: Verdict | None = None
