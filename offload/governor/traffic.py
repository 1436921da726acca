"""Others' traffic on the host link of a device, watched in the background while models stream."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from statistics import median

from ...allocator.errors import BallonetError
from ..policy.tuning import OtherTraffic
from .published import DeviceView


class Traffic:
    """A daemon thread that measures while anything streams. A look takes 20 ms (record/link.py, `received`), too long
    for a forward thread."""

    def __init__(
        self,
        received: Callable[[], int | None],
        copied: Callable[[], int],
        tell: Callable[[float], None],
        clock: Callable[[], float],
        tuning: OtherTraffic,
    ) -> None:
        """`received`: bytes per second that the device receives, None where not known, which ends the looks; `copied`:
        bytes that ballonet sent to the device so far; `tell`: is called with the bytes per second of others; `clock`:
        seconds."""
        self._received = received
        self._copied = copied
        self._tell = tell
        self._clock = clock
        self._period = tuning.period
        self._seen: deque[float] = deque(maxlen=tuning.looks)
        self._lock = threading.Lock()
        self._stop: threading.Event | None = None  # ends the thread

    @property
    def watching(self) -> bool:
        """Does the thread run?"""
        return self._stop is not None

    def wanted(self, streams: bool) -> None:
        """Starts the thread, or stops it. Returns at once."""
        with self._lock:
            if streams and self._stop is None:
                self._stop = threading.Event()
                thread = threading.Thread(
                    target=self._watch, args=(self._stop,), name="ballonet-link-traffic", daemon=True
                )
                thread.start()
            elif not streams and self._stop is not None:
                self._stop.set()
                self._stop = None
                self._seen.clear()

    def look(self) -> bool:
        """Measures once. False where the traffic is not known."""
        began, before = self._clock(), self._copied()
        received = self._received()
        if received is None:
            return False
        passed = self._clock() - began
        own = (self._copied() - before) / passed if passed > 0 else 0.0
        self._seen.append(max(0.0, received - own))
        self._tell(median(self._seen))
        return True

    def _watch(self, stop: threading.Event) -> None:
        with suppress(BallonetError):  # the device may be closed meanwhile
            while self.look() and not stop.wait(self._period):
                pass


def sent(device: DeviceView) -> int:
    """Bytes that ballonet has copied from the host to the device."""
    copied: dict[str, int] = device.snapshot()["copied"]
    return sum(count for name, count in copied.items() if name.endswith("_h2d"))
