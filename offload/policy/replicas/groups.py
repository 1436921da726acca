"""Groups of replicas that together hold one complete copy of the weights, and the span of layers that each holds.

Words
    replica  one process with one device, known by its number
    span     layers [begin, end) that a replica holds
    group    replicas whose spans are all layers, each once; it runs as a pipeline in the order of its members
    stage    the place of a replica in its group

Note [Spans inside the old ones]
    Members are ordered by the middles of their spans, so a stage of the first layers stays in front, and a replica
    that holds everything comes between. For that order all cuts are compared by dynamic programming: first by the pages
    that must be pulled, then by the sum of squares of the pages of each span, which is least for even spans. A cut that
    pulls nothing wins, however uneven, as a drop has to happen at once and cannot wait for pulls under overload. The
    search takes k·L² steps for k members and L layers; results are cached, so thousands of equal groups cost one
    search.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

Members = tuple[int, ...]  # of a group, and its key


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


def slot(span: Span, pages: Sequence[int]) -> int:
    """Returns the pages of the largest layer outside of a span, which a member needs to stream dropped layers."""
    return max((*pages[: span.begin], *pages[span.end :]), default=0)


def check_groups(groups: Iterable[Group], layers: int) -> None:
    """Raises ValueError unless each group has all `layers`, and no replica is in two groups."""
    seen: set[int] = set()
    for group in groups:
        if group.layers != layers:
            raise ValueError(f"group {group.members} has {group.layers} of {layers} layers")
        if twice := seen.intersection(group.members):
            raise ValueError(f"replicas {sorted(twice)} are in two groups")
        seen.update(group.members)


def regroup(held: Mapping[int, Span], pages: Sequence[int]) -> Group:
    """Returns the group of the members of `held`, their present spans. `pages`: of each layer. ValueError: more members
    than layers. See Note [Spans inside the old ones]."""
    order = sorted(held, key=lambda member: (held[member].begin + held[member].end, member))
    if len(order) > len(pages):
        raise ValueError(f"{len(order)} members cannot share {len(pages)} layers: each holds one at least")
    return Group(tuple(order), _cut(tuple(held[member] for member in order), tuple(pages)))


def pulled(group: Group, held: Mapping[int, Span]) -> dict[int, tuple[int, ...]]:
    """Returns the layers that each member has to pull to hold its span, in order; members that need none are left
    out."""
    pulls = {
        member: tuple(layer for layer in span.layers if layer not in held[member])
        for member, span in zip(group.members, group.spans, strict=True)
    }
    return {member: layers for member, layers in pulls.items() if layers}


@lru_cache(maxsize=1024)
def _cut(held: tuple[Span, ...], pages: tuple[int, ...]) -> tuple[Span, ...]:
    """Returns the new spans of members with these present spans, in this order."""
    layers, up_to = len(pages), [0, *accumulate(pages)]
    best: list[tuple[int, int] | None] = [(0, 0), *[None] * layers]  # by the layer where the next member begins
    begins: list[list[int]] = []
    for number, span in enumerate(held):
        after: list[tuple[int, int] | None] = [None] * (layers + 1)
        begin_of = [0] * (layers + 1)
        last = layers - (len(held) - number - 1)  # each of the others needs a layer
        for begin in range(number, last):
            before = best[begin]
            if before is None:
                continue
            for end in range(begin + 1, last + 1):
                size = up_to[end] - up_to[begin]
                low, high = max(begin, span.begin), min(end, span.end)
                kept = up_to[high] - up_to[low] if low < high else 0
                cost = (before[0] + size - kept, before[1] + size * size)
                known = after[end]
                if known is None or cost < known:
                    after[end], begin_of[end] = cost, begin
        best = after
        begins.append(begin_of)
    end, spans = layers, []
    for begin_of in reversed(begins):
        spans.append(Span(begin_of[end], end))
        end = begin_of[end]
    return tuple(reversed(spans))
