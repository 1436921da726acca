"""The pool as torch's CUDA allocator, and when torch can take it.

There are two ways. The compiled one (companion.TorchAllocator) does all that torch asks of a CUDA allocator. Where it
cannot be compiled, torch's pluggable allocator calls functions of the core: it refuses calls that it has no function
for, and `TorchStatistics` gives Python's statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from . import _native, devices
from .companion import Companion, TorchAllocator
from .errors import InstallError
from .mempool import MemPoolRoute
from .torch_stats import TorchStatistics

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
