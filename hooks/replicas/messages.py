"""Messages between supervisor and replicas, and their encoding: actions and events of the controller, and others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...offload.policy.replicas import actions, events
from ...offload.policy.replicas.chunk_cost import ChunkCost
from ...offload.policy.replicas.json_values import KINDS, from_plain, kinds, to_plain
from . import handover, microbatch_plan, requests
from .requests import Request


@dataclass(frozen=True, slots=True)
class Start:
    """To the first stage of a group: compute a request, after its delivered tokens. `assignment`: counts how often the
    request was given to a group (request_ledger.py)."""

    epoch: int
    request: Request
    assignment: int


@dataclass(frozen=True, slots=True)
class End:
    """To a replica: end."""


@dataclass(frozen=True, slots=True)
class StartTimeline:
    """To a replica: send `Seen` for a timeline from now on."""


@dataclass(frozen=True, slots=True)
class Seen:
    """From a replica, periodically after `StartTimeline`: its `bars` of a timeline (notes.py). `machine`, and `sent`,
    the time of sending by its own clock: see recording.py, Note [One clock]."""

    machine: str
    sent: float
    bars: tuple[tuple[str, str, float, float], ...]


@dataclass(frozen=True, slots=True)
class Hello:
    """From a replica that has joined. `process`, `host`: for log lines; `pages`: for layers and KV together; `layers`:
    pages of each; `token`: bytes of a token's KV in all layers; `page`: bytes of a page; `cost`: of chunks on this
    replica; `rank`: on the supervisor's machine, None where the supervisor did not start it."""

    process: int
    host: str
    pages: int
    layers: tuple[int, ...]
    token: int
    page: int
    cost: ChunkCost
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """To a process that the supervisor starts, in its environment: its `rank`, and the `cost` of chunks on this
    machine; None: measure it. A replacement starts under load, where a measurement would be wrong."""

    rank: int
    cost: ChunkCost | None


@dataclass(frozen=True, slots=True)
class Told:
    """From the first stage: tokens of an answer, after `before` earlier ones. `error`: why the request failed."""

    request: str
    assignment: int
    before: int
    tokens: tuple[int, ...]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Counted:
    """From a replica, periodically: bytes of KV and of layers that it has sent in all, and the number of layers that it
    holds. `busy`, `open`, `error`: see stage_times.py."""

    kv_bytes: int
    layer_bytes: int
    layers: int
    busy: float = 0.0
    open: float = 0.0
    error: float | None = None


Message = (
    Hello
    | Start
    | Started
    | End
    | Told
    | Counted
    | StartTimeline
    | Seen
    | handover.HandedOver
    | actions.Action
    | events.Event
)

# Messages that end a replica's part in its group, and so its waits there
ENDS_GROUP: Final[tuple[type[Any], ...]] = (actions.Alone, actions.Rejoin, End)
# and those that end its waits for layers: also the end of an epoch in preparation, while the present group goes on
ENDS_PULL: Final = (*ENDS_GROUP, actions.Discard)

_KINDS: Final[Mapping[str, Any]] = {
    **KINDS,
    **kinds((microbatch_plan, requests, handover)),
    **{each.__name__: each for each in (Hello, Start, Started, End, Told, Counted, StartTimeline, Seen)},
}


def encoded(message: Message) -> str:
    """Returns the message as text."""
    return json.dumps(to_plain(message))


def decoded(text: str) -> Message:
    """Returns the message that `encoded` has encoded. ValueError where the text is none."""
    try:
        found: Message = from_plain(json.loads(text), _KINDS)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{text[:80]!r} is no message of this version: {error}") from None
    return found
