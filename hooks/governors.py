"""The governor of each device that models are managed on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from ..allocator._native import Device
from ..offload import link
from ..offload.governor import Governor

_governors: list[tuple[Device, Governor]] = []
_lock = threading.Lock()


def of(device: Device) -> Governor:
    """That of the device, made where there is none yet. Those of devices that are gone are forgotten."""
    with _lock:
        for each, governor in _governors:
            if each is device:
                return governor
        governor = Governor(device, received=_received(device))
        _governors[:] = [(device, governor)]  # one device is installed at a time
        return governor


def _received(device: Device) -> Callable[[], int | None] | None:
    """Bytes per second that come over the link of a GPU."""
    if device.kind != "cuda":
        return None
    from .record_key import uuid_of  # imports transformers, which other modules can do without

    return partial(link.received, uuid_of(device))
