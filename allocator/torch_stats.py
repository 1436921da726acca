"""torch's memory statistics under ballonet: what `torch.cuda.memory_allocated` and its kin say of the pool.

torch's pluggable allocator keeps no statistics, and the calls that ask for them raise. While ballonet is torch's
allocator the few functions below them are replaced, so that every public one works, under `torch.cuda`,
`torch.cuda.memory` and `torch.accelerator`, also where it was imported by name before.

Note [What the numbers mean here]
    allocated  bytes of live blocks, plus the pages of managed weights and KV caches
    reserved   every page that exists, whoever owns it, free ones included
    free       what can still be had (`mem_get_info`): the pool's free pages, and what budget and device still allow
    Peaks of allocated bytes are not kept as one number: the peak of the blocks plus the pages now, but no more than the
    peak of what existed. Historical totals are kept for the blocks; elsewhere they repeat the current value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from . import _native
from .patches import Patches

_TOTALS: Final = ("allocations", "frees", "allocated_total", "freed_total")
_NEVER: Final = dict.fromkeys(_TOTALS, 0)
_SIZES: Final = ("requested_bytes", "allocated_bytes", "active_bytes", "reserved_bytes", "inactive_split_bytes")
_COUNTS: Final = ("allocation", "active", "segment", "inactive_split")
_EVENTS: Final = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")


def memory_stats(snapshot: Mapping[str, Any], reset: Mapping[str, int] = _NEVER) -> dict[str, Any]:
    """What `torch.cuda.memory_stats_as_nested_dict` gives, from `Device.snapshot()`.

    `reset`: the historical totals when they were last reset. All is in the large pool: there is no small one.
    """
    heap, page = snapshot["heap"], snapshot["page_size"]
    since = {name: heap[name] - reset[name] for name in _TOTALS}
    pages = (snapshot["pages"]["weights"] + snapshot["pages"]["kv"]) * page
    exists, exists_peak = snapshot["created"] * page, snapshot["physical_peak"]

    def with_pages(current: str) -> dict[str, int]:
        now = heap[current] + pages
        return _figure(now, max(now, min(heap[f"{current}_peak"] + pages, exists_peak)))

    nbytes = with_pages("live") | {"allocated": since["allocated_total"], "freed": since["freed_total"]}
    blocks = _figure(heap["blocks"]) | {"allocated": since["allocations"], "freed": since["frees"]}
    known = {
        "requested_bytes": with_pages("requested"),
        "allocated_bytes": nbytes,
        "active_bytes": nbytes,
        "reserved_bytes": _figure(exists, max(exists, exists_peak)),
        "inactive_split_bytes": _figure(heap["reserved"] - heap["live"]),
        "allocation": blocks,
        "active": blocks,
        "segment": _figure(snapshot["created"], max(exists, exists_peak) // page),
        "inactive_split": _figure(0),
    }
    nested: dict[str, Any] = {
        name: {"all": known[name], "large_pool": known[name], "small_pool": _figure(0)} for name in (*_SIZES, *_COUNTS)
    }
    calls = snapshot["driver_calls"]
    events = dict.fromkeys(_EVENTS, 0) | {
        "num_device_alloc": calls.get("cuMemCreate", 0),
        "num_device_free": calls.get("cuMemRelease", 0),
    }
    return nested | events | {"max_split_size": -1, "oversize_allocations": _figure(0), "oversize_segments": _figure(0)}


def mem_get_info(snapshot: Mapping[str, Any], free: int, total: int) -> tuple[int, int]:
    """(free, total) bytes for `torch.cuda.mem_get_info`, from a snapshot and what the driver says of the device.

    Stock says what the device has left. Here the budget is the smaller limit, and a free page of the pool is as good as
    a free one of the device, which memory in torch's own cache is not.
    """
    page = snapshot["page_size"]
    more = min(free, max(0, snapshot["budget"] - snapshot["created"] * page))
    return snapshot["pages"]["free"] * page + more // page * page, total


def _figure(current: int, peak: int | None = None) -> dict[str, int]:
    return {"current": current, "peak": current if peak is None else peak, "allocated": current, "freed": 0}


class TorchStatistics:
    """The replaced functions of torch, for one device; `restore()` puts back exactly what was there."""

    def __init__(self, device: _native.Device) -> None:
        self.device = device
        self._totals = _NEVER
        self._patches = Patches()

    def patch(self) -> None:
        """Puts this device's numbers under torch's functions. Does nothing where that was done."""
        if self._patches:
            return
        for name in ("_cuda_memoryStats", "_accelerator_getDeviceStats"):
            self._patches.replace(torch._C, name, self._stats)
        for name in ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"):
            self._patches.replace(torch._C, name, self._reset_peak)
        for name in ("_cuda_resetAccumulatedMemoryStats", "_accelerator_resetAccumulatedStats"):
            self._patches.replace(torch._C, name, self._reset_accumulated)
        # torch.accelerator asks the allocator that is registered, torch's own, which nobody uses now.
        self._patches.replace(torch._C, "_accelerator_isAllocatorInitialized", torch.cuda.is_initialized)
        self._patches.replace(torch._C, "_accelerator_emptyCache", self._empty_cache)
        accelerator_info = torch._C._accelerator_getMemoryInfo
        self._patches.replace(
            torch._C, "_accelerator_getMemoryInfo", lambda index: self._memory_info(index, accelerator_info)
        )
        public = torch.cuda.memory.mem_get_info

        def mem_get_info(device: Any = None) -> tuple[int, int]:
            return self._memory_info(torch.cuda._utils._get_device_index(device, optional=True), public)

        mem_get_info.__doc__ = public.__doc__
        for module in (torch.cuda, torch.cuda.memory):
            self._patches.replace(module, "mem_get_info", mem_get_info)

    def restore(self) -> None:
        """torch's own functions again."""
        self._patches.restore()

    # Nothing can be allocated on another device while this is torch's allocator: its numbers are those of an empty one.

    def _empty_cache(self) -> None:
        self.device.trim()

    def _stats(self, index: int) -> dict[str, Any]:
        if index != self.device.ordinal:
            return _zeros(memory_stats(self.device.snapshot()))
        return memory_stats(self.device.snapshot(), self._totals)

    def _reset_peak(self, index: int) -> None:
        if index == self.device.ordinal:
            self.device.reset_peaks()

    def _reset_accumulated(self, index: int) -> None:
        if index == self.device.ordinal:
            heap = self.device.snapshot()["heap"]
            self._totals = {name: heap[name] for name in _TOTALS}

    def _memory_info(self, index: int, stock: Callable[[int], tuple[int, int]]) -> tuple[int, int]:
        if index != self.device.ordinal:
            return stock(index)
        return mem_get_info(self.device.snapshot(), *self.device.free_memory())


def _zeros(stats: dict[str, Any]) -> dict[str, Any]:
    return {name: _zeros(value) if isinstance(value, dict) else 0 for name, value in stats.items()}
