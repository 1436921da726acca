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

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union

import msgspec
from msgspec import Meta, Struct

from ...allocator.errors import ManageError, TraceError

Seconds = Annotated[float, Meta(ge=0)]
Number = Annotated[int, Meta(ge=0)]


class PlayedFault(Struct, frozen=True, tag_field="fault", forbid_unknown_fields=True):
    """Base of all faults. `at`: seconds after the first request."""

    at: Seconds


class Killed(PlayedFault, frozen=True, tag="killed"):
    """The process of a replica is killed."""

    member: Number


class Hung(PlayedFault, frozen=True, tag="hung"):
    """A replica is paused for so many `seconds`; None: for good. Its process is killed once that is noticed."""

    member: Number
    seconds: Seconds | None = None


class LinkLost(PlayedFault, frozen=True, tag="link"):
    """The links between two live replicas are lost, if they have any."""

    member: Number
    other: Number


class FaultRefused(PlayedFault, frozen=True, tag="refused"):
    """A replica cannot prepare its next epoch. `why`: no pages, or no host memory."""

    member: Number
    why: Literal["PAGES", "HOST_MEMORY"] = "PAGES"


class FileChanged(PlayedFault, frozen=True, tag="file"):
    """The file of a replica's weights has changed: no layer can be read from it any more."""

    member: Number


class DamagedKV(PlayedFault, frozen=True, tag="damaged"):
    """KV of a request arrives at a replica with a wrong checksum, in the replica's next exchange."""

    member: Number


class ClientLeft(PlayedFault, frozen=True, tag="left"):
    """The client of a `request`, by its index in the trace, goes away. Nothing where the request is not open."""

    request: Number


class NewReplica(PlayedFault, frozen=True, tag="joined"):
    """A replica joins, with a number that was never used."""

    member: Number


class SupervisorFails(PlayedFault, frozen=True, tag="supervisor"):
    """The supervisor ends, and with it all replicas and requests."""


class Shutdown(PlayedFault, frozen=True, tag="shutdown"):
    """The server is shut down: all requests fail, and everything ends."""


_KINDS: Final = {str(kind.__struct_config__.tag): kind for kind in PlayedFault.__subclasses__()}
_ANY: Final[Any] = Union[tuple(_KINDS.values())]  # noqa: UP007 (made of a list)
_decoder: Final = msgspec.json.Decoder(_ANY)


def read_faults(path: Path) -> list[PlayedFault]:
    """Returns the faults of a file. TraceError where a line is none; OSError."""
    faults = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not text.strip():
            continue
        try:
            faults.append(_decoder.decode(text))
        except msgspec.MsgspecError as error:
            raise TraceError(str(path), number, f"no fault: {error}. Kinds: {', '.join(_KINDS)}") from None
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
