"""The links of a device, to the host and to its peer, with others' traffic on the first."""

from __future__ import annotations

import math
from collections.abc import Callable
from threading import Lock

from ..policy.tuning import OtherTraffic
from .published import DeviceView
from .traffic import Traffic, sent


class HostLink:
    """The measured links of a device. Thread-safe. Bandwidths are in bytes per second, None where not measured."""

    def __init__(
        self,
        device: DeviceView,
        lock: Lock,
        moved: Callable[[], None],
        bandwidth: float | None,
        received: Callable[[], int | None] | None,
        clock: Callable[[], float],
        tuning: OtherTraffic,
    ) -> None:
        """`lock`: of the governor, under which `moved` is called where earlier decisions may not hold any more;
        `received`: bytes per second that go over the link (record/link.py), None where not known: called in the
        background, while anything streams."""
        self.traffic = 0.0  # bytes per second that others take
        self._page = device.page_size
        self._lock = lock
        self._moved = moved
        self._bandwidth = bandwidth
        self._peer_bandwidth: float | None = None
        self._steps = tuning.steps
        self._watcher = (
            None if received is None else Traffic(received, lambda: sent(device), self.set_traffic, clock, tuning)
        )

    @property
    def bandwidth(self) -> float | None:
        """Bandwidth from the host. Needed before a model with an SLO is added."""
        return self._bandwidth

    @bandwidth.setter
    def bandwidth(self, bandwidth: float) -> None:
        with self._lock:
            self._bandwidth = bandwidth
            self._moved()

    @property
    def page_seconds(self) -> float | None:
        """Seconds to copy a page from the host."""
        return None if self._bandwidth is None else self._page / self._bandwidth

    @property
    def peer_bandwidth(self) -> float | None:
        """Bandwidth between the device and its peer; None also where there is none."""
        return self._peer_bandwidth

    @peer_bandwidth.setter
    def peer_bandwidth(self, bandwidth: float) -> None:
        with self._lock:
            self._peer_bandwidth = bandwidth
            self._moved()

    @property
    def peer_page_seconds(self) -> float | None:
        """Seconds to copy a page to the peer or back."""
        return None if self._peer_bandwidth is None else self._page / self._peer_bandwidth

    def set_traffic(self, rate: float) -> None:
        """Notes that others take so many bytes per second of the link to the host."""
        with self._lock:
            if self._bandwidth is None:
                return
            step = self._bandwidth / self._steps
            before, self.traffic = self.traffic, math.ceil(rate / step) * step
            if before != self.traffic:
                self._moved()

    def watch(self, streams: bool) -> None:
        """Watches others' traffic, which matters only while anything streams."""
        if self._watcher is not None:
            self._watcher.wanted(streams)
