"""The prefixes that are kept for one model, the lock under which they change, and how many: down to a limit in bytes,
and fewer where pages are short.

Note [Who may touch what]
    All attributes of sequences change under the lock. It is never held while tokens are computed or copied. A sequence
    belongs to one request at a time (`in_use`). While others copy from it (`readers`) it is neither given to a request
    nor shortened. A request that finds a sequence in use copies the tokens that it had when it was taken, or misses; it
    never waits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ...allocator._native import Device
from ...allocator.interrupts import if_free
from ...offload.manager.client import ModelClient
from ...offload.manager.memory_manager import MemoryManager
from ..device import managers
from .identity import Identity
from .index import PrefixIndex
from .sequence import CachedSequence, Counts, TokenRun
from .snapshot import StateSnapshot

if TYPE_CHECKING:
    from .saving import Saver


class Lookup:
    """The stored beginning that one request starts from."""

    def __init__(self) -> None:
        self.columns = 0  # filled columns of its cache
        self.sequence: CachedSequence | None = None  # in use by this request, which gives it back


class Contents:
    """The sequences, states and blocks that are kept for one model, their lock, and counts of their use."""

    def __init__(self, name: str, device: Device, manager: MemoryManager) -> None:
        """`name`: of the model, for messages; `manager`: of the device."""
        self.name = name
        self.device = device
        self.manager = manager
        self.counts = Counts()
        self.lock = threading.RLock()
        self.index = PrefixIndex(manager.tuning.prefixes)
        self.weights: tuple[object, ...] = ()  # the weights' identity at computation: see identity.py
        self.saver: Saver | None = None  # writes to files, if there is a folder
        self.closed = False

    @contextmanager
    def change(self) -> Iterator[PrefixIndex]:
        """Holds the lock, and leaves the index in order. An exception within makes the next change forget everything:
        see index.py, Note [Broken off]. DriverError."""
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
        for sequence in sources:
            sequence.readers.add(lookup)
        return sources

    def end_reading(self, lookup: Lookup, sources: Iterable[CachedSequence]) -> None:
        """Undoes `begin_reading`, and gives back pages that had to stay meanwhile. DriverError."""
        with self.lock:
            for sequence in sources:
                sequence.readers.discard(lookup)
            if any(sequence.trim_pending for sequence in sources):
                self.index.begin()
                self.index.done()

    def log_decision(self, verb: str, pages: int) -> None:
        """Records an event of the timeline."""
        self.manager.events.decided("prefix", verb, pages, what=self.name)


class ModelContents(Contents):
    """The contents of one managed model: its requests leave their sequences here, and the least valuable blocks and
    states are evicted."""

    def __init__(
        self, name: str, device: Device, manager: MemoryManager, model: ModelClient, limit: int | None
    ) -> None:
        """`model`: whose contents they are. `limit`: bytes of pages that may be kept, None for any number."""
        super().__init__(name, device, manager)
        self._model = model
        self.limit = limit
        managers.add_giver(device, self)

    # -- what requests leave

    def keep(self, sequence: CachedSequence | None, now: Identity, states: Sequence[StateSnapshot] = ()) -> None:
        """Keeps a sequence, whose layers are not in any cache, and the states of its layers at some lengths; None for a
        model of states alone. Keeps no more than other models can spare (reclaim.py). DriverError."""
        if sequence is not None:
            sequence.was_written()
        for state in states:
            state.move_to_pages(self.device, self.manager)
        with self.change() as index:
            if not self.closed and now.weights == self.weights:
                if sequence is not None:
                    index.put(sequence)
                for state in states:
                    index.put_state(state)
                self.counts.stored += 1
                index.pins.record([*(sequence.keys if sequence else ()), *(state.key for state in states)])
                self.log_decision("store", index.idle.get(sequence, 0) if sequence else 0)
                if self.saver is not None and sequence is not None and not sequence.needs_state:
                    full = len(sequence.ids) // index.blocks.block
                    self.saver.stored(sequence.ids, sequence.keys[:full], now)
                self.enforce()
            elif sequence is not None:
                index.forget(sequence)
        clients = [state.pages.number for state in states if state.pages is not None]
        self.manager.repayment.keep(self._model, [*clients, *(sequence.caches if sequence else ())])

    def has_new_blocks(self, ids: Sequence[int], now: Identity) -> bool:
        """Would keeping these tokens store anything new?"""
        with self.lock:
            keys = self.index.blocks.keys(ids, now.settings)
            return self.index.blocks.index.peek(keys) < len(keys)

    def give_back(self, sequence: CachedSequence, now: Identity) -> None:
        """Keeps the sequence of a request that raised, as it was before. DriverError."""
        if sequence.layers and all(
            layer.kv_range is not None and layer.get_seq_length() >= len(sequence.ids) for layer in sequence.used
        ):
            sequence.trim()
            self.keep(sequence, now)
        else:
            self.drop(sequence)

    def drop(self, sequence: CachedSequence) -> None:
        """Invalidates the sequence and all that relies on it. DriverError."""
        with self.change() as index:
            index.forget(sequence)

    def lose(self, lookup: Lookup) -> None:
        """Drops, at the next change, the sequence of a request that was collected. For finalizers, which may run
        between any two lines."""
        if lookup.sequence is not None:
            self.index.lost.append(lookup.sequence)

    # -- what is evicted

    @property
    def priority(self) -> int:
        """The priority of the model."""
        return self._model.priority

    def enforce(self) -> None:
        """Evicts down to the limit, and until the core could take all kept pages within any operator, except a part of
        the device (an eighth). The caller is within `Contents.change`."""
        while self.limit is not None and self.nbytes > self.limit and self.evict():
            pass
        most = self.device.budget // self.device.page_size // 8  # chosen
        while self.sequence_pages > most and self._stuck() > most and self.evict(on_device=True):
            pass

    def evict(self, count: int = 1, *, on_device: bool = False) -> bool:
        """Evicts so many blocks or states, see `PrefixIndex.evict`. False where none may be evicted."""
        before = self.pages
        gone = self.index.evict(count, on_device=on_device)
        if gone:
            self.counts.evicted += gone
            self.log_decision("evict", before - self.pages)
        return gone > 0

    def give_up(self, pages: int) -> int:
        """Gives back about so many pages of its device, and returns how many, see managers.py. Does nothing while
        another thread changes the contents. Takes no lock of a paged cache, as the caller may hold another one's."""
        before = self.device_pages

        def make_room() -> None:
            if not self.index.is_sound:  # the paged cache would have to forget its blocks
                return
            with self.change() as index:
                while (left := pages - before + self.device_pages) > 0 and self.evict(
                    index.blocks_of(left, self.sequence_pages), on_device=True
                ):
                    pass

        return before - self.device_pages if if_free(self.lock, make_room) else 0

    def _stuck(self) -> int:
        """Pages that the core could not take: small states, pages that are not full, dirty ones without a host page."""
        numbers = self.device.snapshot()
        host_pages = numbers["host_budget"] // self.device.page_size - numbers["host_pages"] + numbers["host_free"]
        dirty = self.index.states.dirty + sum(sequence.dirty for sequence in self.index.idle)
        fixed = self.fixed_pages + sum(sequence.fixed for sequence in self.index.idle)
        return fixed + max(0, dirty - (host_pages if self.device.host_pages else 0))
