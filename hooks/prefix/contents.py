"""The prefixes that are kept for one model, and the lock under which they change.

Note [Who may touch what]
    All attributes of sequences change under the lock. It is never held while tokens are computed or copied. A sequence
    belongs to one request at a time (`in_use`). While others copy from it (`readers`) it is neither given to a request
    nor shortened. A request that finds a sequence in use copies the tokens that it had when it was taken, or misses; it
    never waits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ...allocator._native import Device
from ...offload.governor.governor import Governor
from .counts import Counts
from .identity import Identity
from .prefix_index import PrefixIndex
from .sequence import CachedSequence, TokenRun

if TYPE_CHECKING:
    from .saving import Saver


class Lookup:
    """The stored beginning that one request starts from."""

    def __init__(self) -> None:
        self.columns = 0  # filled columns of its cache
        self.sequence: CachedSequence | None = None  # in use by this request, which gives it back


class Contents:
    """The sequences, states and blocks that are kept for one model, their lock, and counts of their use."""

    def __init__(self, name: str, device: Device, governor: Governor) -> None:
        """`name`: of the model, for messages; `governor`: of the device."""
        self.name = name
        self.device = device
        self.governor = governor
        self.counts = Counts()
        self.lock = threading.RLock()
        self.index = PrefixIndex(governor.tuning.prefixes)
        self.weights: tuple[object, ...] = ()  # the weights' identity at computation: see identity.py
        self.saver: Saver | None = None  # writes to files, if there is a folder
        self.closed = False

    @contextmanager
    def change(self) -> Iterator[PrefixIndex]:
        """Holds the lock, and leaves the index in order. An exception within makes the next change forget everything:
        see prefix_index.py, Note [Broken off]. DriverError."""
        with self.lock:
            self.index.begin()
            yield self.index
            self.index.done()

    @property
    def state_pages(self) -> int:
        """Pages of all states, rounded up to whole ones."""
        return -(-self.index.states.nbytes // self.device.page_size)

    @property
    def sequence_pages(self) -> int:
        """Pages under sequences and states that are not in use, on the device or the host."""
        return self.index.pages + self.state_pages

    @property
    def pages(self) -> int:
        """Pages of all contents that are not in use; of blocks only while no batched request has any."""
        paged = self.index.blocks.paged
        return self.sequence_pages + (paged.unused_pages if paged is not None else 0)

    @property
    def device_pages(self) -> int:
        """The pages of sequences and states that are on the device."""
        return self.index.device_pages + self.index.states.device_pages + self.fixed_pages

    @property
    def fixed_pages(self) -> int:
        """Pages of states that cannot leave the device, rounded up to whole ones."""
        return -(-self.index.states.fixed_bytes // self.device.page_size)

    @property
    def nbytes(self) -> int:
        """The bytes of `pages`."""
        return self.pages * self.device.page_size

    def renew(self, now: Identity) -> None:
        """Drops contents that were computed with other weights. The caller is within `change`. DriverError."""
        if now.weights != self.weights:
            self.index.clear()
            self.weights = now.weights

    def clear(self) -> None:
        """Drops everything that running requests do not use. DriverError."""
        with self.change() as index:
            index.clear()

    def begin_reading(self, lookup: Lookup, runs: Iterable[TokenRun]) -> list[CachedSequence]:
        """Marks the sequences of the runs as read by a request, and returns them. The caller holds the lock."""
        sources = list({run.source for run in runs if isinstance(run.source, CachedSequence)})
        for each in sources:
            each.readers.add(lookup)
        return sources

    def end_reading(self, lookup: Lookup, sources: Iterable[CachedSequence]) -> None:
        """Undoes `begin_reading`, and gives back pages that had to stay meanwhile. DriverError."""
        with self.lock:
            for each in sources:
                each.readers.discard(lookup)
            if any(each.trim_pending for each in sources):
                self.index.begin()
                self.index.done()

    def log_decision(self, verb: str, pages: int) -> None:
        """Records an event of the timeline."""
        self.governor.events.decided("prefix", verb, pages, what=self.name)
