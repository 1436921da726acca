"""The simulation of `python -m ballonet prefix-sim`: how often a prefix cache of some size has what requests begin
with.

The index and the policy are those of the cache itself (`prefixes`, `worth`). Requests in their order: each asks for its
blocks, of which a leading run may be stored; then all of them are, and as many go as are too many.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

from .prefixes import Hits, Index
from .worth import Odds, Policy, Recency

POLICIES: Final[dict[str, Callable[[], Policy]]] = {"odds": Odds, "lru": Recency}
_SIZES: Final = 12  # of a curve

Trace = Sequence[Sequence[Hashable]]


def _ignore(step: str) -> None:
    pass


def hits(trace: Trace, capacity: int | None, policy: str) -> Hits:
    """Returns the hits of a cache of `capacity` blocks, None for any number, that begins empty. KeyError for an unknown
    policy."""
    index = Index(capacity, POLICIES[policy]())
    for request, keys in enumerate(trace):
        index.match(keys)
        index.insert(keys, request)
        index.evict(index.excess())
    return index.hits


def facts(trace: Trace, capacity: int, policy: str) -> dict[str, Any]:
    """Returns plain values, ready for JSON.

    Keys: requests; hit_blocks, of the blocks that they ask for, blocks; hit_rate, the one over the other; capacity and
    policy, as given; distinct_blocks, what a cache that evicts nothing stores; infinite_hit_rate, of that one.
    """
    found = hits(trace, capacity, policy)
    return {
        "requests": found.requests,
        "hit_blocks": found.hit_blocks,
        "blocks": found.blocks,
        "hit_rate": found.hit_rate,
        "capacity": capacity,
        "policy": policy,
        "distinct_blocks": _distinct(trace),
        "infinite_hit_rate": hits(trace, None, "lru").hit_rate,
    }


def curve(
    trace: Trace, capacity: int, tell: Callable[[str], None] = _ignore
) -> tuple[list[int], dict[str, list[float]]]:
    """Returns capacities, `capacity` among them, and the hit rate at each by policy. `tell`: called with each of the
    `steps_of_curve` steps before it."""
    sizes = _sizes(trace, capacity)
    rates: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for policy, found in rates.items():
        for size in sizes:
            tell(f"{policy}, {size} blocks")
            found.append(hits(trace, size, policy).hit_rate)
    return sizes, rates


def steps_of_curve(trace: Trace, capacity: int) -> int:
    return len(POLICIES) * len(_sizes(trace, capacity))


def _sizes(trace: Trace, capacity: int) -> list[int]:
    """Returns sizes, each about the same multiple of the one before, up to a cache that evicts nothing."""
    most = _distinct(trace)
    return sorted({capacity, *(max(1, round(most * 2 ** ((n - _SIZES) * 2 / 3))) for n in range(1, _SIZES + 1))})


def _distinct(trace: Trace) -> int:
    return len({key for keys in trace for key in keys})
