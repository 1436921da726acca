"""A link within one process."""

from __future__ import annotations

from collections import defaultdict, deque

import torch


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
