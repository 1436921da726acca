"""The memory for KV and activations of requests on a device now."""

from __future__ import annotations

from ...allocator._native import Device
from ...offload.policy.admission import Memory
from ...offload.policy.tuning import DEFAULT, Serving
from ..device import governors
from ..device.shared import reach
from ..weights.capacity import host_pages_left
from .client import SectorClient


def memory_of(device: Device, client: SectorClient, tuning: Serving = DEFAULT.serving) -> Memory:
    """Returns Algorithm 1's P_T: free pages, pages that other clients have published to give, and own pages that no
    request of the batch reads. Free blocks of the heap are for activations."""
    idle: int = device.snapshot()["heap"]["cached"]
    page, host = device.page_size, host_pages_left(device)
    resting, offered = min(client.resting, host), governors.of(device).reclaim.offered(client.number)
    return Memory(
        0,
        idle,
        (device.available + offered.pages + resting) * page,
        (host - resting) * page,
        device.budget // tuning.reserve,
        dirty=(offered.dirty + resting) * page,
        room=host * page,
        in_use=offered.in_use * page,
    )


def most_of(device: Device, client: SectorClient, tuning: Serving = DEFAULT.serving) -> Memory:
    """Returns the memory that a request could use once all others, of all models, have ended: all except weights that
    no client gives; on the host the pages that are left and those of displaced bytes."""
    pages, governor = device.snapshot()["pages"], governors.of(device)
    given = min(pages["weights"], governor.reclaim.offered(client.number).pages)
    total = reach(device) - (pages["weights"] - given) * device.page_size
    host = (host_pages_left(device) + governor.displaced) * device.page_size
    return Memory(0, 0, total, host, device.budget // tuning.reserve)
