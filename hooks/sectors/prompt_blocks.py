"""Reading and filling blocks of a paged cache that shares beginnings of prompts, outside of the generation loop.
listed_blocks.py knows which blocks a search finds.

Note [Two threads]
    A generation loop changes tables, counts and hashes under the lock of the client (client.py). Another thread that
    reads blocks, to write them to files or for a request of `generate()`, counts as one more request that has them, so
    that they are neither evicted nor written to; and it leases the cache, so that no page leaves its address.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch

from ...allocator._native import Group
from ..device.streams import torch_device, wait_for_work
from ..forward.lease import GroupLease
from ..prefix.sequence import Gone, Pair
from .pages import SectorPages, SectorPool


class PromptBlocks:
    """The blocks of the one kind of attention of a cache that shares beginnings of prompts."""

    def __init__(self, allocator: Any, pool: SectorPool, pages: SectorPages, group: Group) -> None:
        """`allocator`: a FullAttentionCacheAllocator whose tensor is registered."""
        self.tokens: int = allocator.tokens_per_page  # tokens of a block
        self.layers: list[int] = list(allocator.layer_indices)
        self.lock = pages.client.lock
        self.group = group
        self.pages = pages
        self._pool = pool
        self._allocator = allocator
        self._ledger = allocator.ledger
        heads, dim = allocator.num_key_value_heads, allocator.head_dim
        self._shape = (len(self.layers), 2, self.tokens, heads, dim)
        self._tensor: torch.Tensor = allocator.cache_tensor.view(-1, *self._shape)

    def of(self, request: str) -> list[int]:
        """Returns the blocks of a request."""
        return list(self._allocator.block_table.get(request, ()))

    def away(self, hashes: Sequence[int]) -> tuple[float, float]:
        """Returns, for those of these blocks that exist, the fraction not on the device and the fraction on a peer."""
        with self.lock:
            blocks = [found for each in hashes if (found := self._ledger.hash_to_block.get(each)) is not None]
            pieces = {piece for block in blocks for piece in self._pieces(block)}
            gone, total = self.pages.client.away(pieces), max(1, len(pieces))
            near = sum(self.pages.range.place(piece) == "peer" for piece in gone)
            return len(gone) / total, near / total

    # -- for others than the loop

    def acquire(self, hashes: Sequence[int]) -> list[int] | None:
        """Keeps these blocks from being evicted, and returns them; None where one is not there. Under the lock."""
        blocks = [self._ledger.hash_to_block.get(each) for each in hashes]
        if None in blocks:
            return None
        for block in blocks:
            self._ledger.acquire(block)
        return [block for block in blocks if block is not None]

    def release(self, blocks: Sequence[int]) -> None:
        """Undoes `acquire`."""
        with self.lock:
            self._pool.free_blocks(self._allocator.index, [block for block in blocks if self._ledger.release(block)])

    def read(self, layer: int, blocks: Sequence[int]) -> Pair:
        """Returns a copy of the keys and values of a layer, [1, heads, tokens, dim]. The caller keeps the blocks in
        place."""
        index = torch.tensor(blocks, device=self._tensor.device)
        found = self._tensor[index, self.layers.index(layer)]  # [blocks, 2, tokens, heads, dim]
        keys, values = (found[:, n].flatten(0, 1).transpose(0, 1).unsqueeze(0) for n in range(2))
        return keys, values

    # -- for the loop

    def place(self, count: int, room: int) -> list[int]:
        """Allocates `count` blocks with pages, or as many as fit into `room` bytes, with undefined contents, until
        `ListedBlocks.keep` or `drop`. torch.OutOfMemoryError, DriverError."""
        index, per = self._allocator.index, self._allocator.blocks_per_sector
        with self.lock:
            self._pool.try_to_free_sectors()
            free = self._pool.count_free_blocks(index)
            sectors = min(self._pool.num_free_sectors, max(0, room) // self.pages.sector)
            count = min(count, free + sectors * per)
            if (lacking := -(-(count - free) // per)) > 0:
                self._pool.take(lacking)
                for _ in range(lacking):
                    self._pool.allocate_sector(index)
            found: list[int] = self._pool.get_free_blocks(index, count)
            return found

    def write(self, layer: int, blocks: Sequence[int], pair: Pair) -> bool:
        """Fills blocks of `place` with keys and values of a layer, [1, heads, tokens, dim]. False where their shape or
        dtype differs."""
        _, _, tokens, heads, dim = self._shape
        wanted = (1, heads, len(blocks) * tokens, dim)
        if any(tuple(each.shape) != wanted or each.dtype != self._tensor.dtype for each in pair):
            return False
        index, at = torch.tensor(blocks, device=self._tensor.device), self.layers.index(layer)
        with GroupLease(self.group), torch.no_grad():
            if not self.pages.client.wait_restored(write=True):
                return False
            for n, each in enumerate(pair):
                self._tensor[index, at, n] = each[0].transpose(0, 1).reshape(len(blocks), tokens, heads, dim)
        return True

    def drop(self, blocks: Sequence[int]) -> None:
        """Frees unused blocks, and their pages if no request has blocks; else the loop frees the pages. DriverError."""
        with self.lock:
            self._pool.free_blocks(self._allocator.index, list(blocks))
            if not self._allocator.block_table:
                self._pool.try_to_free_sectors()

    def wait(self) -> None:
        """Waits until all work submitted to the device is done, on any stream, so that blocks may be written of which a
        step in flight was the last user. ManageError, DriverError."""
        device = self.pages.device
        if device.kind == "cuda":
            wait_for_work(device)

    def _pieces(self, block: int) -> Sequence[int]:
        return self.pages.pieces(block // self._allocator.blocks_per_sector)


class KeptBlocks:
    """The beginning of a prompt in blocks of a paged cache: a source of runs like a cached sequence."""

    disk: Final = False

    def __init__(self, blocks: PromptBlocks, hashes: Sequence[int]) -> None:
        self._blocks = blocks
        self._hashes = hashes
        self._held: list[int] | None = None  # while it is leased

    @property
    def away(self) -> float:
        """Fraction of it that is not on the device."""
        return self._blocks.away(self._hashes)[0]

    @property
    def near(self) -> float:
        """Fraction of it that is on a peer."""
        return self._blocks.away(self._hashes)[1]

    @property
    def held(self) -> Sequence[int]:
        """The layers that hold tokens."""
        return self._blocks.layers

    def holds(self, layer: int) -> bool:
        """Does that layer hold tokens?"""
        return layer in self._blocks.layers

    def part(self, layer: int, start: int, end: int) -> Pair:
        """Copies the keys and values of a layer, [1, heads, end - start, dim]. Gone."""
        if self._held is None:
            raise Gone(self)
        size = self._blocks.tokens
        first = start // size
        keys, values = self._blocks.read(layer, self._held[first : -(-end // size)])
        window = slice(start - first * size, end - first * size)
        return keys[:, :, window], values[:, :, window]

    @contextmanager
    def leased(self, end: int) -> Iterator[None]:
        """Keeps the tokens [0, end) in place. Gone. See Note [Two threads]."""
        blocks = self._blocks
        with ExitStack() as stack:
            with blocks.lock:
                held = blocks.acquire(self._hashes[: -(-end // blocks.tokens)])
                if held is None:
                    raise Gone(self)
                stack.callback(blocks.release, held)
                stack.enter_context(GroupLease(blocks.group))
                if not blocks.pages.client.wait_restored():
                    raise Gone(self)
            self._held = held
            try:
                yield
            finally:
                self._held = None

    def after_writes(self) -> None:
        """Does nothing: blocks that a search finds are written, as transformers has read their results."""

    def was_read(self) -> None:
        """Waits for the current stream, before which the blocks must not be written."""
        place = torch_device(self._blocks.pages.device)
        if place.type == "cuda":
            torch.cuda.current_stream(place).synchronize()
