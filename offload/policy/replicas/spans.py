"""Which span each member of a new group gets, from the spans that they hold now: fewest pages pulled, then evenly.

Note [Spans inside the old ones]
    Members stand in the order of the middles of what they hold, so a stage of the first layers stays in front, and a
    replica that holds everything goes between. For that order all cuts are compared by dynamic programming: first by
    the pages that must be pulled, then by the sum of squares of the pages of each span, which is least when they are
    even. A drop pulls nothing if there is a cut that needs nothing, however uneven: it has to be done at once, and a
    pull under overload is what it must not wait for. k·L² steps for k members and L layers; members that hold the same
    get the same answer, which is remembered, so that thousands of equal groups cost one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

from .groups import Group, Span


def regroup(held: Mapping[int, Span], pages: Sequence[int]) -> Group:
    """The group of the members of `held`, of the span that each holds now; `pages` of each layer. ValueError: more
    members than layers. See Note [Spans inside the old ones]."""
    order = sorted(held, key=lambda member: (held[member].begin + held[member].end, member))
    if len(order) > len(pages):
        raise ValueError(f"{len(order)} members cannot share {len(pages)} layers: each holds one at least")
    return Group(tuple(order), _cut(tuple(held[member] for member in order), tuple(pages)))


def pulled(group: Group, held: Mapping[int, Span]) -> dict[int, tuple[int, ...]]:
    """Layers that each member has to pull to hold its span, in order; members that have all are left out."""
    found = {
        member: tuple(layer for layer in span.layers if layer not in held[member])
        for member, span in zip(group.members, group.spans, strict=True)
    }
    return {member: layers for member, layers in found.items() if layers}


@lru_cache(maxsize=1024)
def _cut(held: tuple[Span, ...], pages: tuple[int, ...]) -> tuple[Span, ...]:
    """The spans of members that hold so much, in this order."""
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
    end, found = layers, []
    for begin_of in reversed(begins):
        found.append(Span(begin_of[end], end))
        end = begin_of[end]
    return tuple(reversed(found))
