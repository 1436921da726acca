"""The device's pages as the governor watches them: how many are free, whether they are short, and how many are
spare."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from ..policy.remap import CalmClock, observe
from ..policy.tuning import FreePages
from .published import DeviceView


class DevicePages:
    """Free pages over time. `look` is not thread-safe, its callers hold the governor's lock; the others are."""

    def __init__(self, device: DeviceView, tuning: FreePages, waits: Callable[[], float] = time.monotonic) -> None:
        """`waits`: the clock by which `wait` gives up."""
        self.short = False  # were few free at the last look?
        self.scarce = False  # or were few free not long ago?
        self._quiet_until = -math.inf  # before then time alone does not change the result of a look
        self._seen = 0, 0  # free pages at the last look, and the budget
        self._ample: float | None = None  # since when pages are ample
        self._device = device
        self._tuning = tuning
        self._waits = waits
        self._calm: CalmClock | None = None
        self._given = threading.Condition()

    @property
    def total(self) -> int:
        """Pages of the budget."""
        return self._device.budget // self._device.page_size

    @property
    def mark(self) -> int:
        """Pages that stay free and are never given back."""
        return self._mark(self.total)

    @property
    def free(self) -> int:
        """Free pages."""
        return self._device.available

    @property
    def unused(self) -> int:
        """Pages that are free, retiring, or under free blocks."""
        now = self._device.snapshot()
        idle: int = now["heap"]["cached"] // self._device.page_size
        used: int = sum(now["pages"][owner] for owner in ("weights", "activations", "kv"))
        return max(0, self.total - used + idle)

    def look(self, now: float, waited: bool) -> tuple[int, int]:
        """Returns (free pages, those of them that may go back). `waited`: was any page taken or refused since the last
        look?"""
        free, budget = self._device.available, self._device.budget
        total = budget // self._device.page_size
        self.short = free * self._tuning.short < total
        self.scarce = self._scarce(now, free, total)
        waited = waited or self._device.page_request > 0
        self._calm, spare = observe(self._calm, now, free, waited, self._mark(total), self._tuning.dwell)
        self._seen = free, budget
        self._quiet_until = self._next_change(free < self._mark(total) and not waited)
        return free, spare

    def unchanged(self, now: float) -> bool:
        """Would a look find what the last one found, with none to go back, while plenty are free?"""
        device = self._device
        return now < self._quiet_until and not device.page_request and (device.available, device.budget) == self._seen

    def _next_change(self, waits: bool) -> float:
        """Returns when a look may find something else although as many pages are free: at once while they are short, or
        where the next look begins a dwell. `waits`: does none begin now?"""
        if self.short or (self._calm is None and not waits):
            return -math.inf
        calm = math.inf if self._calm is None else self._calm.since + self._tuning.dwell
        ample = math.inf if self._ample is None else self._ample + self._tuning.forget
        return min(calm, ample)

    def _mark(self, total: int) -> int:
        return max(1, total // self._tuning.spare)

    def _scarce(self, now: float, free: int, total: int) -> bool:
        """Are pages scarce? They are once they are short, and until they have been ample for long enough."""
        if self.short or free < self._tuning.ample * total or not self.scarce:
            self._ample = None
        elif self._ample is None:
            self._ample = now
        recent = self._ample is None or now - self._ample < self._tuning.forget
        return self.short or (self.scarce and recent)

    def went_back(self) -> None:
        """Notes that pages were given back, which is no use that grows: the dwell begins anew."""
        self._calm, self._quiet_until = None, -math.inf

    def wait(self, timeout: float) -> bool:
        """Waits until others may have given pages, `timeout` seconds at most, and gives meanwhile what others request
        of this thread. False at the timeout."""
        end, before, requested = self._waits() + timeout, self.free, 0
        while True:
            requested, was = self._device.page_request, requested
            if (requested and self._device.yield_pages()) or self.free > before or requested < was:
                return True
            left = end - self._waits()
            if left <= 0:
                return False
            with self._given:
                if self._given.wait(min(left, self._tuning.look)):
                    return True

    def given(self) -> None:
        """Wakes waiting threads, as pages were freed."""
        with self._given:
            self._given.notify_all()
