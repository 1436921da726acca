"""What continuous batching keeps of one model as long as it is managed: the cache that outlives its generation loops,
and what it shares with `generate()` (SwiftCache §4, over turns).

Note [What is found again]
    transformers shares full blocks of one loop by hashes of their tokens. Here the next loop with blocks of the same
    size gets the same cache, with the blocks that nobody uses any more. They are void once the model is another:
    weights that were written to, adapters, settings (prefix/identity.py). Between loops they are a client that rests:
    whoever needs pages has them, and their bytes are on the host then.

Note [Two indexes]
    A block holds all layers of some tokens, and a sequence of `generate()` all tokens of a layer, so neither can be
    used in the place of the other: what one has the other gets as a copy. transformers finds blocks by its hashes, the
    store of prefixes (prefix/store.py) its sequences and files by keys. Each is asked for a prompt that the other does
    not have all of: beginnings.py, prefix/prompt_filler.py. The files are the same ones.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...offload.policy.prefixes import chain
from ..prefix.identity import Identity
from ..prefix.sequence import TokenRun
from ..prefix.store import PrefixStore

if TYPE_CHECKING:
    from .cache import ElasticPagedCache


class Living:
    """Keeps the cache of one model. Loops are made one at a time."""

    def __init__(self, limit: int | None) -> None:
        """`limit`: bytes of pages of blocks that nobody uses, and of sequences that `generate()` keeps; None: no
        limit."""
        self._limit = limit
        self._store: Callable[[], PrefixStore | None] = lambda: None
        self._cache: ElasticPagedCache | None = None
        self._closed = False

    def share(self, store: PrefixStore) -> None:
        """`store`: what `generate()` of the model keeps, which knows what the model is at any moment."""
        self._store = weakref.ref(store)
        store.contents.batches = self

    @property
    def store(self) -> PrefixStore | None:
        """What `generate()` keeps; None where the model is managed no more."""
        return self._store()

    @property
    def limit(self) -> int | None:
        """Bytes of pages that blocks may keep: what the sequences leave. None: as many as there are."""
        if self._limit is None or (store := self.store) is None:
            return self._limit
        return max(0, self._limit - store.contents.nbytes)

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
        return made

    def ended(self, ids: Sequence[int], now: Identity) -> None:
        """Blocks hold these tokens, which a request has computed: they are written to files, if there are any."""
        store = self.store
        if store is not None and store.contents.saver is not None:
            numbers = array("q", ids)
            store.contents.saver.stored(numbers, chain(numbers, store.block, now.settings), now)

    # -- for the store of prefixes, on any thread

    def find(self, ids: Sequence[int], now: Identity) -> TokenRun | None:
        """Returns where the longest beginning of these tokens lies; None where there is none, or the model was another
        one when it was computed."""
        blocks = None if self._cache is None else self._cache.kept
        return None if blocks is None or blocks.identity != now else blocks.find(ids)

    def clear(self) -> None:
        """Forgets everything but what running requests use. DriverError."""
        if (cache := self._cache) is not None and cache.kept is not None:
            with cache.kept.lock:
                cache.kept.forget()
                if cache.user() is None:
                    cache.pool.try_to_free_sectors()

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
