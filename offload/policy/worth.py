"""The worth of a block of a prefix cache: the least worth go first when there are too many. No clock, no chance.

Note [Odds]
    A block that was used is used again with probability p, after a time that is about exponential with mean T, or
    never.
    When a time a has passed without, its odds to return are p / (1 - p) · exp(-a / T). The block to evict is the one
    with the smallest odds. Their logarithm times T, up to what grows alike for all, is

        worth = time of last use + T · log(p / (1 - p)).

    So one number, fixed at the use, orders all blocks for good, and a heap suffices. With one p for all that is least
    recently used. Here p is counted for each *kind* of block: how often it was used; and of one that was used once,
    whether it ended its request, and whether its request left a path that several had gone before (a system prompt), or
    that of a single one. The odds of a kind are nothing but its counts: where the kind makes no difference they are
    alike, and before anything is counted all odds are even, which is plain LRU.

    Time is counted in blocks that were stored, as those need the room. Blocks that have not returned yet count as not
    returned. This underestimates every p alike, and only differences decide.

Note [Gone]
    A policy that only sees what it kept learns that it was right. So keys that were evicted are remembered for
    a while, a few for each that is stored: one that comes back counts as a return, and goes on with its uses.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from math import log
from typing import Protocol

from .tuning import DEFAULT, BlockOdds


class Policy(Protocol):
    """An eviction policy: each event of a block returns its worth from then on."""

    def stored(self, key: Hashable, behind: Hashable | None, *, last: bool) -> float:
        """Notes a new block. `behind`: the last block of its request that is not new; `last`: is it the last of its
        request?"""
        ...

    def used(self, key: Hashable) -> float:
        """Notes that a request begins with the block."""
        ...

    def dropped(self, key: Hashable, *, evicted: bool) -> None:
        """Notes that a block is stored no more: `evicted` for room, or what it stood for is no longer true."""
        ...


class Recency:
    """Evicts the least recently used blocks."""

    def __init__(self) -> None:
        self._clock = 0

    def stored(self, key: Hashable, behind: Hashable | None, *, last: bool) -> float:
        return self.used(key)

    def used(self, key: Hashable) -> float:
        self._clock += 1
        return self._clock

    def dropped(self, key: Hashable, *, evicted: bool) -> None:
        pass


class _Past:
    """The past of a block: how often it was used, when last, and as which kind."""

    __slots__ = ("at", "kind", "uses")

    def __init__(self) -> None:
        self.uses = 0
        self.at = 0
        self.kind: Hashable = None


class _Returns:
    """Counts of a kind of block: uses, and how many of them were followed by another. `even`: returns, and as many
    failures, that it starts with."""

    __slots__ = ("even", "returned", "uses")

    def __init__(self, even: float) -> None:
        self.even = even
        self.uses = 2 * even
        self.returned = even

    def halve(self) -> None:
        """Halves all counts but those it started with."""
        self.uses = self.uses / 2 + self.even
        self.returned = (self.returned + self.even) / 2

    @property
    def odds(self) -> float:
        return self.returned / max(self.uses - self.returned, self.even)


class Odds:
    """Evicts the blocks least likely to return. See Note [Odds]."""

    def __init__(self, tuning: BlockOdds = DEFAULT.prefixes.odds) -> None:
        self._tuning = tuning
        self._clock = 0
        self._stored: dict[Hashable, _Past] = {}
        self._gone: OrderedDict[Hashable, _Past] = OrderedDict()
        self._kinds: dict[Hashable, _Returns] = {}
        self._count = self._sum = 0.0  # of the times between uses

    def stored(self, key: Hashable, behind: Hashable | None, *, last: bool) -> float:
        self._clock += 1
        past = self._gone.pop(key, None) or _Past()
        self._stored[key] = past
        path = self._stored.get(behind)
        return self._use(past, (last, path is not None and path.uses >= self._tuning.shared))

    def used(self, key: Hashable) -> float:
        return self._use(self._stored[key], None)

    def dropped(self, key: Hashable, *, evicted: bool) -> None:
        past = self._stored.pop(key)
        if evicted:
            self._gone[key] = past
        while len(self._gone) > self._tuning.remembered * len(self._stored):
            self._gone.popitem(last=False)

    def _use(self, past: _Past, first: Hashable) -> float:
        """Notes a use and returns the worth. `first`: its kind, if this is its first use."""
        if past.uses:
            self._return(past)
        past.uses += 1
        past.at = self._clock
        past.kind = min(past.uses, self._tuning.often) if past.uses > 1 else first
        kind = self._kinds.setdefault(past.kind, _Returns(self._tuning.even))
        kind.uses += 1
        mean = self._sum / self._count if self._count else 0.0
        return self._clock + mean * log(kind.odds)

    def _return(self, past: _Past) -> None:
        self._kinds[past.kind].returned += 1
        self._count += 1
        self._sum += self._clock - past.at
        if self._count >= self._tuning.learned:
            self._count, self._sum = self._count / 2, self._sum / 2
            for kind in self._kinds.values():
                kind.halve()
