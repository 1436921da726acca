"""Allocate and free: the core's own hit path, and `torch.empty` on the CPU with torch's allocator and with ballonet's.

torch's allocator is put back and taken away again between the repetitions, so both are measured in one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from common import Figure, interleaved, report

import ballonet
from ballonet.allocator import _native, runtime

SIZES = (64, 4096, 65536, 1 << 20, 16 << 20)
ROUNDS = 20_000
BUDGET = "512MiB"


def main() -> None:
    ballonet.install(BUDGET)
    device = runtime.require()
    hit = {size: Figure.of([_native.bench_hit_path(device, size, 200_000) for _ in range(7)]) for size in SIZES}
    rows = []
    for size in SIZES:
        taken = interleaved({"stock": lambda s=size: under_stock(s), "ballonet": lambda s=size: under_ballonet(s)})  # type: ignore[misc]
        stock, ours = taken["stock"], taken["ballonet"]
        rows.append([size, hit[size], stock, ours, round(ours.median / stock.median, 3)])
    ballonet.restore()
    report(
        "allocate",
        "allocating: ns per allocation and free (limits: core 100 ns; torch.empty 1.10 x stock)",
        ["bytes", "core alone", "torch.empty, stock", "torch.empty, ballonet", "ratio"],
        rows,
    )


def under_stock(size: int) -> float:
    ballonet.restore()
    return time_empty(size)


def under_ballonet(size: int) -> float:
    ballonet.install(BUDGET)
    return time_empty(size)


def time_empty(size: int) -> float:
    """ns per `torch.empty` and the free that follows."""
    empty: Callable[..., torch.Tensor] = torch.empty
    for _ in range(200):
        empty(size, dtype=torch.uint8)
    begin = time.perf_counter_ns()
    for _ in range(ROUNDS):
        empty(size, dtype=torch.uint8)
    return (time.perf_counter_ns() - begin) / ROUNDS


if __name__ == "__main__":
    main()
