"""Probes of pages: what the driver says, what it creates and maps, how long that takes, and what it waits for."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable
from functools import partial

from .cuda import ATTRIBUTES, DEVICE, HOST, POSIX_FD, Cuda, DriverRefused, Properties
from .measure import MIB, Tell, answered, busy_with, did, median_time, pattern, returns_at_once, sizes

PAGE_SIZES = (2 * MIB, 8 * MIB, 32 * MIB)


def device(cuda: Cuda, tell: Tell) -> None:
    """What is it, and what does its driver claim to be able to do?"""
    version, total, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    cuda("cuDriverGetVersion", ctypes.byref(version))
    cuda("cuDeviceGetName", name, len(name), cuda.device)
    cuda("cuDeviceTotalMem", ctypes.byref(total), cuda.device)
    tell("name", name.value.decode())
    tell("driver_version", version.value)
    tell("total_memory", total.value)
    tell("attributes", {name: cuda.attribute(number) for name, number in ATTRIBUTES.items()})


def granularity(cuda: Cuda, tell: Tell) -> None:
    """Which sizes may pages of the device and of the host be?"""
    for name, kind in (("device", DEVICE), ("host", HOST)):
        answered(tell, name, partial(cuda.granularity, kind))
        answered(tell, f"{name}_recommended", partial(cuda.granularity, kind, recommended=True))


def handles(cuda: Cuda, tell: Tell) -> None:
    """Which kinds of handles can be made, and with which flags?"""
    page, _ = sizes(cuda)
    for where, kind in (("device", DEVICE), ("host", HOST)):
        for name, types, rdma in (
            ("plain", 0, False),
            ("posix", POSIX_FD, False),
            ("posix_rdma", POSIX_FD, True),
            ("fabric", 8, False),
        ):
            did(tell, f"{where}_{name}", partial(_make, cuda, page, cuda.properties(kind, types, rdma)))


def _make(cuda: Cuda, page: int, properties: Properties) -> None:
    cuda("cuMemRelease", cuda.create(page, properties))


def host_pages(cuda: Cuda, tell: Tell) -> None:
    """Can pages of the host stand behind addresses of the device? One is created, mapped, opened and copied through."""
    page, _ = sizes(cuda)
    data = pattern(1, page)
    handle = answered(tell, "create", lambda: cuda.create(page, cuda.properties(HOST)))
    if handle is None:
        return
    address = cuda.reserve(page)
    did(tell, "map", lambda: cuda("cuMemMap", address, page, 0, handle, 0))
    both = did(tell, "open_for_both", lambda: cuda.open(address, page, HOST))
    if not both and not did(tell, "open_for_device", lambda: cuda.open(address, page, DEVICE)):
        return
    did(tell, "copied_there", lambda: cuda.write(address, data))
    answered(tell, "copied_back", lambda: cuda.read(address, page) == data)
    back = pattern(2, page)
    with cuda.mapped(DEVICE, page) as there, cuda.stream() as stream:

        def copied(to: int, source: int, expected: bytes) -> bool:
            cuda.write(source, expected)
            cuda("cuMemcpyAsync", to, source, page, stream)
            cuda("cuStreamSynchronize", stream)
            return cuda.read(to, page) == expected

        answered(tell, "to_device", lambda: copied(there, address, data))
        answered(tell, "from_device", lambda: copied(address, there, back))
    if both:
        tell("cpu_reads", ctypes.string_at(address, page) == back)  # may end this process: nothing is asked after it


def numa(cuda: Cuda, tell: Tell) -> None:
    """On which NUMA nodes of the host can pages be made?"""
    page, _ = sizes(cuda)
    for node in range(8):
        properties = cuda.properties(HOST)
        properties.location = cuda.location(HOST, node)
        did(tell, f"node_{node}", partial(_make, cuda, page, properties))


def aliases(cuda: Cuda, tell: Tell) -> None:
    """Is what was written through one address of a page read through another, in stream order?"""
    page, _ = sizes(cuda)
    rounds = 50
    handle = cuda.create(page, cuda.properties(DEVICE))
    first, second = cuda.reserve(page), cuda.reserve(page)
    cuda.map(first, [handle], page, DEVICE)
    cuda.map(second, [handle], page, DEVICE)
    with cuda.mapped(DEVICE, page) as out, cuda.stream() as stream:
        right = 0
        for value in range(rounds):
            cuda("cuMemsetD8Async", first, value, page, stream)
            cuda("cuMemcpyAsync", out, second, page, stream)
            cuda("cuStreamSynchronize", stream)
            right += cuda.read(out, page) == bytes([value]) * page
    tell("rounds", rounds)
    tell("right", right)


def page_tables(cuda: Cuda, tell: Tell) -> None:
    """How long do calls for page tables take, by the size of a page?"""
    for where, kind in (("device", DEVICE), ("host", HOST)):
        for page in PAGE_SIZES[:1] if cuda.is_standin else PAGE_SIZES:
            answered(tell, f"{where}_{page // MIB}MiB_us", partial(_page_tables, cuda, kind, page))


def _page_tables(cuda: Cuda, kind: int, page: int) -> dict[str, float]:
    """Microseconds per page, of eight; `open_together`: all eight opened by one call."""
    pages = 8
    address, spent = cuda.reserve(page * pages), {}
    clock = time.perf_counter

    def timed(name: str, per: int, begin: float) -> None:
        spent[name] = round((clock() - begin) / per * 1e6, 2)

    begin = clock()
    handles = [cuda.create(page, cuda.properties(kind)) for _ in range(pages)]
    timed("create", pages, begin)
    begin = clock()
    for index, handle in enumerate(handles):
        cuda("cuMemMap", address + index * page, page, 0, handle, 0)
    timed("map", pages, begin)
    begin = clock()
    cuda.open(address, page, kind)
    timed("open", 1, begin)
    begin = clock()
    cuda.open(address, page * pages, kind)
    timed("open_together", pages, begin)
    begin = clock()
    for index in range(pages):
        cuda("cuMemUnmap", address + index * page, page)
    timed("unmap", pages, begin)
    begin = clock()
    for handle in handles:
        cuda("cuMemRelease", handle)
    timed("release", pages, begin)
    cuda("cuMemAddressFree", address, page * pages)
    return spent


def beside_work(cuda: Cuda, tell: Tell) -> None:
    """Do calls for page tables, and events, wait for what the device is at?"""
    page, _ = sizes(cuda)
    address = cuda.reserve(page)
    handle = cuda.create(page, cuda.properties(DEVICE))
    with cuda.stream() as stream, busy_with(cuda, stream) as begin, cuda.event() as event:
        answered(tell, "map", lambda: returns_at_once(begin, lambda: cuda("cuMemMap", address, page, 0, handle, 0)))
        cuda("cuCtxSynchronize")
        answered(tell, "open", lambda: returns_at_once(begin, lambda: cuda.open(address, page, DEVICE)))
        cuda("cuCtxSynchronize")
        answered(tell, "unmap", lambda: returns_at_once(begin, lambda: cuda("cuMemUnmap", address, page)))
        cuda("cuCtxSynchronize")
        answered(tell, "release", lambda: returns_at_once(begin, lambda: cuda("cuMemRelease", handle)))
        cuda("cuCtxSynchronize")
        tell("record_us", round(median_time(lambda: cuda("cuEventRecord", event, stream), 50) * 1e6, 2))
        tell("query_us", round(median_time(lambda: cuda.code("cuEventQuery", event), 50) * 1e6, 2))


def pinning(cuda: Cuda, tell: Tell) -> None:
    """How long does it take to pin memory, and does another thread's mapping wait for it?"""
    page, pages = sizes(cuda)
    nbytes = page * pages * (1 if cuda.is_standin else 4)
    gib = nbytes / 2**30

    def host_handles() -> float:
        begin = time.perf_counter()
        made = [cuda.create(page, cuda.properties(HOST)) for _ in range(nbytes // page)]
        taken = time.perf_counter() - begin
        for handle in made:
            cuda("cuMemRelease", handle)
        return round(taken / gib, 3)

    def registered() -> float:
        with mmap.mmap(-1, nbytes) as memory:
            held = (ctypes.c_char * nbytes).from_buffer(memory)
            try:
                begin = time.perf_counter()
                cuda("cuMemHostRegister", ctypes.addressof(held), nbytes, 0)
                taken = time.perf_counter() - begin
                cuda("cuMemHostUnregister", ctypes.addressof(held))
            finally:
                del held
        return round(taken / gib, 3)

    def allocated() -> float:
        pointer = ctypes.c_void_p()
        begin = time.perf_counter()
        cuda("cuMemHostAlloc", ctypes.byref(pointer), nbytes, 0)
        taken = time.perf_counter() - begin
        cuda("cuMemFreeHost", pointer)
        return round(taken / gib, 3)

    for name, ask in (("host_pages", host_handles), ("registered", registered), ("allocated", allocated)):
        answered(tell, f"{name}_s_per_gib", ask)
    answered(tell, "longest_map_meanwhile_us", lambda: _map_beside(cuda, host_handles))


def _map_beside(cuda: Cuda, pin: Callable[[], object]) -> float:
    """The longest that mapping a page of the device took on this thread while another one pinned."""
    page, _ = sizes(cuda)
    handle, address = cuda.create(page, cuda.properties(DEVICE)), cuda.reserve(page)
    failed: list[Exception] = []

    def other() -> None:
        try:
            cuda.enter()
            pin()
        except DriverRefused as error:
            failed.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    longest = 0.0
    while thread.is_alive():
        begin = time.perf_counter()
        cuda.map(address, [handle], page, DEVICE)
        longest = max(longest, time.perf_counter() - begin)
        cuda("cuMemUnmap", address, page)
    thread.join()
    if failed:
        raise failed[0]
    return round(longest * 1e6, 1)
