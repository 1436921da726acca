"""Counts of a prefix store's requests, hits and evictions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counts:
    """The counts since `manage()`."""

    requests: int = 0  # calls of generate() that asked the store
    prompts: int = 0  # tokens of their prompts
    on_device: int = 0  # tokens of them found on the device
    on_peer: int = 0
    on_host: int = 0
    on_disk: int = 0
    faster: int = 0  # tokens in files for which computing was faster than reading
    moves: int = 0  # requests that went on with the layers of a stored sequence
    copies: int = 0  # requests that copied from stored sequences
    stored: int = 0  # sequences
    evicted: int = 0  # blocks
    why_not: Counter[str] = field(default_factory=Counter)  # why requests did not ask, or left nothing

    def hit(self, tokens: int, away: float, near: float = 0.0, *, on_disk: bool = False) -> None:
        """Counts found tokens. `away`: the part of them not on the device, of which `near`: on a peer. `on_disk`: in
        files."""
        gone, on_peer = round(tokens * away), round(tokens * min(near, away))
        self.on_device += tokens - gone
        self.on_peer += on_peer
        if on_disk:
            self.on_disk += gone - on_peer
        else:
            self.on_host += gone - on_peer

    @property
    def hits(self) -> int:
        """Tokens of prompts that were not computed."""
        return self.on_device + self.on_peer + self.on_host + self.on_disk

    @property
    def hit_rate(self) -> float:
        """The part of all tokens of prompts that was found."""
        return self.hits / self.prompts if self.prompts else 0.0
