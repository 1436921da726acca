"""Messages between supervisor and replicas, and their encoding: actions and events of the controller, and others."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Union

import msgspec
from msgspec import Struct
from torch import nn

from ...allocator._native import Device
from ...allocator.versions import installed
from ...offload.policy.replicas import protocol
from ...offload.policy.replicas.pipeline import ChunkCost
from ...offload.policy.replicas.protocol import ACTIONS, EVENTS
from ..device.key import key_of
from ..prefix.identity import samples
from ..sampling.settings import ChosenToken
from .microbatch_plan import Request


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The model and versions of one replica. `weights`: a hash of the configuration and of samples of all weights;
    `dtype`: number of tensors per dtype, "bfloat16 x 291"; the others: versions of packages."""

    weights: str
    dtype: str
    ballonet: str
    torch: str
    transformers: str
    llguidance: str = "not installed"

    def differences(self, other: Fingerprint) -> tuple[str, ...]:
        """Returns how `other` differs, one line each: "torch is 2.12.0, not 2.13.0". Leaves out the weights where their
        dtype differs, as then their bytes do, too."""
        mine, its = asdict(self), asdict(other)
        if self.dtype != other.dtype:
            mine["weights"] = its["weights"] = ""
        return tuple(f"{name} is {its[name]}, not {mine[name]}" for name in mine if mine[name] != its[name])


def fingerprint_of(model: nn.Module, device: Device) -> Fingerprint:
    """Returns the fingerprint of a model, from samples of its weights (hooks/prefix/identity.py, Note [Sampled])."""
    facts = key_of(model, device)
    weights = hashlib.blake2b(facts["model"].encode(), digest_size=16)
    for sample in samples(model):
        weights.update(sample.cpu().numpy().data)
    types = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in model.parameters())
    return Fingerprint(
        weights=weights.hexdigest(),
        dtype=", ".join(f"{name} x {count}" for name, count in sorted(types.items())),
        ballonet=facts["ballonet"],
        torch=facts["torch"],
        transformers=facts["transformers"],
        llguidance=installed("llguidance") or "not installed",
    )


class Join(Struct, frozen=True, tag=True):
    """From a replica: it wants to join. `requests`: what it computed as the first stage of a group, for a supervisor
    that was started again, and has no other ledger."""

    fingerprint: Fingerprint
    requests: tuple[Request, ...] = ()


class Welcome(Struct, frozen=True, tag=True):
    """To a replica that joins: its number, which no other one ever had. `host`, `links`: address and port of the store
    in which links form; `cost`: of chunks, where the supervisor knows it."""

    member: int
    host: str
    links: int
    cost: ChunkCost | None = None


class JoinRefusal(Struct, frozen=True, tag=True):
    """To a replica that joins: it is not admitted, as it differs from the others. `differences`: one line each."""

    differences: tuple[str, ...]


class Start(Struct, frozen=True, tag=True):
    """To the first stage of a group: compute a request, after its delivered tokens."""

    epoch: int
    request: Request


class End(Struct, frozen=True, tag=True):
    """To a replica: end."""


class SupervisorRestarted(Struct, frozen=True, tag=True):
    """To a replica, from its own channel: the supervisor was started again, so it joins anew, and says what it
    computes."""


class StartTimeline(Struct, frozen=True, tag=True):
    """To a replica: send `Seen` for a timeline from now on."""


class Seen(Struct, frozen=True, tag=True):
    """From a replica, periodically after `StartTimeline`: its `bars` of a timeline. `machine`, and `sent`, the time of
    sending by its own clock: see recording.py, Note [One clock]."""

    machine: str
    sent: float
    bars: tuple[tuple[str, str, float, float], ...]


class Hello(Struct, frozen=True, tag=True):
    """From a replica that has joined. `process`, `host`: for log lines; `pages`: for layers and KV together; `layers`:
    pages of each; `token`: bytes of a token's KV in all layers; `page`: bytes of a page; `cost`: of chunks on this
    replica; `rank`: its number among those that the supervisor starts."""

    process: int
    host: str
    pages: int
    layers: tuple[int, ...]
    token: int
    page: int
    cost: ChunkCost
    rank: int


class Told(Struct, frozen=True, tag=True):
    """From the first stage, and to a front end on Ray: tokens of an answer, after `before` earlier ones. `error`: why
    the request failed."""

    request: str
    assignment: int
    before: int
    tokens: tuple[ChosenToken, ...]
    error: str | None = None


class Counted(Struct, frozen=True, tag=True):
    """From a replica, periodically: bytes of KV and of layers that it has sent in all, and the number of layers that it
    holds. `busy`, `open`, `error`: see `StageTimes`."""

    kv_bytes: int
    layer_bytes: int
    layers: int
    busy: float = 0.0
    open: float = 0.0
    error: float | None = None


class Ask(Struct, frozen=True, tag=True):
    """From a front end on Ray: a client's request, perhaps after delivered tokens."""

    request: Request


class Forget(Struct, frozen=True, tag=True):
    """From a front end on Ray: the client of a request has gone away."""

    request: str


class Line(Struct, frozen=True, tag=True):
    """From a replica on Ray, and to front ends: a line for people."""

    text: str


Message = (
    Join
    | Welcome
    | JoinRefusal
    | Hello
    | Start
    | End
    | Told
    | Counted
    | StartTimeline
    | Seen
    | SupervisorRestarted
    | Ask
    | Forget
    | Line
    | protocol.Action
    | protocol.Event
)

# Messages that end a replica's part in its group, and so its waits there
ENDS_GROUP: Final[tuple[type[Any], ...]] = (protocol.Alone, End, SupervisorRestarted)
# and those that end its waits for layers: also the end of an epoch in preparation, while the present group goes on
ENDS_PULL: Final[tuple[type[Any], ...]] = (*ENDS_GROUP, protocol.Discard)

_KINDS: Final[Any] = Union[
    *(Join, Welcome, JoinRefusal, Hello, Start, End, Told, Counted, StartTimeline, Seen),
    *(Ask, Forget, Line, ACTIONS, EVENTS),
]
_encoder: Final = msgspec.msgpack.Encoder()  # keeps an infinite number of seconds, which JSON has not
_decoder: Final = msgspec.msgpack.Decoder(tuple[_KINDS, ...])


def encoded(*messages: Message) -> bytes:
    """Returns messages as bytes."""
    return _encoder.encode(messages)


def decoded(packed: bytes) -> Sequence[Message]:
    """Returns the messages that `encoded` has encoded. ValueError where the bytes are none."""
    try:
        messages: Sequence[Message] = _decoder.decode(packed)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{packed[:80]!r} is no message of this version: {error}") from None
    return messages
