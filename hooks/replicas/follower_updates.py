"""What followers of a group know of requests, and what they have to hear with the next plan."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import suppress

from .group_requests import GroupRequests
from .plan import Chunk, Sampling
from .span_cache import SpanCache

# How requests are sampled that begin; those that are gone; those that wait, whose KV may leave the device
Updates = tuple[tuple[tuple[str, Sampling], ...], tuple[str, ...], tuple[str, ...]]


class FollowerUpdates:
    """Used by one thread. Requests whose blocks the cache of the first stage frees are gone."""

    def __init__(self, cache: SpanCache, requests: GroupRequests) -> None:
        self._requests = requests
        self._known: set[str] = set()  # requests that followers have KV of
        self._begun: set[str] = set()  # requests of which they know how they are sampled
        self._gone: list[str] = []  # of those that they know, what they do not know to be gone
        cache.on_freed = weakref.WeakMethod(self._freed)  # no cycle: memory goes with the group, at once

    def __bool__(self) -> bool:
        """Is there anything to tell, although nothing begins?"""
        return bool(self._gone or self._requests.preemption.aside)

    def have(self, request: str) -> None:
        """Followers have KV of a request that no plan told them of."""
        self._known.add(request)

    def take(self, chunks: Iterable[Chunk]) -> Updates:
        """What goes with the plan of these chunks; it is no news any more."""
        begun = [each.request for each in chunks if each.request not in self._begun]
        names = tuple((name, self._requests.by_name[name].sampling) for name in begun)
        aside = tuple(name for name in self._requests.preemption.aside if name in self._known)
        gone, self._gone, self._requests.preemption.aside = tuple(self._gone), [], []
        self._known.update(begun)
        self._begun.update(begun)
        return names, gone, aside

    def _freed(self, request: str) -> None:
        self._begun.discard(request)
        if request in self._known:
            self._known.discard(request)
            self._gone.append(request)
        with suppress(ValueError):
            self._requests.preemption.aside.remove(request)
