"""Which pages of KV leave the peer for the host before it is full, and what a page costs where it is. Pure.

Note [Room]
    What leaves the device goes to the peer while that has pages, as it is nearer, and to the host from then on, however
    hot. So where fewer than an eighth of the peer's pages are free, the coldest of them go to the host, in the
    background, until a quarter is. What is on the peer and not used costs nothing there, so that idle caches go before
    those that run, and of each kind those first that were used longest ago: the reverse of the order in which they
    leave the device (reclaim_order.py), where what was used last is taken first as its owner has just had its turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .tuning import PeerPages


@dataclass(frozen=True, slots=True)
class Near:
    """A cache with so many `pages` on the peer that could go. `active`: is it in use? `used`: when it was last."""

    client: int
    pages: int
    active: bool
    used: float


def lacking(free: int, total: int, tuning: PeerPages) -> int:
    """Returns how many pages should leave a peer of `total`, of which so many are free or on their way."""
    return 0 if free * tuning.low >= total else -(-total // tuning.enough) - free


def leaving(caches: Iterable[Near], pages: int) -> dict[int, int]:
    """Returns how many pages leave, by client, the coldest first."""
    counts: dict[int, int] = {}
    for cache in sorted(caches, key=lambda cache: (cache.active, cache.used)):
        if (going := min(pages, cache.pages)) > 0:
            counts[cache.client] = going
            pages -= going
    return counts


def mean_seconds(near: int, far: int, peer: float | None, host: float | None) -> float | None:
    """Mean seconds to copy a page, of so many on the peer and so many on the host. A link that was not measured counts
    as the other; None where neither was."""
    peer, host = (host if peer is None else peer), (peer if host is None and near else host)
    if peer is None or host is None or not near + far:
        return host
    return (near * peer + far * host) / (near + far)
