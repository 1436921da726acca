"""Where the blocks of a prompt are stored: the index of policy/prefixes.py, whose owners are sequences, states, and the
paged cache of continuous batching.

The caller holds the store's lock.

Note [Two copies]
    A block of a paged cache holds all layers of some tokens, and a sequence all tokens of a layer, so neither can be
    used in the place of the other: missing tokens are copied. So tokens that both have are two entries, each with its
    own value. Keys of the paged cache, which may have blocks of another size, are transformers' hashes of its blocks,
    the others keys of `chain`: two independent forests of one index.
"""

from __future__ import annotations

import weakref
from array import array
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby, takewhile
from typing import Final, Protocol, cast

from ...offload.policy.prefixes import Index, chain
from ...offload.policy.tuning import Prefixes
from ...offload.policy.worth import Odds
from .sequence import CachedSequence, TokenRun
from .snapshot import state_key

PAGED: Final = "paged"  # the owner of the paged cache's blocks


class PagedBlocks(Protocol):
    """The full blocks of a paged cache (hooks/sectors/listed_blocks.py)."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held while a block's users change; taken after the store's lock."""

    @property
    def tokens(self) -> int:
        """Tokens of a block."""

    @property
    def count(self) -> int:
        """Blocks that a search can find."""

    @property
    def unused_tokens(self) -> int:
        """Tokens in the blocks that no request uses."""

    @property
    def unused_pages(self) -> int:
        """Pages under these blocks if no request has any block; else 0."""

    def keys(self, prompt: Sequence[int], salt: bytes) -> Iterable[int]:
        """Returns the keys of a prompt's full blocks; none where they are of other settings or weights."""

    def run(self, keys: Sequence[int]) -> TokenRun:
        """Returns the tokens of the first blocks of a prompt, which are stored."""

    def unused(self, key: Hashable) -> bool:
        """Is this block used by no request? Under `lock`."""

    def dropped(self, keys: Iterable[Hashable]) -> None:
        """Called when the index has dropped these blocks. Under `lock`. DriverError."""

    def lost(self) -> None:
        """Called when the index has dropped all blocks. DriverError."""


class BlockIndex:
    """Finds the owners of the beginning of a prompt."""

    def __init__(self, tuning: Prefixes) -> None:
        self.block = tuning.block  # tokens
        self._odds = tuning.odds
        self.index = Index(policy=Odds(tuning.odds))
        self._paged: Callable[[], PagedBlocks | None] = lambda: None

    @property
    def paged(self) -> PagedBlocks | None:
        """The paged cache whose blocks are in the index, if there is one."""
        return self._paged()

    def hold(self, paged: PagedBlocks) -> None:
        """Indexes the blocks of this paged cache from now on, in the place of another one's. Refers to it weakly.
        DriverError."""
        self.forget_paged()
        self._paged = weakref.ref(paged)

    def forget_paged(self) -> None:
        """Forgets the blocks of the paged cache. DriverError."""
        self.index.forget([key for owner, key in self.index.after(None) if owner is PAGED])
        if (paged := self.paged) is not None:
            paged.lost()

    def clear(self) -> None:
        """Forgets everything. DriverError."""
        self.index.clear()
        if (paged := self.paged) is not None:
            paged.lost()

    def reset(self) -> None:
        """Clears the index whatever state an interrupt has left it in."""
        self.index = Index(policy=Odds(self._odds))
        self.clear()

    def evict(self, count: int, only: Callable[[Hashable], bool]) -> list[tuple[Hashable, Hashable]]:
        """Evicts the `count` least valuable blocks, of owners that `only` allows and of unused blocks of the paged
        cache, which are dropped. Returns (owner, key) of each. DriverError."""
        paged = self.paged

        def may_go(owner: Hashable, key: Hashable) -> bool:
            return only(owner) and (owner is not PAGED or paged is None or paged.unused(key))

        with nullcontext() if paged is None else paged.lock:
            gone = self.index.evict(count, may_go)
            if paged is not None:
                paged.dropped(key for owner, key in gone if owner is PAGED)
        return gone

    def stored(self, ids: Sequence[int], salt: bytes) -> list[bytes]:
        """Returns the keys of the leading blocks that are stored. A hash finds the owner of a block; comparing tokens
        finds how many more blocks of that owner follow. So there is one hash for each owner."""
        ids, keys = numbers_of(ids), list[bytes]()
        full = len(ids) // self.block
        while len(keys) < full:
            start = len(keys)
            key = chain(ids[: (start + 1) * self.block], self.block, salt, keys)[-1]
            if key not in self.index:
                break
            owner = cast(CachedSequence, self.index.owner(key))
            end = _same_blocks(ids, owner.ids, start, min(full, len(owner.ids) // self.block), self.block)
            if end == start:
                break
            keys = [*keys, key, *owner.keys[start + 1 : end]]
        return keys

    def keys(self, ids: Sequence[int], salt: bytes) -> list[bytes]:
        """Returns the keys of all blocks, the last one of which may be partial."""
        ids = numbers_of(ids)
        keys = chain(ids, self.block, salt, self.stored(ids, salt))
        rest = ids[len(keys) * self.block :]
        return keys + (chain(rest, len(rest), keys[-1] if keys else salt) if rest else [])

    def all_keys(self, ids: Sequence[int], salt: bytes) -> list[bytes]:
        """Returns the keys of all blocks, and of the state behind them."""
        return [*self.keys(ids, salt), state_key(ids, salt)] if ids else []

    def find(self, prompt: Sequence[int], salt: bytes, *, peek: bool = False) -> list[TokenRun]:
        """Returns where the longest stored beginning of a prompt lies: in sequences, and the rest in blocks of the
        paged cache. `peek`: does not count as a use."""
        runs, paged = self.in_sequences(prompt, salt, peek=peek), self.paged
        if paged is None:
            return runs
        keys, end = [*takewhile(self.index.__contains__, paged.keys(prompt, salt))], runs[-1].end if runs else 0
        if len(keys) * paged.tokens <= end:
            return runs
        if not peek:
            self.index.use(keys)
        return [*runs, paged.run(keys)._replace(start=end)]

    def in_sequences(self, prompt: Sequence[int], salt: bytes, *, peek: bool = False) -> list[TokenRun]:
        """Returns where sequences hold the longest beginning of a prompt. `peek`: does not count as a use."""
        index, block = self.index, self.block
        prompt = numbers_of(prompt)
        keys = self.stored(prompt, salt)
        count = index.peek(keys) if peek else index.use(keys)
        runs, start = [], 0
        for owner, found in groupby(keys[:count], index.owner):
            end = start + len(list(found)) * block
            runs.append(TokenRun(cast(CachedSequence, owner), start, end))
            start = end
        # A sequence that shares only the beginning of the next block
        most, best = 0, None
        rest = prompt[start : start + block]
        for other in self.after(keys[count - 1] if count else None):
            same = _same_tokens(other.ids[start : start + block], rest) if other.salt == salt else 0
            if same > most or (same == most > 0 and best is not None and best.in_use and not other.in_use):
                most, best = same, other
        if best is not None:
            runs.append(TokenRun(best, start, start + most))
        return runs

    def after(self, key: bytes | None) -> list[CachedSequence]:
        """Returns the sequences with a block right after this one; for None, with a first block. KeyError where the key
        is not stored."""
        return [owner for owner, _ in self.index.after(key) if isinstance(owner, CachedSequence)]

    def behind(self, sequence: CachedSequence, end: int) -> list[bytes]:
        """Returns the sequence's own blocks that do not lie wholly before token `end`."""
        return [key for key in sequence.keys[end // self.block :] if self.owns(sequence, key)]

    def owns(self, owner: object, key: bytes) -> bool:
        """Is this the owner of a stored block?"""
        return key in self.index and self.index.owner(key) is owner


def numbers_of(ids: Sequence[int]) -> array[int]:
    """Returns tokens as they are compared and hashed fastest."""
    return ids if isinstance(ids, array) else array("q", ids)


def _same_blocks(one: array[int], other: array[int], start: int, end: int, block: int) -> int:
    """Returns the first block of [start, end) in which they differ, `end` where there is none."""

    def differ(first: int, last: int) -> bool:
        span = slice(first * block, last * block)
        return one[span] != other[span]

    if not differ(start, end):
        return end
    return bisect_left(range(end), True, lo=start, key=lambda last: differ(start, last + 1))


def _same_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns how many leading tokens are the same."""
    if one[:1] != other[:1]:
        return 0
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
