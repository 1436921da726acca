"""The span of each member of a new group, from the spans that the members hold: fewest pages pulled, then most even.

Note [Spans inside the old ones]
    Members are ordered by the middles of their spans, so a stage of the first layers stays in front, and a replica
    that holds everything comes between. For that order all cuts are compared by dynamic programming: first by the pages
    that must be pulled, then by the sum of squares of the pages of each span, which is least for even spans. A cut that
    pulls nothing wins, however uneven, as a drop has to happen at once and cannot wait for pulls under overload. The
    search takes k·L² steps for k members and L layers; results are cached, so thousands of equal groups cost one
    search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

from .groups import Group, Span


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
