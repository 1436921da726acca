"""What supervisor and replicas tell each other, as text: the controller's actions, its events, requests and tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...offload.policy.replicas import actions, events
from ...offload.policy.replicas.chunk_cost import ChunkCost
from ...offload.policy.replicas.json_values import KINDS, from_plain, kinds, to_plain
from . import handover, plan, requests
from .requests import Request


@dataclass(frozen=True, slots=True)
class Start:
    """To the first stage of a group: it computes a request from what was delivered on. `assignment`: counts how often
    the request was given to a group (ledger.py)."""

    epoch: int
    request: Request
    assignment: int


@dataclass(frozen=True, slots=True)
class End:
    """To a replica: it leaves."""


@dataclass(frozen=True, slots=True)
class Record:
    """To a replica: it tells from now on what it does."""


@dataclass(frozen=True, slots=True)
class Seen:
    """From a replica, now and then, after `Record`: what it has done (notes.py). `machine`, and the time at which it
    `sent` this by its own clock: see recording.py, Note [One clock]."""

    machine: str
    sent: float
    bars: tuple[tuple[str, str, float, float], ...]


@dataclass(frozen=True, slots=True)
class Hello:
    """From a replica that has joined. For people: its `process`, on that `host`. `pages`: for layers and KV together;
    `layers`: pages of each; bytes of a `token` of KV in all layers, and of a `page`; `cost`: what chunks take there;
    `rank`: on the supervisor's machine, None where somebody else started it."""

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
    """To a process that the supervisor starts, in its environment: its `rank`, and what chunks take on this machine;
    None: it measures that. Who replaces another starts in the middle of a load, and would measure that."""

    rank: int
    cost: ChunkCost | None


@dataclass(frozen=True, slots=True)
class Told:
    """From the first stage: tokens of an answer, which come after `before` others. `error`: why the request failed."""

    request: str
    assignment: int
    before: int
    tokens: tuple[int, ...]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Counted:
    """From a replica, now and then: bytes of KV and layers that it has sent in all, and layers that it holds. `busy`,
    `open`, `error`: see stage_times.py."""

    kv_bytes: int
    layer_bytes: int
    layers: int
    busy: float = 0.0
    open: float = 0.0
    error: float | None = None


Message = (
    Hello | Start | Started | End | Told | Counted | Record | Seen | handover.HandedOver | actions.Action | events.Event
)

# What ends a replica's part in its group, and so whatever it waits for there
ENDS_GROUP: Final[tuple[type[Any], ...]] = (actions.Alone, actions.Rejoin, End)
# and what ends its waiting for layers: an epoch that is given up as well, while the group in force goes on
ENDS_PULL: Final = (*ENDS_GROUP, actions.Discard)

_KINDS: Final[Mapping[str, Any]] = {
    **KINDS,
    **kinds((plan, requests, handover)),
    **{each.__name__: each for each in (Hello, Start, Started, End, Told, Counted, Record, Seen)},
}


def encoded(message: Message) -> str:
    """The message as text."""
    return json.dumps(to_plain(message))


def decoded(text: str) -> Message:
    """The message that `encoded` was called on. ValueError where it is none."""
    try:
        found: Message = from_plain(json.loads(text), _KINDS)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{text[:80]!r} is no message of this version: {error}") from None
    return found
