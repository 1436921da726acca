"""The governor of each device that models are managed on.

Note [The link of a model that runs]
    Where pages run out for the first time nobody has measured the link yet, and who may give what depends on it. That
    is made up for before an iteration, once more is free than the next tokens need, and outside of captures, whose work
    must not wait for copies; until then decisions say that they assume.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ...allocator import install, runtime
from ...allocator._native import Device
from ...allocator.errors import DriverError
from ...allocator.interrupts import if_free
from ...offload.governor.governor import Governor
from ...offload.record import link
from .marks import marks_of, relaxed

_governors: list[tuple[Device, Governor]] = []
_lock = threading.Lock()
_measuring = threading.Lock()


def of(device: Device) -> Governor:
    """Returns the governor of the device, made where there is none yet, and forgets those of devices that are gone."""
    with _lock:
        for each, governor in _governors:
            if each is device:
                return governor
        settings = runtime.settings()
        governor = Governor(
            device,
            received=_received(device),
            events=runtime.events(),
            window=settings.reserve,
            marks=None if device.kind == "standin" else marks_of(device),
        )
        _governors[:] = [(device, governor)]  # one device is installed at a time
        install.prepare_with(device, governor.preparing)
        return governor


def obey(device: Device, governor: Governor) -> None:
    """For a thread between two layers: gives what others demand of it. DriverError."""
    if device.obey():
        governor.pages_given()


def measure_link(device: Device, governor: Governor, leave: int = 0) -> None:
    """The governor knows how fast the link is, if that can be found out now with `leave` device pages free. Does
    nothing while another thread finds out."""

    def measure() -> None:
        if governor.bandwidth is None:
            with relaxed(device), suppress(DriverError):  # of a driver that says it has host pages and gives none
                if (found := link.measure(device, leave=leave)) is not None:
                    governor.bandwidth = found
        if governor.peer_bandwidth is None and device.peer is not None:
            with relaxed(device), suppress(DriverError):
                if (found := link.measure(device, leave=leave, place="peer")) is not None:
                    governor.peer_bandwidth = found

    if_free(_measuring, measure)


def _received(device: Device) -> Callable[[], int | None] | None:
    """Bytes per second that come over the link of a GPU."""
    if device.kind != "cuda":
        return None
    from .key import uuid_of

    return partial(link.received, uuid_of(device))
