"""The full blocks of a paged cache that a search can find: in transformers' ledger and in the index alike.

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
from typing import Any

from transformers.generation.continuous_batching.cache_allocators.cache_allocator import compute_block_hash

from ..prefix.contents import Contents
from ..prefix.identity import Identity
from ..prefix.sequence import TokenRun
from .prompt_blocks import KeptBlocks, PromptBlocks


class ListedBlocks:
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
        self.share(Contents(client.name, blocks.pages.device, client.governor))

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
        return next((n for n, each in enumerate(hashes) if each not in known), len(hashes))

    # -- for the index: see prefix/index.py, PagedBlocks

    @property
    def count(self) -> int:
        """Blocks that a search can find."""
        return len(self._ledger.hash_to_block)

    @property
    def unused_tokens(self) -> int:
        """Tokens in the blocks that no request uses."""
        return self.tokens * len(self._ledger.cached_blocks)

    @property
    def unused_pages(self) -> int:
        """Pages under these blocks if no request has any block; else 0."""
        pages = self.blocks.pages
        return 0 if self._allocator.block_table else pages.pages - pages.fixed // pages.device.page_size

    def keys(self, prompt: Sequence[int], salt: bytes) -> Iterable[int]:
        """Yields the hashes of a prompt's full blocks; none where they are of other settings or weights."""
        return self.hashes(prompt) if self.identity == (self._contents.weights, salt) else ()

    def run(self, keys: Sequence[int]) -> TokenRun:
        """Returns the tokens of the first blocks of a prompt, which are stored."""
        return TokenRun(KeptBlocks(self.blocks, keys), 0, len(keys) * self.tokens)

    def unused(self, key: Hashable) -> bool:
        """Is this block used by no request? Under the lock."""
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
            for each, block in zip(hashes[first:end], blocks, strict=True):
                if self._ledger.register_new_hash(block, each) is None:
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
