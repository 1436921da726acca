"""Every test of replicas gives back all that it has taken of the device."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from ballonet.allocator import runtime

from ..pool import take_out


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """No page of KV is in use at the end, and the device is whole."""
    yield
    gc.collect()
    if (device := runtime.current()) is not None:
        device.device.reap(wait=True)
        device.device.check()
        assert device.device.snapshot()["pages"]["kv"] == 0
    take_out()
