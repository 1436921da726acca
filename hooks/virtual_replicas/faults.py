"""Faults of a simulation: of replicas, links and clients, each at a given time.

A file of faults has one per line, as JSON, in any order: "at", in seconds after the first request, "fault", its kind,
and the fields of the kind. Kinds, each a class below:

    {"at": 2.5, "fault": "killed", "member": 1}
    {"at": 2.5, "fault": "hung", "member": 1, "seconds": 4}       without seconds: for good
    {"at": 2.5, "fault": "link", "member": 0, "other": 1}
    {"at": 2.5, "fault": "refused", "member": 1, "why": "PAGES"}  or HOST_MEMORY
    {"at": 2.5, "fault": "file", "member": 1}
    {"at": 2.5, "fault": "damaged", "member": 1}
    {"at": 2.5, "fault": "left", "request": 17}
    {"at": 2.5, "fault": "joined", "member": 4}
    {"at": 2.5, "fault": "supervisor"}
    {"at": 2.5, "fault": "shutdown"}
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...allocator.errors import ManageError, TraceError
from ...offload.policy.replicas.events import Reason


@dataclass(frozen=True, slots=True)
class PlayedFault:
    """Base of all faults. `at`: seconds after the first request."""

    at: float


@dataclass(frozen=True, slots=True)
class Killed(PlayedFault):
    """The process of a replica is killed."""

    member: int


@dataclass(frozen=True, slots=True)
class Hung(PlayedFault):
    """A replica is paused for so many `seconds`, unreachable, so it cannot be killed; None: for good, and its process
    is killed when that is noticed."""

    member: int
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class LinkLost(PlayedFault):
    """The links between two live replicas are lost, if they have any."""

    member: int
    other: int


@dataclass(frozen=True, slots=True)
class FaultRefused(PlayedFault):
    """A replica cannot prepare its next epoch. `why`: no pages, or no host memory."""

    member: int
    why: Reason = Reason.PAGES


@dataclass(frozen=True, slots=True)
class FileChanged(PlayedFault):
    """The file of a replica's weights has changed: no layer can be read from it any more."""

    member: int


@dataclass(frozen=True, slots=True)
class DamagedKV(PlayedFault):
    """KV of a request arrives at a replica with a wrong checksum, in the replica's next exchange."""

    member: int


@dataclass(frozen=True, slots=True)
class ClientLeft(PlayedFault):
    """The client of a `request`, by its index in the trace, goes away. Nothing where the request is not open."""

    request: int


@dataclass(frozen=True, slots=True)
class NewReplica(PlayedFault):
    """A replica joins, with a number that was never used."""

    member: int


@dataclass(frozen=True, slots=True)
class SupervisorFails(PlayedFault):
    """The supervisor ends, and with it all replicas and requests."""


@dataclass(frozen=True, slots=True)
class Shutdown(PlayedFault):
    """The server is shut down: all requests fail, and everything ends."""


KINDS: Final[Mapping[str, type[PlayedFault]]] = {
    "killed": Killed,
    "hung": Hung,
    "link": LinkLost,
    "refused": FaultRefused,
    "file": FileChanged,
    "damaged": DamagedKV,
    "left": ClientLeft,
    "joined": NewReplica,
    "supervisor": SupervisorFails,
    "shutdown": Shutdown,
}
_REASONS: Final = {reason.name: reason for reason in (Reason.PAGES, Reason.HOST_MEMORY)}


def read_faults(path: Path) -> list[PlayedFault]:
    """Returns the faults of a file. TraceError where a line is none; OSError."""
    faults = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not text.strip():
            continue
        try:
            faults.append(_made(json.loads(text)))
        except (ValueError, TypeError, AttributeError) as error:
            raise TraceError(str(path), number, f"no fault: {error}") from None
    return faults


def check_faults(faults: Iterable[PlayedFault], replicas: int, requests: int) -> None:
    """Raises ManageError where a fault names a replica or request that does not exist at that time, or adds a replica
    that does."""
    known = {*range(replicas)}
    for fault in sorted(faults, key=lambda fault: fault.at):
        if isinstance(fault, NewReplica):
            if fault.member in known:
                raise ManageError(f"{fault}: that number is in use; the next free one is {max(known) + 1}")
            known.add(fault.member)
            continue
        for name in ("member", "other"):
            if getattr(fault, name, 0) not in known:
                raise ManageError(f"{fault}: there are replicas {', '.join(map(str, sorted(known)))} then")
        if isinstance(fault, LinkLost) and fault.member == fault.other:
            raise ManageError(f"{fault}: a link is between two replicas")
        if isinstance(fault, ClientLeft) and fault.request >= requests:
            raise ManageError(f"{fault}: there are {requests} requests, from 0 on")


def _made(given: dict[str, Any]) -> PlayedFault:
    """Returns the fault of a JSON object. ValueError, TypeError, AttributeError."""
    kind = KINDS.get(given.pop("fault", None))
    if kind is None:
        raise ValueError(f"its kind, fault, is one of {', '.join(KINDS)}")
    fields = {field.name for field in dataclasses.fields(kind)}
    if unknown := sorted({*given} - fields):
        raise ValueError(f"{', '.join(unknown)}: it has {', '.join(sorted(fields))}")
    values = {name: _value(name, value) for name, value in given.items()}
    return kind(**values)


def _value(name: str, value: Any) -> Any:
    if name == "why":
        if value not in _REASONS:
            raise ValueError(f"why is one of {', '.join(_REASONS)}")
        return _REASONS[value]
    whole = name not in ("at", "seconds")
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise ValueError(f"{name} is {value!r}, and no {'whole ' if whole else ''}number")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}: it is 0 or more")
    return value
