"""The streams that torch uses, and its memory, on the device of a pool."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from ...allocator import install
from ...allocator._native import Device
from ...allocator.errors import DriverError, ManageError
from .marks import relaxed

# (index of a CUDA device) -> the handle of this thread's stream there, of which `torch.cuda.current_stream` makes an
# object; never called where torch was built without CUDA.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
_CAPTURING = range(900, 910)  # the driver's errors for a wait for a stream that is being captured


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
