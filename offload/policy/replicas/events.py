"""Events for the controller. Each has `at`, seconds of one monotonic clock.

Events from a replica carry its epoch: those of an earlier epoch are ignored (fencing).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events. `at`: when it was noticed, in seconds."""

    at: float


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """A period has passed."""


@dataclass(frozen=True, slots=True)
class Joined(Event):
    """A replica has joined, with all weights and no KV. `pages`: that it has for layers and KV together."""

    member: int
    pages: int


@dataclass(frozen=True, slots=True)
class Lost(Event):
    """The process of a replica has ended, or can no longer be reached."""

    member: int


@dataclass(frozen=True, slots=True)
class Suspected(Event):
    """The link of `by` to `of` failed in an epoch."""

    epoch: int
    by: int
    of: int


@dataclass(frozen=True, slots=True)
class Load(Event):
    """A replica's load and heartbeat. Pages for KV: `used`, `free`; `pending`: of prompts queued in its group, as
    demand.prompt_pages counts them; the first stage reports for all. `progress`: iterations of its main loop."""

    member: int
    epoch: int
    used: int
    free: int
    pending: int
    progress: int


@dataclass(frozen=True, slots=True)
class Arrived(Event):
    """A new request. Tokens: of its `prompt`, and `new` that it is expected to generate."""

    request: str
    prompt: int
    new: int


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """A request has all its tokens."""

    request: str


@dataclass(frozen=True, slots=True)
class Left(Event):
    """The client of a request is gone."""

    request: str


@dataclass(frozen=True, slots=True)
class Damaged(Event):
    """KV of a request arrived with a wrong checksum."""

    epoch: int
    member: int
    request: str


@dataclass(frozen=True, slots=True)
class Prepared(Event):
    """A member has everything that the epoch needs: links, pages, host copies."""

    epoch: int
    member: int


@dataclass(frozen=True, slots=True)
class PrepareFailed(Event):
    """A member cannot prepare the epoch, and stays in its present one."""

    epoch: int
    member: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Committed(Event):
    """A member has entered the epoch."""

    epoch: int
    member: int


@dataclass(frozen=True, slots=True)
class Exchanged(Event):
    """A member has all KV that belongs to its span."""

    epoch: int
    member: int


@dataclass(frozen=True, slots=True)
class Restored(Event):
    """A member has pulled all layers that it was told to pull."""

    epoch: int
    member: int


@dataclass(frozen=True, slots=True)
class PullFailed(Event):
    """A member could not pull layers."""

    epoch: int
    member: int
    reason: Reason
