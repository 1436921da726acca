"""The interface of a link between two stages, and records encoded as tensors."""

from __future__ import annotations

from typing import Protocol

import torch


class StageLink(Protocol):
    """One end of a link. Tensors of one tag arrive in order."""

    def send(self, tensor: torch.Tensor, tag: str, urgent: bool) -> object:
        """Sends a tensor, which must not be written to afterwards. `urgent`: before queued messages that are not."""

    def recv(self, tag: str) -> torch.Tensor:
        """Waits for the next tensor of this tag, and returns it."""


def tensor_of(text: str) -> torch.Tensor:
    """Returns a record as uint8[bytes], to be sent."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def text_of(tensor: torch.Tensor) -> str:
    """Returns the record that `tensor_of` has encoded."""
    return tensor.cpu().numpy().tobytes().decode()
