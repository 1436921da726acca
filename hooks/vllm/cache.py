"""The blocks of a vLLM engine: the worker's side, the engine's KV cache as a reservation with a page under each block
that may be handed out, and the scheduler's, which blocks those are: those that the worker has reported to have pages.

Note [Beside vLLM's own memory]
    Weights and activations stay in vLLM's memory. Only the cache lies in the pool, so the budget is that of KV alone.
    vLLM makes the cache by one `torch.zeros` of bytes, inside a context that its connector may give: there the call
    returns the reservation.

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
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.dlpack import from_dlpack

from ...allocator import control, devices, install
from ...allocator._native import Lease
from ...allocator.config import Config
from ...allocator.errors import DriverError, InstallError
from ..batching.pages import RESERVED, SectorPages
from ..device import managers, shared


class EngineCache:
    """The blocks of one worker of an engine. Used by the computing thread."""

    def __init__(
        self,
        settings: Config,
        blocks: int,
        nbytes: int,
        parts: Sequence[tuple[int, int, int]],
        model: str,
        share: int | bool | None = None,
    ) -> None:
        """`blocks`: their number; `nbytes`: of one; `parts`: where their bytes lie, see SectorPages; `model`: its name;
        `share`: the budget that it shares with other processes, as `manage(shared_budget=)`. Starts a device, unless
        there is one. BallonetError, torch.OutOfMemoryError."""
        runtime = devices.current()
        self._started = None if runtime is not None else devices.start(settings, torch.cuda.is_available())
        self._device = (runtime or self._started).device  # type: ignore[union-attr]
        if self._started is not None and settings.control:
            install.listen()
        if share is not None:
            shared.join(devices.holding(self._device), share, 0, 0, managers.composed_with().tuning.sharing)
        self._blocks = blocks
        self._nbytes = nbytes
        self._group = self._device.group()
        self._pages = SectorPages(self._device, self._group, blocks, nbytes, model, parts)
        self._fixed = self._device.snapshot()["pages"]["kv"] + len(parts)  # each part may end with a page half in use
        self._lease = Lease()
        self._open: set[int] = set()
        self.tensor = from_dlpack(self._pages.window()).view(torch.int8)  # [blocks x nbytes]
        for block in range(RESERVED):
            self._clear(self._pages.pieces(block))

    @property
    def limit(self) -> int:
        """Blocks that the budget has pages for."""
        free: int = shared.reach(self._device) - self._fixed * self._device.page_size
        return max(RESERVED, min(self._blocks, RESERVED + free // self._nbytes))

    def open(self, blocks: Iterable[int]) -> tuple[int, ...]:
        """Backs these blocks, in this order, as far as there are pages beside those of its own blocks, and returns the
        backed ones. A new page holds zeros, as vLLM's own memory does."""
        blocks, done = list(blocks), list[int]()
        lacking = _count(self._pages.missing(block for block in blocks if block not in self._open))
        shared.lacks(self._device, max(0, lacking - self._device.available) * self._device.page_size)
        room = self._room()
        for block in blocks:
            if block not in self._open:
                fresh = self._pages.missing([block])
                room -= _count(fresh)
                if room < 0:
                    break
                try:
                    self._pages.take([block])
                except (torch.OutOfMemoryError, DriverError):
                    break
                self._open.add(block)
                for first, count in fresh:
                    self._clear(range(first, first + count))
            done.append(block)
        return tuple(done)

    @property
    def away(self) -> frozenset[int]:
        """Blocks that lie on the host, in part or whole."""
        client = self._pages.client
        if not client.displaced:
            return frozenset()
        there = set(client.away(piece for block in self._open for piece in self._pages.pieces(block)))
        return frozenset(block for block in self._open if not there.isdisjoint(self._pages.pieces(block)))

    def close(self, blocks: Iterable[int]) -> None:
        """Frees the pages of these blocks, which are not used any more, once the device is done with them."""
        gone = [block for block in blocks if block in self._open]
        self._open.difference_update(gone)
        self._pages.give(gone)

    def begin(self) -> None:
        """Begins a step: until `end` no page of the cache is moved. DriverError."""
        client = self._pages.client
        client.begins({piece for block in (*range(RESERVED), *self._open) for piece in self._pages.pieces(block)})
        self._lease.enter(self._group)
        client.uses()

    def end(self, idle: bool) -> None:
        """Ends a step, which has submitted its work. `idle`: no request is left, so free pages go back to the driver,
        for other processes."""
        self._lease.close()
        self._lease = Lease()
        if idle:
            with suppress(DriverError):  # the pages stay in the pool then
                self._device.trim()

    def shut(self) -> None:
        """Closes the cache when the engine ends."""
        self._lease.close()
        if self._started is not None:
            control.stop()

    def _room(self) -> int:
        """Free pages, and those that other clients in this process would give."""
        client = self._pages.client
        return self._device.available + client.manager.reclaim.offered(client.number).pages

    def _clear(self, pieces: Iterable[int]) -> None:
        for piece in pieces:
            self.tensor[self._pages.of_piece(piece)].zero_()


def _count(runs: Iterable[tuple[int, int]]) -> int:
    """Pieces of runs (first, count)."""
    return sum(count for _, count in runs)


class Reserving(TorchFunctionMode):
    """A `with` block in which the one `torch.zeros` of `cache`'s size returns its tensor. InstallError at the end where
    vLLM made its cache in another way."""

    def __init__(self, cache: EngineCache) -> None:
        super().__init__()
        self._cache = cache
        self._used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensor = self._cache.tensor
        if func is torch.zeros and kwargs.get("dtype") is torch.int8 and args == (tensor.numel(),):
            self._used = True
            return tensor
        return func(*args, **kwargs)

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if kind is None and not self._used:
            with suppress(Exception):
                self._cache.shut()
            raise InstallError("vLLM has made its KV cache in a way that the connector does not know: see patches.py")


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
