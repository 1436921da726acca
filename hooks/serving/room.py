"""What there is for KV and activations of requests on a device at this moment."""

from __future__ import annotations

from ...allocator._native import Device
from ...offload.policy.admission import Memory
from ...offload.policy.tuning import DEFAULT, Serving
from ..device import governors
from ..weights.room import host_pages_left


def memory_of(device: Device, tuning: Serving = DEFAULT.serving) -> Memory:
    """Free pages, and those that others have published to give: Algorithm 1's P_T. Free blocks of the heap are for
    activations."""
    idle: int = device.snapshot()["heap"]["cached"]
    others = device.available + governors.of(device).reclaim.offered
    page = device.page_size
    return Memory(0, idle, others * page, host_pages_left(device) * page, device.budget // tuning.reserve)
