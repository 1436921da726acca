"""The pool as torch's CUDA allocator, and when torch can take it; torch's statistics of it.

There are two ways. The compiled one (companion.TorchAllocator) does all that torch asks of a CUDA allocator. Where it
cannot be compiled, torch's pluggable allocator calls functions of the core: it refuses calls that it has no function
for, and keeps no statistics. Then the functions that ask for these are replaced (`TorchStatistics`), so that every
public one works, under `torch.cuda`, `torch.cuda.memory` and `torch.accelerator`, also where it was imported by name
before. `torch.cuda.mem_get_info` asks the driver and is replaced in both cases: memory is free only as far as the
budget allows. The numbers are the core's (device.cpp defines them).

After CUDA was used, as in a notebook where a cell has run before, torch's allocator cannot be changed. But the source
of a `torch.cuda.MemPool`'s segments can be set, and a thread made to allocate from one (`MemPoolRoute`).

Note [Other pools of the thread]
    torch looks for the pool of an allocation in the order in which pools were begun, and takes the first that says it
    is for this thread or stream. So ours, begun first, would also get what a thread allocates while it captures a CUDA
    graph or within another `torch.cuda.use_mem_pool`: a graph's memory would be given to others between its replays.
    So the calls with which another pool begins end ours before, and those with which it ends begin ours again.

Note [What torch caches]
    As long as a thread allocates from a pool, torch neither gives back segments that are free nor looks at events of
    blocks used on several streams (it treats the thread as if it was capturing). `renew` leaves the pool, which is when
    torch does both, and goes on with a new one. Blocks of the old pool stay valid; its segments follow when they are
    free and torch is asked to give back what it caches.
"""

from __future__ import annotations

import atexit
import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from . import _native, captures, devices
from .companion import Companion, TorchAllocator
from .errors import InstallError
from .interrupts import guarded
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


# With which torch begins to allocate from a pool; in torch._C, and by name in torch.cuda.memory.
_BEGIN: Final = ("_cuda_beginAllocateToPool", "_cuda_beginAllocateCurrentThreadToPool")
_END: Final = "_cuda_endAllocateToPool"


class MemPoolRoute(captures.CaptureListener):
    """A route by which one thread's allocations on one device come from the pool, from `open()` until `close()`."""

    def __init__(self, allocate: int, free: int, ordinal: int) -> None:
        """`allocate`, `free`: addresses of functions as `CUDAPluggableAllocator` takes them. `allocate` returns null
        where memory runs out."""
        make: Callable[[int, int], Any] = torch._C._cuda_customAllocator
        self._segments = make(allocate, free)
        self._ordinal = ordinal
        self._thread = 0
        self._pool: Any = None
        self._using: AbstractContextManager[None] | None = None
        self._others: list[object] = []  # ids of pools, or graphs, that this thread allocates for instead
        self._patches = Patches()

    @property
    def is_open(self) -> bool:
        return bool(self._patches)

    def open(self) -> None:
        """Opens the route, or moves it, for the calling thread."""
        self.close()
        self._thread = threading.get_ident()
        try:
            self._begin()
            self._patch()
        except BaseException:
            self._unpatch()
            self._end()
            raise
        atexit.register(self.close)

    def close(self) -> None:
        """Has the thread allocate from torch's own memory again; live blocks stay valid. Idempotent."""
        if not self.is_open:
            return
        atexit.unregister(self.close)
        self._unpatch()
        self._end()
        self._others.clear()
        torch.cuda.empty_cache()

    def renew(self) -> bool:
        """Has torch give back memory that it caches. False, and nothing done, on another thread or while another pool
        is in use. See Note [What torch caches]."""
        if self._using is None or threading.get_ident() != self._thread:
            return False
        torch.cuda.empty_cache()
        return True

    def _patch(self) -> None:
        for module in (torch._C, torch.cuda.memory):
            for name in (*_BEGIN, _END):
                if hasattr(module, name):
                    around = self._around_end if name == _END else self._around_begin
                    self._patches.replace(module, name, around(getattr(module, name)))
        captures.listen(self)
        emptied = self._around_empty_cache(torch.cuda.memory.empty_cache)
        for module in (torch.cuda, torch.cuda.memory):
            self._patches.replace(module, "empty_cache", emptied)

    def _unpatch(self) -> None:
        captures.leave(self)
        self._patches.restore()

    def begins(self, graph: Any, pool: object) -> None:
        self._give_way(graph)

    def ended(self, graph: Any, *, captured: bool) -> None:
        self._take_over(graph)

    def aside(self, owner: object) -> AbstractContextManager[object]:
        return guarded(lambda: self._give_way(owner), lambda failed: self._take_over(owner))

    def _begin(self) -> None:
        if self._pool is None:
            self._pool = torch.cuda.MemPool(self._segments)
        self._using = torch.cuda.use_mem_pool(self._pool, self._ordinal)
        self._using.__enter__()

    def _end(self, keep: bool = False) -> None:
        """Ends allocating from the pool. `keep`: it goes on with the same pool later."""
        using, self._using = self._using, None
        if using is not None:
            using.__exit__(None, None, None)
        if not keep:
            self._pool = None  # torch frees memory that it caches there

    def _give_way(self, other: object) -> None:
        if threading.get_ident() == self._thread:
            self._others.append(other)
            if self._using is not None:
                self._end(keep=True)

    def _take_over(self, other: object) -> None:
        """Allocates from the pool again, as `other` has ended, which need not be one that was given way to."""
        if other in self._others and threading.get_ident() == self._thread:
            self._others.remove(other)
            if not self._others:
                self._begin()

    def _around_begin(self, stock: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(stock)
        def begin(device: int, pool: object) -> None:
            if self._pool is not None and pool == self._pool.id:
                stock(device, pool)
                return
            self._give_way(pool)
            try:
                stock(device, pool)
            except BaseException:
                self._take_over(pool)
                raise

        return begin

    def _around_end(self, stock: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(stock)
        def end(device: int, pool: object) -> None:
            stock(device, pool)
            self._take_over(pool)

        return end

    def _around_empty_cache(self, stock: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(stock)
        def empty_cache() -> None:
            if self._using is None or threading.get_ident() != self._thread:
                stock()
                return
            self._end()
            try:
                stock()
            finally:
                self._begin()

        return empty_cache


# What torch's pluggable allocator lets one set, and to which function of the core.
HOOKS: Final = {
    "set_reset_fn": "trim",
    "set_record_stream_fn": "record_stream",
    "set_begin_allocate_to_pool": "begin_pool",
    "set_end_allocate_to_pool_fn": "end_pool",
    "set_release_pool": "release_pool",
    "set_memory_fraction_fn": "memory_fraction",
    "set_base_alloc_fn": "base_allocation",
}


class CudaAllocator(torch.cuda.memory._CUDAAllocator):
    """The pool in the form that `torch.cuda.memory.change_current_allocator` takes."""

    def __init__(
        self, companion: Companion | None, statistics: TorchStatistics, whole: TorchAllocator | None = None
    ) -> None:
        """`whole`: the compiled allocator, where there is one."""
        self._statistics = statistics
        self._whole = whole
        made: Any = None if whole is not None else self._pluggable(companion)  # torch says which it is once in place
        super().__init__(made)

    def _pluggable(self, companion: Companion | None) -> Any:
        functions = _functions(companion)
        make: Callable[[int, int], Any] = torch._C._cuda_customAllocator
        pluggable = make(functions["alloc"], functions["free"])
        for setter, function in HOOKS.items():
            getattr(pluggable, setter)(functions[function])
        return pluggable

    def allocator(self) -> Any:
        """The allocator for torch, read when it changes to it. InstallError where it could not."""
        check_cuda_unused()
        if not any(runtime.device is self._statistics.device for runtime in devices.every()):
            raise InstallError(
                "the pool behind this allocator was closed by ballonet.restore(): call ballonet.allocator() again"
            )
        if self._whole is not None:
            if not self._whole.place():
                check_cuda_unused()
            self._allocator = torch._C._cuda_getAllocator()
        self._statistics.patch(whole=self._whole is not None)
        return self._allocator

    @property
    def whole(self) -> bool:
        """Is it the compiled allocator, and torch's now?"""
        return self._whole is not None and self.in_place

    @property
    def in_place(self) -> bool:
        """Is it torch's allocator now?"""
        return self._allocator is not None and torch._C._cuda_getAllocator() is self._allocator


def check_cuda_unused() -> None:
    """Raises InstallError where torch would refuse another CUDA allocator."""
    if cuda_used():
        raise InstallError(
            "torch has used CUDA in this process, and then its allocator cannot be changed any more: do it before "
            "anything is moved to the GPU, or call ballonet.install(), which from then on gives this thread's tensors "
            "memory of the pool through torch.cuda.MemPool"
        )


def cuda_used() -> bool:
    """Has torch used its own CUDA allocator? InstallError where it has a pluggable one already."""
    if torch._C._cuda_getAllocator() is not None:
        raise InstallError(
            "torch has a pluggable CUDA allocator already, which cannot be changed again in this process"
        )
    return torch._C._accelerator_isAllocatorInitialized()


def mem_pool_route(companion: Companion | None, ordinal: int) -> MemPoolRoute:
    """Returns the pool under `torch.cuda.MemPool`, not yet open."""
    functions = _functions(companion)
    return MemPoolRoute(functions["segment"], functions["free"], ordinal)


def _functions(companion: Companion | None) -> dict[str, int]:
    """Returns the addresses of functions that torch's CUDA allocator is to call. Those of the companion raise torch's
    own errors."""
    functions = _native.entry_points()
    if companion is not None:
        functions |= {name: companion.address(f"ballonet_cuda_{name}") for name in ("alloc", "segment")}
    return functions
