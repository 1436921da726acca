"""Which sequences and states are kept, which blocks each owns, and what happens to their pages.

The caller holds the store's lock.

Note [Once]
    Each token of the sequences that are not in use lies on one page only. The index knows the owner of a block. A
    sequence whose first blocks belong to another one has given up their pages, as far as they are whole, and gets the
    tokens copied back when it is used. A block is only evicted after those that follow it, so that such tokens can be
    filled in. A sequence that is in use has all its pages.

Note [Purged first]
    Blocks are removed from the index before their pages are freed or written to, under the same lock. So no key ever
    leads to bytes of other tokens.

Note [States]
    A state follows the block before it, as another block would: it is evicted before that block, or with it. Where
    layers keep every token, a state needs all tokens before it. It is dropped with any of them, including the partial
    block behind the last full one; and tokens of such a model that no state needs are useless and dropped as well.

Note [Broken off]
    Ctrl-C, or an error of the driver, may come between any two lines. The next caller then finds `sound` unset, and as
    the index may be in any state, clears it. That is the price of a microsecond in which the index is written.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from typing import cast

from ...offload.policy.prefixes import chain
from ...offload.policy.tuning import DEFAULT, Prefixes
from .block_index import PAGED, BlockIndex, numbers_of
from .pins import Pins
from .sequence import CachedSequence, TokenRun
from .snapshot import StateSnapshot
from .snapshot_index import States


class PrefixIndex:
    """Keeps sequences and states, by the tokens they begin with."""

    def __init__(self, tuning: Prefixes = DEFAULT.prefixes) -> None:
        self._worth = tuning.worth
        self.blocks = BlockIndex(tuning)
        self.pins = Pins(self.blocks)
        self.states = States()
        self.idle: dict[CachedSequence, int] = {}  # sequences that no request goes on with, and their pages
        self.lost: deque[CachedSequence] = deque()  # sequences of requests that were collected before they ended
        self._in_use: weakref.WeakSet[CachedSequence] = weakref.WeakSet()
        self.sound = True  # was the last change not broken off?

    @property
    def pages(self) -> int:
        """Pages of the idle sequences, on the device or the host."""
        return sum(tuple(self.idle.values()))

    @property
    def device_pages(self) -> int:
        """Pages of the idle sequences on the device."""
        return sum(each.device_pages for each in tuple(self.idle))

    def begin(self) -> None:
        """Begins a change: clears the index after a broken-off one, and does deferred work. DriverError."""
        if not self.sound:
            self.blocks.reset()
            self.pins.restore()
            self.states.clear()
        self.sound = False
        for each in tuple(self.idle):
            if each.trim_pending or not len(self.blocks.index):
                self._fit(each)
        while self.lost:
            self.forget(self.lost[0])
            self.lost.popleft()
        self.pins.apply_removals()

    def done(self) -> None:
        """Ends a change: drops states and tokens that have become useless. DriverError."""
        self._drop_useless()
        self.sound = True

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
            or left > min(self.blocks.block, end // self._worth)
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
        some = {each for each in self.idle if each.device_pages} if on_device else self.idle.keys()
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
        for each in tuple(self.idle):
            self._fit(each)

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
        for each in {*further, *(owner for owner, _ in gone if isinstance(owner, CachedSequence))}:
            if not each.in_use:
                self._fit(each)
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
            or any(_has_tokens(each, state, start) for each in self.blocks.after(place))
            or any(_has_tokens(each, state) for each in self._in_use)
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


def _has_tokens(sequence: CachedSequence, state: StateSnapshot, start: int = 0) -> bool:
    """Does the sequence have the tokens from `start` to the state?"""
    return sequence.salt == state.salt and sequence.ids[start : len(state.ids)] == state.ids[start:]


def _is_unused(owner: object) -> bool:
    sequence = cast(CachedSequence, owner)
    return not sequence.in_use and not sequence.readers
