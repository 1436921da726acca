"""The devices of this process, each with its runtime, by number, and their budgets, which change while the program
runs. Further GPUs are registered here. No torch.

Note [One registry]
    Internal code gets a device, or its runtime, as an argument. Only functions that a user calls look the runtime up
    here, by the device's number. `install()` puts one runtime under torch; further ones may live beside it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final, Protocol, TypeVar

from . import _native, device_choice, findings
from ._native import Device
from .config import Config, format_size, parse_size, parse_time
from .defaults import BUDGET_LOOK
from .errors import BudgetInUse, ConfigError, InstallError, NotInstalled
from .events import Events

Part = TypeVar("Part")


class RuntimeParts:
    """At most one object of each class, for as long as the runtime lives. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._parts: dict[type, Any] = {}

    def get(self, kind: type[Part]) -> Part | None:
        """Returns the object of this class, None where there is none."""
        part: Part | None = self._parts.get(kind)
        return part

    def of(self, kind: type[Part], make: Callable[[], Part]) -> Part:
        """Returns the object of this class, made by `make` where there is none yet. If `make` raises there is still
        none."""
        with self._lock:
            part = self.get(kind)
            return self.put(make()) if part is None else part

    def put(self, part: Part) -> Part:
        """Keeps the object, in place of an earlier one of its class, and returns it."""
        with self._lock:
            self._parts[type(part)] = part
        return part

    def drop(self, kind: type) -> None:
        """Drops the object of this class. Idempotent."""
        with self._lock:
            self._parts.pop(kind, None)


Preparing = Callable[[], AbstractContextManager[Callable[[], int]]]


class Shared(Protocol):
    """The part that this process has of a shared budget."""

    def set_budget(self, nbytes: int, patience: float) -> None:
        """Changes the budget as `ballonet.set_budget()`."""

    def give(self, nbytes: int, patience: float) -> None:
        """Gives pages until it has no more than so many bytes, or as few as it can. BudgetInUse."""

    def close(self) -> None:
        """Ends the sharing, as the device is gone."""


class Runtime:
    """A device, the settings that it was started with, and the log of decisions about its pages. `number`: in the
    registry; `process`: the one that may use it, not a child of a fork."""

    def __init__(self, number: int, device: _native.Device, settings: Config) -> None:
        self.number: Final = number
        self.device: Final = device
        self.settings: Final = settings
        self.events: Final = Events(device)
        self.parts: Final = RuntimeParts()
        self.process: Final = os.getpid()
        self.why_no_graphs = ""  # may models decode by CUDA graphs? Empty where they may
        # Entered where a lower budget is refused: within it more pages are made ready to leave the device; it yields a
        # function that counts those not ready yet.
        self.preparing: Preparing | None = None
        self.shared: Shared | None = None

    @property
    def library(self) -> str:
        """The library of the device's driver."""
        return self.settings.libcuda or device_choice.LIBCUDA

    def __repr__(self) -> str:
        return f"<Runtime {self.number} of {self.device.kind} {self.device.ordinal}>"


_runtimes: dict[int, Runtime] = {}  # by number


def start(
    config: Config, torch_has_cuda: bool | None = None, *, spill: bool = True, number: int | None = None
) -> Runtime:
    """Opens a device and registers its runtime under `number`, by default that of the device. InstallError where there
    is one; raises as `open_device`."""
    target = device_choice.choose(config, torch_has_cuda)
    number = target.ordinal if number is None else number
    if number in _runtimes:
        raise InstallError("ballonet is installed already in this process; ballonet.set_budget() changes its budget")
    made = Runtime(
        number, device_choice.opened(config, target, spill), replace(config, spill=config.spill is not False)
    )
    made.why_no_graphs = findings.why_no_graphs(config, target.facts)
    _runtimes[number] = made
    return made


def current(number: int | None = None) -> Runtime | None:
    """Returns the runtime of that number, or where none is given the first that was started; None where there is
    none."""
    return next(iter(_runtimes.values()), None) if number is None else _runtimes.get(number)


def of(number: int | None = None) -> Runtime:
    """Returns the runtime as `current`. NotInstalled where there is none."""
    runtime = current(number)
    if runtime is None:
        raise NotInstalled("ballonet is not installed in this process: call ballonet.install() first")
    return runtime


def holding(device: _native.Device) -> Runtime:
    """Returns the runtime of this device. NotInstalled where it has none."""
    for runtime in every():
        if runtime.device is device:
            return runtime
    raise NotInstalled(f"no runtime holds {device.kind} {device.ordinal}: call ballonet.install() first")


def every() -> tuple[Runtime, ...]:
    """Returns all runtimes, in the order in which they were started."""
    return tuple(_runtimes.values())


def require() -> _native.Device:
    """Returns the device of the runtime that was started first. NotInstalled."""
    return of().device


def stop(number: int | None = None) -> None:
    """Closes the device of that runtime, or where no number is given of the first, if there is any. Raises
    BallonetError, and changes nothing, while memory of it is in use."""
    runtime = current(number)
    if runtime is not None:
        runtime.device.close()
        del _runtimes[runtime.number]
        if runtime.shared is not None:
            runtime.shared.close()


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
    runtime = of(number)
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
