"""Groups of replicas that together hold one complete copy of the weights, and the span of layers that each holds.

Words
    replica  one process with one device, known by its number
    span     layers [begin, end) that a replica holds
    group    replicas whose spans are all layers, each once; it runs as a pipeline in the order of its members
    stage    the place of a replica in its group
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Layers from `begin` up to, not including, `end`. ValueError unless there is at least one."""

    begin: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end:
            raise ValueError(f"layers [{self.begin}, {self.end}) are no span: it begins at 0 or later, with one layer")

    def __len__(self) -> int:
        return self.end - self.begin

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.begin <= layer < self.end

    @property
    def layers(self) -> range:
        return range(self.begin, self.end)

    def covers(self, other: Span) -> bool:
        """Returns whether every layer of `other` is in this span."""
        return self.begin <= other.begin and other.end <= self.end


@dataclass(frozen=True, slots=True)
class Group:
    """Replicas in the order of their stages, and the span of each. ValueError unless the spans are all layers, each
    once, in order."""

    members: tuple[int, ...]
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        if not self.members or len(self.members) != len(self.spans):
            raise ValueError(f"{len(self.members)} members have {len(self.spans)} spans: each has one")
        if len({*self.members}) != len(self.members):
            raise ValueError(f"a replica is twice in the group {self.members}")
        ends = [0, *(span.end for span in self.spans)]
        if [span.begin for span in self.spans] != ends[:-1]:
            raise ValueError(f"the spans {self.spans} are not all layers, each once and in order")

    @property
    def size(self) -> int:
        """Number of members, which are the stages of the pipeline."""
        return len(self.members)

    @property
    def layers(self) -> int:
        return self.spans[-1].end

    @property
    def is_dropped(self) -> bool:
        """Whether each member holds only a part of the layers."""
        return self.size > 1

    def span(self, member: int) -> Span:
        """Returns the span of a member. KeyError."""
        for other, span in zip(self.members, self.spans, strict=True):
            if other == member:
                return span
        raise KeyError(member)

    def holder(self, layer: int) -> int:
        """Returns the member that holds a layer. KeyError."""
        for member, span in zip(self.members, self.spans, strict=True):
            if layer in span:
                return member
        raise KeyError(layer)


def alone(member: int, layers: int) -> Group:
    """Returns a group of one replica, which holds all layers."""
    return Group((member,), (Span(0, layers),))


def check_groups(groups: Iterable[Group], layers: int) -> None:
    """Raises ValueError unless each group has all `layers`, and no replica is in two groups."""
    seen: set[int] = set()
    for group in groups:
        if group.layers != layers:
            raise ValueError(f"group {group.members} has {group.layers} of {layers} layers")
        if twice := seen.intersection(group.members):
            raise ValueError(f"replicas {sorted(twice)} are in two groups")
        seen.update(group.members)
