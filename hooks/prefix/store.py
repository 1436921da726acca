"""The prefixes of one model as its user sees them (`Managed.prefixes`), and how the unused cache of a request is filled
with the stored beginning of its prompt.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, Final, cast

import torch
from torch import nn

from ...allocator._native import Device
from ...allocator.units import format_size
from ...offload.manager.client import ModelClient
from ...offload.manager.memory_manager import MemoryManager
from ...offload.policy.prefixes import chain
from ..kv.layer import ElasticLayer
from .contents import Lookup, ModelContents
from .identity import Identity, Looks
from .sequence import CachedSequence, Gone, StoredTokens, TokenRun, copy_in, fill_in, open_runs, up_to
from .snapshot import StateSnapshot, give_state

Ids = torch.Tensor | Sequence[int]

_PUBLIC: Final = (
    *("block", "counts", "limit", "nbytes", "pages", "reused", "states", "tokens"),
    *("clear", "flush", "get_num_new_matched_tokens", "pin", "unpin"),
)


class PrefixStore:
    """The prefixes that are kept for one model that generates: `Managed.prefixes`.

    What `dir()` lists is public. The rest serves requests (sessions.py): `contents`, `filler`.
    """

    def __init__(
        self, model: nn.Module, device: Device, limit: int | None, manager: MemoryManager, governed: ModelClient
    ) -> None:
        """`limit`: bytes of pages, None for any number. `manager`: of the device; it knows the model as `governed`."""
        self.contents = ModelContents(type(model).__name__, device, manager, governed, limit)
        self.counts = self.contents.counts
        self.looks = Looks(model)
        self.filler = PromptFiller(self.contents)

    def __repr__(self) -> str:
        limit = "" if self.limit is None else f" of {format_size(self.limit)}"
        hits = f"{self.counts.hit_rate:.0%} of the tokens of {self.counts.requests:,} requests were found"
        held = f"{self.tokens:,} tokens in {format_size(self.nbytes)}{limit}"
        return f"<prefixes of {self.contents.name}: {held}; {hits}>"

    def __dir__(self) -> list[str]:
        return [*_PUBLIC]

    @property
    def limit(self) -> int | None:
        """Bytes of pages that may be kept, None for any number. It may be set."""
        return self.contents.limit

    @limit.setter
    def limit(self, nbytes: int | None) -> None:
        self.contents.limit = nbytes
        self.enforce()

    def enforce(self) -> None:
        """Evicts down to the limit. DriverError."""
        with self.contents.change():
            self.contents.enforce()

    @property
    def block(self) -> int:
        """Tokens that are stored and evicted together."""
        return self.contents.index.blocks.block

    @property
    def pages(self) -> int:
        """Pages of kept tokens and states that are not in use, on the device or the host; of continuous batching's
        blocks only while no request has any. States are rounded up to whole pages."""
        return self.contents.pages

    @property
    def nbytes(self) -> int:
        """The bytes of `pages`."""
        return self.contents.nbytes

    @property
    def states(self) -> int:
        """Lengths of sequences at which windows and recurrent states are kept."""
        return len(self.contents.index.states)

    @property
    def tokens(self) -> int:
        """Stored tokens that are not in use, counted once in sequences and once in blocks."""
        paged = self.contents.index.blocks.paged
        blocks = paged.unused_tokens if paged is not None else 0
        return blocks + sum(len(sequence.ids) - sequence.first for sequence in tuple(self.contents.index.idle))

    @property
    def reused(self) -> int:
        """Tokens of each sequence that the last request of this thread did not compute."""
        return self.filler.reused

    def identity(self) -> Identity:
        """Returns the identity on which keys and values depend now, beside their tokens."""
        return self.looks.now()

    def get_num_new_matched_tokens(self, ids: Ids) -> int:
        """Returns how many tokens of a prompt, int[tokens] or a list, would not be computed now. Does not count as a
        use."""
        now, prompt = self.identity(), numbers(ids)[:-1]
        settings = now.settings
        with self.contents.lock:
            if now.weights != self.contents.weights:
                return 0
            index = self.contents.index
            if index.states:
                growing = next(iter(index.states)).growing
                _, state = index.find_state(prompt, settings, growing, peek=True)
                return len(state.ids) if state is not None else 0
            runs = index.blocks.find(prompt, settings, peek=True)
        return runs[-1].end if runs else 0

    def pin(self, ids: Ids) -> list[bytes]:
        """Keeps the blocks of these tokens, stored or not, and the state behind the last one, from being evicted until
        they are unpinned as often. Blocks may go to the host. Returns their keys."""
        settings = self.identity().settings
        with self.contents.change() as index:
            keys = index.blocks.all_keys(numbers(ids), settings)
            index.pins.add(keys)
        return keys

    def unpin(self, ids: Ids) -> None:
        """Undoes `pin`. ValueError where they are not pinned."""
        settings = self.identity().settings
        with self.contents.lock:
            keys = self.contents.index.blocks.all_keys(numbers(ids), settings)
        self.unpin_keys(keys)

    def unpin_keys(self, keys: Sequence[bytes]) -> None:
        """Undoes `pin`, which returned the keys, even if the model has other adapters since. ValueError where they are
        not pinned."""
        with self.contents.change() as index:
            pinned = index.pins.remove(keys)
            self.contents.enforce()
        if not pinned:
            raise ValueError("these tokens are not pinned")

    def clear(self) -> None:
        """Drops everything that running requests do not use. DriverError."""
        self.contents.clear()

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until all stored tokens are in files, if there is a folder; returns whether that took no more than
        `timeout` seconds."""
        return self.contents.saver is None or self.contents.saver.flush(timeout)

    def close(self) -> None:
        """Stops keeping prefixes. Tokens that running requests use are freed when those end. DriverError."""
        if self.contents.saver is not None:
            self.contents.saver.close()
        with self.contents.lock:
            self.contents.closed = True
            self.contents.clear()

    @contextmanager
    def read(self, ids: Sequence[int], now: Identity, start: int, end: int) -> Iterator[StoredTokens | None]:
        """Keeps the tokens [start, end) of a stored prompt in place; None where they cannot be read now. On any thread:
        for the saving thread, and for blocks of continuous batching. Only threads that need the pages of these tokens
        wait for it."""
        contents, lookup = self.contents, Lookup()
        with contents.change() as index:
            known = contents.weights == now.weights
            runs = index.blocks.find(ids[:end], now.settings, peek=True) if known else []
            sources = contents.begin_reading(lookup, runs)
        try:
            stored = runs[-1].end if runs else 0
            with open_runs(runs if stored >= end else [], start, end) as tokens:
                yield tokens
        finally:
            contents.end_reading(lookup, sources)


class _Thread(threading.local):
    reused = 0


class PromptFiller:
    """Fills the caches of requests, from memory and from files."""

    def __init__(self, contents: ModelContents) -> None:
        self._contents = contents
        self._proofs: dict[bytes, bool] = {}  # by settings: does the model go on from a state?
        self._thread = _Thread()

    @property
    def reused(self) -> int:
        """Tokens of each sequence that the last request of this thread did not compute."""
        return self._thread.reused

    def begin_request(self) -> None:
        """Begins a request of this thread, which may be filled with nothing."""
        self._thread.reused = 0

    def fill(
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
        `rows`, behind `pads` columns of padding each. At least one token of each is left to be computed. `movable`:
        layers of the store may take their place. DriverError."""
        contents = self._contents
        with contents.change() as index:
            self._count_request(rows, now)
            stored = [index.blocks.find(row[:-1], now.settings) for row in rows]
            known = [_keys(runs, index.blocks.block) for runs in stored]
            sources = contents.begin_reading(lookup, (run for runs in stored for run in runs))
        try:
            more = self._with_files(rows, stored, known, now)
            alone = movable and len(rows) == 1 and not pads[0] and more is None
            columns = self._move(lookup, layers, stored[0], rows[0], now) if alone else 0
            lookup.columns = self._thread.reused = columns or self._copy(layers, more or stored, pads)
        finally:
            contents.end_reading(lookup, sources)

    def count_batched(self, row: Sequence[int], now: Identity, cached: int) -> int:
        """Counts a batched request with this prompt, `cached` tokens of which are in its blocks, and returns how many
        are stored, without the last one. DriverError."""
        with self._contents.change() as index:
            self._count_request((row,), now)
            runs = index.blocks.find(row[:-1], now.settings, peek=True)
            if runs and runs[-1].end > cached:
                index.blocks.find(row[:-1], now.settings)  # a use
        return runs[-1].end if runs else 0

    def resumes_from_state(self, now: Identity, proof: Callable[[], bool] | None) -> bool:
        """Can the model go on from a state? `proof` finds it out, and is called once, when there is a state; None where
        it is known. Clears the store of a model that cannot. DriverError."""
        if proof is None or (now.settings not in self._proofs and not self._contents.index.states):
            return True
        if now.settings not in self._proofs:
            self._proofs[now.settings] = proof()
            if not self._proofs[now.settings]:
                self._contents.clear()
        return self._proofs[now.settings]

    def fill_with_state(self, lookup: Lookup, layers: list[Any], row: Sequence[int], now: Identity) -> None:
        """Fills a cache as `fill` does, for one prompt of a model with layers that keep a state: with the longest kept
        state of its beginning. DriverError."""
        contents, growing = self._contents, any(isinstance(layer, ElasticLayer) for layer in layers)
        with contents.change() as index:
            self._count_request((row,), now)
            runs, state = index.find_state(row[:-1], now.settings, growing)
            sources = contents.begin_reading(lookup, runs)
        try:
            if state is not None:
                lookup.columns = self._thread.reused = self._resume(lookup, layers, runs, state, row, now)
        finally:
            contents.end_reading(lookup, sources)

    def _count_request(self, rows: Sequence[Sequence[int]], now: Identity) -> None:
        """Counts a request with these prompts; drops contents of other weights."""
        contents = self._contents
        contents.renew(now)
        contents.counts.requests += 1
        contents.counts.prompts += sum(map(len, rows))

    def _with_files(
        self,
        rows: Sequence[Sequence[int]],
        stored: Sequence[list[TokenRun]],
        known: Sequence[list[bytes]],
        now: Identity,
    ) -> list[list[TokenRun]] | None:
        """Returns the runs found in memory with those that only files have; None where these have no more. `known`:
        keys of the first blocks of each prompt."""
        saver, block = self._contents.saver, self._contents.index.blocks.block
        extended, more = [], False
        for row, runs, there in zip(rows, stored, known, strict=True):
            count, full = (runs[-1].end if runs else 0) // block, len(row[:-1]) // block
            files: list[TokenRun] = []
            if saver is not None and count < full:
                files = saver.find(chain(row[:-1], block, now.settings, there), count, row, now)
            extended.append(up_to(runs, count * block) + files if files else list(runs))
            more |= bool(files)
        return extended if more else None

    def _resume(
        self,
        lookup: Lookup,
        layers: list[Any],
        runs: list[TokenRun],
        state: StateSnapshot,
        row: Sequence[int],
        now: Identity,
    ) -> int:
        """Gives the layers a state and the tokens before it, which lie in `runs`. Returns the number of filled columns:
        all or 0. DriverError."""
        columns, counts = len(state.ids), self._contents.counts
        try:
            parts = state.copied()
        except torch.OutOfMemoryError:
            return 0
        if not parts:
            return 0
        if not runs:
            counts.copies += 1
            counts.hit(columns, 0.0)
        elif not (self._move(lookup, layers, runs, row, now) or self._copy(layers, [runs], [0], columns)):
            return 0
        give_state(layers, parts)
        return columns

    def _move(self, lookup: Lookup, layers: list[Any], runs: list[TokenRun], row: Sequence[int], now: Identity) -> int:
        """Puts the layers of a sequence in the place of the request's. Returns the number of filled columns: 0 where no
        sequence may be moved, or it fails; the sequence is removed from `runs` then. DriverError."""
        if not runs:
            return 0
        contents = self._contents
        with contents.change() as index:
            sequence = index.movable(runs, lookup)
            if sequence is not None:
                lookup.sequence = sequence
                index.take_out(sequence, row[: runs[-1].end])
        if sequence is None:
            return 0
        sequence.mark_idle(False)
        sequence.after_reads()
        away, near = sequence.away, sequence.near
        try:
            sequence.trim(len(row))
            fill_in(sequence, [run for run in runs if run.source is not sequence])
        except (Gone, torch.OutOfMemoryError):
            sequence.readers.discard(lookup)
            contents.give_back(sequence, now)
            lookup.sequence = None
            runs[:] = _before(runs, sequence)
            return 0
        contents.counts.moves += 1
        contents.counts.hit(len(sequence.ids), away, near)
        contents.log_decision("reuse", sequence.pages)
        for number, layer in enumerate(sequence.layers):
            if sequence.holds(number):
                layers[number] = layer
        return len(sequence.ids)

    def _copy(
        self, layers: Sequence[Any], stored: Sequence[list[TokenRun]], pads: Sequence[int], least: int = 1
    ) -> int:
        """Copies the runs into the layers. Returns the number of filled columns: at least `least`, or 0."""
        contents = self._contents
        while True:
            ends = [runs[-1].end if runs else 0 for runs in stored]
            columns = min(pad + end for pad, end in zip(pads, ends, strict=True))
            rows = [up_to(runs, columns - pad) for pad, runs in zip(pads, stored, strict=True)]
            used = [run for runs in rows for run in runs]
            if columns < least or not used:
                return 0
            try:
                away = [(run.source.away, run.source.near) for run in used]
                copy_in(layers, rows, pads)
            except Gone as gone:
                stored = [_before(runs, gone.source) for runs in stored]
            except torch.OutOfMemoryError:
                stored = [[] for _ in stored]
            else:
                contents.counts.copies += 1
                for run, parts in zip(used, away, strict=True):
                    contents.counts.hit(run.end - run.start, *parts, on_disk=run.source.disk)
                pages = sum(layer.kv_range.held for layer in layers if getattr(layer, "kv_range", None))
                contents.log_decision("copy", pages)
                return columns
            for layer in layers:
                layer.reset()


def numbers(ids: Ids) -> array[int]:
    """Returns tokens on the host. ValueError for more than one sequence, TypeError for values that are no integers."""
    if isinstance(ids, torch.Tensor):
        if ids.is_floating_point() or ids.is_complex():
            raise TypeError(f"tokens are whole numbers, not {ids.dtype}")
        if ids.numel() != ids.shape[-1]:
            raise ValueError(f"tokens of one sequence are needed, not of shape {tuple(ids.shape)}")
        return array("q", ids.detach().to("cpu", torch.int64).numpy().tobytes())
    return array("q", ids)


def _keys(runs: Sequence[TokenRun], block: int) -> list[bytes]:
    """Returns the keys of the full blocks that the runs hold, up to the last one of a sequence."""
    last = next((run for run in reversed(runs) if isinstance(run.source, CachedSequence)), None)
    return cast(CachedSequence, last.source).keys[: last.end // block] if last is not None else []


def _before(runs: Iterable[TokenRun], source: object) -> list[TokenRun]:
    return list(takewhile(lambda run: run.source is not source, runs))
