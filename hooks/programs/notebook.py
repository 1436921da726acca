"""`%load_ext ballonet`: a notebook whose models live in the pool, each from its first forward or `generate()`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...allocator import devices
from ...allocator.config import Config
from ...allocator.devices import set_budget
from ...allocator.errors import InstallError
from ...allocator.install import install, restore
from ...allocator.units import format_size
from .first_use import FirstUse

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_watching: FirstUse | None = None
_installed = False  # was it installed by loading, and not by the notebook itself?


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Installs ballonet unless it is installed, and manages models at their first use from now on. Idempotent."""
    global _watching, _installed
    if _watching is not None:
        print("ballonet: loaded already")
        return
    before, _installed = devices.current(), _installed or devices.current() is None
    install()
    _watching = FirstUse()
    runtime = devices.of()
    device = runtime.device
    if _installed and runtime is before and (asked := Config.from_env().budget) is not None:
        set_budget(asked)  # the pool was kept open, under the budget of the time before
    place = f"GPU {device.ordinal}" if device.kind == "cuda" else "the CPU (host stand-in)"
    print(
        f"ballonet: {format_size(device.budget)} on {place} in pages of {format_size(device.page_size)}; models are "
        "managed at their first forward or generate(). ballonet.stats() shows who owns what"
    )


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """Releases the models, and gives torch its own allocator back if loading had replaced it and torch can return to
    it."""
    global _watching, _installed
    if _watching is None:
        return
    _watching.close()
    for managed in _watching.managed:
        managed.release()
    _watching = None
    if _installed:
        try:
            restore()
        except InstallError as error:
            print(f"ballonet: unloaded; models are as they were. The pool stays: {error}")
            return
        _installed = devices.current() is not None  # memory of the pool is still in use, so it closes later
    if _installed:
        print(
            "ballonet: unloaded; models are as they were. Tensors that lie in the pool keep it open: drop them, and "
            "ballonet.restore() closes it; until then a new budget needs ballonet.set_budget()"
        )
    else:
        print("ballonet: unloaded; models and the allocator are as they were")
