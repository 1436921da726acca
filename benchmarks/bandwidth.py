"""What the link gives: large copies from the host to the device and nothing else, the yardstick of what streams."""

from __future__ import annotations

from collections.abc import Callable

import torch
from common import MIB, Options
from peer import seconds

import ballonet
from ballonet.allocator import devices
from ballonet.allocator._native import Transfer

COPIES = 4


def measure(chosen: Options) -> Callable[[], float]:
    """What measures bytes per second: torch's copies from pinned memory; on the stand-in its own, where they are as
    slow as it was told."""
    nbytes = (16 if chosen.tiny else 256) * MIB
    copy = pinned(nbytes) if chosen.cuda else paged(nbytes)
    return lambda: COPIES * nbytes / seconds(chosen.device, copy)


def pinned(nbytes: int) -> Callable[[], object]:
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    return lambda: [target.copy_(source, non_blocking=True) for _ in range(COPIES)]


def paged(nbytes: int) -> Callable[[], object]:
    if devices.current() is None:
        ballonet.install(2 * nbytes, host_budget=2 * nbytes)
    device = devices.require()
    source, target = (device.reserve(nbytes, "weights", device.group()) for _ in range(2))
    source.map_host(0, source.pieces)
    target.map(0, target.pieces)
    transfer = Transfer(device)

    def copy() -> None:
        parts = [(target.address, source.address, nbytes)]
        done = [transfer.copy(parts, after=0, owner="weights", to="device") for _ in range(COPIES)]
        done[-1].wait()

    return copy
