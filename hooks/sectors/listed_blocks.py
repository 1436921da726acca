"""Which full blocks of a paged cache are found: by transformers' ledger and by the index alike.

Note [Ledger and index]
    transformers finds blocks in a ledger of its own, which says what the index says: each block that it leads to is an
    entry, and hangs on the one before it. So both change together, under the store's lock and the client's: when blocks
    get full (`mark`, `keep`), when the index drops them (`dropped`, `lost`), and when a request gives its blocks up for
    good (`discard`). Whether requests use a block only the ledger knows. What nobody uses leaves by what it is worth,
    for the limit that it shares with sequences, or for memory of requests (`evict`). A cache that does not outlive its
    loop has an index of its own.

Note [Another model]
    Hashes are of tokens alone. So all of them go before a request is looked at after the model has changed. Requests
    that run when all are dropped are `stale`: none of their blocks is found by anyone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

from transformers.generation.continuous_batching.cache_allocators.cache_allocator import compute_block_hash

from ..prefix.block_index import PAGED
from ..prefix.contents import Contents
from ..prefix.identity import Identity
from ..prefix.sequence import TokenRun
from .prompt_blocks import KeptBlocks, PromptBlocks


class ListedBlocks:
    """The full blocks of the one kind of attention of a cache that shares beginnings of prompts."""

    def __init__(self, allocator: Any, blocks: PromptBlocks) -> None:
        """`allocator`: a FullAttentionCacheAllocator; `blocks`: what is in its blocks. DriverError."""
        self.blocks = blocks
        self.tokens = blocks.tokens  # of a block
        self.lock = blocks.lock
        self.identity: Identity | None = None  # of the model that has computed them
        self.stale: set[str] = set()  # requests: see Note [Another model]
        self._allocator = allocator
        self._ledger = allocator.ledger
        client = blocks.pages.client
        self.share(Contents(client.name, blocks.pages.device, client.governor))

    def share(self, contents: Contents) -> None:
        """Has its blocks in the index of `contents` from now on, in the place of another cache's. None is full yet.
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
        """Returns how many of the first ones lead to blocks."""
        known = self._ledger.hash_to_block
        return next((n for n, each in enumerate(hashes) if each not in known), len(hashes))

    # -- for the index: see block_index.py, PagedBlocks

    @property
    def count(self) -> int:
        """How many blocks are found."""
        return len(self._ledger.hash_to_block)

    @property
    def unused_tokens(self) -> int:
        """Tokens in the blocks that nobody uses."""
        return self.tokens * len(self._ledger.cached_blocks)

    @property
    def unused_pages(self) -> int:
        """Pages under these where no request has blocks; else 0."""
        pages = self.blocks.pages
        return 0 if self._allocator.block_table else pages.pages - pages.fixed // pages.device.page_size

    def keys(self, prompt: Sequence[int], salt: bytes) -> Iterable[int]:
        """Yields the hashes of a prompt's full blocks; none where they are of other settings or weights."""
        return self.hashes(prompt) if self.identity == (self._contents.weights, salt) else ()

    def run(self, keys: Sequence[int]) -> TokenRun:
        """Returns the tokens of the first blocks of a prompt, which are stored."""
        return TokenRun(KeptBlocks(self.blocks, keys), 0, len(keys) * self.tokens)

    def unused(self, key: Hashable) -> bool:
        """Does nobody use this block? Under the lock."""
        return self._ledger.hash_to_block[key] in self._ledger.cached_blocks

    def dropped(self, keys: Iterable[Hashable]) -> None:
        """The index has dropped these. Those that nobody uses are free. Under the lock. DriverError."""
        ledger, free = self._ledger, list[int]()
        for key in keys:
            block = ledger.hash_to_block.pop(key)
            del ledger.block_to_hash[block]
            if block in ledger.cached_blocks:
                del ledger.cached_blocks[block]
                free.append(block)
        self.blocks.drop(free)

    def lost(self) -> None:
        """The index has dropped all: see Note [Another model]. DriverError."""
        with self.lock:
            self.stale.update(self._allocator.block_table)
            blocks = self._ledger.evict_cached_blocks()
            self._ledger.hash_to_block.clear()
            self._ledger.block_to_hash.clear()
            self.blocks.drop(blocks)

    # -- for the loop

    def full(self, request: str) -> int:
        """Returns how many blocks of a request, from the first one on, are found by their tokens."""
        known, table = self._ledger.block_to_hash, self.blocks.of(request)
        return next((n for n, block in enumerate(table) if block not in known), len(table))

    def mark(self, request: str, ids: Sequence[int], count: int) -> None:
        """The next `count` blocks of a request, which has these tokens, are full and found from now on, unless it is
        stale or has no blocks any more. DriverError."""
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
            index.blocks.index.insert(path[::-1], PAGED, ended=False)

    def used(self, hashes: Sequence[int]) -> None:
        """Notes that a request uses the first of these blocks, as far as they are there. DriverError."""
        with self._contents.change() as index:
            index.blocks.index.use(hashes)

    def evict(self, count: int) -> int:
        """Forgets the `count` blocks that are worth least of those that nobody uses, or as many as there are; returns
        how many. DriverError."""
        if not self._ledger.cached_blocks:
            return 0
        with self._contents.change() as index:
            gone = len(index.blocks.evict(count, lambda owner: owner is PAGED))
        self._contents.counts.evicted += gone
        return gone

    def discard(self, request: str) -> None:
        """Forgets the blocks that this request alone has. DriverError."""
        with self._contents.change() as index, self.lock:
            known, shared = self._ledger.block_to_hash, self._ledger.shared_ref_counts
            own = [known[block] for block in self.blocks.of(request) if block in known and block not in shared]
            self.dropped([key for _, key in index.blocks.index.forget(own)])

    def keep(self, hashes: Sequence[int], first: int, blocks: Sequence[int]) -> None:
        """Blocks that were filled, of a prompt with these hashes from the one numbered `first` on, are found from now
        on, and kept like those of requests that have ended; unless what they hang on is gone, or the model another.
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
            index.blocks.index.insert(hashes[max(0, first - 1) : end], PAGED, ended=False)

    def renew(self, now: Identity) -> None:
        """Forgets everything if the model is not what it was: see Note [Another model]. DriverError."""
        if now != self.identity:
            with self._contents.change() as index:
                self._contents.renew(now)
                index.blocks.forget_paged()
                self.identity = now

    def forget(self) -> None:
        """No block is found any more. Those that requests have, or readers, are free once these end. DriverError."""
        with self._contents.change() as index:
            index.blocks.forget_paged()
