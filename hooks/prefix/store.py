"""The prefixes of one model: what requests begin with, what they leave behind, and how much of it is kept.

Note [Who may touch what]
    All that is said of sequences changes under the lock, which is never held while tokens are computed or copied. A
    sequence is moved to one request at a time (`out`). While others copy from it (`readers`) it is neither moved, nor
    shortened. Who finds a sequence out copies from it what it had when it left, or misses; nobody waits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import nn

from ...allocator._native import Device
from ...allocator.interrupts import if_free
from ...offload.decide.prefixes import chain
from ...offload.govern.governor import Governor
from . import pressure
from .counts import Counts
from .identity import Identity, Looks
from .sequence import Gone, KeptSequence, Pair, Run, copy_in, fill_in, reading
from .shelf import Shelf

if TYPE_CHECKING:
    from .saving import Saver

Ids = torch.Tensor | Sequence[int]

_STUCK: Final = 8  # of the device's pages, the part that prefixes may have and nobody can take


class _Thread(threading.local):
    reused = 0
    pins: list[list[bytes]] | None = None  # what is kept now is pinned, and its keys are added here


class Lookup:
    """What a request begins with."""

    def __init__(self) -> None:
        self.columns = 0  # of its cache that are filled
        self.sequence: KeptSequence | None = None  # that it has, and has to give back


class Parts:
    """Tokens that are stored, as the runs say."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        first = cast(KeptSequence, runs[0].source)
        self.layers = [number for number in range(len(first.layers)) if first.holds(number)]  # that hold some

    def __call__(self, layer: int) -> Pair:
        """Keys and values of a layer, [1, heads, tokens, dim] on the device. Gone."""
        keys, values = zip(*(run.source.part(layer, run.start, run.end) for run in self._runs), strict=True)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)


class PrefixStore:
    """Of one model that generates."""

    def __init__(self, model: nn.Module, device: Device, limit: int | None, governor: Governor) -> None:
        """`limit`: bytes of pages, None for any number. `governor`: of the device."""
        self.counts = Counts()
        self._device = device
        self._limit = limit
        self._governor = governor
        self._looks = Looks(model)
        self._name = type(model).__name__
        self.saver: Saver | None = None
        self._thread = _Thread()
        self._lock = threading.RLock()
        self._shelf = Shelf()
        self._weights: tuple[object, ...] = ()
        self._closed = False
        pressure.add(self)

    @property
    def limit(self) -> int | None:
        """Bytes of pages that may be kept, None for any number. It may be set."""
        return self._limit

    @limit.setter
    def limit(self, nbytes: int | None) -> None:
        with self._lock:
            self._shelf.begin()
            self._limit = nbytes
            self._keep_to_limit()
            self._shelf.done()

    @property
    def block(self) -> int:
        """Tokens that are stored and evicted together."""
        return self._shelf.block

    @property
    def pages(self) -> int:
        """Under what is kept and not in use, on the device or the host."""
        return self._shelf.pages

    @property
    def nbytes(self) -> int:
        """Of those pages."""
        return self.pages * self._device.page_size

    @property
    def tokens(self) -> int:
        """That are stored and not in use, each counted once."""
        return sum(len(each.ids) - each.first for each in tuple(self._shelf.at_rest))

    @property
    def reused(self) -> int:
        """Tokens of each sequence that the last request of this thread did not compute."""
        return self._thread.reused

    def identity(self) -> Identity:
        """What keys and values depend on now, beside their tokens."""
        return self._looks.now()

    # -- for requests

    def take(
        self,
        lookup: Lookup,
        layers: list[Any],
        rows: Sequence[Sequence[int]],
        pads: Sequence[int],
        now: Identity,
        *,
        movable: bool,
    ) -> None:
        """Fills the unused `layers` of a cache, in place, with the longest prefixes that are stored of the prompts
        `rows`, which begin behind so many pads; at least one token of each is left to be computed. `movable`: layers of
        the store may take their place. DriverError."""
        self._thread.reused = 0
        with self._lock:
            self._shelf.begin()
            if now.weights != self._weights:
                self._shelf.clear()
                self._weights = now.weights
            self.counts.requests += 1
            self.counts.prompts += sum(map(len, rows))
            found = [self._shelf.find(row[:-1], now.settings) for row in rows]
            sources = self._begin_reading(lookup, (run for runs in found for run in runs))
            self._shelf.done()
        try:
            further = self._on_disk(rows, found, now)
            alone = movable and len(rows) == 1 and not pads[0]
            moved = self._move(lookup, found[0], rows[0], now) if alone and further is None and found[0] else None
            if moved is not None:
                for number, layer in enumerate(moved.layers):
                    if moved.holds(number):
                        layers[number] = layer
                lookup.columns = self._thread.reused = len(moved.ids)
                return
            lookup.columns = self._thread.reused = self._copy(layers, further or found, pads)
        finally:
            self._end_reading(lookup, sources)

    def keep(self, sequence: KeptSequence, now: Identity) -> None:
        """Stores a sequence, whose layers nobody else has. DriverError."""
        sequence.was_written()
        with self._lock:
            self._shelf.begin()
            if self._closed or now.weights != self._weights:
                self._shelf.forget(sequence)
            else:
                self._shelf.put(sequence)
                self.counts.stored += 1
                if (pins := self._thread.pins) is not None:
                    pins.append(keys := list(sequence.keys))
                    self._shelf.pin(keys)
                self._decided("store", self._shelf.at_rest.get(sequence, 0))
                if self.saver is not None:
                    full = len(sequence.ids) // self.block
                    self.saver.stored(sequence.ids, sequence.keys[:full], now)
                self._keep_to_limit()
            self._shelf.done()

    def missing(self, ids: Sequence[int], now: Identity) -> bool:
        """Would anything of such a sequence be new?"""
        with self._lock:
            keys = self._shelf.keys(ids, now.settings)
            return self._shelf.index.peek(keys) < len(keys)

    def give_back(self, sequence: KeptSequence, now: Identity) -> None:
        """The request that had it was broken off: what it went on from is still right. DriverError."""
        if sequence.layers and all(
            layer.home is not None and layer.get_seq_length() >= len(sequence.ids) for layer in sequence.used
        ):
            sequence.trim()
            self.keep(sequence, now)
        else:
            self.drop(sequence)

    def drop(self, sequence: KeptSequence) -> None:
        """It is not what it was, nor is what relies on it. DriverError."""
        with self._lock:
            self._shelf.begin()
            self._shelf.forget(sequence)
            self._shelf.done()

    def lose(self, lookup: Lookup) -> None:
        """The request that asked is gone without a word. For finalizers, which may run in the middle of anything."""
        if lookup.sequence is not None:
            self._shelf.lost.append(lookup.sequence)

    # -- for those who look at it, or take care of it

    def get_num_new_matched_tokens(self, ids: Ids) -> int:
        """Tokens of a prompt, int[tokens] or a list, that would not be computed now. This is no use of them."""
        settings = self._settings()
        with self._lock:
            runs = self._shelf.find(_listed(ids)[:-1], settings, peek=True)
        return runs[-1].end if runs else 0

    def pin(self, ids: Ids) -> list[bytes]:
        """The blocks of these tokens, those that are stored and those that will be, are not evicted until they are
        unpinned as often. They may go to the host. Returns their keys."""
        keys = self._shelf.keys(_listed(ids), self._settings())
        with self._lock:
            self._shelf.begin()
            self._shelf.pin(keys)
            self._shelf.done()
        return keys

    def unpin(self, ids: Ids) -> None:
        """ValueError where they are not pinned."""
        self.unpin_keys(self._shelf.keys(_listed(ids), self._settings()))

    def unpin_keys(self, keys: Sequence[bytes]) -> None:
        """What `pin` returned; for when the model has other adapters since. ValueError where they are not pinned."""
        with self._lock:
            self._shelf.begin()
            try:
                self._shelf.unpin(keys)
                self._keep_to_limit()
            finally:
                self._shelf.done()

    @contextmanager
    def pinning(self, pins: list[list[bytes]]) -> Iterator[None]:
        """What requests of this thread leave behind within it is pinned before anything is evicted. `pins`: where the
        keys go that have to be unpinned."""
        self._thread.pins = pins
        try:
            yield
        finally:
            self._thread.pins = None

    def unpin_later(self, keys: Iterable[Sequence[bytes]]) -> None:
        """For finalizers, which may run in the middle of anything."""
        self._shelf.unpinned.extend(keys)

    def clear(self) -> None:
        """Forgets everything but what requests that run go on with. DriverError."""
        with self._lock:
            self._shelf.begin()
            self._shelf.clear()
            self._shelf.done()

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until all that is stored is in files, where it goes to files; whether that came within so many
        seconds."""
        return self.saver is None or self.saver.flush(timeout)

    def close(self) -> None:
        """Nothing is kept any more: what requests that run go on with is let go of when they end. DriverError."""
        if self.saver is not None:
            self.saver.close()
        with self._lock:
            self._closed = True
            self.clear()

    def give_up(self, device: Device, pages: int) -> int:
        """See pressure.py. Does nothing where another thread is about to change something here."""
        before = self.pages

        def evict() -> None:
            self._shelf.begin()
            while before - self.pages < pages and self._evict():
                pass
            self._shelf.done()

        if device is self._device and if_free(self._lock, evict):
            return before - self.pages
        return 0

    @contextmanager
    def read(self, ids: Sequence[int], now: Identity, start: int, end: int) -> Iterator[Parts | None]:
        """The tokens [start, end) of a stored prompt, which stay where they are meanwhile; None where they cannot be
        read now. For any thread; nobody waits for it but who needs their pages."""
        lookup = Lookup()
        with self._lock:
            self._shelf.begin()
            runs = self._shelf.find(ids[:end], now.settings, peek=True)
            found = runs[-1].end if runs else 0
            runs = [run._replace(start=max(start, run.start)) for run in _up_to(runs, end) if run.end > start]
            sources = self._begin_reading(lookup, runs)
            self._shelf.done()
        try:
            if found < end or self._weights != now.weights:
                yield None
                return
            with ExitStack() as held:
                parts: Parts | None = Parts(runs)
                try:
                    held.enter_context(reading(runs))
                except Gone:
                    parts = None
                yield parts
        finally:
            self._end_reading(lookup, sources)

    # -- under the lock

    def _evict(self) -> bool:
        """One block goes. False where there is none that may."""
        pages = self._shelf.evict()
        if pages is not None:
            self.counts.evicted += 1
            self._decided("evict", pages)
        return pages is not None

    def _keep_to_limit(self) -> None:
        """No more is kept than may be; and but for a part of the device no more than the core can take, in the middle
        of any operator, as far as the host has pages for it."""
        while self._limit is not None and self.nbytes > self._limit and self._evict():
            pass
        most = self._device.budget // self._device.page_size // _STUCK
        while self.pages > most and self._stuck() > most and self._evict():
            pass

    def _stuck(self) -> int:
        """Pages that would not be given to whoever needs some."""
        numbers = self._device.snapshot()
        room = numbers["host_budget"] // self._device.page_size - numbers["host_pages"] + numbers["host_free"]
        dirty = sum(each.dirty for each in self._shelf.at_rest)
        fixed = sum(each.fixed for each in self._shelf.at_rest)
        return fixed + max(0, dirty - (room if self._device.host_pages else 0))

    # -- without the lock

    def _on_disk(
        self, rows: Sequence[Sequence[int]], found: Sequence[list[Run]], now: Identity
    ) -> list[list[Run]] | None:
        """What is found with that which only files have; None where they have no more."""
        if self.saver is None:
            return None
        further, more = [], False
        for row, runs in zip(rows, found, strict=True):
            keys = chain(row[:-1], self.block, now.settings)
            count = (runs[-1].end if runs else 0) // self.block
            files = self.saver.find(keys, count, row, now) if count < len(keys) else []
            further.append(_up_to(runs, count * self.block) + files if files else list(runs))
            more |= bool(files)
        return further if more else None

    def _move(self, lookup: Lookup, runs: list[Run], row: Sequence[int], now: Identity) -> KeptSequence | None:
        """The sequence that the request goes on with itself, None where that may not be; where it fails it is not among
        the runs any more. DriverError."""
        with self._lock:
            self._shelf.begin()
            sequence = self._shelf.movable(runs, lookup)
            if sequence is not None:
                lookup.sequence = sequence
                self._shelf.take_out(sequence, row[: runs[-1].end])
            self._shelf.done()
        if sequence is None:
            return None
        sequence.idle(kept=False)
        sequence.after_reads()
        away = sequence.away
        try:
            sequence.trim()
            fill_in(sequence, [run for run in runs if run.source is not sequence])
        except (Gone, torch.OutOfMemoryError):
            sequence.readers.discard(lookup)
            self.give_back(sequence, now)
            lookup.sequence = None
            runs[:] = _before(runs, sequence)
            return None
        self.counts.moves += 1
        self.counts.hit(len(sequence.ids), away)
        self._decided("reuse", sequence.held)
        return sequence

    def _copy(self, layers: Sequence[Any], found: Sequence[list[Run]], pads: Sequence[int]) -> int:
        """Copies the runs into the layers. Returns the columns that are filled then."""
        while True:
            ends = [runs[-1].end if runs else 0 for runs in found]
            columns = min(pad + end for pad, end in zip(pads, ends, strict=True))
            rows = [_up_to(runs, columns - pad) for pad, runs in zip(pads, found, strict=True)]
            used = [run for runs in rows for run in runs]
            if not used:
                return 0
            try:
                away = [run.source.away for run in used]
                copy_in(layers, rows, pads)
            except Gone as gone:
                found = [_before(runs, gone.source) for runs in found]
            except torch.OutOfMemoryError:
                found = [[] for _ in found]
            else:
                self.counts.copies += 1
                for run, part in zip(used, away, strict=True):
                    self.counts.hit(run.end - run.start, part, on_disk=run.source.disk)
                self._decided("copy", sum(layer.home.held for layer in layers if getattr(layer, "home", None)))
                return columns
            for layer in layers:
                layer.reset()

    def _begin_reading(self, lookup: Lookup, runs: Iterable[Run]) -> list[KeptSequence]:
        """The caller holds the lock."""
        sources = list({run.source for run in runs if isinstance(run.source, KeptSequence)})
        for each in sources:
            each.readers.add(lookup)
        return sources

    def _end_reading(self, lookup: Lookup, sources: Iterable[KeptSequence]) -> None:
        with self._lock:
            for each in sources:
                each.readers.discard(lookup)
            if any(each.late for each in sources):
                self._shelf.begin()
                self._shelf.done()

    def _settings(self) -> bytes:
        return self.identity().settings

    def _decided(self, verb: str, pages: int) -> None:
        self._governor.events.decided("prefix", verb, pages, what=self._name)


def _listed(ids: Ids) -> list[int]:
    """ValueError for more than one sequence."""
    if isinstance(ids, torch.Tensor):
        if ids.numel() != ids.shape[-1]:
            raise ValueError(f"tokens of one sequence are needed, not of shape {tuple(ids.shape)}")
        return cast(list[int], ids.flatten().tolist())
    return list(ids)


def _before(runs: Iterable[Run], source: object) -> list[Run]:
    return list(takewhile(lambda run: run.source is not source, runs))


def _up_to(runs: Iterable[Run], end: int) -> list[Run]:
    """The runs of the tokens before that one."""
    return [run._replace(end=min(run.end, end)) for run in runs if run.start < end]
