"""The facts of a managed model that its generation loops use, and the paged cache that outlives these loops and shares
blocks with `generate()` (SwiftCache §4, over turns).

Note [What is found again]
    transformers shares full blocks of one loop by hashes of their tokens. With ballonet the next loop with blocks of
    the same size gets the same cache, with its unused blocks. They are dropped once the model has changed: weights that
    were written to, adapters, settings (prefix/identity.py). Between loops their pages may be taken for any use, and
    their bytes are on the host then. `generate()` finds the blocks in the same index (blocks.py), and they share files.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from ...allocator._native import Device
from ...offload.manager.client import ModelClient
from ...offload.manager.decision import Lendable
from ...offload.policy.prefixes import chain
from ...offload.policy.step_costs import NOTHING, RequestSLO, StepCosts
from ..measure.timings import Latencies
from ..prefix.identity import Identity
from ..prefix.store import PrefixStore
from .attention import Way
from .pages import SectorClient

Require = Callable[[float | None, float | None, bool], None]
# (pages) -> (pages that the layers would give, pages copied in a step now, pages copied in a step with so many less)
Lends = Callable[[int], Lendable]


class Schedule(Protocol):
    """The requests of one loop."""

    @property
    def wanted(self) -> float:
        """The time until which requests need the model, on the manager's clock: infinity while there are any."""

    @property
    def runs(self) -> bool:
        """Has any request begun, and not ended?"""


@dataclass(frozen=True, slots=True)
class Batched:
    """A model whose continuous batching is elastic, on `device`; `name`: for logs. `costs`: times of its steps. `fast`:
    are batches chosen by them? `require(tpot, ttft, others)` is called before each batch with the seconds that its
    requests allow for a decode step and for one with prompts, and whether other requests wait for its end. `lends`:
    pages that its own layers could give, and their price. `client`: returns its layers, as the manager knows them; None
    once it is collected. `loop_caches`: the cache that outlives the loops; None: each
    loop has its own. `slo`: of requests without one of their own. `positions`: the longest sequence that it supports;
    None: any. `schedules`: of its live loops; `clients`: of the pages of their caches; `latencies`: of their
    requests."""

    name: str
    device: Device
    costs: StepCosts
    fast: bool
    require: Require
    lends: Lends
    client: Callable[[], ModelClient | None]
    loop_caches: LoopCaches | None = None
    slo: RequestSLO = NOTHING
    positions: int | None = None
    schedules: list[weakref.ref[Schedule]] = field(default_factory=list)
    clients: weakref.WeakSet[SectorClient] = field(default_factory=weakref.WeakSet)
    latencies: Latencies = field(default_factory=Latencies)

    def scheduled_by(self, schedule: Schedule) -> None:
        """Notes the schedule of one more loop."""
        self.schedules[:] = [reference for reference in self.schedules if reference() is not None]
        self.schedules.append(weakref.ref(schedule))

    @property
    def runs(self) -> bool:
        """Have requests of any loop begun, and not ended?"""
        return any(it.runs for reference in tuple(self.schedules) if (it := reference()) is not None)

    @property
    def wanted(self) -> float | None:
        """The time until which requests of any loop need the model; None where there is no loop."""
        return max((it.wanted for reference in tuple(self.schedules) if (it := reference()) is not None), default=None)


class LoopCache(Protocol):
    """The part of a paged cache that counts from loop to loop."""

    allow_block_sharing: bool
    block_tokens: int
    dtype: Any
    kept: Any
    max_batch_tokens: int
    pages: Any
    way: Way | None

    def user(self) -> object: ...
    def free_all_requests(self) -> None: ...
    def evict_kept(self, nbytes: int) -> int: ...


C = TypeVar("C", bound=LoopCache)


class LoopCaches:
    """Hands the cache of one model from loop to loop. Loops are made one at a time."""

    def __init__(self) -> None:
        self._store: Callable[[], PrefixStore | None] = lambda: None
        self._cache: Any = None
        self._closed = False

    def share(self, store: PrefixStore) -> None:
        """Shares blocks with `store`, the prefixes of the model."""
        self._store = weakref.ref(store)

    @property
    def store(self) -> PrefixStore | None:
        """The prefixes of the model, with the blocks of the cache; None once it is not managed any more."""
        return self._store()

    def take(self, settings: Any, dtype: object, way: Way | None, make: Callable[[], C]) -> C:
        """Returns the cache for a loop with these settings, a ContinuousBatchingConfig, and `way` of attention: the
        present one, or a new one where that is in use or of other sizes."""
        cache: C | None = self._cache
        if cache is not None and cache.user() is None and cache.way == way and _fits(cache, settings, dtype):
            cache.free_all_requests()
            return cache
        made = make()
        if not self._closed and (cache is None or cache.user() is None):
            self._cache = made
            if (store := self.store) is not None and made.kept is not None:
                made.kept.share(store.contents)
        return made

    def ended(self, ids: Sequence[int], now: Identity) -> None:
        """Has the blocks with these tokens, which a request has computed, written to files, if there are any."""
        store = self.store
        if store is not None and store.contents.saver is not None:
            numbers = array("q", ids)
            store.contents.saver.stored(numbers, chain(numbers, store.block, now.settings), now)

    def rests(self, cache: LoopCache) -> None:
        """Cuts the kept blocks to their limit when no request has blocks of `cache` any more; drops all blocks of a
        cache that does not outlive its loop, if there is a limit. DriverError."""
        if (store := self.store) is not None and store.limit is not None:
            if cache is self._cache:
                store.enforce()
            else:
                cache.evict_kept(cache.pages.nbytes)

    def close(self) -> None:
        """Drops the cache: its memory is freed with the loop that uses it."""
        self._closed, self._cache = True, None


def _fits(cache: LoopCache, settings: Any, dtype: object) -> bool:
    return bool(
        cache.dtype == dtype
        and cache.block_tokens == settings.page_size
        and settings.max_batch_tokens in (None, cache.max_batch_tokens)
        and cache.allow_block_sharing == settings.allow_block_sharing
    )
