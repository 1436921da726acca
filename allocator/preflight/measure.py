"""Helpers of the probes: telling facts, sizes for the device at hand, and times."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from .cuda import Cuda

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
