"""Probes of the driver: pages that it makes and maps, copies over them, how fast these are, and graphs; and what all
probes use to tell facts and to take times.
"""

from __future__ import annotations

import ctypes
import json
import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from .cuda import DEVICE, HOST, Cuda

Tell = Callable[[str, Any], None]
MIB = 2**20  # bytes


def tell(name: str, value: Any) -> None:
    """Tells one fact, at once: it counts however the probe ends."""
    print(json.dumps({"fact": name, "value": value}), flush=True)


def sizes(cuda: Cuda) -> tuple[int, int]:
    """Returns (bytes of a page, pages of one copy): 64 MiB in ballonet's pages; on the stand-in 8 MiB."""
    return (2 * MIB, 4) if cuda.is_standin else (8 * MIB, 8)


def pattern(seed: int, nbytes: int) -> bytes:
    """Returns bytes that differ everywhere, so that pages which changed places are seen."""
    return random.Random(seed).randbytes(nbytes)


def answered(tell: Tell, name: str, ask: Callable[[], Any]) -> Any:
    """Tells what `ask` returns, or that it failed and how; then returns None."""
    try:
        value = ask()
    except Exception as error:  # whatever it is, it is an answer
        tell(name, {"error": str(error)})
        return None
    tell(name, value)
    return value


def did(tell: Tell, name: str, action: Callable[[], object]) -> bool:
    """Tells that the action went well, or how it failed; returns which it was."""
    return answered(tell, name, lambda: (action(), True)[1]) is True


def median_time(action: Callable[[], object], times: int = 5) -> float:
    """Returns the median seconds of so many runs, after one that does not count."""
    taken = []
    for _ in range(times + 1):
        begin = time.perf_counter()
        action()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


Memory = Callable[[], AbstractContextManager[int]]  # hands out the address of memory of the host


def granularity(cuda: Cuda, tell: Tell) -> None:
    """Which sizes may pages of the device and of the host be?"""
    for name, kind in (("device", DEVICE), ("host", HOST)):
        answered(tell, name, partial(cuda.granularity, kind))
        answered(tell, f"{name}_recommended", partial(cuda.granularity, kind, recommended=True))


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


def copies(cuda: Cuda, tell: Tell) -> None:
    """Are copies of pages of the host right, and are they as fast as those of memory that the driver allocated?"""
    page, count = sizes(cuda)
    nbytes = page * count
    kinds: dict[str, Memory] = {
        "pages": partial(cuda.mapped, HOST, page, count),
        "allocated": partial(cuda.pinned, nbytes),
    }
    with cuda.mapped(DEVICE, page, count) as device, cuda.stream() as stream:
        for kind, memory in kinds.items():
            for way in ("to_device", "from_device"):

                def ask(memory: Memory = memory, way: str = way) -> dict[str, object]:
                    with memory() as host:
                        to, source = (device, host) if way == "to_device" else (host, device)
                        return _copy(cuda, to, source, nbytes, stream)

                answered(tell, f"{kind}_{way}", ask)


def _copy(cuda: Cuda, to: int, source: int, nbytes: int, stream: ctypes.c_void_p) -> dict[str, object]:
    """Makes a copy, and returns whether it was right and how fast it is."""

    def whole() -> None:
        cuda("cuMemcpyAsync", to, source, nbytes, stream)
        cuda("cuStreamSynchronize", stream)

    data = pattern(4, nbytes)
    cuda.write(source, data)
    whole()
    right = cuda.read(to, nbytes) == data
    return {"right": right, "gb_per_s": round(nbytes / median_time(whole) / 1e9, 2)}


def several_handles(cuda: Cuda, tell: Tell) -> None:
    """Is one copy right that spans the ends of pages, or begins and ends in the middle of one?"""
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
