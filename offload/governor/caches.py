"""The KV caches of a device as its governor knows them: whose they are, what they offer, and what was taken of them.

Note [Whose caches]
    A range of KV is made within a forward. Where that is one of a managed model, the cache is that model's: it has its
    priority, and its pages count for the model's floor. Others have priority 0 and no floor.

Note [Collected at any moment]
    Caches are collected, not closed. So they are referred to weakly, and whoever takes a reference may be the last to
    hold one: then a finalizer comes by under the governor's lock, and says with `gone` what the next one buries.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .seat import LAYERS, SPLIT, Cache, Offer


@dataclass(slots=True, eq=False)
class CacheSeat:
    """`number`: never used again, of a model neither. `model`: the number of the seat whose cache it is, 0 of none.
    `taken`: what the core took since anyone asked. `home`: pages that it may bring back. `used`: when it was in use
    last, as known when that was asked last; `waking`: it rested until the iteration that begins now."""

    number: int
    name: str
    cache: weakref.ref[Cache]
    model: int = 0
    taken: set[int] = field(default_factory=set)
    home: int = 0
    used: float = -math.inf
    waking: bool = True

    def key(self, index: int) -> int:
        """In the reclaim list."""
        return self.number * LAYERS + index

    def entry(self, index: int) -> tuple[Any, list[Any]] | None:
        """See Cache.entry."""
        cache = self.cache()
        return None if cache is None else cache.entry(index % SPLIT)

    def ask(self) -> list[Offer]:
        """What it offers now, without what was taken and it does not know of yet."""
        cache = self.cache()
        if cache is None:
            return []
        return [each for each in cache.offers() if each.divisible or each.index not in self.taken]


class Caches:
    """By number. Not thread-safe: whoever calls holds the governor's lock."""

    def __init__(self) -> None:
        self._seats: dict[int, CacheSeat] = {}

    def __iter__(self) -> Iterator[tuple[CacheSeat, Cache]]:
        """Iterates over the caches that are alive, in the order in which they came."""
        for seat in tuple(self._seats.values()):
            cache = seat.cache()
            if cache is not None:
                yield seat, cache

    def __len__(self) -> int:
        return len(self._seats)

    def add(self, number: int, name: str, cache: Cache, model: int) -> None:
        """See CacheSeat."""
        self._seats[number] = CacheSeat(number, name, weakref.ref(cache), model)

    def get(self, number: int) -> CacheSeat | None:
        """None where there is no such cache any more."""
        return self._seats.get(number)

    def pop(self, number: int) -> CacheSeat | None:
        """Removes the cache. Idempotent."""
        return self._seats.pop(number, None)

    def took(self, number: int, index: int) -> None:
        """The core took that."""
        seat = self._seats.get(number)
        if seat is not None:
            seat.taken.add(index)

    def stay(self) -> None:
        """Pages are wanted: none comes home."""
        for seat in self._seats.values():
            seat.home = 0
