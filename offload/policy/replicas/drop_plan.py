"""Which groups merge so that enough parameters are dropped (paper 003, Fig. 6), and what that frees.

Note [What a drop frees]
    A group of k holds the model once instead of k times: each merge frees one model, M. But a member that drops layers
    keeps one slot, as large as the largest layer that it dropped: dropped layers stream through it if the member has
    to run alone. So a configuration has freed

        merges x M - sum over members of one slot.

    Fig. 6 counts whole models, and so does `drop_plan`. To get R pages net, pass `gross_needed`, which adds what the
    slots may take.

Note [Fewest instances]
    The two groups with the fewest members merge, since each further stage costs latency (§4.1, Fig. 5). Each member
    holds at least one layer, so once the two smallest groups have more members than the model layers, none can merge.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .groups import Group, Span
from .spans import pulled, regroup


@dataclass(frozen=True, slots=True)
class DropPlan:
    """Groups that merge into others. `formed`: the new groups; `kept`: those that stay as they are. Pages: `freed`,
    one model for each merge, and `net_freed`, less the slots that the members need beyond those that they have.
    `pulls`: layers that a member must pull to hold its new span; empty where all spans lie inside the old ones."""

    formed: tuple[Group, ...]
    kept: tuple[Group, ...]
    merges: int
    freed: int
    net_freed: int
    pulls: dict[int, tuple[int, ...]]


def drop_plan(groups: Iterable[Group], needed: int, pages: Sequence[int]) -> DropPlan:
    """Merges the two groups with fewest members until `needed` pages are freed or no two can merge. `pages` of each
    layer. Among groups of equal size the first in `groups` merge first. O(N log N). See Note [Fewest instances]."""
    model, merges = sum(pages), 0
    queue: list[tuple[int, int, tuple[Group, ...]]] = [(group.size, n, (group,)) for n, group in enumerate(groups)]
    heapq.heapify(queue)
    while len(queue) >= 2 and merges * model < needed:
        first = heapq.heappop(queue)
        if first[0] + queue[0][0] > len(pages):
            heapq.heappush(queue, first)
            break
        size, number, parts = queue[0]
        heapq.heapreplace(queue, (first[0] + size, min(first[1], number), (*first[2], *parts)))
        merges += 1
    return _planned([parts for _, _, parts in sorted(queue, key=lambda entry: entry[1])], merges, pages)


def _planned(parts: Iterable[tuple[Group, ...]], merges: int, pages: Sequence[int]) -> DropPlan:
    """Returns the plan that merges the groups of each part."""
    formed: list[Group] = []
    kept: list[Group] = []
    pulls: dict[int, tuple[int, ...]] = {}
    slots = 0
    for old in parts:
        if len(old) == 1:
            kept.extend(old)
            continue
        held = {member: span for group in old for member, span in zip(group.members, group.spans, strict=True)}
        new = regroup(held, pages)
        pulls.update(pulled(new, held))
        slots += group_slots(new, pages) - sum(group_slots(group, pages) for group in old)
        formed.append(new)
    freed = merges * sum(pages)
    return DropPlan(tuple(formed), tuple(kept), merges, freed, freed - slots, pulls)


def slot(span: Span, pages: Sequence[int]) -> int:
    """Returns the pages of the largest layer outside of a span, which a member needs to stream dropped layers."""
    return max((*pages[: span.begin], *pages[span.end :]), default=0)


def group_slots(group: Group, pages: Sequence[int]) -> int:
    """Returns the pages of the slots of all members."""
    return sum(slot(span, pages) for span in group.spans)


def net_freed(groups: Iterable[Group], pages: Sequence[int]) -> int:
    """Returns the pages that groups have freed, compared with undropped replicas. See Note [What a drop frees]."""
    return sum((group.size - 1) * sum(pages) - group_slots(group, pages) for group in groups)


def gross_needed(needed: int, pages: Sequence[int]) -> int | None:
    """Returns the pages to ask `drop_plan` for, so that at least `needed` are freed net; None where a merge may free
    nothing. A merge adds at most two slots of the largest layer: in a group that has dropped, all members have such a
    slot already, but perhaps the one that holds that layer."""
    model, worst = sum(pages), 2 * max(pages)
    return None if model <= worst else -(-needed * model // (model - worst))


def with_growth(groups: Iterable[Group], needed: int, growth: int, pages: Sequence[int]) -> int | None:
    """Returns `gross_needed` with the expected `growth` of demand, limited to what lone replicas free as pairs."""
    gross, more = gross_needed(needed, pages), gross_needed(needed + growth, pages)
    if gross is None or more is None:
        return None
    pairs = sum(not group.is_dropped for group in groups) // 2
    return max(gross, min(more, pairs * sum(pages)))
