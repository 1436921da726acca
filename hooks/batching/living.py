"""The cache of a model that outlives its generation loops, so that the next one finds what prompts begin with
(SwiftCache §4, over turns).

Note [What is found again]
    transformers shares full blocks of one loop by hashes of their tokens. Here the next loop with blocks of the same
    size gets the same cache, with the blocks that nobody uses any more. They are void once the model is another:
    weights that were written to, adapters, settings (prefix/identity.py). Between loops they are a client that rests:
    whoever needs pages has them, and their bytes are on the host then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache import ElasticPagedCache


class Living:
    """Keeps the cache of one model. Loops are made one at a time."""

    def __init__(self, identity: Callable[[], object], limit: int | None) -> None:
        """`identity`: what the model is, at any moment; `limit`: bytes of pages of blocks that nobody uses; None: as
        many as there are."""
        self.limit = limit
        self._identity = identity
        self._known: object = None
        self._cache: ElasticPagedCache | None = None
        self._closed = False

    def take(self, settings: Any, dtype: object, make: Callable[[], ElasticPagedCache]) -> ElasticPagedCache:
        """Returns the cache for a loop with these settings, a ContinuousBatchingConfig: the living one, or a new one
        where that is in use or of other sizes."""
        known, cache = self._identity(), self._cache
        if cache is not None and cache.user() is None and _fits(cache, settings, dtype):
            cache.free_all_requests()
            if known != self._known:
                cache.evict_oldest(cache.pages.nbytes)
            self._known = known
            return cache
        made = make()
        if not self._closed and (cache is None or cache.user() is None):
            self._cache, self._known = made, known
        return made

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
