"""The devices of this process, each with its runtime, by number. Further GPUs are registered here. No torch.

Note [One registry]
    Internal code gets a device, or its runtime, as an argument. Only functions that a user calls look the runtime up
    here, by the device's number. `install()` puts one runtime under torch; further ones may live beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Final, Protocol

from . import _native, device_choice, findings
from .config import Config
from .device_parts import RuntimeParts
from .errors import InstallError, NotInstalled
from .events import Events

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
    registry."""

    def __init__(self, number: int, device: _native.Device, settings: Config) -> None:
        self.number: Final = number
        self.device: Final = device
        self.settings: Final = settings
        self.events: Final = Events(device)
        self.parts: Final = RuntimeParts()
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
