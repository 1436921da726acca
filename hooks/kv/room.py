"""Where pages for new tokens come from when there are none: what is tried, in this order.

1  what torch caches goes back to the pool
2  what is full by now is offered, pages of the very forward that asks too, and the core takes from that
3  prefixes that are only kept in case that a prompt begins with them are forgotten
4  what nobody can reach any more is collected: caches of calls that were interrupted hang on their tracebacks
5  whoever controls replicas of a model is told that pages are lacking (duplicates.py); what other threads lease is
   requested of them, and waited for, while they may be waiting for what this one leases
6  pages of the host
7  torch.OutOfMemoryError
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


def find_room(
    device: Device,
    tier: KVTier | None,
    range_: Range,
    runs: Sequence[tuple[int, int]],
    reason: PoolExhausted,
    goal: int,
) -> None:
    """Maps the pieces (first, count) of `range_`, which found no page. `goal`: tokens that the cache is to have.
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
    """Backs these pieces with pages of the device, but for those that a call that was interrupted has backed with pages
    of the host. PoolExhausted, DriverError."""
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
            if tried():  # also where they were given since
                tier.last_wait_succeeded = True
                return True
            if not requested and not device.page_request:
                return False
        tier.last_wait_succeeded = False
        return False
    finally:
        if most:
            tier.decided(Rung.WAIT.label, "revert", most, measured=clock() - began)
