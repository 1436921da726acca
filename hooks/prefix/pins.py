"""Which blocks and states are not evicted. Pins are of keys, whether they are stored or not."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from .block_index import BlockIndex


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
