"""What followers of a group know of its requests, and the updates that the next plan has for them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import suppress

from .group_requests import GroupRequests
from .microbatch_plan import Chunk, Sampling
from .span_cache import SpanCache

# Sampling of new requests; requests whose KV is to be freed; preempted requests, whose KV may go to the host
Updates = tuple[tuple[tuple[str, Sampling], ...], tuple[str, ...], tuple[str, ...]]


class FollowerUpdates:
    """Collects updates for followers: a request is gone once the first stage's cache frees its blocks. Used by one
    thread."""

    def __init__(self, cache: SpanCache, requests: GroupRequests) -> None:
        self._requests = requests
        self._known: set[str] = set()  # requests of which followers have KV
        self._begun: set[str] = set()  # requests whose sampling they have
        self._gone: list[str] = []  # known requests that are gone, which they have not been told
        cache.on_freed = weakref.WeakMethod(self._add_gone)  # no cycle: memory is freed with the group, at once

    def __bool__(self) -> bool:
        """Whether there are updates other than the sampling of new requests."""
        return bool(self._gone or self._requests.preemption.aside)

    def add_known(self, request: str) -> None:
        """Notes that followers have KV of a request that was in no plan."""
        self._known.add(request)

    def take(self, chunks: Iterable[Chunk]) -> Updates:
        """Removes and returns the updates for the plan of these chunks."""
        begun = [each.request for each in chunks if each.request not in self._begun]
        names = tuple((name, self._requests.by_name[name].sampling) for name in begun)
        aside = tuple(name for name in self._requests.preemption.aside if name in self._known)
        gone, self._gone, self._requests.preemption.aside = tuple(self._gone), [], []
        self._known.update(begun)
        self._begun.update(begun)
        return names, gone, aside

    def _add_gone(self, request: str) -> None:
        self._begun.discard(request)
        if request in self._known:
            self._known.discard(request)
            self._gone.append(request)
        with suppress(ValueError):
            self._requests.preemption.aside.remove(request)
