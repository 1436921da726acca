"""Which sequences are at rest, whose each block is, and what their pages are. Whoever calls holds the store's lock.

Note [Once]
    At rest each token of a stored prompt lies once. The index says whose a block is; whoever has tokens before its own
    that are another's has given their pages up (`hollow`), as far as they are whole, and gets them copied back when it
    is used. A block is only evicted after those that hang on it, so that what is hollow can be filled. A sequence that
    is out, as a request goes on with it, is whole.

Note [Purged first]
    Blocks are forgotten before their pages go, and before anything is written to them, under the same lock. So no key
    ever leads to bytes that are not its own.

Note [States]
    A state hangs on the block before it, as another block would: so it goes before that, and with it. Of layers that
    keep every token it needs all that it stands behind. Where these are gone, in the part of a block behind the last
    full one, the state goes too; and tokens of such a model on which no state relies are of no use and go as well.

Note [Broken off]
    Ctrl-C, or an error of the driver, may come between any two lines. Whoever comes next then finds `_sound` unset, and
    as the books may say anything, forgets all. It is the price of a microsecond in which they are written.
"""

from __future__ import annotations

import weakref
from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from itertools import groupby
from typing import cast

from ...offload.policy.prefixes import Index, chain
from ...offload.policy.tuning import DEFAULT, Prefixes
from ...offload.policy.worth import Odds
from .sequence import CachedSequence, Run
from .snapshot import StateSnapshot, state_key
from .snapshot_index import States


class PrefixIndex:
    """Sequences, by what they begin with."""

    def __init__(self, tuning: Prefixes = DEFAULT.prefixes) -> None:
        self.block = tuning.block
        self._worth = tuning.worth
        self.index = Index(policy=Odds(tuning.odds))
        self.states = States()
        self.at_rest: dict[CachedSequence, int] = {}  # and their pages
        self._out: weakref.WeakSet[CachedSequence] = weakref.WeakSet()
        self.lost: deque[CachedSequence] = deque()  # of requests that nobody has ended
        self.unpinned: deque[Sequence[bytes]] = deque()  # keys of those who are gone
        self._pinned: Counter[bytes] = Counter()
        self._sound = True

    @property
    def pages(self) -> int:
        """Under what is at rest, wherever they are."""
        return sum(tuple(self.at_rest.values()))

    @property
    def here(self) -> int:
        """The pages of these that are on the device."""
        return sum(each.here for each in tuple(self.at_rest))

    def begin(self) -> None:
        """Something is about to change: first what others have left is put in order. DriverError."""
        if not self._sound:
            hits, self.index = self.index.hits, Index()
            self.index.hits = hits
            self.index.pin(self._pinned.elements())
            self.states.clear()
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
        """Everything is in order. DriverError."""
        self._settle()
        self._sound = True

    def stored(self, ids: Sequence[int], salt: bytes) -> list[bytes]:
        """Keys of the leading blocks that are stored. Whose a block is is found by its hash, and how far the tokens go
        on as his by comparing them: one hash for each whose blocks they are."""
        ids, keys = _numbers(ids), list[bytes]()
        full = len(ids) // self.block
        while len(keys) < full:
            start = len(keys)
            key = chain(ids[: (start + 1) * self.block], self.block, salt, keys)[-1]
            if key not in self.index:
                break
            owner = cast(CachedSequence, self.index.owner(key))
            end = _alike_up_to(ids, owner.ids, start, min(full, len(owner.ids) // self.block), self.block)
            if end == start:
                break
            keys = [*keys, key, *owner.keys[start + 1 : end]]
        return keys

    def keys(self, ids: Sequence[int], salt: bytes) -> list[bytes]:
        """The keys of all blocks, the last one of which may be partial."""
        ids = _numbers(ids)
        keys = chain(ids, self.block, salt, self.stored(ids, salt))
        rest = ids[len(keys) * self.block :]
        return keys + (chain(rest, len(rest), keys[-1] if keys else salt) if rest else [])

    def all_keys(self, ids: Sequence[int], salt: bytes) -> list[bytes]:
        """The keys of all blocks, and of the state behind them."""
        return [*self.keys(ids, salt), state_key(ids, salt)] if ids else []

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
        prompt = _numbers(prompt)
        keys = self.stored(prompt, salt)
        count = index.peek(keys) if peek else index.match(keys, len(prompt) // block)
        runs, start = [], 0
        for owner, found in groupby(keys[:count], index.owner):
            end = start + len(list(found)) * block
            runs.append(Run(cast(CachedSequence, owner), start, end))
            start = end
        # What shares the beginning of its next block
        most, best = 0, None
        rest = prompt[start : start + block]
        for other in self._after(keys[count - 1] if count else None):
            alike = _alike(other.ids[start : start + block], rest) if other.salt == salt else 0
            if alike > most or (alike == most > 0 and best is not None and best.out and not other.out):
                most, best = alike, other
        if best is not None:
            runs.append(Run(best, start, start + most))
        return runs

    def find_state(
        self, prompt: Sequence[int], salt: bytes, growing: bool, *, peek: bool = False
    ) -> tuple[list[Run], StateSnapshot | None]:
        """The longest state with which a prompt begins, and where the tokens before it lie. `growing`: have layers of
        its model any? `peek`: this is no use of it."""
        prompt = _numbers(prompt)
        runs = self.find(prompt, salt, peek=True) if growing else []
        most = runs[-1].end if runs else 0 if growing else len(prompt)
        keys = self.stored(prompt, salt) if growing else chain(prompt, self.block, salt)
        state = self.states.longest(prompt[:most], (salt, *keys))
        if state is None:
            return [], None
        end = len(state.ids)
        if not peek:
            self.index.match([*(state.blocks if growing else ()), state.key])
        return [run._replace(end=min(run.end, end)) for run in runs if run.start < end], state

    def movable(self, runs: Sequence[Run], reader: object) -> CachedSequence | None:
        """The sequence that a request, which reads it, may go on with itself, as that costs next to nothing of what is
        stored."""
        sequence, end = cast(CachedSequence, runs[-1].source), runs[-1].end
        left, leaving = len(sequence.ids) - end, self._behind(sequence, end)
        if (
            sequence.out
            or sequence not in self.at_rest
            or {*sequence.readers} != {reader}
            or left > min(self.block, end // self._worth)
            or (left and any(key in self._pinned for key in leaving))
            or any(owner is not sequence for key in leaving for owner, _ in self.index.after(key))
            or (left and any(len(state.ids) > end and self._same(sequence, state, 0) for state in self.states))
        ):
            return None
        return sequence

    def take_out(self, sequence: CachedSequence, prompt: Sequence[int]) -> None:
        """A request goes on with it, from these tokens on."""
        self.at_rest.pop(sequence)
        sequence.out = True
        self._out.add(sequence)
        self.index.forget(self._behind(sequence, len(prompt)))
        sequence.keys = sequence.keys[: len(prompt) // self.block]
        sequence.ids = _numbers(prompt)

    def put(self, sequence: CachedSequence) -> None:
        """Stores a sequence that is no longer in use: what of it is new is its own. DriverError."""
        self._is_in(sequence)
        sequence.keys = self.keys(sequence.ids, sequence.salt)
        self.at_rest[sequence] = sequence.held
        self.index.insert(sequence.keys, sequence)
        self.arrange(sequence)

    def arrange(self, sequence: CachedSequence) -> None:
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

    def forget(self, sequence: CachedSequence) -> None:
        """Forgets the sequence and all that relies on it. DriverError."""
        self._is_in(sequence)
        self.at_rest.setdefault(sequence, 0)
        self._gone(self.index.forget([key for key in sequence.keys if self._owns(sequence, key)]), sequence)

    def evict(self, count: int = 1, *, here: bool = False) -> int:
        """Evicts so many blocks or states, those that are worth least, as far as they may, with what is of no use
        without them: how many. All keys go first, then the pages, a sequence at a time. `here`: of those on the device,
        as all states are. DriverError."""
        there = {each for each in self.at_rest if each.here} if here else self.at_rest.keys()
        gone = self.index.evict(
            count, only=lambda owner: isinstance(owner, StateSnapshot) or (owner in there and _unused(owner))
        )
        self._gone(gone)
        self._settle()
        return len(gone)

    def blocks(self, pages: int, of: int) -> int:
        """Blocks and states that have about so many of all pages."""
        return max(1, pages * len(self.index) // max(1, of))

    def clear(self) -> None:
        """Forgets all but what is out. DriverError."""
        self.index.clear()
        self.states.clear()
        for each in tuple(self.at_rest):
            self.arrange(each)

    # -- see Note [States]

    def put_state(self, state: StateSnapshot) -> None:
        """Keeps the state, if the tokens that it needs are, and none is behind the same ones."""
        state.blocks = chain(state.ids, self.block, state.salt)
        keys = state.blocks if state.growing else []
        if state.key not in self.index and self.index.peek(keys) == len(keys) and self._covered(state):
            self.index.insert([*keys, state.key], state)
            self.states.add(state)

    def _settle(self) -> None:
        """States that are not in the index any more go, and tokens on which none relies. DriverError."""
        for state in self.states:
            if not self._owns(state, state.key):
                self.states.drop(state)
        going = True
        while going:  # what one sequence loses may have been all that needed another's
            going = False
            for sequence in tuple(self.at_rest):
                if sequence.whole and not sequence.readers and (gone := self.index.forget(self._useless(sequence))):
                    self._gone(gone)
                    going = True

    def _gone(self, gone: Sequence[tuple[Hashable, Hashable]], *further: CachedSequence) -> None:
        """What the index has dropped is let go of, and what relied on it. DriverError."""
        for owner, _ in gone:
            if isinstance(owner, StateSnapshot):
                self.states.drop(owner)
        for each in {*further, *(owner for owner, _ in gone if isinstance(owner, CachedSequence))}:
            if not each.out:
                self.arrange(each)
        homeless = [state.key for state in self.states if not self._covered(state)]
        if homeless:
            self._gone(self.index.forget(homeless))

    def _covered(self, state: StateSnapshot) -> bool:
        """Does someone have the tokens behind the last full block before it, if it needs any?"""
        start, end = len(state.blocks) * self.block, len(state.ids)
        place = state.blocks[-1] if state.blocks else None
        if place is not None and place not in self.index:
            return not state.growing
        return (
            start == end
            or not state.growing
            or any(self._same(each, state, start) for each in self._after(place))
            or any(self._same(each, state, 0) for each in self._out)
        )

    def _same(self, sequence: CachedSequence, state: StateSnapshot, start: int) -> bool:
        """Has the sequence the tokens from there to the state?"""
        return sequence.salt == state.salt and sequence.ids[start : len(state.ids)] == state.ids[start:]

    def _useless(self, sequence: CachedSequence) -> list[bytes]:
        """Returns the last blocks of a sequence, as far as no state needs them."""
        kept = len(sequence.keys)
        while kept and self._owns(sequence, sequence.keys[kept - 1]):
            key, start = sequence.keys[kept - 1], (kept - 1) * self.block
            place = sequence.keys[kept - 2] if kept > 1 else sequence.salt
            block = sequence.ids[start : start + self.block]
            tails = [state.ids[start:] for state in self.states.behind(place)]
            hanging = [1 for _, other in self.index.after(key) if other not in sequence.keys[kept:]]
            if hanging or any(tail and block[: len(tail)] == tail for tail in tails):
                break
            kept -= 1
        return sequence.keys[kept:]

    def _after(self, key: bytes | None) -> list[CachedSequence]:
        """Whose blocks hang on this one, on none for None. KeyError where it is not stored."""
        return [owner for owner, _ in self.index.after(key) if isinstance(owner, CachedSequence)]

    def _is_in(self, sequence: CachedSequence) -> None:
        sequence.out = False
        self._out.discard(sequence)

    def _behind(self, sequence: CachedSequence, end: int) -> list[bytes]:
        """Returns the blocks of the sequence that do not lie wholly before that token."""
        return [key for key in sequence.keys[end // self.block :] if self._owns(sequence, key)]

    def _owns(self, owner: object, key: bytes) -> bool:
        return key in self.index and self.index.owner(key) is owner


def _numbers(ids: Sequence[int]) -> array[int]:
    """As they are compared and hashed fastest."""
    return ids if isinstance(ids, array) else array("q", ids)


def _alike_up_to(one: array[int], other: array[int], start: int, end: int, block: int) -> int:
    """The first block of [start, end) in which they differ, `end` where there is none."""

    def differ(first: int, last: int) -> bool:
        span = slice(first * block, last * block)
        return one[span] != other[span]

    if not differ(start, end):
        return end
    return bisect_left(range(end), True, lo=start, key=lambda last: differ(start, last + 1))


def _unused(owner: object) -> bool:
    sequence = cast(CachedSequence, owner)
    return not sequence.out and not sequence.readers


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens they begin with both."""
    if one[:1] != other[:1]:
        return 0
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
