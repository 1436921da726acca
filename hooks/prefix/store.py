"""The prefixes of one model: what requests begin with, what they leave behind, and how much of it is kept.

Note [Who may touch what]
    All that is said of sequences changes under the lock, which is never held while tokens are computed or copied. A
    sequence is moved to one request at a time (`out`). While others copy from it (`readers`) it is neither moved, nor
    shortened. Who finds a sequence out copies from it what it had when it left, or misses; nobody waits.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import nn

from ...allocator._native import Device
from ...allocator.interrupts import if_free
from ...allocator.units import format_size
from ...offload.governor.client import ModelClient
from ...offload.governor.governor import Governor
from ...offload.policy.prefixes import chain
from ..device import pressure
from ..kv.layer import ElasticLayer
from .counts import Counts
from .identity import Identity, Looks
from .prefix_index import PrefixIndex
from .sequence import CachedSequence, Gone, Pair, Run, copy_in, fill_in, reading
from .snapshot import StateSnapshot, begin

if TYPE_CHECKING:
    from .saving import Saver

Ids = torch.Tensor | Sequence[int]


class _Thread(threading.local):
    reused = 0
    pins: list[list[bytes]] | None = None  # what is kept now is pinned, and its keys are added here


class Lookup:
    """What a request begins with."""

    def __init__(self) -> None:
        self.columns = 0  # of its cache that are filled
        self.sequence: CachedSequence | None = None  # that it has, and has to give back


class Parts:
    """Tokens that are stored, as the runs say."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        first = cast(CachedSequence, runs[0].source)
        self.layers = [number for number in range(len(first.layers)) if first.holds(number)]  # that hold some

    def __call__(self, layer: int) -> Pair:
        """Keys and values of a layer, [1, heads, tokens, dim] on the device. Gone."""
        keys, values = zip(*(run.source.part(layer, run.start, run.end) for run in self._runs), strict=True)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)


# What `Managed.prefixes` is for; the rest is the project's own.
_PUBLIC: Final = (
    *("block", "counts", "limit", "nbytes", "pages", "reused", "states", "tokens"),
    *("clear", "flush", "get_num_new_matched_tokens", "pin", "unpin"),
)


class PrefixStore:
    """The prefixes that are kept for one model that generates: `Managed.prefixes`."""

    def __init__(
        self, model: nn.Module, device: Device, limit: int | None, governor: Governor, governed: ModelClient
    ) -> None:
        """`limit`: bytes of pages, None for any number. `governor`: of the device, who knows the model as
        `governed`."""
        self.counts = Counts()
        self._device = device
        self._limit = limit
        self._governor = governor
        self._governed = governed
        self._looks = Looks(model)
        self._name = type(model).__name__
        self.saver: Saver | None = None
        self._thread = _Thread()
        self._lock = threading.RLock()
        self._prefix_index = PrefixIndex(governor.tuning.prefixes)
        self._weights: tuple[object, ...] = ()
        self._proofs: dict[bytes, bool] = {}  # by settings: does the model go on from a state?
        self._closed = False
        pressure.add(self)

    def __repr__(self) -> str:
        limit = "" if self._limit is None else f" of {format_size(self._limit)}"
        found = f"{self.counts.hit_rate:.0%} of the tokens of {self.counts.requests:,} requests were found"
        return f"<prefixes of {self._name}: {self.tokens:,} tokens in {format_size(self.nbytes)}{limit}; {found}>"

    def __dir__(self) -> list[str]:
        return [*_PUBLIC]

    @property
    def limit(self) -> int | None:
        """Bytes of pages that may be kept, None for any number. It may be set."""
        return self._limit

    @limit.setter
    def limit(self, nbytes: int | None) -> None:
        with self._lock:
            self._prefix_index.begin()
            self._limit = nbytes
            self._keep_to_limit()
            self._prefix_index.done()

    @property
    def block(self) -> int:
        """Tokens that are stored and evicted together."""
        return self._prefix_index.block

    @property
    def pages(self) -> int:
        """Under what is kept and not in use, on the device or the host. States count as if they lay on whole ones."""
        return self._prefix_index.pages + self._state_pages

    @property
    def _state_pages(self) -> int:
        return -(-self._prefix_index.states.nbytes // self._device.page_size)

    @property
    def _here(self) -> int:
        """The pages of it that are on the device."""
        return self._prefix_index.here + self._state_pages

    @property
    def states(self) -> int:
        """Lengths of sequences at which windows and recurrent states are kept."""
        return len(self._prefix_index.states)

    @property
    def nbytes(self) -> int:
        """The bytes of those pages."""
        return self.pages * self._device.page_size

    @property
    def tokens(self) -> int:
        """The tokens that are stored and not in use, each counted once."""
        return sum(len(each.ids) - each.first for each in tuple(self._prefix_index.at_rest))

    @property
    def reused(self) -> int:
        """Tokens of each sequence that the last request of this thread did not compute."""
        return self._thread.reused

    def identity(self) -> Identity:
        """What keys and values depend on now, beside their tokens."""
        return self._looks.now()

    def stepped(self, parameters: Collection[int]) -> None:
        """An optimizer has written to some of these, by id."""
        self._looks.stepped(parameters)

    # -- for requests

    def called(self) -> None:
        """A request of this thread begins, which may never ask."""
        self._thread.reused = 0

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
        with self._lock:
            self._asked(rows, now)
            found = [self._prefix_index.find(row[:-1], now.settings) for row in rows]
            known = [_keys(runs, self.block) for runs in found]
            sources = self._begin_reading(lookup, (run for runs in found for run in runs))
            self._prefix_index.done()
        try:
            further = self._on_disk(rows, found, known, now)
            alone = movable and len(rows) == 1 and not pads[0] and further is None
            columns = self._move(lookup, layers, found[0], rows[0], now) if alone else 0
            lookup.columns = self._thread.reused = columns or self._copy(layers, further or found, pads)
        finally:
            self._end_reading(lookup, sources)

    def goes_on(self, now: Identity, proof: Callable[[], bool] | None) -> bool:
        """May the model go on from a state? `proof`, which finds it out, is asked once, and not before there is one;
        None where nobody doubts it. Where it may not, nothing is kept. DriverError."""
        if proof is None or (now.settings not in self._proofs and not self.states):
            return True
        if now.settings not in self._proofs:
            self._proofs[now.settings] = proof()
            if not self._proofs[now.settings]:
                self.clear()
        return self._proofs[now.settings]

    def take_whole(self, lookup: Lookup, layers: list[Any], row: Sequence[int], now: Identity) -> None:
        """As `take`, of one prompt to a model some of whose layers keep a state: with the longest one that is kept of
        its beginnings. DriverError."""
        growing = any(isinstance(layer, ElasticLayer) for layer in layers)
        with self._lock:
            self._asked((row,), now)
            runs, state = self._prefix_index.find_state(row[:-1], now.settings, growing)
            sources = self._begin_reading(lookup, runs)
            self._prefix_index.done()
        try:
            if state is not None:
                lookup.columns = self._thread.reused = self._take_state(lookup, layers, runs, state, row, now)
        finally:
            self._end_reading(lookup, sources)

    def keep(self, sequence: CachedSequence | None, now: Identity, states: Sequence[StateSnapshot] = ()) -> None:
        """Stores a sequence, whose layers nobody else has, and the states of its layers at some lengths; None where it
        is all states. No more stays than others can spare (exchange.py). DriverError."""
        if sequence is not None:
            sequence.was_written()
        with self._lock:
            self._prefix_index.begin()
            if not self._closed and now.weights == self._weights:
                if sequence is not None:
                    self._prefix_index.put(sequence)
                for state in states:
                    self._prefix_index.put_state(state)
                self.counts.stored += 1
                if (pins := self._thread.pins) is not None:
                    pins.append(keys := [*(sequence.keys if sequence else ()), *(state.key for state in states)])
                    self._prefix_index.pin(keys)
                self._decided("store", self._prefix_index.at_rest.get(sequence, 0) if sequence else 0)
                if self.saver is not None and sequence is not None and not sequence.whole:
                    full = len(sequence.ids) // self.block
                    self.saver.stored(sequence.ids, sequence.keys[:full], now)
                self._keep_to_limit()
            elif sequence is not None:
                self._prefix_index.forget(sequence)
            self._prefix_index.done()
        if sequence is not None:
            self._governor.exchange.keep(self._governed, sequence.caches)

    def missing(self, ids: Sequence[int], now: Identity) -> bool:
        """Would anything of such a sequence be new?"""
        with self._lock:
            keys = self._prefix_index.keys(ids, now.settings)
            return self._prefix_index.index.peek(keys) < len(keys)

    def give_back(self, sequence: CachedSequence, now: Identity) -> None:
        """The request that had it was broken off: what it went on from is still right. DriverError."""
        if sequence.layers and all(
            layer.home is not None and layer.get_seq_length() >= len(sequence.ids) for layer in sequence.used
        ):
            sequence.trim()
            self.keep(sequence, now)
        else:
            self.drop(sequence)

    def drop(self, sequence: CachedSequence) -> None:
        """Invalidates the sequence and all that relies on it. DriverError."""
        with self._lock:
            self._prefix_index.begin()
            self._prefix_index.forget(sequence)
            self._prefix_index.done()

    def lose(self, lookup: Lookup) -> None:
        """The request that asked is gone without a word. For finalizers, which may run in the middle of anything."""
        if lookup.sequence is not None:
            self._prefix_index.lost.append(lookup.sequence)

    # -- for those who look at it, or take care of it

    def get_num_new_matched_tokens(self, ids: Ids) -> int:
        """Tokens of a prompt, int[tokens] or a list, that would not be computed now. This is no use of them."""
        settings, prompt = self._settings(), numbers(ids)[:-1]
        with self._lock:
            if self._prefix_index.states:
                growing = next(iter(self._prefix_index.states)).growing
                _, state = self._prefix_index.find_state(prompt, settings, growing, peek=True)
                return len(state.ids) if state is not None else 0
            runs = self._prefix_index.find(prompt, settings, peek=True)
        return runs[-1].end if runs else 0

    def pin(self, ids: Ids) -> list[bytes]:
        """The blocks of these tokens, those that are stored and those that will be, and the state behind the last one,
        are not evicted until they are unpinned as often. Blocks may go to the host. Returns their keys."""
        settings = self._settings()
        with self._lock:
            self._prefix_index.begin()
            keys = self._prefix_index.all_keys(numbers(ids), settings)
            self._prefix_index.pin(keys)
            self._prefix_index.done()
        return keys

    def unpin(self, ids: Ids) -> None:
        """ValueError where they are not pinned."""
        settings = self._settings()
        with self._lock:
            keys = self._prefix_index.all_keys(numbers(ids), settings)
        self.unpin_keys(keys)

    def unpin_keys(self, keys: Sequence[bytes]) -> None:
        """What `pin` returned; for when the model has other adapters since. ValueError where they are not pinned."""
        with self._lock:
            self._prefix_index.begin()
            try:
                self._prefix_index.unpin(keys)
                self._keep_to_limit()
            finally:
                self._prefix_index.done()

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
        self._prefix_index.unpinned.extend(keys)

    def clear(self) -> None:
        """Forgets everything but what requests that run go on with. DriverError."""
        with self._lock:
            self._prefix_index.begin()
            self._prefix_index.clear()
            self._prefix_index.done()

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
        if device is not self._device:
            return 0
        before = self._here

        def evict() -> None:
            self._prefix_index.begin()
            while (left := pages - before + self._here) > 0 and self._evict(
                self._prefix_index.blocks(left, self.pages), here=True
            ):
                pass
            self._prefix_index.done()

        return before - self._here if if_free(self._lock, evict) else 0

    @contextmanager
    def read(self, ids: Sequence[int], now: Identity, start: int, end: int) -> Iterator[Parts | None]:
        """The tokens [start, end) of a stored prompt, which stay where they are meanwhile; None where they cannot be
        read now. For any thread; nobody waits for it but who needs their pages."""
        lookup = Lookup()
        with self._lock:
            self._prefix_index.begin()
            runs = self._prefix_index.find(ids[:end], now.settings, peek=True)
            found = runs[-1].end if runs else 0
            runs = [run._replace(start=max(start, run.start)) for run in _up_to(runs, end) if run.end > start]
            sources = self._begin_reading(lookup, runs)
            self._prefix_index.done()
        try:
            if not runs or found < end or self._weights != now.weights:
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

    def _asked(self, rows: Sequence[Sequence[int]], now: Identity) -> None:
        """Begins a request with these prompts; forgets what was stored of other weights."""
        self._prefix_index.begin()
        if now.weights != self._weights:
            self._prefix_index.clear()
            self._weights = now.weights
        self.counts.requests += 1
        self.counts.prompts += sum(map(len, rows))

    def _evict(self, count: int = 1, *, here: bool = False) -> bool:
        """Evicts so many blocks or states, see PrefixIndex.evict. False where there is none that may."""
        before = self.pages
        gone = self._prefix_index.evict(count, here=here)
        if gone:
            self.counts.evicted += gone
            self._decided("evict", before - self.pages)
        return gone > 0

    def _keep_to_limit(self) -> None:
        """No more is kept than may be; and but for a part of the device no more than the core can take, in the middle
        of any operator, as far as the host has pages for it."""
        while self._limit is not None and self.nbytes > self._limit and self._evict():
            pass
        most = self._device.budget // self._device.page_size // self._governor.tuning.prefixes.stuck
        while self.pages > most and self._stuck() > most and self._evict():
            pass

    def _stuck(self) -> int:
        """Pages that would not be given to whoever needs some."""
        numbers = self._device.snapshot()
        room = numbers["host_budget"] // self._device.page_size - numbers["host_pages"] + numbers["host_free"]
        dirty = sum(each.dirty for each in self._prefix_index.at_rest)
        fixed = self._state_pages + sum(each.fixed for each in self._prefix_index.at_rest)
        return fixed + max(0, dirty - (room if self._device.host_pages else 0))

    # -- without the lock

    def _on_disk(
        self, rows: Sequence[Sequence[int]], found: Sequence[list[Run]], known: Sequence[list[bytes]], now: Identity
    ) -> list[list[Run]] | None:
        """What is found with that which only files have; None where they have no more. `known`: keys of what is
        found."""
        if self.saver is None:
            return None
        further, more = [], False
        for row, runs, there in zip(rows, found, known, strict=True):
            keys, count = chain(row[:-1], self.block, now.settings, there), len(there)
            files = self.saver.find(keys, count, row, now) if count < len(keys) else []
            further.append(_up_to(runs, count * self.block) + files if files else list(runs))
            more |= bool(files)
        return further if more else None

    def _take_state(
        self,
        lookup: Lookup,
        layers: list[Any],
        runs: list[Run],
        state: StateSnapshot,
        row: Sequence[int],
        now: Identity,
    ) -> int:
        """Makes the layers go on from a state and the tokens before it, which the runs are. Returns the columns that
        are filled then: all of these, or none. DriverError."""
        columns = len(state.ids)
        try:
            parts = state.copied()
        except torch.OutOfMemoryError:
            return 0
        if not parts:
            return 0
        if not runs:
            self.counts.copies += 1
            self.counts.hit(columns, 0.0)
        elif not (self._move(lookup, layers, runs, row, now) or self._copy(layers, [runs], [0], columns)):
            return 0
        begin(layers, parts)
        return columns

    def _move(self, lookup: Lookup, layers: list[Any], runs: list[Run], row: Sequence[int], now: Identity) -> int:
        """Puts layers of a sequence among those of the request, which goes on with it. Returns the columns that are
        filled then; none where that may not be, and where it fails the sequence is not among the runs any more.
        DriverError."""
        if not runs:
            return 0
        with self._lock:
            self._prefix_index.begin()
            sequence = self._prefix_index.movable(runs, lookup)
            if sequence is not None:
                lookup.sequence = sequence
                self._prefix_index.take_out(sequence, row[: runs[-1].end])
            self._prefix_index.done()
        if sequence is None:
            return 0
        sequence.idle(kept=False)
        sequence.after_reads()
        away, near = sequence.away, sequence.near
        try:
            sequence.trim(len(row))
            fill_in(sequence, [run for run in runs if run.source is not sequence])
        except (Gone, torch.OutOfMemoryError):
            sequence.readers.discard(lookup)
            self.give_back(sequence, now)
            lookup.sequence = None
            runs[:] = _before(runs, sequence)
            return 0
        self.counts.moves += 1
        self.counts.hit(len(sequence.ids), away, near)
        self._decided("reuse", sequence.held)
        for number, layer in enumerate(sequence.layers):
            if sequence.holds(number):
                layers[number] = layer
        return len(sequence.ids)

    def _copy(self, layers: Sequence[Any], found: Sequence[list[Run]], pads: Sequence[int], least: int = 1) -> int:
        """Copies the runs into the layers. Returns the columns that are filled then: so many at least, or none."""
        while True:
            ends = [runs[-1].end if runs else 0 for runs in found]
            columns = min(pad + end for pad, end in zip(pads, ends, strict=True))
            rows = [_up_to(runs, columns - pad) for pad, runs in zip(pads, found, strict=True)]
            used = [run for runs in rows for run in runs]
            if columns < least or not used:
                return 0
            try:
                away = [(run.source.away, run.source.near) for run in used]
                copy_in(layers, rows, pads)
            except Gone as gone:
                found = [_before(runs, gone.source) for runs in found]
            except torch.OutOfMemoryError:
                found = [[] for _ in found]
            else:
                self.counts.copies += 1
                for run, parts in zip(used, away, strict=True):
                    self.counts.hit(run.end - run.start, *parts, on_disk=run.source.disk)
                self._decided("copy", sum(layer.home.held for layer in layers if getattr(layer, "home", None)))
                return columns
            for layer in layers:
                layer.reset()

    def _begin_reading(self, lookup: Lookup, runs: Iterable[Run]) -> list[CachedSequence]:
        """The caller holds the lock."""
        sources = list({run.source for run in runs if isinstance(run.source, CachedSequence)})
        for each in sources:
            each.readers.add(lookup)
        return sources

    def _end_reading(self, lookup: Lookup, sources: Iterable[CachedSequence]) -> None:
        with self._lock:
            for each in sources:
                each.readers.discard(lookup)
            if any(each.late for each in sources):
                self._prefix_index.begin()
                self._prefix_index.done()

    def _settings(self) -> bytes:
        return self.identity().settings

    def _decided(self, verb: str, pages: int) -> None:
        self._governor.events.decided("prefix", verb, pages, what=self._name)


def numbers(ids: Ids) -> array[int]:
    """Tokens on the host. ValueError for more than one sequence, TypeError for what are no whole numbers."""
    if isinstance(ids, torch.Tensor):
        if ids.is_floating_point() or ids.is_complex():
            raise TypeError(f"tokens are whole numbers, not {ids.dtype}")
        if ids.numel() != ids.shape[-1]:
            raise ValueError(f"tokens of one sequence are needed, not of shape {tuple(ids.shape)}")
        return array("q", ids.detach().to("cpu", torch.int64).numpy().tobytes())
    return array("q", ids)


def _keys(runs: Sequence[Run], block: int) -> list[bytes]:
    """Returns the keys of the full blocks that they hold."""
    return cast(CachedSequence, runs[-1].source).keys[: runs[-1].end // block] if runs else []


def _before(runs: Iterable[Run], source: object) -> list[Run]:
    return list(takewhile(lambda run: run.source is not source, runs))


def _up_to(runs: Iterable[Run], end: int) -> list[Run]:
    """The runs of the tokens before that one."""
    return [run._replace(end=min(run.end, end)) for run in runs if run.start < end]
