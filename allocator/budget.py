"""The budget of a device changes while the program runs."""

from __future__ import annotations

import time

from . import device_choice, devices
from ._native import Device
from .config import format_size, parse_size, parse_time
from .defaults import BUDGET_LOOK
from .devices import Preparing, Runtime
from .errors import BudgetInUse, ConfigError


def set_budget(size: int | str, timeout: float | str = "60s") -> None:
    """Changes the bytes of device pages while running, from any thread or a signal's handler. Returns when pages above
    it are back with the driver.

    A smaller budget is met as an allocation would be: by free and idle pages, then by weights and caches that may go to
    the host, waiting for threads that use them and for copies of layers. BudgetInUse, with the smallest possible
    budget, where that is too little; also where it took longer than `timeout`, or another call asked for another budget
    meanwhile. The former budget is in force then. ConfigError, NotInstalled, DriverError.
    """
    set_budget_of(None, size, timeout)


def set_budget_of(number: int | None, size: int | str, timeout: float | str) -> None:
    """Changes the budget as `set_budget`, of the runtime of that number; None: of the first."""
    runtime = devices.of(number)
    device = runtime.device
    nbytes = device_choice.whole_pages(parse_size(size, "budget"), device.page_size, "the budget")
    _, there = device.free_memory()
    if nbytes > there:
        raise ConfigError(f"the budget is {format_size(nbytes)} but the device has {format_size(there)}: ask for less")
    patience = parse_time(timeout, "timeout")
    if runtime.shared is not None:
        runtime.shared.set_budget(nbytes, patience)
    else:
        change_budget(runtime, nbytes, patience)


def change_budget(runtime: Runtime, nbytes: int, patience: float) -> None:
    """Changes the budget to so many bytes, whole pages, within `patience` seconds. BudgetInUse, DriverError."""
    device, began = runtime.device, time.monotonic()
    try:
        device.set_budget(nbytes, round(patience * 1e9))
    except BudgetInUse as error:
        if error.waited or runtime.preparing is None:
            raise
        _set_prepared(device, nbytes, began, patience, runtime.preparing, error)


def _set_prepared(
    device: Device, nbytes: int, began: float, patience: float, preparing: Preparing, error: BudgetInUse
) -> None:
    """Tries again each time that more pages are ready, until no more will be, or the time is up."""
    with preparing() as unready:
        before, left = None, unready()
        while True:
            if left != before:
                remaining = patience - (time.monotonic() - began)
                try:
                    return device.set_budget(nbytes, max(0, round(remaining * 1e9)))
                except BudgetInUse as again:
                    error = again
                if error.waited or not left:
                    raise error
            waited = time.monotonic() - began
            if waited >= patience:
                raise BudgetInUse(error.immovable, error.budget, waited)
            time.sleep(BUDGET_LOOK)
            before, left = left, unready()
