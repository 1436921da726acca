"""The ladder of a device as one list of levers, each with `would_free`, `would_cost`, `pull` and `revert`.

As a rule the core pulls, in the middle of an operator, by the published list, and the governor reverts when pages are
to spare. This list is for chaos.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from ..offload.governor.device_view import DeviceView
from ..offload.governor.governor import Governor
from ..offload.policy.reclaim_order import LISTED, Candidate, Rung


class Lever(Protocol):
    """The lever of one rung. Pages are of the device."""

    rung: Rung

    @abstractmethod
    def would_free(self) -> int:
        """The most pages that a pull would free at this moment."""

    @abstractmethod
    def would_cost(self) -> tuple[float, float]:
        """Returns (seconds of each iteration while all of them are away, seconds once)."""

    @abstractmethod
    def pull(self, pages: int) -> int:
        """Frees up to so many pages, of what this thread may take, or a few more. Returns how many. DriverError."""

    @abstractmethod
    def revert(self, pages: int) -> int:
        """Grants up to so many free pages to clients that gave theirs, before their next iteration. Returns how
        many."""


class Free(Lever):
    """Free pages."""

    rung = Rung.TRIM

    def __init__(self, governor: Governor) -> None:
        self._governor = governor

    def would_free(self) -> int:
        return self._governor.pages.free

    def would_cost(self) -> tuple[float, float]:
        return 0.0, 0.0

    def pull(self, pages: int) -> int:
        return min(pages, self.would_free())

    def revert(self, pages: int) -> int:
        return 0


class Inflate(Lever):
    """Pages that lie wholly inside free blocks. They come back as blocks are asked for."""

    rung = Rung.INFLATE

    def __init__(self, device: DeviceView) -> None:
        self._device = device

    def would_free(self) -> int:
        return int(self._device.snapshot()["heap"]["cached"]) // self._device.page_size

    def would_cost(self) -> tuple[float, float]:
        return 0.0, 0.0

    def pull(self, pages: int) -> int:
        return self._device.trim() // self._device.page_size if pages > 0 else 0

    def revert(self, pages: int) -> int:
        return 0


class Listed(Lever):
    """Offers of models and caches on one rung."""

    def __init__(self, governor: Governor, rung: Rung) -> None:
        self.rung = rung
        self._governor = governor

    def would_free(self) -> int:
        return sum(candidate.pages for candidate in self._candidates())

    def would_cost(self) -> tuple[float, float]:
        candidates = self._candidates()
        return sum(candidate.pages * candidate.seconds for candidate in candidates), sum(
            candidate.once for candidate in candidates
        )

    def pull(self, pages: int) -> int:
        return self._governor.ladder.pull(self.rung, pages)

    def revert(self, pages: int) -> int:
        return self._governor.ladder.revert(self.rung, pages)

    def _candidates(self) -> list[Candidate]:
        return [candidate for candidate in self._governor.reclaim.candidates() if candidate.rung is self.rung]


class DropLever(Lever):
    """Layers that other replicas hold as well. A pull posts a request and frees nothing: see overview.py. The
    controller of the replicas weighs what running as a stage of a pipeline costs."""

    rung = Rung.DUPLICATES

    def __init__(self, governor: Governor) -> None:
        self._duplicates = governor.duplicates

    def would_free(self) -> int:
        return self._duplicates.pages

    def would_cost(self) -> tuple[float, float]:
        return 0.0, 0.0

    def pull(self, pages: int) -> int:
        self._duplicates.request_drop(pages)
        return 0

    def revert(self, pages: int) -> int:
        return 0


class Wait(Lever):
    """Waiting for other threads: this one gives the pages requested of it, and may get others."""

    rung = Rung.WAIT

    def __init__(self, governor: Governor, device: DeviceView) -> None:
        self._governor = governor
        self._device = device

    def would_free(self) -> int:
        return self._device.page_request

    def would_cost(self) -> tuple[float, float]:
        return 0.0, 0.0

    def pull(self, pages: int) -> int:
        before = self._governor.pages.free
        self._governor.pages.wait(0.0)
        return max(0, self._governor.pages.free - before)

    def revert(self, pages: int) -> int:
        return 0


class Spill(Lever):
    """Pages of the host in the place of pages of the device: used by the core when an allocation finds nothing else,
    and given back by it as they become free."""

    rung = Rung.SPILL

    def __init__(self, governor: Governor, device: DeviceView, allowed: bool) -> None:
        self._governor = governor
        self._device = device
        self._allowed = allowed

    def would_free(self) -> int:
        if not self._allowed:
            return 0
        now = self._device.snapshot()
        free: int = now["host_budget"] // self._device.page_size - now["host_pages"] + now["host_free"]
        return max(0, free)

    def would_cost(self) -> tuple[float, float]:
        seconds = self._governor.link.page_seconds or 0.0
        return self.would_free() * seconds, 0.0

    def pull(self, pages: int) -> int:
        return 0

    def revert(self, pages: int) -> int:
        return 0


def levers(governor: Governor, device: DeviceView, *, spill: bool) -> Sequence[Lever]:
    """Returns the levers in the order of their rungs. `spill`: may pages of the host stand in?"""
    every: list[Lever] = [
        Free(governor),
        Inflate(device),
        *(Listed(governor, rung) for rung in LISTED),
        DropLever(governor),
        Wait(governor, device),
        Spill(governor, device, spill),
    ]
    return sorted(every, key=lambda lever: lever.rung)
