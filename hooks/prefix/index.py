"""Where stored tokens are: which blocks are kept, who owns each, which may go, and what happens to their pages.

`BlockIndex` finds the owners of the beginning of a prompt in the index of policy/prefixes.py: sequences, states, and
the paged cache of continuous batching. `Pins` keeps blocks from being evicted. `PrefixIndex` changes what is kept. The
caller holds the store's lock.

Note [Two copies]
    A block of a paged cache holds all layers of some tokens, and a sequence all tokens of a layer, so neither can be
    used in the place of the other: missing tokens are copied. So tokens that both have are two entries, each with its
    own value. Keys of the paged cache, which may have blocks of another size, are transformers' hashes of its blocks,
    the others keys of `chain`: two independent forests of one index.

Note [Once]
    Each token of the sequences that are not in use lies on one page only. The index knows the owner of a block. A
    sequence whose first blocks belong to another one has given up their pages, as far as they are whole, and gets the
    tokens copied back when it is used. A block is only evicted after those that follow it, so that such tokens can be
    filled in. A sequence that is in use has all its pages.

        ids     | block 0 | block 1 | block 2 | part |      a sequence that shares its first two blocks
        owner   |    another one    |    this one    |
        pages   |   given back      |   held  (`first` is the first token of block 2)

Note [Purged first]
    Blocks are removed from the index before their pages are freed or written to, under the same lock. So no key ever
    leads to bytes of other tokens.

Note [States]
    A state follows the block before it, as another block would: it is evicted before that block, or with it. Where
    layers keep every token, a state needs all tokens before it. It is dropped with any of them, including the partial
    block behind the last full one; and tokens of such a model that no state needs are useless and dropped as well.

Note [Broken off]
    Ctrl-C, or an error of the driver, may come between any two lines. The next caller then finds `is_sound` unset, and
    as the index may be in any state, clears it. That is the price of a microsecond in which the index is written.
"""

from __future__ import annotations

import threading
import weakref
from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby, takewhile
from typing import Final, Protocol, cast

from ...offload.policy.prefixes import Density, Index, chain
from ...offload.policy.tuning import DEFAULT, Prefixes
from .sequence import CachedSequence, TokenRun
from .snapshot import States, StateSnapshot, state_key

PAGED: Final = "paged"  # the owner of the paged cache's blocks


class PagedBlocks(Protocol):
    """The full blocks of a paged cache (hooks/batching/blocks.py)."""

    lock: AbstractContextManager[object]  # held while a block's users change; taken after the store's lock
    tokens: int  # of a block

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
        self._doubt = tuning.doubt
        self.index = Index(policy=Density(tuning.doubt))
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
        self.index = Index(policy=Density(self._doubt))
        self.clear()

    def insert_paged(self, keys: Sequence[Hashable]) -> None:
        """Stores blocks of the paged cache, the first of which is a first block, or is stored."""
        self.index.insert(keys, PAGED, ended=False)

    def evict_paged(self, count: int) -> int:
        """Evicts the `count` least valuable unused blocks of the paged cache; returns how many. DriverError."""
        return len(self.evict(count, lambda owner: owner is PAGED))

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
        for owner, blocks in groupby(keys[:count], index.owner):
            end = start + len(list(blocks)) * block
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


class _Thread(threading.local):
    recorded: list[list[bytes]] | None = None


class Pins:
    """Counts the pins of each key. The caller holds the store's lock, except for `remove_later` and `recording`."""

    def __init__(self, blocks: BlockIndex) -> None:
        """`blocks`: the index that respects the pins."""
        self._blocks = blocks
        self._counts: Counter[bytes] = Counter()
        self._later: deque[Sequence[bytes]] = deque()
        self._thread = _Thread()

    def __contains__(self, key: bytes) -> bool:
        return key in self._counts

    def add(self, keys: Sequence[bytes]) -> None:
        """Pins each key once more."""
        self._counts.update(keys)
        self._blocks.index.pin(keys)

    def remove(self, keys: Sequence[bytes]) -> bool:
        """Undoes `add`. Returns False, and changes nothing, where the keys are not pinned."""
        if not Counter(keys) <= self._counts:
            return False
        self._blocks.index.unpin(keys)
        self._counts = +(self._counts - Counter(keys))
        return True

    def remove_later(self, keys: Iterable[Sequence[bytes]]) -> None:
        """Has `apply_removals` remove them. For finalizers, which may run between any two lines."""
        self._later.extend(keys)

    def apply_removals(self) -> None:
        """Removes the pins that were given to `remove_later`."""
        while self._later:
            self.remove(self._later.popleft())

    def restore(self) -> None:
        """Pins the keys in a new index that were pinned in the old one."""
        self._blocks.index.pin(self._counts.elements())

    @contextmanager
    def recording(self, pins: list[list[bytes]]) -> Iterator[None]:
        """A `with` block in which the tokens that requests of this thread leave behind are pinned before any eviction.
        The keys to unpin later are appended to `pins`."""
        self._thread.recorded = pins
        try:
            yield
        finally:
            self._thread.recorded = None

    def record(self, keys: list[bytes]) -> None:
        """Pins the keys that a request of this thread leaves behind, if within `recording`."""
        if (recorded := self._thread.recorded) is not None:
            recorded.append(keys)
            self.add(keys)


# Tokens that are copied rather than take a sequence in which one more is lost for each. Chosen.
_WORTH: Final = 4


class PrefixIndex:
    """Keeps sequences and states, by the tokens they begin with."""

    def __init__(self, tuning: Prefixes = DEFAULT.prefixes) -> None:
        self.blocks = BlockIndex(tuning)
        self.pins = Pins(self.blocks)
        self.states = States()
        self.idle: dict[CachedSequence, int] = {}  # sequences that no request goes on with, and their pages
        self.lost: deque[CachedSequence] = deque()  # sequences of requests that were collected before they ended
        self._in_use: weakref.WeakSet[CachedSequence] = weakref.WeakSet()
        self.is_sound = True  # was the last change not broken off?

    @property
    def pages(self) -> int:
        """Pages of the idle sequences, on the device or the host."""
        return sum(tuple(self.idle.values()))

    @property
    def device_pages(self) -> int:
        """Pages of the idle sequences on the device."""
        return sum(sequence.device_pages for sequence in tuple(self.idle))

    def begin(self) -> None:
        """Begins a change: clears the index after a broken-off one, and does deferred work. DriverError."""
        if not self.is_sound:
            self.blocks.reset()
            self.pins.restore()
            self.states.clear()
        self.is_sound = False
        for sequence in tuple(self.idle):
            if sequence.trim_pending or not len(self.blocks.index):
                self._fit(sequence)
        while self.lost:
            self.forget(self.lost[0])
            self.lost.popleft()
        self.pins.apply_removals()

    def done(self) -> None:
        """Ends a change: drops states and tokens that have become useless. DriverError."""
        self._drop_useless()
        self.is_sound = True

    def find_state(
        self, prompt: Sequence[int], salt: bytes, growing: bool, *, peek: bool = False
    ) -> tuple[list[TokenRun], StateSnapshot | None]:
        """Returns the runs of the tokens before the longest kept state of a prompt, and that state. `growing`: does the
        model have layers that keep every token? `peek`: does not count as a use."""
        prompt, blocks = numbers_of(prompt), self.blocks
        runs = blocks.in_sequences(prompt, salt, peek=True) if growing else []
        most = runs[-1].end if runs else 0 if growing else len(prompt)
        keys = blocks.stored(prompt, salt) if growing else chain(prompt, blocks.block, salt)
        state = self.states.longest(prompt[:most], (salt, *keys))
        if state is None:
            return [], None
        end = len(state.ids)
        if not peek:
            blocks.index.use([*(state.blocks if growing else ()), state.key])
        return [run._replace(end=min(run.end, end)) for run in runs if run.start < end], state

    def movable(self, runs: Sequence[TokenRun], reader: object) -> CachedSequence | None:
        """Returns the sequence that the request `reader`, which reads these runs, may take over; None where more than a
        few stored tokens would be lost."""
        sequence, end = runs[-1].source, runs[-1].end
        if not isinstance(sequence, CachedSequence):
            return None
        left, leaving = len(sequence.ids) - end, self.blocks.behind(sequence, end)
        if (
            sequence.in_use
            or sequence not in self.idle
            or {*sequence.readers} != {reader}
            or left > min(self.blocks.block, end // _WORTH)
            or (left and any(key in self.pins for key in leaving))
            or any(owner is not sequence for key in leaving for owner, _ in self.blocks.index.after(key))
            or (left and any(len(state.ids) > end and _has_tokens(sequence, state) for state in self.states))
        ):
            return None
        return sequence

    def take_out(self, sequence: CachedSequence, prompt: Sequence[int]) -> None:
        """Gives a sequence to a request, which appends behind these tokens."""
        self.idle.pop(sequence)
        sequence.in_use = True
        self._in_use.add(sequence)
        self.blocks.index.forget(self.blocks.behind(sequence, len(prompt)))
        sequence.keys = sequence.keys[: len(prompt) // self.blocks.block]
        sequence.ids = numbers_of(prompt)

    def put(self, sequence: CachedSequence) -> None:
        """Keeps a sequence that is no longer in use, as the owner of its new blocks. DriverError."""
        self._end_use(sequence)
        sequence.keys = self.blocks.keys(sequence.ids, sequence.salt)
        self.idle[sequence] = sequence.pages
        self.blocks.index.insert(sequence.keys, sequence)
        self._fit(sequence)

    def put_state(self, state: StateSnapshot) -> None:
        """Keeps a state, if the tokens that it needs are kept and there is no state behind the same tokens."""
        state.blocks, index = chain(state.ids, self.blocks.block, state.salt), self.blocks.index
        keys = state.blocks if state.growing else []
        if state.key not in index and index.peek(keys) == len(keys) and self._is_usable(state):
            index.insert([*keys, state.key], state)
            self.states.add(state)

    def forget(self, sequence: CachedSequence) -> None:
        """Drops the sequence and its dependents. DriverError."""
        self._end_use(sequence)
        self.idle.setdefault(sequence, 0)
        self._dropped(self.blocks.index.forget(self.blocks.behind(sequence, 0)), sequence)

    def evict(self, count: int = 1, *, on_device: bool = False) -> int:
        """Evicts up to `count` of the least valuable blocks or states, and their dependents. Returns how many. Removes
        all keys first, then the pages, a sequence at a time. Blocks of the paged cache only while their pages count
        (`Contents.pages`); `on_device`: only sequences and states that have pages there. DriverError."""
        some = {sequence for sequence in self.idle if sequence.device_pages} if on_device else self.idle.keys()
        paged = None if on_device else self.blocks.paged
        blocks_too = paged is not None and paged.unused_pages > 0

        def may_go(owner: object) -> bool:
            if owner is PAGED:
                return blocks_too
            if isinstance(owner, StateSnapshot):
                return not on_device or owner.pages is None or owner.pages.device_pages > 0
            return owner in some and _is_unused(owner)

        if blocks_too:
            gone = self.blocks.evict(count, may_go)
        else:
            gone = self.blocks.index.evict(count, lambda owner, _: may_go(owner))
        self._dropped(gone)
        self._drop_useless()
        return len(gone)

    def blocks_of(self, pages: int, total: int) -> int:
        """Returns how many blocks of sequences and states have about so many of their `total` pages; at least one."""
        paged = self.blocks.paged
        return max(1, pages * (len(self.blocks.index) - (paged.count if paged else 0)) // max(1, total))

    def clear(self) -> None:
        """Drops everything that is not in use. DriverError."""
        self.blocks.clear()
        self.states.clear()
        for sequence in tuple(self.idle):
            self._fit(sequence)

    def _fit(self, sequence: CachedSequence) -> None:
        """Cuts an idle sequence to the blocks that it owns; frees the pages once no request reads them. DriverError."""
        own = [n for n, key in enumerate(sequence.keys) if self.blocks.owns(sequence, key)]
        if own:
            sequence.first = own[0] * self.blocks.block
            sequence.keys = sequence.keys[: own[-1] + 1]
            sequence.ids = sequence.ids[: len(sequence.keys) * self.blocks.block]
        else:
            sequence.keys = []
        sequence.trim_pending = bool(sequence.readers)
        if sequence.trim_pending:
            return
        if own:
            sequence.trim()
            sequence.share_prefix_pages(sequence.first)
            sequence.mark_idle(True)
            self.idle[sequence] = sequence.pages
        else:
            sequence.free()
            del self.idle[sequence]

    def _drop_useless(self) -> None:
        """Drops states that are not in the index any more, and tokens that no state needs. DriverError."""
        for state in self.states:
            if not self.blocks.owns(state, state.key):
                self.states.drop(state)
        going = True
        while going:  # dropped tokens may have been the only dependents of others
            going = False
            for sequence in tuple(self.idle):
                if sequence.readers or not sequence.needs_state:
                    continue
                if gone := self.blocks.index.forget(self._useless(sequence)):
                    self._dropped(gone)
                    going = True

    def _dropped(self, gone: Sequence[tuple[Hashable, Hashable]], *further: CachedSequence) -> None:
        """Gives back the pages of dropped blocks and states, and drops their dependents. DriverError."""
        for owner, _ in gone:
            if isinstance(owner, StateSnapshot):
                self.states.drop(owner)
        for sequence in {*further, *(owner for owner, _ in gone if isinstance(owner, CachedSequence))}:
            if not sequence.in_use:
                self._fit(sequence)
        unusable = [state.key for state in self.states if not self._is_usable(state)]
        if unusable:
            self._dropped(self.blocks.index.forget(unusable))

    def _is_usable(self, state: StateSnapshot) -> bool:
        """Does any sequence have the tokens between the last full block and the state, if it needs any?"""
        start, end = len(state.blocks) * self.blocks.block, len(state.ids)
        place = state.blocks[-1] if state.blocks else None
        if place is not None and place not in self.blocks.index:
            return not state.growing
        return (
            start == end
            or not state.growing
            or any(_has_tokens(sequence, state, start) for sequence in self.blocks.after(place))
            or any(_has_tokens(sequence, state) for sequence in self._in_use)
        )

    def _useless(self, sequence: CachedSequence) -> list[bytes]:
        """Returns the last blocks of a sequence, as far as no state needs them."""
        kept, block = len(sequence.keys), self.blocks.block
        while kept and self.blocks.owns(sequence, sequence.keys[kept - 1]):
            key, start = sequence.keys[kept - 1], (kept - 1) * block
            place = sequence.keys[kept - 2] if kept > 1 else sequence.salt
            tokens = sequence.ids[start : start + block]
            tails = [state.ids[start:] for state in self.states.behind(place)]
            following = [1 for _, other in self.blocks.index.after(key) if other not in sequence.keys[kept:]]
            if following or any(tail and tokens[: len(tail)] == tail for tail in tails):
                break
            kept -= 1
        return sequence.keys[kept:]

    def _end_use(self, sequence: CachedSequence) -> None:
        sequence.in_use = False
        self._in_use.discard(sequence)


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


def _has_tokens(sequence: CachedSequence, state: StateSnapshot, start: int = 0) -> bool:
    """Does the sequence have the tokens from `start` to the state?"""
    return sequence.salt == state.salt and sequence.ids[start : len(state.ids)] == state.ids[start:]


def _is_unused(owner: object) -> bool:
    sequence = cast(CachedSequence, owner)
    return not sequence.in_use and not sequence.readers
