"""What stages need of a link between two of them, and a link within one process."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Protocol

import torch


class StageLink(Protocol):
    """One end of a link. Tensors of one tag arrive in the order in which they were sent."""

    def send(self, tensor: torch.Tensor, tag: str, urgent: bool) -> object:
        """Sends a tensor, which is not written to afterwards. `urgent`: before what is waiting and is not."""

    def recv(self, tag: str) -> torch.Tensor:
        """The next tensor of this tag; waits for it."""


class LocalLink:
    """One end of a link within a process and a thread. Nothing is waited for: what was not sent is an error."""

    def __init__(
        self, sent: defaultdict[str, deque[torch.Tensor]], came: defaultdict[str, deque[torch.Tensor]]
    ) -> None:
        self._sent = sent
        self._came = came

    @classmethod
    def pair(cls) -> tuple[LocalLink, LocalLink]:
        """Both ends of a new link."""
        there: defaultdict[str, deque[torch.Tensor]] = defaultdict(deque)
        back: defaultdict[str, deque[torch.Tensor]] = defaultdict(deque)
        return cls(there, back), cls(back, there)

    def send(self, tensor: torch.Tensor, tag: str, urgent: bool) -> None:
        """Sends a copy, as another process would get one."""
        self._sent[tag].append(tensor.detach().clone())

    def recv(self, tag: str) -> torch.Tensor:
        """The next tensor of this tag. LookupError where none was sent."""
        if not self.has(tag):
            raise LookupError(f"nothing was sent as {tag}")
        return self._came[tag].popleft()

    def has(self, tag: str) -> bool:
        """Was a tensor of this tag sent that was not received?"""
        return bool(self._came[tag])


def tensor_of(text: str) -> torch.Tensor:
    """A record as uint8[bytes], to be sent."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def text_of(tensor: torch.Tensor) -> str:
    """The record that `tensor_of` was called on."""
    return tensor.cpu().numpy().tobytes().decode()
