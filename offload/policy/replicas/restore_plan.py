"""The layers that replicas pull to hold all again, in order, each with its source (paper 003, §4.4).

Note [Next needed first]
    A member of a group has just computed its span, so once alone it next needs the layer after its span, and after the
    last layer the first. It pulls in that order, M(k - 1)/k in all. In a group each layer has one holder; members of
    undropped groups hold all. Where no peer answers, or none holds the layer, the layer comes from its backing (host
    copy or file).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .groups import Group, Span


@dataclass(frozen=True, slots=True)
class Pull:
    """A layer that a member pulls from the replica `source`, or from its own backing where that is None."""

    member: int
    layer: int
    source: int | None


def pull_order(span: Span, layers: int) -> tuple[int, ...]:
    """Returns the layers outside of a span, the one that is needed next first. See Note [Next needed first]."""
    return (*range(span.end, layers), *range(span.begin))


def restore_plan(member: int, held: Span, layers: int, peers: Iterable[Group]) -> tuple[Pull, ...]:
    """Returns the pulls of a member that holds `held`, each from the first of the `peers`' members with the layer."""
    sources: Mapping[int, int] = {
        layer: source
        for group in reversed([*peers])
        for source, span in zip(group.members, group.spans, strict=True)
        if source != member
        for layer in span.layers
    }
    return tuple(Pull(member, layer, sources.get(layer)) for layer in pull_order(held, layers))


def group_restore(group: Group) -> dict[int, tuple[Pull, ...]]:
    """Returns the pulls of all members of a group, each from the others."""
    return {
        member: restore_plan(member, span, group.layers, (group,))
        for member, span in zip(group.members, group.spans, strict=True)
    }


def homes(demands: Mapping[str, int], room: Mapping[int, int]) -> dict[str, int] | None:
    """Returns the member that each request of a group goes to when the group ends: largest demand first, to the member
    with most room, both in tokens of KV. None where a request fits none: then the group cannot end."""
    left, targets = dict(room), {}
    for request in sorted(demands, key=lambda demand: (-demands[demand], demand)):
        member = max(left, key=lambda other: (left[other], -other))
        if left[member] < demands[request]:
            return None
        left[member] -= demands[request]
        targets[request] = member
    return targets
