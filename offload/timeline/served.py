"""The requests of generation loops, with their times, and the sizes of batches.

A loop is told apart by its name, that of its model. Times are ns of CLOCK_MONOTONIC.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .series import End, Level, RequestSeries, thinned


@dataclass(slots=True)
class Served:
    """Requests and batches of loops, bounded: of too many requests those that came first are kept, and the others
    counted; of too many batches the largest of each stretch of time."""

    most_requests: int
    most_batches: int
    requests: list[RequestSeries] = field(default_factory=list)
    batches: dict[str, list[Level]] = field(default_factory=dict)  # by loop: time, requests, new tokens
    missing: int = 0  # requests that came and are not kept
    _known: dict[tuple[str, str], RequestSeries] = field(default_factory=dict)  # the last one of each loop and name

    def came(self, loop: str, name: str, when: int, prompt: int) -> None:
        """Notes that a new request waits."""
        self._known.pop((loop, name), None)
        if len(self.requests) >= self.most_requests:
            self.missing += 1
            return
        self.requests.append(RequestSeries(loop, name, when, prompt))
        self._known[loop, name] = self.requests[-1]

    def again(self, loop: str, name: str) -> None:
        """Notes that a request that has begun waits again, or begins anew."""
        if (known := self._known.get((loop, name))) is not None:
            known.again, known.ended, known.end = known.again + 1, 0, ""

    def batch(self, loop: str, when: int, requests: list[tuple[str, int]], tokens: int) -> None:
        """Notes that a batch begins with requests (name, tokens generated), and so many new tokens."""
        kept = self.batches.setdefault(loop, [])
        kept.append((when, len(requests), tokens))
        if len(kept) > self.most_batches:
            self.batches[loop] = thinned(kept, self.most_batches)
        for name, got in requests:
            if (known := self._known.get((loop, name))) is not None:
                known.began = known.began or when
                if got:
                    known.first = known.first or when

    def rests(self, loop: str, when: int) -> None:
        """Notes that the loop has no batch."""
        kept = self.batches.get(loop)
        if kept and kept[-1][1]:
            kept.append((when, 0, 0))

    def ended(self, loop: str, name: str, when: int, tokens: int, end: End) -> None:
        """Notes that a request is over, with so many tokens."""
        if (known := self._known.get((loop, name))) is not None:
            known.ended, known.end, known.tokens = when, end, tokens
            if tokens:
                known.first = known.first or when
