"""Scenes that end a simulated device, each in a process of its own: `python -m tests.contract.violations NAME LIBRARY`.

A scene that goes as it should prints `done` before the process ends, with whatever status the device gives it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
import threading

from .driver import ILLEGAL_ADDRESS, NOT_INITIALIZED, SUCCESS
from .simulated import GLOBAL, Simulated

PAGE = 64 << 10


def _page(gpu: Simulated) -> tuple[int, int]:
    """An address and the handle that is mapped there."""
    handle, address = gpu.create(PAGE), gpu.reserve(PAGE)
    gpu.map(address, PAGE, handle)
    return address, handle


def _stream(gpu: Simulated) -> int:
    made = ctypes.c_void_p()
    gpu.ok("cuStreamCreate", ctypes.byref(made), 1)
    return made.value or 0


def _never() -> None:
    raise AssertionError("an operation ran that must not")


def _dies(gpu: Simulated, stream: int) -> None:
    """What is queued is passed over, and every call says so from now on."""
    assert gpu.result("cuStreamSynchronize", stream) == ILLEGAL_ADDRESS
    assert gpu.result("cuStreamSynchronize", stream) == ILLEGAL_ADDRESS
    assert gpu.result("cuEventCreate", ctypes.byref(ctypes.c_void_p()), 0) == ILLEGAL_ADDRESS
    assert gpu.launch(stream, _never) == ILLEGAL_ADDRESS
    assert gpu.failures == []


def unmapped_under_a_queued_kernel(gpu: Simulated) -> None:
    (address, _), stream = _page(gpu), _stream(gpu)
    with gpu.held():
        gpu.launch(stream, _never, (address, PAGE, True), name="late_kernel")
        gpu.launch(stream, _never)
        gpu.unmap(address, PAGE)
    _dies(gpu, stream)


def remapped_under_a_queued_kernel(gpu: Simulated) -> None:
    (address, handle), stream = _page(gpu), _stream(gpu)
    with gpu.held():
        gpu.launch(stream, _never, (address + 64, 64, False), name="late_kernel")
        gpu.unmap(address, PAGE)
        gpu.map(address, PAGE, handle)
    _dies(gpu, stream)


def unmapped_under_a_queued_copy(gpu: Simulated) -> None:
    (source, _), (target, _), stream = _page(gpu), _page(gpu), _stream(gpu)
    with gpu.held():
        gpu.ok("cuMemcpyAsync", target, source, PAGE, stream)
        gpu.unmap(source, PAGE)
    _dies(gpu, stream)


def unmapped_under_a_running_kernel(gpu: Simulated) -> None:
    (address, _), stream = _page(gpu), _stream(gpu)
    entered = threading.Event()

    def write() -> None:
        entered.set()
        while gpu.counts().reports == 0:  # until the unmap below has seen it
            ctypes.memset(address, 1, PAGE)
        ctypes.memset(address, 2, PAGE)

    gpu.launch(stream, write, (address, PAGE, True), name="running_kernel")
    entered.wait()
    gpu.unmap(address, PAGE)  # not before the kernel has ended, or this process would be killed
    _dies(gpu, stream)


def unmapped_under_a_graph(gpu: Simulated) -> None:
    (address, handle), stream = _page(gpu), _stream(gpu)
    ran: list[int] = []
    gpu.must("cuStreamBeginCapture_v2", stream, GLOBAL)
    gpu.launch(stream, lambda: ran.append(1), (address, PAGE, True), name="captured_kernel")
    _, graph = gpu.end_capture(stream)
    made = ctypes.c_void_p()
    gpu.must("cuGraphInstantiateWithFlags", ctypes.byref(made), graph, 0)
    gpu.unmap(address, PAGE)
    gpu.map(address, PAGE, handle)
    gpu.must("cuGraphLaunch", made.value or 0, stream)
    gpu.ok("cuStreamSynchronize", stream)
    assert ran == [1], "a replay over pages that were mapped anew before it"
    with gpu.held():
        gpu.must("cuGraphLaunch", made.value or 0, stream)
        gpu.unmap(address, PAGE)
    _dies(gpu, stream)
    assert ran == [1]


def never_mapped(gpu: Simulated) -> None:
    stream, address = _stream(gpu), gpu.reserve(PAGE)
    gpu.launch(stream, _never, (address, 16, False))
    _dies(gpu, stream)


def pageable_memory_in_a_kernel(gpu: Simulated) -> None:
    stream, pageable = _stream(gpu), ctypes.create_string_buffer(PAGE)
    gpu.launch(stream, _never, (ctypes.addressof(pageable), PAGE, False))
    _dies(gpu, stream)


def unregistered_under_a_queued_copy(gpu: Simulated) -> None:
    (target, _), stream, host = _page(gpu), _stream(gpu), mmap.mmap(-1, PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(host))
    gpu.ok("cuMemHostRegister", address, PAGE, 0)
    with gpu.held():
        gpu.ok("cuMemcpyAsync", target, address, PAGE, stream)
        gpu.ok("cuMemHostUnregister", address)
    _dies(gpu, stream)


def a_mapped_file_that_became_shorter(gpu: Simulated) -> None:
    (target, _), stream = _page(gpu), _stream(gpu)
    with tempfile.TemporaryFile() as file:
        file.write(b"w" * PAGE)
        file.flush()
        weights = mmap.mmap(file.fileno(), PAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(weights))
        gpu.ok("cuMemHostRegister", address, PAGE, 0)
        with gpu.held():
            gpu.ok("cuMemcpyAsync", target, address, PAGE, stream)
            file.truncate(0)
        _dies(gpu, stream)


def an_injected_error_stays(gpu: Simulated) -> None:
    """SIMGPU_FAULT=sticky:2."""
    ran: list[int] = []
    stream = _stream(gpu)
    gpu.launch(stream, lambda: ran.append(1))
    gpu.ok("cuStreamSynchronize", stream)
    gpu.launch(stream, _never)
    _dies(gpu, stream)
    assert ran == [1]


def what_is_queued_at_the_end_does_not_hang(gpu: Simulated) -> None:
    stream = _stream(gpu)
    gpu.library.simgpu_hold(1)
    for _ in range(3):
        gpu.launch(stream, _never)


def a_child_of_a_fork_is_refused(gpu: Simulated) -> None:
    stream = _stream(gpu)
    gpu.launch(stream, lambda: None)
    gpu.ok("cuStreamSynchronize", stream)
    child = os.fork()
    if child == 0:
        os._exit(0 if gpu.result("cuStreamSynchronize", stream) == NOT_INITIALIZED else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert gpu.result("cuStreamSynchronize", stream) == SUCCESS


if __name__ == "__main__":
    globals()[sys.argv[1]](Simulated(sys.argv[2]))
    print("done")
