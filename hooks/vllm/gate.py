"""Which blocks of a vLLM engine may be handed out: those that the worker has reported to have pages.

Note [Only what has pages]
    vLLM's scheduler hands out any block of the queue of free blocks, and kernels of the same step write to it. So a
    block without pages is *closed*: not in the queue, and not counted in the pool's size. The scheduler asks the worker
    to open some, ahead of need, and puts them into the queue with the answer. Where no page is left vLLM finds too few
    free blocks and preempts, as it does with a cache of a fixed size.
    The scheduler may be some steps ahead of the workers. So requests to open are numbered, and a block is in one
    unanswered request at most: a late answer never opens a block that was closed meanwhile.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from typing import Any, Protocol


class Queue(Protocol):
    """The free blocks (vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue)."""

    def remove(self, block: Any) -> None: ...
    def prepend_n(self, blocks: list[Any]) -> None: ...
    def get_all_free_blocks(self) -> list[Any]: ...


class Blocks(Protocol):
    """All blocks (vllm.v1.core.block_pool.BlockPool)."""

    blocks: list[Any]
    num_gpu_blocks: int
    free_block_queue: Queue

    def evict_blocks(self, block_ids: set[int]) -> None: ...
    def get_num_free_blocks(self) -> int: ...


class BlockGate:
    """Opens and closes blocks, see Note [Only what has pages]. Used by the scheduling thread."""

    def __init__(self, pool: Blocks, first: int) -> None:
        """Closes all free blocks except those numbered below `first`, which always have pages."""
        self._pool = pool
        self._closed: dict[int, Any] = {}
        self._asked: dict[int, tuple[int, ...]] = {}  # by the number of the request, until it is answered
        self._number = 0
        self._close([block for block in pool.free_block_queue.get_all_free_blocks() if block.block_id >= first])

    @property
    def open(self) -> int:
        """Blocks that have pages, in use or free, without those that always have."""
        return len(self._pool.blocks) - len(self._closed)

    def ask(self, need: int, limit: int) -> tuple[int, tuple[int, ...]]:
        """Returns a numbered request for closed blocks to open, the lowest first, so that `need` are free and at most
        `limit` open."""
        awaited = {block for blocks in self._asked.values() for block in blocks}
        count = min(need - self._pool.get_num_free_blocks(), limit - self.open) - len(awaited)
        self._number += 1
        blocks = tuple(heapq.nsmallest(count, self._closed.keys() - awaited)) if count > 0 else ()
        self._asked[self._number] = blocks
        return self._number, blocks

    def answered(self, number: int, blocks: Collection[int]) -> None:
        """Opens the blocks of the request of that number that have pages now: the scheduler may hand them out."""
        opened = [self._closed.pop(block) for block in self._asked.pop(number, ()) if block in blocks]
        self._pool.free_block_queue.prepend_n(opened)
        self._pool.num_gpu_blocks += len(opened)

    def gives(self, first: int, cached: bool) -> bool:
        """Would `close` close any block of an idle engine?"""
        free = self._pool.free_block_queue.get_all_free_blocks()
        return any(block.block_id >= first and (cached or block.block_hash is None) for block in free)

    def close(
        self, need: int, limit: int, first: int, cached: bool, away: Collection[int] = frozenset()
    ) -> tuple[int, ...]:
        """Closes free blocks until at most `need` are free and at most `limit` open, and returns them: those that hold
        no prefix first, the highest number first; those that hold one only where `cached`, or the limit demands it; and
        all that are `away`, on the host, as no request is to begin there. Blocks below `first` stay open."""
        free = [block for block in self._pool.free_block_queue.get_all_free_blocks() if block.block_id >= first]
        empty = sorted((block for block in free if block.block_hash is None), key=lambda it: -it.block_id)
        kept = [block for block in free if block.block_hash is not None]  # the least recently used first
        over = max(0, self.open - limit)
        spare = max(over, self._pool.get_num_free_blocks() - need)
        chosen = empty[:spare]
        chosen += kept[: spare - len(chosen) if cached else max(0, over - len(chosen))]
        if away:
            left = {block.block_id for block in chosen}
            chosen += [block for block in free if block.block_id in away and block.block_id not in left]
        self._close(chosen)
        return tuple(block.block_id for block in chosen)

    def _close(self, blocks: list[Any]) -> None:
        self._pool.evict_blocks({block.block_id for block in blocks if block.block_hash is not None})
        for block in blocks:
            self._pool.free_block_queue.remove(block)
            self._closed[block.block_id] = block
        self._pool.num_gpu_blocks -= len(blocks)
