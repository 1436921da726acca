"""What the controller is told (events), what it answers (actions), and the lines of the log of both.

Each event has `at`, seconds of one monotonic clock. Events from a replica carry its epoch: those of an earlier epoch
are ignored (fencing).

Note [Log of decisions]
    The supervisor of a server and the simulation write the same JSON lines: first a `Setup`, then a `Decision` for each
    event, with `epoch`, `event` and `actions`; `type` names the class of each. The controller reads no clock and
    draws no random number, so another one with the same setup that gets the logged events at their times takes the
    logged actions. So a decision of a server can be examined afterwards, and a changed policy compared with it.

    A long log is cut into files. A later file begins with `Continued` and the setup again: it can be read alone, but
    replayed only after the earlier files, as the state of its controller at that point is not written down.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum
from typing import Any, Final, Union

import msgspec
from msgspec import Struct

from .demand import KVSize
from .drops import Pull, Verdict
from .groups import Group
from .pipeline import ChunkCost
from .tuning import ReplicaTuning as Tuning

# Events


class Reason(Enum):
    """Why something is discarded, declined, fenced or refused."""

    PAGES = "no pages for it"
    HOST_MEMORY = "no host memory for it"
    FILE_CHANGED = "the file of the weights has changed"
    LINK = "a link failed"
    TIMEOUT = "no answer in time"
    LOST = "a replica is lost"
    HUNG = "its count of iterations stands still"
    BEHIND = "it did not take up its epoch"
    OVERLOAD = "memory is needed again"
    NO_ROOM = "a request does not fit into one replica"
    NO_PLAN = "no groups can merge so that it frees memory"
    NO_GAIN = "the queue would not drain sooner"
    TOO_LONG = "no group can ever hold it"
    LIVES = "replicas were lost too often while they computed it"


class Event(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all events. `at`: when it was noticed, in seconds."""

    at: float


class Tick(Event, frozen=True):
    """A period has passed."""


class Joined(Event, frozen=True):
    """A replica has joined, with all weights and no KV. `pages`: that it has for layers and KV together."""

    member: int
    pages: int


class Lost(Event, frozen=True):
    """The process of a replica has ended, or can no longer be reached."""

    member: int


class Suspected(Event, frozen=True):
    """The link of `by` to `of` failed in an epoch."""

    epoch: int
    by: int
    of: int


class Load(Event, frozen=True):
    """A replica's load and heartbeat. Pages for KV: `used`, `free`; `pending`: of prompts queued in its group, as
    demand.prompt_pages counts them; the first stage reports for all. `progress`: iterations of its main loop."""

    member: int
    epoch: int
    used: int
    free: int
    pending: int
    progress: int


class Arrived(Event, frozen=True):
    """A new request. Tokens: of its `prompt`, and `new` that it is expected to generate."""

    request: str
    prompt: int
    new: int


class Finished(Event, frozen=True):
    """A request has all its tokens."""

    request: str


class Left(Event, frozen=True):
    """The client of a request is gone."""

    request: str


class Damaged(Event, frozen=True):
    """KV of a request arrived with a wrong checksum."""

    epoch: int
    member: int
    request: str


class Prepared(Event, frozen=True):
    """A member has everything that the epoch needs: links, pages, host copies."""

    epoch: int
    member: int


class PrepareFailed(Event, frozen=True):
    """A member cannot prepare the epoch, and stays in its present one."""

    epoch: int
    member: int
    reason: Reason


class Committed(Event, frozen=True):
    """A member has entered the epoch."""

    epoch: int
    member: int


class Exchanged(Event, frozen=True):
    """A member has all KV that belongs to its span."""

    epoch: int
    member: int


class Restored(Event, frozen=True):
    """A member has pulled all layers that it was told to pull."""

    epoch: int
    member: int


class PullFailed(Event, frozen=True):
    """A member could not pull layers."""

    epoch: int
    member: int
    reason: Reason


# Actions


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
    """No drop: the next level of the reclaim order has to find memory. `verdict`: the prediction, for NO_GAIN."""

    reason: Reason
    verdict: Verdict | None = None


# The log


class Setup(Struct, frozen=True):
    """The arguments of `Controller`."""

    pages: tuple[int, ...]
    kv: KVSize
    cost: ChunkCost
    tuning: Tuning
    page_seconds: float


class Decision(Struct, frozen=True):
    """One event, and the `actions` that the controller returned, in order. `epoch`: its latest epoch number then."""

    epoch: int
    event: Event
    actions: tuple[Action, ...]


class Continued(Struct, frozen=True, forbid_unknown_fields=True):
    """The first entry of a later file of a log: how many `decisions` the earlier files have."""

    decisions: int


EVENTS: Final[Any] = Union[tuple(Event.__subclasses__())]  # noqa: UP007 (made of a list)
ACTIONS: Final[Any] = Union[tuple(Action.__subclasses__())]  # noqa: UP007
Entry = Setup | Decision | Continued
Note = Callable[[Entry], object]  # is given each entry of a log, in order


def to_line(entry: Entry) -> str:
    """Returns the entry as a line of JSON, without the line end."""
    return json.dumps(msgspec.to_builtins(entry))  # of Python, as msgspec writes an infinite number of seconds as null


def from_line(text: str) -> Entry:
    """Returns the entry of a line, the inverse of `to_line`. ValueError: no entry of this version."""
    try:
        fields = json.loads(text)
        if "event" in fields:
            event = msgspec.convert(fields["event"], EVENTS)
            return Decision(fields["epoch"], event, msgspec.convert(fields["actions"], tuple[ACTIONS, ...]))
        kind: type[Continued | Setup] = Continued if "decisions" in fields else Setup
        return msgspec.convert(fields, kind)
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise ValueError(f"{text[:80]!r} is no line of a log of this version: {error!r}") from None
