"""torch's memory statistics under ballonet: `torch.cuda.memory_allocated` and its kin, for the pool.

The numbers are the core's (device_stats.cpp defines them). Where torch's allocator is the compiled one, torch asks it.
torch's own pluggable allocator keeps no statistics, and the calls that ask for them raise: there the few functions
below them are replaced, so that every public one works, under `torch.cuda`, `torch.cuda.memory` and
`torch.accelerator`, also where it was imported by name before. `torch.cuda.mem_get_info` asks the driver and is
replaced in both cases: memory is free only as far as the budget allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import _native
from .patches import Patches


class TorchStatistics:
    """The replaced functions of torch, for one device; `restore()` puts back exactly what was there."""

    def __init__(self, device: _native.Device) -> None:
        self.device = device
        self._patches = Patches()

    def patch(self, whole: bool = False) -> None:
        """Puts this device's numbers under torch's functions. Does nothing where that was done. `whole`: torch's
        allocator answers for itself."""
        if self._patches:
            return
        self._patch_memory_info()
        if not whole:
            self._patch_statistics()

    def _patch_memory_info(self) -> None:
        public = torch.cuda.memory.mem_get_info

        def mem_get_info(device: Any = None) -> tuple[int, int]:
            return self._memory_info(torch.cuda._utils._get_device_index(device, optional=True), public)

        mem_get_info.__doc__ = public.__doc__
        for module in (torch.cuda, torch.cuda.memory):
            self._patches.replace(module, "mem_get_info", mem_get_info)

    def _patch_statistics(self) -> None:
        for name in ("_cuda_memoryStats", "_accelerator_getDeviceStats"):
            self._patches.replace(torch._C, name, self._stats)
        for name in ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"):
            self._patches.replace(torch._C, name, self._reset_peak)
        for name in ("_cuda_resetAccumulatedMemoryStats", "_accelerator_resetAccumulatedStats"):
            self._patches.replace(torch._C, name, self._reset_accumulated)
        # torch.accelerator asks the allocator that is registered, torch's own, which is unused now.
        self._patches.replace(torch._C, "_accelerator_isAllocatorInitialized", torch.cuda.is_initialized)
        self._patches.replace(torch._C, "_accelerator_emptyCache", self._empty_cache)
        accelerator_info = torch._C._accelerator_getMemoryInfo
        self._patches.replace(
            torch._C, "_accelerator_getMemoryInfo", lambda index: self._memory_info(index, accelerator_info)
        )

    def restore(self) -> None:
        """Puts torch's own functions back."""
        self._patches.restore()

    # Nothing can be allocated on another device while this is torch's allocator: its numbers are those of an empty one.

    def _empty_cache(self) -> None:
        self.device.trim()

    def _stats(self, index: int) -> dict[str, Any]:
        stats = self.device.memory_stats()
        return stats if index == self.device.ordinal else _zeros(stats)

    def _reset_peak(self, index: int) -> None:
        if index == self.device.ordinal:
            self.device.reset_peaks()

    def _reset_accumulated(self, index: int) -> None:
        if index == self.device.ordinal:
            self.device.reset_accumulated()

    def _memory_info(self, index: int, stock: Callable[[int], tuple[int, int]]) -> tuple[int, int]:
        if index != self.device.ordinal:
            return stock(index)
        return self.device.memory_info()


def _zeros(stats: dict[str, Any]) -> dict[str, Any]:
    return {name: _zeros(value) if isinstance(value, dict) else 0 for name, value in stats.items()}
