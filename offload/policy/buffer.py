"""How much host memory KV of new prompts may have (eLLM §4.4.2, Algorithm 2). Pure.

Note [Algorithm 2]
    Read here: line 4 means min(2 B, B_max). A violation event is three violations within five iterations; a decode
    step's (TPOT) counts before a first token's (TTFT). The paper begins with 1; here `Serving.buffer` says with how
    much, as without SLOs nothing is violated, and prompts may have all of the host. After an event counting begins
    anew, as the next iterations still show what was before it. A smaller buffer evicts nothing: it only admits no
    request until it is used less.
"""

from __future__ import annotations

from collections import deque

from .tuning import DEFAULT, Serving


class LogicalBuffer:
    """The logical buffer of one device: `size` bytes of the `most` that there are. Not thread-safe."""

    def __init__(self, most: int, smallest: int, start: int | None = None, tuning: Serving = DEFAULT.serving) -> None:
        """`smallest`: bytes that it never goes below, as one page; `start`: by default the smallest."""
        self._most = most
        self._smallest = min(smallest, most)
        self._tuning = tuning
        self._recent: deque[tuple[bool, bool]] = deque(maxlen=tuning.window)
        self.size = max(self._smallest, min(most, self._smallest if start is None else start))

    def observe(self, *, tpot: bool, ttft: bool) -> int:
        """Notes whether an iteration violated either SLO; returns the size from now on."""
        self._recent.append((tpot, ttft))
        slow_steps, slow_starts = (sum(kind) for kind in zip(*self._recent, strict=True))
        if slow_steps >= self._tuning.violations:
            self.size = max(self.size // self._tuning.factor, self._smallest)
        elif slow_starts >= self._tuning.violations:
            self.size = min(self.size * self._tuning.factor, self._most)
        else:
            return self.size
        self._recent.clear()
        return self.size

    def open(self) -> bool:
        """Makes it as large as it can be, as nothing runs that it could slow down. Was it smaller?"""
        before, self.size = self.size, self._most
        self._recent.clear()
        return before < self._most

    def usable(self, used: int) -> int:
        """Returns the bytes that new KV may have beside `used` ones."""
        return max(0, min(self._most, self.size) - used)
