"""Where pages for new tokens come from when none is free: the steps, in this order.

1  torch's cached blocks go back to the pool
2  pages that are full by now are offered, those of the asking forward too, and the core takes some
3  prefixes that are only kept for later prompts are dropped
4  unreachable objects are collected: caches of calls that were interrupted are kept alive by tracebacks
5  the controller of the model's replicas is told that pages are lacking (overview.py)
6  pages that other threads lease are requested of them, and waited for
7  host pages are mapped
8  torch.OutOfMemoryError
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import torch

from ...allocator._native import Device, Range
from ...allocator.errors import PoolExhausted
from ...allocator.install import reclaim, spilled
from ...offload.governor.kv_tier import KVTier
from ...offload.policy.reclaim_order import Rung
from ..device import graphs
from ..device.pressure import give_up


def find_pages(
    device: Device,
    tier: KVTier | None,
    range_: Range,
    runs: Sequence[tuple[int, int]],
    reason: PoolExhausted,
    goal: int,
) -> None:
    """Maps the pieces (first, count) of `range_`, for which no page was free. `goal`: tokens that the cache is to have.
    torch.OutOfMemoryError, DriverError."""

    def tried() -> bool:
        try:
            map_device(range_, runs)
        except PoolExhausted:
            return False
        return True

    if reclaim() and tried():
        return
    if tier is not None:
        tier.governor.reclaim.publish_now()
        if tried():
            return
    if give_up(device, sum(count for _, count in runs)) and tried():
        return
    if gc.collect() and tried():
        return
    if tier is not None:
        tier.governor.duplicates.request_drop(sum(count for _, count in runs))
        if _waited(device, tier, tried):
            return
        if tier.governor.spill:
            with suppress(PoolExhausted):
                for first, count in runs:
                    range_.map_host(first, count)
                tier.decided(Rung.SPILL.label, "pull", sum(count for _, count in runs))
                spilled()
                return
    raise torch.OutOfMemoryError(f"no room for {goal} tokens of KV cache: {reason}{graphs.why_short()}") from reason


def map_device(range_: Range, runs: Iterable[tuple[int, int]]) -> None:
    """Backs these pieces with device pages, except those that an interrupted call has backed with host pages.
    PoolExhausted, DriverError."""
    for first, count in runs:
        for piece in range(first, first + count):
            if range_.leads_to(piece) == "host":
                range_.map_host(piece, 1)
                break
        else:
            range_.map(first, count)


def _waited(device: Device, tier: KVTier, tried: Callable[[], bool]) -> bool:
    waiting, clock = tier.governor.tuning.waiting, tier.governor.waits
    began, most, patience = clock(), 0, waiting.room if tier.last_wait_succeeded else waiting.room_look
    try:
        while (left := began + patience - clock()) > 0:
            requested = device.page_request
            most = max(most, requested)
            if requested:
                tier.governor.pages.wait(min(left, waiting.room_look))
            if tried():  # also without a request, as pages may have been given since
                tier.last_wait_succeeded = True
                return True
            if not requested and not device.page_request:
                return False
        tier.last_wait_succeeded = False
        return False
    finally:
        if most:
            tier.decided(Rung.WAIT.label, "revert", most, measured=clock() - began)
