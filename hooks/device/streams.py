"""The streams that torch uses on the device of a pool, its memory there, and moments in the work of a stream: the time
between them is known without the host ever waiting for it.

Note [Marks]
    On a GPU a mark is an event with a time; it is read once it has passed and used again. Querying an event breaks a
    capture that any other thread has begun in the usual mode, unless the querying thread is in the relaxed mode, as the
    core's own threads are.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Final, Protocol

import torch

from ...allocator import devices, install
from ...allocator._native import Device
from ...allocator.errors import DriverError, ManageError

# (index of a CUDA device) -> the handle of this thread's stream there, of which `torch.cuda.current_stream` makes an
# object; never called where torch was built without CUDA.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
_CAPTURING = range(900, 910)  # the driver's errors for a wait for a stream that is being captured
_RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def wait_for_work(device: Device) -> None:
    """Waits until the device has done all submitted work, on any stream. ManageError while a CUDA graph is being
    captured, DriverError."""
    try:
        with relaxed(device):
            device.synchronize()
    except DriverError as error:
        if error.code in _CAPTURING:
            raise ManageError("a CUDA graph is being captured on another thread: call manage() afterwards") from error
        raise


def torch_device(device: Device) -> torch.device:
    """Returns torch's device for the tensors of `device`."""
    return torch.device("cuda", device.ordinal) if device.kind == "cuda" else torch.device("cpu")


def torch_memory(device: Device) -> AbstractContextManager[None]:
    """A `with` block in which this thread's allocations on the CPU come from torch's own allocator. Does nothing on
    CUDA."""
    return install.stock() if device.kind == "standin" else nullcontext()


def stream_of(device: Device) -> Callable[[], int]:
    """Returns the function that returns this thread's current stream."""
    if device.kind == "standin":
        return int  # returns 0
    return partial(raw_stream, device.ordinal)


def note_of(device: Device) -> Callable[[int, int, bool], None]:
    """Returns the function that tells the device that this thread's stream uses (address, bytes, whether it writes)."""
    stream = stream_of(device)
    if device.kind == "standin":
        return lambda address, nbytes, write: device.note_use(address, nbytes, 0, write)
    return lambda address, nbytes, write: device.note_stream(stream())


class Marks(Protocol):
    """Moments in the work of this thread's current stream. `ahead`: the host goes on while that work is done."""

    ahead: bool

    def capturing(self) -> bool:
        """Is the stream being captured?"""

    def mark(self) -> Any:
        """The moment at which all that was submitted so far is done."""

    def passed(self, marks: Iterable[Any]) -> bool:
        """Have all of these marks passed?"""

    def seconds(self, first: Any, last: Any) -> float:
        """Returns the seconds between two marks that have passed."""

    def release(self, marks: Iterable[Any]) -> None:
        """Gives back the events of the marks."""

    def read(self, marks: Sequence[Any]) -> list[float] | None:
        """Returns the seconds from the first of these to each of them, and releases them; None, and nothing has
        happened, unless all have passed."""


class HostMarks:
    """Marks of a device on which an operator is complete when it returns."""

    ahead = False
    capturing = staticmethod(bool)  # returns False

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        """`clock`: ns."""
        self.mark = clock

    def passed(self, marks: Iterable[int]) -> bool:
        return True

    def seconds(self, first: int, last: int) -> float:
        return (last - first) / 1e9

    def release(self, marks: Iterable[int]) -> None:
        """Does nothing: these marks hold no events."""

    def read(self, marks: Sequence[int]) -> list[float] | None:
        times = []
        for mark in marks:  # in one call, as it runs for each token
            times.append((mark - marks[0]) / 1e9)
        return times


class CudaMarks:
    """Marks that are CUDA events: see Note [Marks]."""

    ahead = True

    def __init__(self, ordinal: int, library: str) -> None:
        """`library`: the name of the driver's."""
        self._ordinal = ordinal
        self._free: list[torch.cuda.Event] = []
        self._exchange = _exchange(library)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def mark(self) -> torch.cuda.Event:
        try:
            event = self._free.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._ordinal))
        return event

    def passed(self, marks: Iterable[torch.cuda.Event]) -> bool:
        with _relaxed(self._exchange):
            return all(mark.query() for mark in marks)

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        with _relaxed(self._exchange):
            return float(first.elapsed_time(last)) / 1e3

    def release(self, marks: Iterable[torch.cuda.Event]) -> None:
        self._free.extend(marks)

    def read(self, marks: Sequence[torch.cuda.Event]) -> list[float] | None:
        if not self.passed(reversed(marks)):
            return None
        times = [self.seconds(marks[0], mark) for mark in marks]
        self.release(marks)
        return times


def marks_of(device: Device, clock: Callable[[], int] = time.perf_counter_ns) -> Marks:
    """Returns the marks of this device's streams. `clock`: ns, for marks of the host."""
    return HostMarks(clock) if device.kind == "standin" else CudaMarks(device.ordinal, _library(device))


def relaxed(device: Device) -> AbstractContextManager[None]:
    """A `with` block in which this thread breaks no capture that another one has begun, as calls of torch that wait for
    a stream do in the usual mode. See Note [Marks]."""
    return nullcontext() if device.kind == "standin" else _relaxed(_exchange(_library(device)))


def _library(device: Device) -> str:
    return devices.holding(device).library


def _exchange(library: str) -> Callable[[object], object]:
    function: Callable[[object], object] = ctypes.CDLL(library).cuThreadExchangeStreamCaptureMode
    return function


@contextmanager
def _relaxed(exchange: Callable[[object], object]) -> Iterator[None]:
    mode = ctypes.c_int(_RELAXED)
    failed = exchange(ctypes.byref(mode))  # `mode` now holds the one before
    try:
        yield
    finally:
        if not failed:
            exchange(ctypes.byref(mode))
