"""Helpers of the probes: telling facts, sizes for the device at hand, and a busy stream."""

from __future__ import annotations

import ctypes
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..defaults import PROBE_BUSY
from .cuda import DEVICE, NOT_READY, Cuda

Tell = Callable[[str, Any], None]
MIB = 2**20


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


@contextmanager
def busy_with(cuda: Cuda, stream: ctypes.c_void_p) -> Iterator[Callable[[], Callable[[], bool]]]:
    """Yields a function that gives the stream work for about `PROBE_BUSY` seconds and returns another: is it still at
    it?"""
    page, pages = sizes(cuda)
    with cuda.mapped(DEVICE, page, 4 * pages) as address, cuda.event() as done:
        nbytes = 4 * page * pages

        def fill() -> None:
            cuda("cuMemsetD8Async", address, 1, nbytes, stream)

        def once() -> None:
            fill()
            cuda("cuStreamSynchronize", stream)

        count = max(1, min(500, int(PROBE_BUSY / max(median_time(once, 3), 1e-6))))

        def begin() -> Callable[[], bool]:
            for _ in range(count):
                fill()
            cuda("cuEventRecord", done, stream)
            return lambda: cuda.code("cuEventQuery", done) == NOT_READY

        yield begin


def returns_at_once(begin: Callable[[], Callable[[], bool]], submit: Callable[[], object]) -> dict[str, Any]:
    """Tells whether a call returns while the work in front of it goes on, and how long it took. `at_once` is None where
    that work had ended before the call."""
    busy = begin()
    was_busy = busy()
    before = time.perf_counter()
    submit()
    taken = time.perf_counter() - before
    return {"at_once": busy() if was_busy else None, "behind_work_us": round(taken * 1e6, 1)}
