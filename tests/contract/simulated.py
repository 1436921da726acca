"""The simulated device through ctypes: the driver's calls that only an asynchronous device makes interesting."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .driver import Driver

LEGACY, PER_THREAD = 0, 2  # streams
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2  # modes of a capture
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_UNJOINED, CAPTURE_ISOLATION = 900, 901, 904, 905
CAPTURE_IMPLICIT, CAPTURED_EVENT = 906, 907

_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_uint64), ("size", ctypes.c_uint64), ("write", ctypes.c_int))


class Counts(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            "operations", "kernels", "maps", "unmaps", "unmaps_busy", "synchronizations", "launches", "reports",
            "queued_most",
        )
    )  # fmt: skip


class Simulated(Driver):
    """A started simulated device. Functions that it runs are functions of Python; they are kept alive here."""

    def __init__(self, path: object) -> None:
        super().__init__(str(path))
        self._alive: list[object] = []
        self.failures: list[BaseException] = []  # of functions that it ran
        self.start()

    def call(self, symbol: str, *arguments: Any) -> int:
        """Calls a function that `driver_abi.h` does not list; ints are passed as 64 bits."""
        function = getattr(self.library, symbol)
        return function(*(ctypes.c_uint64(value) if type(value) is int else value for value in arguments))

    def must(self, symbol: str, *arguments: Any) -> None:
        result = self.call(symbol, *arguments)
        assert result == 0, f"{symbol} = {result}"

    def counts(self) -> Counts:
        counts = Counts()
        self.library.simgpu_counts(ctypes.byref(counts))
        return counts

    @contextmanager
    def held(self) -> Iterator[None]:
        """No operation begins."""
        self.library.simgpu_hold(1)
        try:
            yield
        finally:
            self.library.simgpu_hold(0)

    def _callback(self, run: Callable[[], object]) -> Any:
        def run_and_keep_what_fails(_: object) -> None:
            try:
                run()
            except BaseException as error:
                self.failures.append(error)

        made = _CALLBACK(run_and_keep_what_fails)
        self._alive.append(made)
        return made

    def launch(
        self,
        stream: int,
        run: Callable[[], object],
        *ranges: tuple[int, int, bool],
        drop: Callable[[], object] | None = None,
        name: str = "kernel",
    ) -> int:
        """Queues a kernel; `ranges`: address, bytes, is it written."""
        run_it, drop_it = self._callback(run), self._callback(drop) if drop else _CALLBACK(0)
        table = (Range * max(len(ranges), 1))(*(Range(*one) for one in ranges))
        return self.call("simgpu_launch", stream, name.encode(), run_it, drop_it, 0, table, len(ranges))

    def host_function(self, stream: int, run: Callable[[], object]) -> int:
        return self.call("cuLaunchHostFunc", stream, self._callback(run), 0)

    @contextmanager
    def blocking_stream(self) -> Iterator[int]:
        made = ctypes.c_void_p()
        self.ok("cuStreamCreate", ctypes.byref(made), 0)
        assert made.value is not None
        yield made.value
        self.ok("cuStreamSynchronize", made)
        self.ok("cuStreamDestroy", made)

    def end_capture(self, stream: int) -> tuple[int, int]:
        """The result and the graph."""
        graph = ctypes.c_void_p()
        result = self.call("cuStreamEndCapture", stream, ctypes.byref(graph))
        return result, graph.value or 0

    @contextmanager
    def executable(self, graph: int) -> Iterator[int]:
        """The graph itself is destroyed at once: an executable needs it no more."""
        made = ctypes.c_void_p()
        self.must("cuGraphInstantiateWithFlags", ctypes.byref(made), graph, 0)
        self.must("cuGraphDestroy", graph)
        yield made.value or 0
        self.must("cuGraphExecDestroy", made.value or 0)

    @contextmanager
    def pinned(self, nbytes: int) -> Iterator[int]:
        made = ctypes.c_void_p()
        self.must("cuMemHostAlloc", ctypes.byref(made), nbytes, 0)
        yield made.value or 0
        self.must("cuMemFreeHost", made.value or 0)
