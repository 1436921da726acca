"""Budgets that processes of one user share: joining one, and what other modules ask of this process's part."""

from __future__ import annotations

import atexit
import os
import threading
from contextlib import suppress
from typing import Any

from ...allocator import devices, install, looks
from ...allocator._native import Device
from ...allocator.devices import Runtime
from ...allocator.errors import BallonetError, SharedBudgetError
from ...allocator.shared_ledger import SharedLedger
from ...offload.policy.tuning import Sharing
from .shared_part import Share

_joining = threading.Lock()


def join(runtime: Runtime, wanted: int | bool, floor: int, priority: int, tuning: Sharing) -> None:
    """Joins the shared budget of that device: `wanted` bytes in all, or True for the total that others have set. In a
    process that has joined already, only raises its priority to that of its models. SharedBudgetError, LedgerDamaged,
    OSError."""
    total = None if wanted is True else int(wanted)
    with _joining:
        if isinstance(runtime.shared, Share):
            share = runtime.shared
            if total is not None and total != share.ledger.read().total:
                raise SharedBudgetError(
                    "this process shares a budget of another size already: change it for all who share it with `python "
                    "-m ballonet budget --shared SIZE`"
                )
            share.priority = max(share.priority, priority)
            return
        if not runtime.settings.control:
            raise SharedBudgetError(
                "processes that share a budget ask each other through the control socket, which BALLONET_CONTROL=0 "
                "forbids: leave that out"
            )
        install.listen()
        share = Share(runtime, SharedLedger(_name(runtime.device)), tuning)
        share.join(total, floor, priority)
        runtime.shared = share
        looks.publish(runtime, "shared", _published)


def reach(device: Device) -> int:
    """Returns the bytes to which the budget of the device could grow by itself."""
    share = _of(device)
    return device.budget if share is None else share.reach


def reserve(device: Device, pages: int) -> None:
    """Takes up to so many pages more where the budget is shared."""
    share = _of(device)
    if share is not None and pages > 0:
        with suppress(BallonetError, OSError):
            share.reserve(pages * device.page_size)


def may_grow(device: Device) -> bool:
    """May the bytes reported by `lacks` still be had? False where other processes use them."""
    share = _of(device)
    return share is not None and share.may_grow


def lacks(device: Device, nbytes: int) -> None:
    """Reports that a scheduler on the device could use so many bytes more; see `Share.lacks`."""
    share = _of(device)
    if share is not None:
        share.lacks(nbytes)


def _of(device: Device) -> Share | None:
    share = next((runtime.shared for runtime in devices.every() if runtime.device is device), None)
    return share if isinstance(share, Share) else None


def _name(device: Device) -> str:
    if device.kind == "standin":
        return "cpu"
    from .key import uuid_of

    return uuid_of(device)


def _end() -> None:
    for runtime in devices.every():
        if isinstance(runtime.shared, Share):
            runtime.shared.end()


def _forget() -> None:
    for runtime in devices.every():
        if isinstance(runtime.shared, Share):
            runtime.shared.forget()
            runtime.shared = None


def _published(runtime: Runtime) -> dict[str, Any] | None:
    return runtime.shared.facts() if isinstance(runtime.shared, Share) else None


atexit.register(_end)
os.register_at_fork(after_in_child=_forget)
