"""The interface of a link between two stages, and records encoded as tensors (msgspec)."""

from __future__ import annotations

from typing import Protocol, TypeVar

import msgspec
import torch

Record = TypeVar("Record")


class StageLink(Protocol):
    """One end of a link. Tensors of one tag arrive in order."""

    def send(self, tensor: torch.Tensor, tag: str, urgent: bool) -> object:
        """Sends a tensor, which must not be written to afterwards. `urgent`: before queued messages that are not."""

    def recv(self, tag: str) -> torch.Tensor:
        """Waits for the next tensor of this tag, and returns it."""


def tensor_of(record: object) -> torch.Tensor:
    """Returns a record (a struct, a dataclass, or plain values) as uint8[bytes], to be sent."""
    return torch.frombuffer(bytearray(msgspec.msgpack.encode(record)), dtype=torch.uint8)


def record_of(tensor: torch.Tensor, kind: type[Record]) -> Record:
    """Returns the record of this type that `tensor_of` has encoded. msgspec.ValidationError where it is none."""
    return msgspec.msgpack.decode(tensor.cpu().numpy().data, type=kind)
