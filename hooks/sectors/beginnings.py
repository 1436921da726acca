"""What the store of prefixes and its files have of a prompt, copied into blocks before its request is scheduled.

Note [Asked once]
    A request that waits is looked at when it could be in the next batch. What sequences of `generate()` have is copied
    at once. What files have is read on a thread of its own, one request at a time; only that request waits for it.
    Blocks that are filled are found by transformers' own search, as those of requests that have ended; if they are
    evicted before, their tokens are computed. No more is copied than there is room for, and what fails is a miss.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial

import torch

from ...allocator.errors import BallonetError, PoolExhausted
from ...offload.policy.prefixes import chain
from ..prefix.sequence import Gone, TokenRun
from ..prefix.store import PrefixStore
from ..prefix.stored_tokens import StoredTokens, cut, open_runs
from .listed_blocks import ListedBlocks

_FAILURES = (BallonetError, PoolExhausted, torch.OutOfMemoryError, MemoryError, Gone)
Opened = Callable[[int, int], AbstractContextManager[StoredTokens | None]]  # of the tokens [start, end)


class Beginnings:
    """Fills blocks with what prompts begin with. Used by the thread that schedules."""

    def __init__(self, listed: ListedBlocks, store: PrefixStore, renew: Callable[[], None]) -> None:
        """`store`: of the same model; `renew` has what was computed before the model changed forgotten."""
        self._listed = listed
        self._blocks = listed.blocks
        self._renew = renew
        self._store = store
        self._hashes: dict[str, list[int]] = {}  # by request that waits, of its prompt: those that were looked at
        self._readings: dict[str, _Reading] = {}
        self._one = threading.Lock()  # held by who reads files

    def only(self, requests: Collection[str]) -> None:
        """Forgets all requests but these, which wait."""
        for name in [name for name in self._hashes if name not in requests]:
            del self._hashes[name]
            self._readings.pop(name, None)

    def found(self, request: str) -> int:
        """Returns how many tokens of a request that was looked at blocks hold: never the last one."""
        return self._listed.found(self._hashes.get(request, ())) * self._blocks.tokens

    def look(self, request: str, ids: Sequence[int], room: Callable[[], int]) -> bool:
        """Looks once for what is stored of a prompt. `room`: bytes that its blocks may take. False while files are
        read."""
        if request not in self._hashes:
            self._hashes[request] = [*self._listed.hashes(ids[:-1])]
            with suppress(*_FAILURES):
                self._begin(request, ids, room)
            if request not in self._readings:
                self._count(request, 0)
        reading = self._readings.get(request)
        if reading is None or not reading.is_alive():
            if self._readings.pop(request, None) is not None and reading is not None:
                before = self.found(request)
                if reading.runs and before >= reading.runs[0].start:
                    runs = reading.runs
                    self._fill(self._hashes[request], runs[-1].end, room, lambda *span: open_runs(cut(runs, *span)))
                self._count(request, self.found(request) - before)
            return True
        return False

    def wait(self, seconds: float) -> bool:
        """Waits for a reading, but no longer than that. Is there any?"""
        for each in self._readings.values():
            each.join(seconds)
            return True
        return False

    def _count(self, request: str, from_files: int) -> None:
        """Counts what is found of a prompt, of which so many tokens were read from files."""
        counts, found = self._store.counts, self.found(request)
        counts.hit(from_files, 1.0, on_disk=True)
        counts.hit(found - from_files, *self._blocks.away(self._hashes[request]))

    def _begin(self, request: str, ids: Sequence[int], room: Callable[[], int]) -> None:
        store, listed, hashes = self._store, self._listed, self._hashes[request]
        self._renew()
        now = listed.identity
        assert now is not None
        listed.used(hashes)
        stored = store.filler.look(ids, now, listed.found(hashes) * listed.tokens)
        self._fill(hashes, stored, room, partial(store.read, ids, now))
        saver, full = store.contents.saver, (len(ids) - 1) // store.block
        count = listed.found(hashes) * listed.tokens // store.block
        if saver is not None and count < full and listed.found(hashes) < len(hashes):
            keys = chain(ids[:-1], store.block, now.settings)
            self._readings[request] = _Reading(self._one, partial(saver.find, keys, count, ids, now))
            self._readings[request].start()

    def _fill(self, hashes: Sequence[int], end: int, room: Callable[[], int], opened: Opened) -> None:
        """Fills blocks with the tokens of a prompt before `end` that none holds yet, as far as there is room."""
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
    """Reads what files have of one prompt."""

    def __init__(self, one: threading.Lock, find: Callable[[], list[TokenRun]]) -> None:
        """`find`: does it, holding `one`."""
        super().__init__(name="ballonet-prefix-reads", daemon=True)
        self._one = one
        self._find = find
        self.runs: list[TokenRun] = []

    def run(self) -> None:
        """The thread."""
        with self._one:
            self.runs = self._find()
