"""What supervisor and replicas tell each other, as text: the controller's actions, its events, requests and tokens."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from ...offload.policy.replicas import actions, events, gate, groups, restore_plan
from ...offload.policy.replicas.chunk_cost import ChunkCost
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
class Hello:
    """From a replica that has joined. `process`: its id, on its machine; `pages`: for layers and KV together; `layers`:
    pages of each; bytes of a `token` of KV in all layers, and of a `page`; `cost`: what chunks take there; `rank`: on
    the supervisor's machine, None where somebody else started it."""

    process: int
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
    """From a replica, now and then: bytes of KV and layers that it has sent in all, and layers that it holds."""

    kv_bytes: int
    layer_bytes: int
    layers: int


Message = Hello | Start | Started | End | Told | Counted | handover.HandedOver | actions.Action | events.Event

_TYPES: Final[dict[str, Any]] = {
    name: found
    for module in (actions, events, gate, groups, restore_plan, plan, requests, handover)
    for name, found in vars(module).items()
    if isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, Enum))
} | {each.__name__: each for each in (Hello, Start, Started, End, Told, Counted, ChunkCost)}


def encoded(message: Message) -> str:
    """The message as text."""
    return json.dumps(_plain(message))


def decoded(text: str) -> Message:
    """The message that `encoded` was called on. ValueError where it is none."""
    try:
        found: Message = _made(json.loads(text))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{text[:80]!r} is no message of this version: {error}") from None
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return {"": type(value).__name__, "value": value.value}
    if dataclasses.is_dataclass(value):
        fields = {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
        return {"": type(value).__name__, **fields}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"{value!r} cannot be sent")


def _made(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_made, value))
    if isinstance(value, dict):
        kind = _TYPES[value.pop("")]
        return kind(**{name: _made(each) for name, each in value.items()})
    return value
