"""The reclaim order of a device as one list of sources, each with `would_free`, `would_cost`, `reclaim` and `restore`.

As a rule the core reclaims, in the middle of an operator, by the published list, and the manager restores when pages
are to spare. This list is for chaos.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from ..offload.manager.device_view import DeviceView
from ..offload.manager.memory_manager import MemoryManager
from ..offload.policy.reclaim_order import LISTED, Candidate, PageSource


class ReclaimSource(Protocol):
    """What one source has. Pages are of the device."""

    source: PageSource

    @abstractmethod
    def would_free(self) -> int:
        """The most pages that a reclaim would free at this moment."""

    @abstractmethod
    def would_cost(self) -> tuple[float, float]:
        """Returns (seconds lost in each second while all of them are away, seconds of their way there and back)."""

    @abstractmethod
    def reclaim(self, pages: int) -> int:
        """Frees up to so many pages, of what this thread may take, or a few more. Returns how many. DriverError."""

    @abstractmethod
    def restore(self, pages: int) -> int:
        """Grants up to so many free pages to clients that gave theirs, before their next iteration. Returns how
        many."""


class Free(ReclaimSource):
    """Free pages."""

    source = PageSource.TRIM

    def __init__(self, manager: MemoryManager) -> None:
        self._manager = manager

    def would_free(self) -> int:
        return self._manager.pages.free

    def would_cost(self) -> tuple[float, float]:
        return 0.0, 0.0

    def reclaim(self, pages: int) -> int:
        return min(pages, self.would_free())

    def restore(self, pages: int) -> int:
        return 0


class IdleActivations(ReclaimSource):
    """Pages that lie wholly inside free blocks. They come back as blocks are asked for."""

    source = PageSource.IDLE_ACTIVATIONS

    def __init__(self, device: DeviceView) -> None:
        self._device = device

    def would_free(self) -> int:
        return int(self._device.snapshot()["heap"]["cached"]) // self._device.page_size

    def would_cost(self) -> tuple[float, float]:
        return 0.0, 0.0

    def reclaim(self, pages: int) -> int:
        return self._device.trim() // self._device.page_size if pages > 0 else 0

    def restore(self, pages: int) -> int:
        return 0


class Listed(ReclaimSource):
    """Offers of models and caches that are one source."""

    def __init__(self, manager: MemoryManager, source: PageSource) -> None:
        self.source = source
        self._manager = manager

    def would_free(self) -> int:
        return sum(candidate.pages for candidate in self._candidates())

    def would_cost(self) -> tuple[float, float]:
        candidates = self._candidates()
        return sum(candidate.pages * candidate.price.rate for candidate in candidates), sum(
            candidate.pages * candidate.price.once for candidate in candidates
        )

    def reclaim(self, pages: int) -> int:
        return self._manager.sources.reclaim(self.source, pages)

    def restore(self, pages: int) -> int:
        return self._manager.sources.restore(self.source, pages)

    def _candidates(self) -> list[Candidate]:
        return [candidate for candidate in self._manager.reclaim.candidates() if candidate.source is self.source]


class DropSource(ReclaimSource):
    """Layers that other replicas hold as well. A reclaim posts a request and frees nothing: see overview.py. The
    controller of the replicas weighs what running as a stage of a pipeline costs."""

    source = PageSource.DUPLICATES

    def __init__(self, manager: MemoryManager) -> None:
        self._duplicates = manager.duplicates

    def would_free(self) -> int:
        return self._duplicates.pages

    def would_cost(self) -> tuple[float, float]:
        return 0.0, 0.0

    def reclaim(self, pages: int) -> int:
        self._duplicates.request_drop(pages)
        return 0

    def restore(self, pages: int) -> int:
        return 0


class Wait(ReclaimSource):
    """Waiting for other threads: this one gives the pages requested of it, and may get others."""

    source = PageSource.WAIT

    def __init__(self, manager: MemoryManager, device: DeviceView) -> None:
        self._manager = manager
        self._device = device

    def would_free(self) -> int:
        return self._device.page_request

    def would_cost(self) -> tuple[float, float]:
        return 0.0, 0.0

    def reclaim(self, pages: int) -> int:
        before = self._manager.pages.free
        self._manager.pages.wait(0.0)
        return max(0, self._manager.pages.free - before)

    def restore(self, pages: int) -> int:
        return 0


class Spill(ReclaimSource):
    """Pages of the host in the place of pages of the device: used by the core when an allocation finds nothing else,
    and given back by it as they become free."""

    source = PageSource.SPILL

    def __init__(self, manager: MemoryManager, device: DeviceView, allowed: bool) -> None:
        self._manager = manager
        self._device = device
        self._allowed = allowed

    def would_free(self) -> int:
        if not self._allowed:
            return 0
        now = self._device.snapshot()
        free: int = now["host_budget"] // self._device.page_size - now["host_pages"] + now["host_free"]
        return max(0, free)

    def would_cost(self) -> tuple[float, float]:
        seconds = self._manager.link.page_seconds or 0.0
        return self.would_free() * seconds, 0.0

    def reclaim(self, pages: int) -> int:
        return 0

    def restore(self, pages: int) -> int:
        return 0


def sources(manager: MemoryManager, device: DeviceView, *, spill: bool) -> Sequence[ReclaimSource]:
    """Returns the sources, what costs nothing first and what is done last at the end. `spill`: may pages of the host
    stand in?"""
    every: list[ReclaimSource] = [
        Free(manager),
        IdleActivations(device),
        *(Listed(manager, source) for source in LISTED),
        DropSource(manager),
        Wait(manager, device),
        Spill(manager, device, spill),
    ]
    return sorted(every, key=lambda it: it.source)
