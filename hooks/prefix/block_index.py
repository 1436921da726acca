"""Where the blocks of a prompt are stored: the index of policy/prefixes.py, whose owners are sequences and states.

Whoever calls holds the store's lock.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby
from typing import cast

from ...offload.policy.prefixes import Index, chain
from ...offload.policy.tuning import Prefixes
from ...offload.policy.worth import Odds
from .sequence import CachedSequence, TokenRun
from .snapshot import state_key


class BlockIndex:
    """Finds the sequences that hold the beginning of a prompt."""

    def __init__(self, tuning: Prefixes) -> None:
        self.block = tuning.block  # tokens
        self._odds = tuning.odds
        self.index = Index(policy=Odds(tuning.odds))

    def reset(self) -> None:
        """Forgets everything but what was counted, whatever state an interrupt has left the index in."""
        hits, self.index = self.index.hits, Index(policy=Odds(self._odds))
        self.index.hits = hits

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
        """Returns where the longest stored beginning of a prompt lies. `peek`: does not count as a use."""
        index, block = self.index, self.block
        prompt = numbers_of(prompt)
        keys = self.stored(prompt, salt)
        count = index.peek(keys) if peek else index.match(keys, len(prompt) // block)
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
