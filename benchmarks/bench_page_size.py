"""What a page size costs: the time to map and unmap a GiB, and what the last page of every range wastes.

The default of each kind of device (allocator/device_choice.py, Note [Page size]) is chosen from this table. Waste is
that of the weights of two model shapes, and of a KV cache of 1,000 tokens with a range per layer.
"""

from __future__ import annotations

import time
from typing import Any

from common import MIB, Figure, Options, options, report

from ballonet.allocator import device_choice
from ballonet.allocator.config import Config
from ballonet.offload.policy.geometry import Geometry
from ballonet.offload.policy.layout import Block, place

PAGE_SIZES = tuple(size * 2**10 for size in (64, 256, 1024, 2048, 4096, 8192, 32768))
ROUNDS = 3  # nobody is compared


def main() -> None:
    chosen = options("page-size", __doc__)
    smallest = device_choice.GRANULARITY["cuda" if chosen.cuda else "standin"]
    rows = [costs(page, chosen) | waste(page) for page in PAGE_SIZES if page % smallest == 0]
    report(chosen, "page-size", "the cost of a page size", rows)


def costs(page: int, chosen: Options) -> dict[str, Any]:
    """ms to map and unmap a GiB: with pages that have to be created, and with pages that are there."""
    nbytes = 4 * page if chosen.tiny else 1 << 30
    device = device_choice.open_device(Config.from_env().merge(budget=nbytes, page_size=page))
    fresh: list[float] = []
    again: list[float] = []
    for _ in range(min(ROUNDS, chosen.repetitions)):
        for taken in (fresh, again):
            held = device.reserve(nbytes, "kv", device.group())
            begin = time.perf_counter_ns()
            held.map(0, held.pieces)
            held.close()
            device.reap(wait=True)
            taken.append((time.perf_counter_ns() - begin) / 1e6 * 2**30 / nbytes)
        device.trim()
    device.close()
    times = {"ms per GiB, first time": Figure.of(fresh), "ms per GiB, again": Figure.of(again)}
    return {"MiB per page": f"{page / MIB:g}", **times}


def waste(page: int) -> dict[str, str]:
    """MiB in the last pages of the ranges."""
    eight = [Block(-1, 2 * 128256 * 4096 * 2)] + [Block(i, 416 * MIB, i) for i in range(32)]
    small = [Block(-1, 49152 * 576 * 4)] + [Block(i, 3_540_096 * 4, i) for i in range(30)]
    caches = (
        (32, Geometry(layers=1, batch=1, heads=8, k_dim=128, v_dim=128, itemsize=2, page=page, tokens=1000)),
        (30, Geometry(layers=1, batch=1, heads=3, k_dim=64, v_dim=64, itemsize=4, page=page, tokens=1000)),
    )
    weights = [place(blocks, page).waste for blocks in (eight, small)]
    kv = [layers * (-(-each.token_bytes * 1000 // page) * page - each.token_bytes * 1000) for layers, each in caches]
    names = ("8B weights", "135M weights", "8B KV", "135M KV")
    return {name: f"{value / MIB:.0f}" for name, value in zip(names, [*weights, *kv], strict=True)}


if __name__ == "__main__":
    main()
