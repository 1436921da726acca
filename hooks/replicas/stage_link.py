"""What stages need of a link between two of them; records that are sent over it as tensors."""

from __future__ import annotations

from typing import Protocol

import torch


class StageLink(Protocol):
    """One end of a link. Tensors of one tag arrive in the order in which they were sent."""

    def send(self, tensor: torch.Tensor, tag: str, urgent: bool) -> object:
        """Sends a tensor, which is not written to afterwards. `urgent`: before what is waiting and is not."""

    def recv(self, tag: str) -> torch.Tensor:
        """The next tensor of this tag; waits for it."""


def tensor_of(text: str) -> torch.Tensor:
    """A record as uint8[bytes], to be sent."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def text_of(tensor: torch.Tensor) -> str:
    """The record that `tensor_of` was called on."""
    return tensor.cpu().numpy().tobytes().decode()
