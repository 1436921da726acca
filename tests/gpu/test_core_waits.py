"""Whom the driver lets wait, and what NVML counts: promises about time, which only a real GPU keeps or breaks."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from statistics import median
from typing import Any

import numpy
import pytest
import torch

from ballonet.allocator.preflight.cuda import ATTRIBUTES, DEVICE, HOST, Cuda
from ballonet.allocator.preflight.driver_probes import median_time, sizes
from ballonet.allocator.preflight.torch_probes import opened, place

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("SIMGPU_HOME" in os.environ, reason="the simulated device keeps no promise about time"),
]
LIBRARY = "libcuda.so.1"
NOT_READY = 600
POSIX_FD = 1
READ_ONLY = 8  # CU_MEMHOSTREGISTER_READ_ONLY
BUSY = 0.03  # seconds of work in front of a call: longer than the host needs to make it


@pytest.fixture
def cuda() -> Cuda:
    return Cuda(LIBRARY)


@contextmanager
def busy_stream(cuda: Cuda) -> Iterator[tuple[ctypes.c_void_p, Callable[[], Callable[[], bool]]]]:
    """A stream, and a function that gives it work for about `BUSY` seconds and returns whether it is still at it."""
    page, pages = sizes(cuda)
    nbytes = 4 * page * pages
    with cuda.stream() as stream, cuda.mapped(DEVICE, page, 4 * pages) as address, cuda.event() as done:

        def fill() -> None:
            cuda("cuMemsetD8Async", address, 1, nbytes, stream)

        def fill_and_wait() -> None:
            fill()
            cuda("cuStreamSynchronize", stream)

        count = max(1, min(500, int(BUSY / median_time(fill_and_wait, 3))))

        def begin() -> Callable[[], bool]:
            for _ in range(count):
                fill()
            cuda("cuEventRecord", done, stream)
            return lambda: cuda.code("cuEventQuery", done) == NOT_READY

        yield stream, begin


def returns_at_once(begin: Callable[[], Callable[[], bool]], call: Callable[[], object]) -> bool:
    """Whether the call returns while the work in front of it goes on; True, too, where that had ended before."""
    is_busy = begin()
    was_busy = is_busy()
    call()
    return is_busy() or not was_busy


def test_page_calls_return_while_the_device_is_busy(cuda: Cuda) -> None:
    page, _ = sizes(cuda)
    address, handle = cuda.reserve(page), cuda.create(page, cuda.properties(DEVICE))
    calls: dict[str, Callable[[], object]] = {
        "map": lambda: cuda("cuMemMap", address, page, 0, handle, 0),
        "open": lambda: cuda.open(address, page, DEVICE),
        "unmap": lambda: cuda("cuMemUnmap", address, page),
        "release": lambda: cuda("cuMemRelease", handle),
    }
    with busy_stream(cuda) as (_, begin):
        waited = []
        for name, call in calls.items():
            waited += [] if returns_at_once(begin, call) else [name]
            cuda("cuCtxSynchronize")
    assert waited == []


@contextmanager
def registered_file(cuda: Cuda, nbytes: int) -> Iterator[int]:
    """A file that is mapped and registered as weights are."""
    with tempfile.TemporaryFile() as file:
        file.write(bytes(nbytes))
        file.flush()
        memory = mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ)
        address = int(numpy.frombuffer(memory, numpy.uint8).ctypes.data)
        cuda("cuMemHostRegister", address, nbytes, READ_ONLY if cuda.attribute(ATTRIBUTES["read_only_register"]) else 0)
        try:
            yield address
        finally:
            cuda.code("cuCtxSynchronize")
            cuda.code("cuMemHostUnregister", address)


def test_copies_of_host_memory_return_while_the_stream_is_busy(cuda: Cuda) -> None:
    page, count = sizes(cuda)
    nbytes = page * count
    with ExitStack() as stack:
        host = stack.enter_context(cuda.mapped(HOST, page, count))
        file = stack.enter_context(registered_file(cuda, nbytes))
        device = stack.enter_context(cuda.mapped(DEVICE, page, count))
        stream, begin = stack.enter_context(busy_stream(cuda))
        waited = []
        ways = {"to device": (device, host), "from device": (host, device), "of a file": (device, file)}
        for name, (to, source) in ways.items():
            cuda("cuMemcpyAsync", to, source, nbytes, stream)
            cuda("cuStreamSynchronize", stream)
            if not returns_at_once(begin, lambda: cuda("cuMemcpyAsync", to, source, nbytes, stream)):  # noqa: B023
                waited.append(name)
            cuda("cuStreamSynchronize", stream)
    assert waited == []


def test_torch_copies_over_host_pages_return_while_the_stream_is_busy() -> None:
    with opened(LIBRARY, 0) as device:
        host, here, work = place(device, "host"), place(device, "device"), place(device, "device", 32).tensor
        done = torch.cuda.Event()

        def begin() -> Callable[[], bool]:
            for _ in range(300):
                work.fill_(1)
            done.record()
            return lambda: not done.query()

        for to, source in ((here, host), (host, here)):
            to.tensor.copy_(source.tensor)
            torch.cuda.synchronize()
            assert returns_at_once(begin, lambda: to.tensor.copy_(source.tensor, non_blocking=True))  # noqa: B023


def test_mapping_waits_at_most_20_ms_for_a_thread_that_pins(cuda: Cuda) -> None:
    page, pages = sizes(cuda)
    handle, address = cuda.create(page, cuda.properties(DEVICE)), cuda.reserve(page)
    errors: list[Exception] = []

    def pin() -> None:
        try:
            cuda.enter()
            for made in [cuda.create(page, cuda.properties(HOST)) for _ in range(4 * pages)]:
                cuda("cuMemRelease", made)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=pin)
    thread.start()
    longest = 0.0
    while thread.is_alive():
        before = time.perf_counter()
        cuda.map(address, [handle], page, DEVICE)
        longest = max(longest, time.perf_counter() - before)
        cuda("cuMemUnmap", address, page)
    thread.join()
    cuda("cuMemRelease", handle)
    assert errors == []
    assert longest <= 0.02


def test_pages_for_other_processes_are_made_where_they_are_claimed(cuda: Cuda) -> None:
    if cuda.attribute(ATTRIBUTES["posix_handles"]):
        page, _ = sizes(cuda)
        cuda("cuMemRelease", cuda.create(page, cuda.properties(DEVICE, POSIX_FD)))


def test_nvml_counts_copies_within_15_percent() -> None:
    pynvml: Any = import_module("pynvml")
    pynvml.nvmlInit()
    with opened(LIBRARY, 0) as device:
        uuid = f"GPU-{torch.cuda.get_device_properties(device.ordinal).uuid}"
        gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        host, here = place(device, "host"), place(device, "device")
        stop, copied = threading.Event(), [0]

        def copy() -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not stop.is_set():
                    here.tensor.copy_(host.tensor, non_blocking=True)
                    torch.cuda.current_stream().synchronize()
                    copied[0] += host.tensor.numel()

        thread = threading.Thread(target=copy)
        thread.start()
        try:
            time.sleep(0.1)
            bytes_before, before = copied[0], time.perf_counter()
            looks = [pynvml.nvmlDeviceGetPcieThroughput(gpu, pynvml.NVML_PCIE_UTIL_RX_BYTES) * 1024 for _ in range(10)]
            rate = (copied[0] - bytes_before) / (time.perf_counter() - before)
        finally:
            stop.set()
            thread.join()
        assert median(looks) == pytest.approx(rate, rel=0.15)
