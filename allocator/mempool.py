"""The pool under torch after CUDA was used: `torch.cuda.MemPool`, torch's own caching allocator over our segments.

torch's CUDA allocator cannot be changed once it was used, as in a notebook where a cell has run before. But the source
of a `torch.cuda.MemPool`'s segments can be set, and a thread made to allocate from one.

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

from . import captures
from .interrupts import guarded
from .patches import Patches

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
