"""What continuous batching keeps of one model as long as it is managed: the cache that outlives its generation loops,
and what it shares with `generate()` (SwiftCache §4, over turns).

Note [What is found again]
    transformers shares full blocks of one loop by hashes of their tokens. Here the next loop with blocks of the same
    size gets the same cache, with the blocks that nobody uses any more. They are void once the model is another:
    weights that were written to, adapters, settings (prefix/identity.py). Between loops they are a client that rests:
    whoever needs pages has them, and their bytes are on the host then. `generate()` finds them in the same index
    (sectors/listed_blocks.py), and files are the same ones.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...offload.policy.prefixes import chain
from ..prefix.identity import Identity
from ..prefix.store import PrefixStore

if TYPE_CHECKING:
    from .cache import ElasticPagedCache


class Living:
    """Keeps the cache of one model. Loops are made one at a time."""

    def __init__(self) -> None:
        self._store: Callable[[], PrefixStore | None] = lambda: None
        self._cache: ElasticPagedCache | None = None
        self._closed = False

    def share(self, store: PrefixStore) -> None:
        """`store`: what is kept of the model, which knows what the model is at any moment."""
        self._store = weakref.ref(store)

    @property
    def store(self) -> PrefixStore | None:
        """What is kept of the model, with the blocks of the cache; None where it is managed no more."""
        return self._store()

    def take(self, settings: Any, dtype: object, make: Callable[[], ElasticPagedCache]) -> ElasticPagedCache:
        """Returns the cache for a loop with these settings, a ContinuousBatchingConfig: the living one, or a new one
        where that is in use or of other sizes."""
        cache = self._cache
        if cache is not None and cache.user() is None and _fits(cache, settings, dtype):
            cache.free_all_requests()
            return cache
        made = make()
        if not self._closed and (cache is None or cache.user() is None):
            self._cache = made
            if (store := self.store) is not None and made.kept is not None:
                made.kept.share(store.contents)
        return made

    def ended(self, ids: Sequence[int], now: Identity) -> None:
        """Blocks hold these tokens, which a request has computed: they are written to files, if there are any."""
        store = self.store
        if store is not None and store.contents.saver is not None:
            numbers = array("q", ids)
            store.contents.saver.stored(numbers, chain(numbers, store.block, now.settings), now)

    def rests(self, cache: ElasticPagedCache) -> None:
        """No request has blocks of a cache any more: what is kept is cut to its limit; all of a cache that does not
        outlive its loop, if there is a limit. DriverError."""
        if (store := self.store) is not None and store.limit is not None:
            if cache is self._cache:
                store.enforce()
            else:
                cache.evict_kept(cache.pages.nbytes)

    def close(self) -> None:
        """Forgets it: its memory is free once the loop that has it is gone."""
        self._closed, self._cache = True, None


def _fits(cache: ElasticPagedCache, settings: Any, dtype: object) -> bool:
    return (
        cache.dtype == dtype
        and cache.block_tokens == settings.page_size
        and settings.max_batch_tokens in (None, cache.max_batch_tokens)
        and cache.allow_block_sharing == settings.allow_block_sharing
    )
