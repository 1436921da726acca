"""What a store of prefixes has done so far."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counts:
    """Since `manage()`."""

    requests: int = 0  # calls of generate() that asked the store
    prompts: int = 0  # tokens of their prompts
    on_device: int = 0  # of these tokens, those that were found there
    on_host: int = 0
    on_disk: int = 0
    moves: int = 0  # requests that went on with the layers of a stored sequence
    copies: int = 0  # requests that copied from stored sequences
    stored: int = 0  # sequences
    evicted: int = 0  # blocks
    why_not: Counter[str] = field(default_factory=Counter)  # why requests did not ask, or left nothing

    def hit(self, tokens: int, away: float, *, on_disk: bool = False) -> None:
        """So many tokens were found, that part of them on the host, or in files."""
        on_host = round(tokens * away)
        self.on_device += tokens - on_host
        if on_disk:
            self.on_disk += on_host
        else:
            self.on_host += on_host

    @property
    def hits(self) -> int:
        """Tokens of prompts that were not computed."""
        return self.on_device + self.on_host + self.on_disk

    @property
    def hit_rate(self) -> float:
        """Of all tokens of prompts."""
        return self.hits / self.prompts if self.prompts else 0.0
