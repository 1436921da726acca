"""The full blocks of a paged cache that shares beginnings of prompts: which of them a search can find, in transformers'
ledger and in the index of kept sequences alike, and reading and filling them outside of the generation loop.

Note [Two threads]
    A generation loop changes tables, counts and hashes under the lock of the client (pages.py). Another thread that
    reads blocks, to write them to files or for a request of `generate()`, counts as one more request that has them, so
    that they are neither evicted nor written to; and it leases the cache, so that no page leaves its address.

Note [Ledger and index]
    transformers finds blocks in a ledger of its own, which agrees with the index: each of its blocks is an entry that
    depends on the one before it. So both change together, under the store's lock and the client's: when blocks get full
    (`mark`, `keep`), when the index drops them (`dropped`, `lost`), and when a request gives its blocks up for good
    (`discard`). Only the ledger knows whether requests use a block. Unused blocks are evicted, the least valuable
    first, for the limit that they share with sequences, or for memory of requests (`evict`). A cache that does not
    outlive its loop has an index of its own.

Note [Another model]
    Hashes cover tokens alone. So after a change of the model all of them are dropped before a request is looked up.
    Requests that run then are `stale`: their blocks are never found.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import compute_block_hash

from ...allocator._native import Group
from ..device.streams import torch_device, wait_for_work
from ..forward.lease import GroupLease
from ..prefix.contents import Contents
from ..prefix.identity import Identity
from ..prefix.index import PagedBlocks
from ..prefix.sequence import Gone, Pair, TokenRun, TokenSource
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
            blocks = [held for key in hashes if (held := self._ledger.hash_to_block.get(key)) is not None]
            pieces = {piece for block in blocks for piece in self._pieces(block)}
            gone, total = self.pages.client.away(pieces), max(1, len(pieces))
            near = sum(self.pages.range.place(piece) == "peer" for piece in gone)
            return len(gone) / total, near / total

    # -- for others than the loop

    def acquire(self, hashes: Sequence[int]) -> list[int] | None:
        """Keeps these blocks from being evicted, and returns them; None where one is not there. Under the lock."""
        blocks = [self._ledger.hash_to_block.get(key) for key in hashes]
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
        states = self._tensor[index, self.layers.index(layer)]  # [blocks, 2, tokens, heads, dim]
        keys, values = (states[:, n].flatten(0, 1).transpose(0, 1).unsqueeze(0) for n in range(2))
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
            blocks: list[int] = self._pool.get_free_blocks(index, count)
            return blocks

    def write(self, layer: int, blocks: Sequence[int], pair: Pair) -> bool:
        """Fills blocks of `place` with keys and values of a layer, [1, heads, tokens, dim]. False where their shape or
        dtype differs."""
        _, _, tokens, heads, dim = self._shape
        wanted = (1, heads, len(blocks) * tokens, dim)
        if any(tuple(states.shape) != wanted or states.dtype != self._tensor.dtype for states in pair):
            return False
        index, at = torch.tensor(blocks, device=self._tensor.device), self.layers.index(layer)
        with GroupLease(self.group), torch.no_grad():
            if not self.pages.client.wait_restored(write=True):
                return False
            for n, states in enumerate(pair):
                self._tensor[index, at, n] = states[0].transpose(0, 1).reshape(len(blocks), tokens, heads, dim)
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


class KeptBlocks(TokenSource):
    """The beginning of a prompt in blocks of a paged cache, which are written: transformers has read their results."""

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

    def was_read(self) -> None:
        """Waits for the current stream, before which the blocks must not be written."""
        place = torch_device(self._blocks.pages.device)
        if place.type == "cuda":
            torch.cuda.current_stream(place).synchronize()


class ListedBlocks(PagedBlocks):
    """The full blocks of the one kind of attention of a cache that shares beginnings of prompts."""

    def __init__(self, allocator: Any, blocks: PromptBlocks) -> None:
        """`allocator`: a FullAttentionCacheAllocator. `blocks`: reads and writes its blocks. DriverError."""
        self.blocks = blocks
        self.tokens = blocks.tokens  # tokens of a block
        self.lock = blocks.lock
        self.identity: Identity | None = None  # the model's when it computed the blocks
        self.stale: set[str] = set()  # requests: see Note [Another model]
        self._allocator = allocator
        self._ledger = allocator.ledger
        client = blocks.pages.client
        self.share(Contents(client.name, blocks.pages.device, client.manager))

    def share(self, contents: Contents) -> None:
        """Puts its blocks into the index of `contents`, in the place of another cache's. None is full yet.
        DriverError."""
        self._contents = contents
        with contents.change() as index:
            index.blocks.hold(self)

    def hashes(self, ids: Sequence[int]) -> Iterator[int]:
        """Yields transformers' hashes of the full blocks of these tokens."""
        last: int | None = None
        for end in range(self.tokens, len(ids) + 1, self.tokens):
            last = compute_block_hash(last, list(ids[end - self.tokens : end]))
            yield last

    def found(self, hashes: Sequence[int]) -> int:
        """Returns how many of the leading hashes have blocks."""
        known = self._ledger.hash_to_block
        return next((n for n, key in enumerate(hashes) if key not in known), len(hashes))

    # -- for the index: see prefix/index.py, PagedBlocks

    @property
    def count(self) -> int:
        return len(self._ledger.hash_to_block)

    @property
    def unused_tokens(self) -> int:
        return self.tokens * len(self._ledger.cached_blocks)

    @property
    def unused_pages(self) -> int:
        pages = self.blocks.pages
        return 0 if self._allocator.block_table else pages.pages - pages.fixed // pages.device.page_size

    def keys(self, prompt: Sequence[int], salt: bytes) -> Iterable[int]:
        """Yields the hashes of a prompt's full blocks; none where they are of other settings or weights."""
        return self.hashes(prompt) if self.identity == (self._contents.weights, salt) else ()

    def run(self, keys: Sequence[int]) -> TokenRun:
        return TokenRun(KeptBlocks(self.blocks, keys), 0, len(keys) * self.tokens)

    def unused(self, key: Hashable) -> bool:
        return self._ledger.hash_to_block[key] in self._ledger.cached_blocks

    def dropped(self, keys: Iterable[Hashable]) -> None:
        """Removes blocks from the ledger that the index has dropped, and frees unused ones. Under the lock.
        DriverError."""
        ledger, free = self._ledger, list[int]()
        for key in keys:
            block = ledger.hash_to_block.pop(key)
            del ledger.block_to_hash[block]
            if block in ledger.cached_blocks:
                del ledger.cached_blocks[block]
                free.append(block)
        self.blocks.drop(free)

    def lost(self) -> None:
        """Removes all blocks from the ledger, as the index has dropped all: see Note [Another model]. DriverError."""
        with self.lock:
            self.stale.update(self._allocator.block_table)
            blocks = self._ledger.evict_cached_blocks()
            self._ledger.hash_to_block.clear()
            self._ledger.block_to_hash.clear()
            self.blocks.drop(blocks)

    # -- for the loop

    def full(self, request: str) -> int:
        """Returns how many leading blocks of a request a search can find."""
        known, table = self._ledger.block_to_hash, self.blocks.of(request)
        return next((n for n, block in enumerate(table) if block not in known), len(table))

    def mark(self, request: str, ids: Sequence[int], count: int) -> None:
        """Makes the next `count` blocks of a request with these tokens, which are full, findable, unless it is stale or
        has no blocks any more. DriverError."""
        with self._contents.change() as index, self.lock:
            table, known, path = self._allocator.block_table, self._ledger.block_to_hash, list[int]()
            if request in self.stale or request not in table:
                return
            self._allocator.mark_complete_blocks(request, ids, count)
            for block in reversed(table[request]):
                if (key := known.get(block)) is not None:
                    path.append(key)
                    if key in index.blocks.index:
                        break
            index.blocks.insert_paged(path[::-1])

    def used(self, hashes: Sequence[int]) -> None:
        """Notes that a request uses the leading ones of these blocks that exist. DriverError."""
        with self._contents.change() as index:
            index.blocks.index.use(hashes)

    def evict(self, count: int) -> int:
        """Drops up to `count` of the least valuable unused blocks; returns how many. DriverError."""
        if not self._ledger.cached_blocks:
            return 0
        with self._contents.change() as index:
            gone = index.blocks.evict_paged(count)
        self._contents.counts.evicted += gone
        return gone

    def discard(self, request: str) -> None:
        """Drops the blocks that only this request has. DriverError."""
        with self._contents.change() as index, self.lock:
            known, shared = self._ledger.block_to_hash, self._ledger.shared_ref_counts
            own = [known[block] for block in self.blocks.of(request) if block in known and block not in shared]
            self.dropped([key for _, key in index.blocks.index.forget(own)])

    def keep(self, hashes: Sequence[int], first: int, blocks: Sequence[int]) -> None:
        """Makes filled blocks findable, those of a prompt with these hashes from block `first` on, and keeps them like
        blocks of requests that have ended; unless the block before them was dropped, or the model has changed.
        DriverError."""
        with self._contents.change() as index, self.lock:
            there, end = first == 0 or hashes[first - 1] in index.blocks.index, first + len(blocks)
            if not there or self.identity is None or self.identity.weights != self._contents.weights:
                self.blocks.drop(blocks)
                return
            for key, block in zip(hashes[first:end], blocks, strict=True):
                if self._ledger.register_new_hash(block, key) is None:
                    self._ledger.cached_blocks[block] = None
                else:
                    self.blocks.drop([block])
            index.blocks.insert_paged(hashes[max(0, first - 1) : end])

    def renew(self, now: Identity) -> None:
        """Drops all blocks if the model has changed: see Note [Another model]. DriverError."""
        if now != self.identity:
            with self._contents.change() as index:
                self._contents.renew(now)
                index.blocks.forget_paged()
                self.identity = now

    def forget(self) -> None:
        """Makes no block findable any more. Blocks in use are freed once their requests or readers end. DriverError."""
        with self._contents.change() as index:
            index.blocks.forget_paged()
