"""Which sequences are at rest, whose each block is, and what their pages are. Whoever calls holds the store's lock.

Note [Once]
    At rest each token of a stored prompt lies once. The index says whose a block is; whoever has tokens before its own
    that are another's has given their pages up (`hollow`), as far as they are whole, and gets them copied back when it
    is used. A block is only evicted after those that hang on it, so that what is hollow can be filled. A sequence that
    is out, as a request goes on with it, is whole.

Note [Purged first]
    Blocks are forgotten before their pages go, and before anything is written to them, under the same lock. So no key
    ever leads to bytes that are not its own.

Note [Broken off]
    Ctrl-C, or an error of the driver, may come between any two lines. Whoever comes next then finds `_sound` unset, and
    as the books may say anything, forgets all. It is the price of a microsecond in which they are written.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from itertools import groupby
from typing import Final, cast

from ...offload.decide.prefixes import Index, chain
from .sequence import KeptSequence, Run

BLOCK: Final = 256  # tokens; a common size
_WORTH: Final = 4  # tokens that are copied rather than lose one that is stored


class Shelf:
    """Sequences, by what they begin with."""

    def __init__(self) -> None:
        self.block = BLOCK
        self.index = Index()
        self.at_rest: dict[KeptSequence, int] = {}  # and their pages
        self.lost: deque[KeptSequence] = deque()  # of requests that nobody has ended
        self.unpinned: deque[Sequence[bytes]] = deque()  # keys of those who are gone
        self._pinned: Counter[bytes] = Counter()
        self._sound = True

    @property
    def pages(self) -> int:
        """Under what is at rest, wherever they are."""
        return sum(tuple(self.at_rest.values()))

    def begin(self) -> None:
        """Something is about to change: first what others have left is put in order. DriverError."""
        if not self._sound:
            hits, self.index = self.index.hits, Index()
            self.index.hits = hits
            self.index.pin(self._pinned.elements())
        self._sound = False
        for each in tuple(self.at_rest):
            if each.late or not len(self.index):
                self.arrange(each)
        while self.lost:
            self.forget(self.lost[0])
            self.lost.popleft()
        while self.unpinned:
            self.unpin(self.unpinned.popleft())

    def done(self) -> None:
        """Everything is in order."""
        self._sound = True

    def keys(self, ids: Sequence[int], salt: bytes) -> list[bytes]:
        """Of all blocks, the last one of which may be partial."""
        keys = chain(ids, self.block, salt)
        rest = ids[len(keys) * self.block :]
        return keys + (chain(rest, len(rest), keys[-1] if keys else salt) if rest else [])

    def pin(self, keys: Sequence[bytes]) -> None:
        """See Index.pin."""
        self._pinned.update(keys)
        self.index.pin(keys)

    def unpin(self, keys: Sequence[bytes]) -> None:
        """See Index.unpin."""
        if not Counter(keys) <= self._pinned:
            raise ValueError("these tokens are not pinned")
        self.index.unpin(keys)
        self._pinned = +(self._pinned - Counter(keys))

    def find(self, prompt: Sequence[int], salt: bytes, *, peek: bool = False) -> list[Run]:
        """Where the longest stored beginning of a prompt lies. `peek`: this is no use of it."""
        index, block = self.index, self.block
        keys = chain(prompt, block, salt)
        count = index.peek(keys) if peek else index.match(keys)
        runs, start = [], 0
        for owner, found in groupby(keys[:count], index.owner):
            end = start + len(list(found)) * block
            runs.append(Run(cast(KeptSequence, owner), start, end))
            start = end
        # What shares the beginning of its next block
        most, best = 0, None
        rest = prompt[start : start + block]
        for owner, _ in index.after(keys[count - 1] if count else None):
            other = cast(KeptSequence, owner)
            alike = _alike(other.ids[start : start + block], rest) if other.salt == salt else 0
            if alike > most or (alike == most > 0 and best is not None and best.out and not other.out):
                most, best = alike, other
        if best is not None:
            runs.append(Run(best, start, start + most))
        return runs

    def movable(self, runs: Sequence[Run], reader: object) -> KeptSequence | None:
        """The sequence that a request, which reads it, may go on with itself, as that costs next to nothing of what is
        stored."""
        sequence, end = cast(KeptSequence, runs[-1].source), runs[-1].end
        left, leaving = len(sequence.ids) - end, self._behind(sequence, end)
        if (
            sequence.out
            or sequence not in self.at_rest
            or {*sequence.readers} != {reader}
            or left > min(self.block, end // _WORTH)
            or (left and any(key in self._pinned for key in leaving))
            or any(owner is not sequence for key in leaving for owner, _ in self.index.after(key))
        ):
            return None
        return sequence

    def take_out(self, sequence: KeptSequence, prompt: Sequence[int]) -> None:
        """A request goes on with it, from these tokens on."""
        self.at_rest.pop(sequence)
        sequence.out = True
        self.index.forget(self._behind(sequence, len(prompt)))
        sequence.keys = sequence.keys[: len(prompt) // self.block]
        sequence.ids = list(prompt)

    def put(self, sequence: KeptSequence) -> None:
        """It is at rest from now on: what of it is new is its own. DriverError."""
        sequence.out = False
        sequence.keys = self.keys(sequence.ids, sequence.salt)
        self.at_rest[sequence] = sequence.held
        self.index.insert(sequence.keys, sequence)
        self.arrange(sequence)

    def arrange(self, sequence: KeptSequence) -> None:
        """A sequence at rest has what the index says that it has; its pages follow once nobody reads them any more.
        DriverError."""
        own = [n for n, key in enumerate(sequence.keys) if self._owns(sequence, key)]
        if own:
            sequence.first = own[0] * self.block
            sequence.keys = sequence.keys[: own[-1] + 1]
            sequence.ids = sequence.ids[: len(sequence.keys) * self.block]
        else:
            sequence.keys = []
        sequence.late = bool(sequence.readers)
        if sequence.late:
            return
        if own:
            sequence.trim()
            sequence.hollow(sequence.first)
            sequence.idle(kept=True)
            self.at_rest[sequence] = sequence.held
        else:
            sequence.let_go()
            del self.at_rest[sequence]

    def forget(self, sequence: KeptSequence) -> None:
        """And all that relies on it. DriverError."""
        sequence.out = False
        self.at_rest.setdefault(sequence, 0)
        gone = self.index.forget([key for key in sequence.keys if self._owns(sequence, key)])
        for each in {sequence, *(cast(KeptSequence, owner) for owner, _ in gone)}:
            if not each.out:
                self.arrange(each)

    def evict(self) -> int | None:
        """One block goes, the one that is worth least; how many pages with it. None where there is none that may.
        DriverError."""
        for owner, _ in self.index.evict(1, only=_unused):
            sequence = cast(KeptSequence, owner)
            before = self.at_rest[sequence]
            self.arrange(sequence)
            return before - self.at_rest.get(sequence, 0)
        return None

    def clear(self) -> None:
        """Forgets all but what is out. DriverError."""
        self.index.clear()
        for each in tuple(self.at_rest):
            self.arrange(each)

    def _behind(self, sequence: KeptSequence, end: int) -> list[bytes]:
        """Its own blocks that do not lie wholly before that token."""
        return [key for key in sequence.keys[end // self.block :] if self._owns(sequence, key)]

    def _owns(self, sequence: KeptSequence, key: bytes) -> bool:
        return key in self.index and self.index.owner(key) is sequence


def _unused(owner: object) -> bool:
    sequence = cast(KeptSequence, owner)
    return not sequence.out and not sequence.readers


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens they begin with both."""
    if one[:1] != other[:1]:
        return 0
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
