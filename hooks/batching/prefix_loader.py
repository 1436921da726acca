"""Copies the stored beginning of a prompt into blocks before its request is scheduled.

Note [Looked up once]
    A waiting request is looked up when it could be in the next batch. Tokens that sequences of `generate()` have are
    copied at once. Tokens in files are read on a reading thread, one request at a time; only that request waits for it.
    Filled blocks are found by transformers' own search, like those of requests that have ended; if they are evicted
    before, their tokens are computed. No more is copied than fits, and an error is a miss.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial

import torch

from ...allocator.errors import BallonetError, PoolExhausted
from ...offload.policy.prefixes import chain
from ..prefix.sequence import Gone, StoredTokens, TokenRun, open_runs
from ..prefix.store import PrefixStore
from .blocks import ListedBlocks

_FAILURES = (BallonetError, PoolExhausted, torch.OutOfMemoryError, MemoryError, Gone)
Opened = Callable[[int, int], AbstractContextManager[StoredTokens | None]]  # opens the tokens [start, end)


class PrefixLoader:
    """Fills blocks with the beginnings of prompts. Used by the scheduling thread."""

    def __init__(self, listed: ListedBlocks, store: PrefixStore, renew: Callable[[], None]) -> None:
        """`store`: of the same model. `renew`: drops blocks that were computed before the model changed."""
        self._listed = listed
        self._blocks = listed.blocks
        self._renew = renew
        self._store = store
        self._hashes: dict[str, list[int]] = {}  # by waiting request that was looked up: the hashes of its prompt
        self._readings: dict[str, _Reading] = {}
        self._one = threading.Lock()  # held by the thread that reads files

    def keep_only(self, requests: Collection[str]) -> None:
        """Forgets all requests except these, which wait."""
        for name in [name for name in self._hashes if name not in requests]:
            del self._hashes[name]
            self._readings.pop(name, None)

    def loaded_tokens(self, request: str) -> int:
        """Returns how many tokens of a request that was looked up are in blocks, without the last one."""
        return self._listed.found(self._hashes.get(request, ())) * self._blocks.tokens

    def look_up(self, request: str, ids: Sequence[int], room: Callable[[], int]) -> bool:
        """Looks up once the stored beginning of a prompt. `room`: returns the bytes that its blocks may take. False
        while files are read."""
        if request not in self._hashes:
            self._hashes[request] = [*self._listed.hashes(ids[:-1])]
            with suppress(*_FAILURES):
                self._begin(request, ids, room)
            if request not in self._readings:
                self._count(request, 0)
        reading = self._readings.get(request)
        if reading is None or not reading.is_alive():
            if self._readings.pop(request, None) is not None and reading is not None:
                before = self.loaded_tokens(request)
                if reading.runs and before >= reading.runs[0].start:
                    runs = reading.runs
                    self._fill(self._hashes[request], runs[-1].end, room, partial(open_runs, runs))
                self._count(request, self.loaded_tokens(request) - before)
            return True
        return False

    def wait_for_files(self, seconds: float) -> bool:
        """Waits for the reading thread, at most so many seconds. Returns whether there is one."""
        for reading in self._readings.values():
            reading.join(seconds)
            return True
        return False

    def _count(self, request: str, from_files: int) -> None:
        """Counts the found tokens of a prompt, so many of which were read from files."""
        counts, tokens = self._store.counts, self.loaded_tokens(request)
        counts.hit(from_files, 1.0, on_disk=True)
        counts.hit(tokens - from_files, *self._blocks.away(self._hashes[request]))

    def _begin(self, request: str, ids: Sequence[int], room: Callable[[], int]) -> None:
        store, listed, hashes = self._store, self._listed, self._hashes[request]
        self._renew()
        now = listed.identity
        assert now is not None
        listed.used(hashes)
        stored = store.filler.count_batched(ids, now, listed.found(hashes) * listed.tokens)
        self._fill(hashes, stored, room, partial(store.read, ids, now))
        saver, full = store.contents.saver, (len(ids) - 1) // store.block
        count = listed.found(hashes) * listed.tokens // store.block
        if saver is not None and count < full and listed.found(hashes) < len(hashes):
            keys = chain(ids[:-1], store.block, now.settings)
            self._readings[request] = _Reading(self._one, partial(saver.find, keys, count, ids, now))
            self._readings[request].start()

    def _fill(self, hashes: Sequence[int], end: int, room: Callable[[], int], opened: Opened) -> None:
        """Fills blocks with the tokens of a prompt before `end` that no block holds yet, as far as they fit."""
        blocks, done = self._blocks, False
        size, first = blocks.tokens, self._listed.found(hashes)
        if (count := min(end // size, len(hashes)) - first) <= 0:
            return
        try:
            placed = blocks.place(count, room())
        except _FAILURES:
            return
        try:
            done = bool(placed) and self._copy(placed, partial(opened, first * size, (first + len(placed)) * size))
        except _FAILURES:
            pass
        finally:
            if not done:
                blocks.drop(placed)
        if done:
            self._listed.keep(hashes, first, placed)

    def _copy(self, placed: Sequence[int], opened: Callable[[], AbstractContextManager[StoredTokens | None]]) -> bool:
        blocks = self._blocks
        blocks.wait()
        with torch.no_grad(), opened() as tokens:
            if tokens is None or list(tokens.layers) != blocks.layers:
                return False
            if not all(blocks.write(layer, placed, tokens(layer)) for layer in tokens.layers):
                return False
        blocks.wait()
        return True


class _Reading(threading.Thread):
    """The thread that reads the tokens of one prompt from files."""

    def __init__(self, one: threading.Lock, find: Callable[[], list[TokenRun]]) -> None:
        """`find`: reads the tokens, under the lock `one`."""
        super().__init__(name="ballonet-prefix-reads", daemon=True)
        self._one = one
        self._find = find
        self.runs: list[TokenRun] = []

    def run(self) -> None:
        """Runs the thread."""
        with self._one:
            self.runs = self._find()
