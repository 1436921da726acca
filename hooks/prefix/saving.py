"""Prefixes that outlive the process: stored tokens are written to files in the background, and read from there when
memory does not have them.

Note [In the background]
    Requests never wait for a write to disk. The tokens that a request leaves behind are noted, and a saving thread
    reads them from the store while no request uses them, on a stream of its own, and writes blocks that no file has
    yet, some at a time. Tokens that a request has taken meanwhile are skipped: that request leaves behind all of them
    and more. If the process dies only unwritten tokens are lost. When Python ends in order, or a model is released, the
    rest is written first.

Note [Read or compute]
    The speed of reading files and the time of prefills are measured as they occur, and tokens that are predicted to
    take longer to read than to compute are not read (policy/prefixes.py). As a disk may be faster at another time, a
    read is tried again after a number of such decisions.

Note [Ids, not hashes]
    The key of a block leads to a file. Its tokens are then compared with those of the prompt.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Final, Protocol

import numpy as np
import torch
from torch import nn

from ...allocator._native import Device
from ...allocator.errors import BallonetError, PoolExhausted
from ...allocator.units import steps
from ...offload.manager.memory_manager import MemoryManager
from ...offload.policy.prefixes import Reading, reading
from ...offload.record.record import Record
from ...offload.residency.prefix_files import Array, PrefixFiles, Saved
from ..device.streams import relaxed, torch_device
from .identity import Identity, fingerprint
from .sequence import Counts, Gone, Pair, StoredTokens, TokenRun, TokenSource

_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_FAILURES: Final = (BallonetError, PoolExhausted, torch.OutOfMemoryError, MemoryError)


class SavedStore(Protocol):
    """A store whose tokens are written to files. `counts`: of its use."""

    counts: Counts

    @property
    def block(self) -> int:
        """Tokens of a block."""

    def identity(self) -> Identity:
        """Returns the identity on which its tokens depend now."""

    def read(
        self, ids: Sequence[int], now: Identity, start: int, end: int
    ) -> AbstractContextManager[StoredTokens | None]:
        """Opens the tokens [start, end) of a sequence."""


class SavedRun(TokenSource):
    """Tokens of a prompt that were read from a file, into memory that is not shared."""

    disk = True
    away = 1.0
    near = 0.0

    def __init__(self, saved: Saved, start: int, device: torch.device) -> None:
        """`start`: where its first token is in the prompt."""
        self._saved = saved
        self._start = start
        self._device = device

    @property
    def held(self) -> Sequence[int]:
        """The layers that hold tokens."""
        return [int(name.partition(".")[0]) for name in self._saved.tensors if name.endswith(".keys")]

    def part(self, layer: int, start: int, end: int) -> Pair:
        """Keys and values of a layer, [1, heads, end - start, dim], on the device."""
        keys, values = (_tensor(self._saved.tensors[f"{layer}.{kind}"]) for kind in ("keys", "values"))
        window = slice(start - self._start, end - self._start)
        return keys[:, :, window].to(self._device), values[:, :, window].to(self._device)

    def leased(self, end: int) -> AbstractContextManager[None]:
        """Does nothing: the host waits for copies from this memory."""
        return nullcontext()


class Saver:
    """Writes what the store of one model keeps to `directory`, within `limit` bytes (None: any number)."""

    def __init__(
        self,
        model: nn.Module,
        device: Device,
        directory: str | os.PathLike[str],
        limit: int | None,
        store: SavedStore,
        manager: MemoryManager,
        record: Callable[[], Record | None],
    ) -> None:
        """`manager`: of the device. `record`: returns the measured times of the model's iterations."""
        self._model = weakref.ref(model)
        self._device = device
        self._directory = directory
        self._limit = limit
        self._read, self._look, self._block, self._counts = store.read, store.identity, store.block, store.counts
        self._manager = manager
        self._tuning = manager.tuning.prefixes
        self._record = record
        self._speeds = deque[tuple[int, float]](maxlen=8)  # (bytes, seconds) of the last reads. Chosen
        self._computed = 0  # requests since a read was tried last
        self._naming = threading.Lock()
        self._known: tuple[tuple[object, ...], bytes] | None = None  # weights, and what stands for them in files
        self._folders: dict[bytes, PrefixFiles] = {}  # by salt
        self._change = threading.Condition()
        self._waiting: dict[bytes, tuple[Sequence[int], list[bytes], Identity]] = {}  # by last key, oldest first
        self._busy = False
        self._ended = False
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None
        self._at_exit = atexit.register(_flushing(weakref.ref(self), manager.tuning.waiting.files))

    def stored_bytes(self) -> tuple[str, int]:
        """Returns the folder, and the bytes of all prefix files in it, those of other models too; 0 until the first
        is needed."""
        files = next(iter(tuple(self._folders.values())), None)
        return str(self._directory), 0 if files is None else files.nbytes()

    # -- for the store

    def stored(self, ids: Sequence[int], keys: list[bytes], now: Identity) -> None:
        """Notes that a sequence is kept and may be written. `keys`: of its full blocks, at least of one."""
        with self._change:
            if self._ended or not keys:
                return
            for key in keys:
                self._waiting.pop(key, None)  # a beginning of it
            self._waiting[keys[-1]] = (ids, keys, now)
            if self._thread is None or not self._thread.is_alive():  # as in a child after a fork
                self._thread = threading.Thread(target=self._work, name="ballonet-prefixes", daemon=True)
                self._thread.start()
            self._change.notify_all()

    def find(self, keys: Sequence[bytes], count: int, ids: Sequence[int], now: Identity) -> list[TokenRun]:
        """Returns the tokens of a prompt that files have behind the first `count` blocks, without a gap. `keys`: of its
        full blocks. On the thread of the request."""
        try:
            return self._find(keys, count, ids, now)
        except _FAILURES:
            return []

    def _find(self, keys: Sequence[bytes], count: int, ids: Sequence[int], now: Identity) -> list[TokenRun]:
        files, runs = self._files(now), list[TokenRun]()
        end = count + (files.match(keys[count:]) if files is not None else 0)
        if files is None or end == count:
            return runs
        nbytes, tokens = files.size_of(keys[count:end]), (end - count) * self._block
        estimate = self._reading(nbytes, tokens, len(ids) - count * self._block)
        if not estimate.worth and self._computed < self._tuning.again:
            self._computed += 1
            self._counts.faster += tokens
            self._decided("compute", nbytes, estimate.compute)
            return runs
        self._computed = 0
        begin = self._manager.clock()
        runs = self._read_in(files, keys, count, end, ids)
        if runs and runs[-1].end == end * self._block:
            taken = max(self._manager.clock() - begin, 1e-9)
            self._speeds.append((nbytes, taken))
            self._decided("load", nbytes, estimate.disk, taken)
        return runs

    def _reading(self, nbytes: int, tokens: int, lacking: int) -> Reading:
        """Decides whether to read, see Note [Read or compute]. `lacking`: tokens that would be computed."""
        record, speeds = self._record(), tuple(self._speeds)
        disk = sum(size for size, _ in speeds) / sum(seconds for _, seconds in speeds) if speeds else None
        per_token = None if record is None else record.prefill_token(lacking)
        return reading(nbytes, tokens, disk=disk, link=self._manager.link.bandwidth, per_token=per_token)

    def _decided(self, verb: str, nbytes: int, predicted: float | None, measured: float | None = None) -> None:
        pages = -(-nbytes // self._device.page_size)
        self._manager.events.decided("prefix", verb, pages, what="files", predicted=predicted, measured=measured)

    def _read_in(
        self, files: PrefixFiles, keys: Sequence[bytes], reached: int, end: int, ids: Sequence[int]
    ) -> list[TokenRun]:
        """Reads the blocks [reached, end) of a prompt, up to the first that no undamaged file has."""
        runs = list[TokenRun]()
        while reached < end:
            saved = files.load(keys[reached], lambda name, dtype, shape, nbytes: self._memory(nbytes))
            if saved is None:
                break
            first = reached - saved.part.keys.index(keys[reached])
            alike = 0
            for mine, theirs in zip(keys[reached:], saved.part.keys[reached - first :], strict=False):
                span = slice((reached + alike) * self._block, (reached + alike + 1) * self._block)
                held = slice(span.start - first * self._block, span.stop - first * self._block)
                if mine != theirs or list(saved.ids[held]) != list(ids[span]):
                    break
                alike += 1
            if not alike:
                break
            source = SavedRun(saved, first * self._block, torch_device(self._device))
            runs.append(TokenRun(source, reached * self._block, (reached + alike) * self._block))
            reached += alike
        return runs

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until everything stored is written, or will not be; returns whether that took no more than `timeout`
        seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        with self._change:
            total = len(self._waiting) + self._busy
            if not total:
                return True
            with steps("writing prefixes", total) as told:
                while left := len(self._waiting) + self._busy:
                    told(f"{left} left")
                    if self._thread is None or not self._thread.is_alive():
                        return False
                    if not self._change.wait(None if end is None else max(0.0, end - time.monotonic())):
                        return False
        return True

    def close(self) -> None:
        """Stops writing, without waiting; call `flush` before to have the rest written."""
        with self._change:
            self._ended = True
            self._waiting.clear()
            self._change.notify_all()
        atexit.unregister(self._at_exit)

    # -- in the background

    def _work(self) -> None:
        """Runs the saving thread, which ends when there is nothing to do."""
        try:
            while True:
                with self._change:
                    self._busy = False
                    self._change.notify_all()
                    if not self._waiting:
                        self._thread = None
                        return
                    ids, keys, now = self._waiting.pop(next(iter(self._waiting)))
                    self._busy = True
                with suppress(Gone, *_FAILURES), relaxed(self._device):
                    self._save(ids, keys, now)
        finally:
            with self._change:
                if self._thread is threading.current_thread():  # it ends by an error
                    self._thread, self._busy = None, False
                    self._waiting.clear()
                    self._change.notify_all()

    def _save(self, ids: Sequence[int], keys: Sequence[bytes], now: Identity) -> None:
        files = self._files(now)
        reached = files.match(keys) if files is not None else len(keys)
        while files is not None and reached < len(keys):
            end = min(reached + self._tuning.blocks, len(keys))
            tensors = self._read_out(ids, now, reached * self._block, end * self._block)
            after = keys[reached - 1] if reached else b""
            window = ids[reached * self._block : end * self._block]
            if tensors is None or not files.save(keys[reached:end], window, tensors, after):
                return
            reached = end

    def _read_out(self, ids: Sequence[int], now: Identity, start: int, end: int) -> dict[str, Array] | None:
        """Copies the tokens to the host. None where a request uses them, or they were evicted."""
        tensors = {}
        with torch.no_grad(), self._aside(), self._read(ids, now, start, end) as parts:
            if parts is None:
                return None
            for layer in parts.layers:
                for kind, tensor in zip(("keys", "values"), parts(layer), strict=True):
                    if tensor.dtype not in _DTYPES:
                        return None
                    memory = self._memory(tensor.nbytes)
                    array = tensors[f"{layer}.{kind}"] = Array(_DTYPES[tensor.dtype], tuple(tensor.shape), memory)
                    _tensor(array).copy_(tensor)
        return tensors

    def _memory(self, nbytes: int) -> memoryview:
        """Allocates host memory outside of the pool; pinned, if there is any left, where there is a GPU, which copies
        several times as fast from there."""
        if torch_device(self._device).type == "cuda":
            with suppress(RuntimeError):
                return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy().data
        return np.empty(nbytes, np.uint8).data

    def _aside(self) -> AbstractContextManager[object]:
        """A `with` block on the saving thread's own stream, whose copies do not wait for requests."""
        place = torch_device(self._device)
        if place.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(place)
        return torch.cuda.stream(self._stream)

    def _files(self, now: Identity) -> PrefixFiles | None:
        """Returns the files for the model as it is now, None where it has changed meanwhile."""
        model = self._model()
        if model is None:
            return None
        with self._naming:
            if self._known is None or self._known[0] != now.weights:
                digest = fingerprint(model, self._device)
                if self._look().weights != now.weights:
                    return None
                self._known = now.weights, digest
            salt = self._known[1] + now.settings
            if salt not in self._folders:
                self._folders[salt] = PrefixFiles(
                    self._directory, self._limit, salt, self._manager.clock, self._tuning.rest
                )
            return self._folders[salt]


def _tensor(array: Array) -> torch.Tensor:
    """Makes a tensor over the array's memory."""
    dtype = next(dtype for dtype, name in _DTYPES.items() if name == array.dtype)
    return torch.frombuffer(array.data, dtype=torch.uint8).view(dtype).view(array.shape)


def _flushing(saver: weakref.ref[Saver], patience: float) -> Callable[[], None]:
    def flush() -> None:
        if (alive := saver()) is not None:
            alive.flush(patience)

    return flush
