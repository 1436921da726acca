"""The stream and the memory of one model's graphs.

Note [One stream]
    Recorded steps, captures and replays of a model run on a stream of its own, which waits for the caller's and which
    the caller's waits for. So no two steps over one pool overlap, whichever threads run them; and a cuBLAS workspace,
    which torch keeps for each stream, is the same in eager calls and in graphs.

Note [Workspaces]
    A graph holds the address of cuBLAS' workspace. Made within a capture it would lie in the graphs' pool; and some
    versions of torch free the workspaces of a stream with the first graph that is reset (pytorch 193402), after which
    others replay into memory that may be somebody's. So they are made beforehand, in a pool of their own from which
    nothing else is allocated, and which is kept until all graphs are gone.

Note [Captures of our own]
    These go to torch's class itself: the listeners of allocator/captures.py, which keep resident what a program's own
    graphs read, are not told. Only who decides where a thread allocates steps aside (`captures.aside`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import torch

from ...allocator import captures
from ...allocator.interrupts import Guarded, guarded
from ..device.streams import raw_stream


class GraphPool:
    """What the graphs of one model are captured on and into, from the first one until `close`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.handle: int = self.stream.cuda_stream
        self.captured = 0  # graphs so far
        self._users: dict[int, Any] = {}  # streams that steps were run for, by handle
        self._last = -1  # the handle of that of the last step
        self._came, self._went = torch.cuda.Event(), torch.cuda.Event()
        self._pool: Any = None  # torch's handle, from the first capture on
        self._workspaces: Any = None

    def entered(self) -> Guarded[None]:
        """A `with` block whose work is done on the stream, after that of the current one, which then waits for it."""
        current = self._current()

        def begin() -> None:
            _order(current, self._came, self.stream)
            _enter(self.stream)

        def end(failed: bool) -> None:
            _enter(current)
            _order(self.stream, self._went, current)

        return guarded(begin, end)

    def _current(self) -> Any:
        """Returns this thread's current stream. Where it is another one than that of the last step, work of all others
        comes first: it may still read memory that is used anew on ours, or copy what the last step has returned."""
        handle = raw_stream(self.device.index)
        if handle != self._last:
            self._users.setdefault(handle, torch.cuda.current_stream(self.device))
            for user in self._users.values():
                self.stream.wait_stream(user)
            self._last = handle
        return self._users[handle]

    def capture(self, work: Iterable[Callable[[], object]]) -> Callable[[], None]:
        """Captures the calls of `work` on the stream, which is current, and returns the function that replays them.
        After a failure, of whatever kind, nothing is being captured."""
        self._prepare()
        graph = torch._C._CUDAGraph()
        capturing = False

        def begin() -> None:
            nonlocal capturing
            if not capturing:
                capturing = True
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def end(failed: bool) -> None:
            nonlocal capturing
            if capturing and torch.cuda.is_current_stream_capturing():
                self._end(graph)
            capturing = False

        with _no_collection(), captures.aside(self), guarded(begin, end):
            for act in work:
                act()
        self.captured += 1
        replay: Callable[[], None] = graph.replay
        return replay

    def close(self) -> None:
        """Gives back the memory, once no graph is left. Idempotent."""
        for pool in (self._pool, self._workspaces):
            if pool is not None:
                torch._C._cuda_releasePool(self.device.index, pool)
        self._pool = self._workspaces = None

    def holds_only(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Are these, of those that lie in the graphs' memory, all that is allocated there, as far as torch tells?"""
        addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        live = {
            block["address"]
            for segment in self._segments()
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        }
        return live <= addresses

    def nbytes(self) -> int:
        """Bytes of the device that the graphs' memory takes, as far as torch tells."""
        return sum(segment["total_size"] for segment in self._segments())

    def _segments(self) -> list[dict[str, Any]]:
        pools = [tuple(pool) for pool in (self._pool, self._workspaces) if pool is not None]
        try:
            segments = torch._C._cuda_memorySnapshot(None)["segments"] if pools else []
        except RuntimeError:  # an allocator that has no snapshots
            return []
        return [segment for segment in segments if tuple(segment["segment_pool_id"]) in pools[:1]]

    def _prepare(self) -> None:
        """Makes the pools and the workspaces of the stream."""
        if self._pool is not None:
            return
        small = torch.ones((16, 16), dtype=torch.bfloat16, device=self.device)
        with captures.aside(self), self._allocating(handle := torch._C._graph_pool_handle()):
            self._workspaces = handle
            for matrix in (small, small.float()):
                torch.addmm(matrix[0], matrix, matrix)
                torch.mm(matrix, matrix)
        # The pool outlives the first graph, whatever becomes of that.
        with torch.cuda.device(self.device), self._allocating(handle := torch._C._graph_pool_handle()):
            self._pool = handle

    def _allocating(self, pool: Any) -> Guarded[None]:
        """A `with` block in which this thread allocates from that pool."""
        index = self.device.index

        def end(failed: bool) -> None:
            with suppress(RuntimeError):  # it had not begun
                torch._C._cuda_endAllocateToPool(index, pool)

        return guarded(partial(torch._C._cuda_beginAllocateCurrentThreadToPool, index, pool), end)

    def _end(self, graph: Any) -> None:
        """Ends the capture, also one that has failed."""
        try:
            graph.capture_end()
        except RuntimeError:
            with suppress(RuntimeError):  # torch has ended the stream's capture, but not the use of the pool
                torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
            raise


_without_collection: Final = set[object]()  # blocks that run, on all threads


def _no_collection() -> Guarded[None]:
    """A `with` block in which Python collects nothing: what is collected may free graphs or wait for the device, which
    ends a capture. Where several run, until the last of them ends."""
    block, collects = object(), gc.isenabled() or bool(_without_collection)

    def begin() -> None:
        _without_collection.add(block)
        gc.disable()

    def end(failed: bool) -> None:
        _without_collection.discard(block)
        if collects and not _without_collection:
            gc.enable()

    return guarded(begin, end)


# What torch's functions of these names do, for each token, without the three functions that they take to it.


def _order(before: Any, event: Any, after: Any) -> None:
    """Has a stream wait for what another one has been given so far."""
    _EVENT.record(event, before)
    _EVENT.wait(event, after)


def _enter(stream: Any) -> None:
    """Makes a stream this thread's current one."""
    torch._C._cuda_setStream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


_EVENT: Final = torch._C._CudaEventBase
