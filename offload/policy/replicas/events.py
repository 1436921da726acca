"""Events for the controller. Each has `at`, seconds of one monotonic clock.

Events from a replica carry its epoch: those of an earlier epoch are ignored (fencing).
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct


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
