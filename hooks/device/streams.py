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
# object; where torch was built without CUDA nobody asks.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
_CAPTURING = range(900, 910)  # what the driver answers to whoever waits for a stream that is being captured


def wait_for_work(device: Device) -> None:
    """Returns when the device has done all that was submitted to it, on any stream. ManageError while a CUDA graph is
    being captured, DriverError."""
    try:
        with relaxed(device):
            device.synchronize()
    except DriverError as error:
        if error.code in _CAPTURING:
            raise ManageError("a CUDA graph is being captured on another thread: call manage() afterwards") from error
        raise


def torch_device(device: Device) -> torch.device:
    """Where the tensors of `device` are for torch."""
    return torch.device("cuda", device.ordinal) if device.kind == "cuda" else torch.device("cpu")


def torch_memory(device: Device) -> AbstractContextManager[None]:
    """Within it, what this thread allocates on the CPU comes from torch's own allocator. Changes nothing on CUDA."""
    return install.stock() if device.kind == "standin" else nullcontext()


def stream_of(device: Device) -> Callable[[], int]:
    """What returns this thread's current stream."""
    if device.kind == "standin":
        return int  # which is 0
    return partial(raw_stream, device.ordinal)


def note_of(device: Device) -> Callable[[int, int, bool], None]:
    """What tells the device that this thread's current stream uses (address, bytes, whether it writes)."""
    stream = stream_of(device)
    if device.kind == "standin":
        return lambda address, nbytes, write: device.note_use(address, nbytes, 0, write)
    return lambda address, nbytes, write: device.note_stream(stream())
