"""Spans of decoder layers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """The layers [begin, end) that a replica holds."""

    begin: int
    end: int

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.begin <= layer < self.end

    def __len__(self) -> int:
        return max(0, self.end - self.begin)
