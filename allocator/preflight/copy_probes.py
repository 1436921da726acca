"""Probes of copies: does a call return at once, how fast are the bytes, and are they right, for each kind of memory?"""

from __future__ import annotations

import ctypes
import mmap
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy

from .cuda import ATTRIBUTES, DEVICE, HOST, READ_ONLY, Cuda
from .measure import Tell, answered, busy_with, median_time, pattern, returns_at_once, sizes

Memory = Callable[[Cuda, int], Any]  # a context manager that hands out the address of so many bytes on the host


@contextmanager
def pages(cuda: Cuda, nbytes: int) -> Iterator[int]:
    page, _ = sizes(cuda)
    with cuda.mapped(HOST, page, nbytes // page) as address:
        yield address


@contextmanager
def one_handle(cuda: Cuda, nbytes: int) -> Iterator[int]:
    with cuda.mapped(HOST, nbytes) as address:
        yield address


@contextmanager
def allocated(cuda: Cuda, nbytes: int) -> Iterator[int]:
    pointer = ctypes.c_void_p()
    cuda("cuMemHostAlloc", ctypes.byref(pointer), nbytes, 0)
    try:
        yield pointer.value or 0
    finally:
        cuda.code("cuCtxSynchronize")
        cuda.code("cuMemFreeHost", pointer)


@contextmanager
def pageable(cuda: Cuda, nbytes: int) -> Iterator[int]:
    memory = mmap.mmap(-1, nbytes)
    try:
        yield ctypes.addressof((ctypes.c_char * nbytes).from_buffer(memory))
    finally:
        cuda.code("cuCtxSynchronize")


@contextmanager
def registered(cuda: Cuda, nbytes: int) -> Iterator[int]:
    with pageable(cuda, nbytes) as address:
        cuda("cuMemHostRegister", address, nbytes, 0)
        try:
            yield address
        finally:
            cuda.code("cuCtxSynchronize")
            cuda.code("cuMemHostUnregister", address)


@contextmanager
def registered_file(cuda: Cuda, nbytes: int) -> Iterator[int]:
    """Yields a file mapped and registered like weights: read-only where that is offered."""
    with tempfile.TemporaryFile() as file:
        file.write(pattern(3, nbytes))
        file.flush()
        memory = mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ)
        address = int(numpy.frombuffer(memory, numpy.uint8).ctypes.data)
        read_only = READ_ONLY if cuda.attribute(ATTRIBUTES["read_only_register"]) else 0
        cuda("cuMemHostRegister", address, nbytes, read_only)
        try:
            yield address
        finally:
            cuda.code("cuCtxSynchronize")
            cuda.code("cuMemHostUnregister", address)


KINDS: dict[str, Memory] = {
    "pages": pages,
    "one_handle": one_handle,
    "allocated": allocated,
    "registered": registered,
    "pageable": pageable,
}


def copies(cuda: Cuda, tell: Tell) -> None:
    """Which copies return at once, how fast are they, and are the bytes right? Both ways, by the address alone and with
    the direction said."""
    _compare(cuda, tell, KINDS, ("to_device", "from_device"))


def file_copies(cuda: Cuda, tell: Tell) -> None:
    """Asks the same about a file that is mapped and registered, to the device."""
    _compare(cuda, tell, {"registered_file": registered_file}, ("to_device",))


def _compare(cuda: Cuda, tell: Tell, kinds: Mapping[str, Memory], ways: Sequence[str]) -> None:
    page, count = sizes(cuda)
    nbytes = page * count
    with cuda.mapped(DEVICE, page, count) as device, cuda.stream() as stream, busy_with(cuda, stream) as begin:
        for kind, memory in kinds.items():
            for way in ways:
                for call in ("by_address", "with_direction"):

                    def ask(memory: Memory = memory, way: str = way, call: str = call) -> dict[str, Any]:
                        with memory(cuda, nbytes) as host:
                            return _copy(cuda, host, device, nbytes, way, call, stream, begin)

                    answered(tell, f"{kind}_{way}_{call}", ask)
                    cuda.code("cuCtxSynchronize")


def _copy(
    cuda: Cuda,
    host: int,
    device: int,
    nbytes: int,
    way: str,
    call: str,
    stream: ctypes.c_void_p,
    begin: Callable[[], Callable[[], bool]],
) -> dict[str, Any]:
    """Submits the same copy alone and behind other work; GB/s, microseconds of the call, and whether it was right."""
    down = way == "from_device"
    to, source = (host, device) if down else (device, host)
    name = "cuMemcpyAsync" if call == "by_address" else "cuMemcpyDtoHAsync" if down else "cuMemcpyHtoDAsync"

    def submit() -> None:
        cuda(name, to, source, nbytes, stream)

    def whole() -> None:
        submit()
        cuda("cuStreamSynchronize", stream)

    data = ctypes.string_at(host, nbytes)
    if down:
        data = pattern(5, nbytes)
        cuda.write(device, data)
    elif not any(data[:64]):  # a file has its bytes already
        data = pattern(4, nbytes)
        ctypes.memmove(host, data, nbytes)
    whole()
    right = ctypes.string_at(host, nbytes) == data if down else cuda.read(device, nbytes) == data
    seconds = median_time(whole)
    before = time.perf_counter()
    submit()
    call_us = (time.perf_counter() - before) * 1e6
    cuda("cuStreamSynchronize", stream)
    behind = returns_at_once(begin, submit)
    cuda("cuStreamSynchronize", stream)
    return {"right": right, "gb_per_s": round(nbytes / seconds / 1e9, 2), "call_us": round(call_us, 1), **behind}


def several_handles(cuda: Cuda, tell: Tell) -> None:
    """Is one copy right that spans the ends of pages, or begins and ends in the middle of one? May memory be set so?"""
    page, count = sizes(cuda)
    nbytes, edge = page * count, page // 2 + 512
    data = pattern(6, nbytes)
    with (
        cuda.mapped(HOST, page, count) as host,
        cuda.mapped(HOST, page, count) as other,
        cuda.mapped(DEVICE, page, count) as device,
        cuda.mapped(DEVICE, page, count) as second,
        cuda.stream() as stream,
    ):
        for name, source, to in (
            ("to_device", host, device),
            ("from_device", device, host),
            ("on_device", device, second),
            ("on_host", host, other),
        ):

            def ask(source: int = source, to: int = to) -> bool:
                cuda.write(source, data)
                cuda.write(to, bytes(nbytes))
                cuda("cuMemcpyAsync", to + edge, source + edge, nbytes - 2 * edge, stream)
                cuda("cuStreamSynchronize", stream)
                return cuda.read(to, nbytes) == bytes(edge) + data[edge : nbytes - edge] + bytes(edge)

            answered(tell, name, ask)
        for name, size in (("host_page_set", page), ("host_pages_set", nbytes)):

            def set_to(size: int = size) -> bool:
                cuda("cuMemsetD8Async", host, 7, size, stream)
                cuda("cuStreamSynchronize", stream)
                return cuda.read(host, size) == bytes([7]) * size

            answered(tell, name, set_to)


def pieces(cuda: Cuda, tell: Tell) -> None:
    """How fast are pages of the host read in pieces of some size, and both ways at once?"""
    page, count = sizes(cuda)
    nbytes = page * count
    with (
        cuda.mapped(HOST, page, count) as host,
        cuda.mapped(HOST, page, count) as other,
        cuda.mapped(DEVICE, page, count) as device,
        cuda.mapped(DEVICE, page, count) as second,
        cuda.stream() as down,
        cuda.stream() as up,
    ):
        for piece in (2**16, 2**18, 2**20, 2**23):

            def parts(piece: int = piece) -> None:
                for at in range(0, nbytes, piece):
                    cuda("cuMemcpyAsync", device + at, host + at, min(piece, nbytes - at), down)
                cuda("cuStreamSynchronize", down)

            tell(f"{piece // 1024}KiB_gb_per_s", round(nbytes / median_time(parts) / 1e9, 2))

        def both() -> None:
            cuda("cuMemcpyAsync", device, host, nbytes, down)
            cuda("cuMemcpyAsync", other, second, nbytes, up)
            cuda("cuStreamSynchronize", down)
            cuda("cuStreamSynchronize", up)

        tell("both_ways_gb_per_s", round(2 * nbytes / median_time(both) / 1e9, 2))


def graphs(cuda: Cuda, tell: Tell) -> None:
    """Is a CUDA graph right that is replayed after a page it reads was replaced by another, also one of the host?"""
    page, _ = sizes(cuda)
    first, second, third = (pattern(seed, page) for seed in (7, 8, 9))
    handles = [cuda.create(page, cuda.properties(kind)) for kind in (DEVICE, DEVICE, HOST)]
    address, graph, executable = cuda.reserve(page), ctypes.c_void_p(), ctypes.c_void_p()
    cuda.map(address, handles[:1], page, DEVICE)
    cuda.write(address, first)
    with cuda.mapped(DEVICE, page) as out, cuda.stream() as stream:
        cuda("cuStreamBeginCapture", stream, 2)  # relaxed
        cuda("cuMemcpyAsync", out, address, page, stream)
        cuda("cuStreamEndCapture", stream, ctypes.byref(graph))
        cuda("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, 0)

        def replay(expected: bytes) -> bool:
            cuda("cuGraphLaunch", executable, stream)
            cuda("cuStreamSynchronize", stream)
            return cuda.read(out, page) == expected

        answered(tell, "as_captured", lambda: replay(first))
        for name, handle, kind, data in (
            ("another_page", handles[1], DEVICE, second),
            ("host_page", handles[2], HOST, third),
        ):

            def ask(handle: int = handle, kind: int = kind, data: bytes = data) -> bool:
                cuda("cuMemUnmap", address, page)
                cuda.map(address, [handle], page, kind)
                cuda.write(address, data)
                return replay(data)

            answered(tell, name, ask)
