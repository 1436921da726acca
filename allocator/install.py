"""Puts the pool under torch and takes it away again: `install`, `allocator`, `restore`, `stock`, `stock_everywhere`.

On a GPU the pool becomes torch's CUDA allocator, which torch lets one do once, before its own has been used. Where it
was used, what the calling thread allocates from then on lies in the pool, through `torch.cuda.MemPool`. With no GPU the
device is the host stand-in, and what torch allocates on the CPU from then on lies in the pool.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from . import _native, control, device_choice, devices, versions
from .companion import Companion, TorchAllocator, load, load_allocator
from .config import Config, cache_dir
from .cuda_headers import WITHOUT
from .devices import Runtime, set_budget_of
from .errors import (
    BallonetError,
    CompanionUnavailable,
    DriverError,
    InstallError,
)
from .interrupts import Guarded
from .notices import warn
from .pluggable import CudaAllocator, MemPoolRoute, TorchStatistics, check_cuda_unused, cuda_used, mem_pool_route


@dataclass
class _Installed:
    """The parts that `install()` put under torch. `companion` is None where there is none for this torch; on CUDA there
    is one of `cuda` and `route`, on the stand-in neither."""

    runtime: Runtime
    companion: Companion | None
    statistics: TorchStatistics
    cuda: CudaAllocator | None
    route: MemPoolRoute | None
    paused: bool = False  # restore() was called while memory of the pool was in use
    outside: set[object] = field(default_factory=set)  # sections of stock_everywhere() that are open

    @property
    def device(self) -> _native.Device:
        return self.runtime.device


_installed: _Installed | None = None
_lock = threading.RLock()
_warned = False  # that something was spilled


def install(
    budget: int | str | None = None,
    *,
    page_size: int | str | None = None,
    host_budget: int | str | None = None,
    peer: str | None = None,
    peer_budget: int | str | None = None,
    device: str | torch.device | None = None,
    spill: bool | None = None,
) -> None:
    """Makes one pool of device pages and puts it under torch. Models may be loaded before or after.

    `budget`: bytes of device pages (`"24GiB"` or an int); by default the free device memory less room for what lives
    outside, with no GPU half of the RAM that is available. `page_size`: bytes per page. `host_budget`: bytes of host
    pages; 0: none are used. `peer`: a second place for KV that leaves the device, before the host: "cuda:N", whose
    memory this device can reach; "same", a second pool on the device itself; "auto", the first of the two that there
    is; by default "none", or "auto" where there is a `peer_budget`, the bytes of its pages. `device`: "auto", "cpu",
    "cuda" or "cuda:N". `spill`: may an allocation that fits nowhere else lie on host pages, where it is slower to use,
    rather than be refused? What is not given comes from the environment (`BALLONET_BUDGET`, …), then from the machine.

    Where torch has used CUDA already it warns: then only what the calling thread allocates from now on, and what
    `manage()` moves, lies in the pool. Called again with the same settings, or none, it does nothing. If it fails,
    nothing has changed. Raises ConfigError, InstallError (another pluggable allocator is in place; installed with other
    settings), UnsupportedVersion, DriverUnavailable, DriverError.
    """
    with _lock:
        asked, settings = (
            base.merge(
                budget=budget,
                page_size=page_size,
                host_budget=host_budget,
                peer=peer,
                peer_budget=peer_budget,
                device=device,
                spill=spill,
            )
            for base in (Config(), Config.from_env())
        )
        _put(_started(asked, settings))


def allocator() -> CudaAllocator:
    """The pool as an argument for `torch.cuda.memory.change_current_allocator`, which then does what `install()` does.

    Starts the device, with the settings of the environment, where `install()` did not. InstallError on a machine with
    no GPU, and where torch has used CUDA already.
    """
    with _lock:
        settings = Config.from_env()
        if device_choice.choose(settings, _torch_has_cuda()).kind != "cuda":
            raise InstallError(
                "there is no CUDA device here, so there is no CUDA allocator to change: call ballonet.install(), "
                "which puts what torch allocates on the CPU into the pool"
            )
        if _installed is None:
            check_cuda_unused()
        cuda = _started(Config(), settings).cuda
        if cuda is None:
            raise InstallError("ballonet is installed in another way: call ballonet.restore() first")
        return cuda


def restore() -> None:
    """Puts torch's own CPU allocator back, or ends the use of `torch.cuda.MemPool`; does nothing where nothing is
    installed.

    Tensors that lie in the pool stay as they are. The device is closed at once if there are none, otherwise by the next
    `restore()` or `install()` that finds them gone. InstallError on a GPU: torch cannot change its CUDA allocator a
    second time.
    """
    with _lock:
        if _installed is None:
            return
        if _installed.cuda is not None and _installed.cuda.in_place:
            raise InstallError(
                "torch cannot return to its own CUDA allocator once another is in use: start a new process, without "
                "ballonet.install()"
            )
        _pause(_installed)
        _close()


def spilled() -> None:
    """Warns, once per process, that an allocation lies on host pages for want of device pages."""
    global _warned
    if not _warned:
        _warned = True
        warn(
            "the device budget is used up: something that was allocated lies on host pages, where it is "
            "slower to use, until it is freed. A larger budget (ballonet.set_budget), a smaller batch or a shorter "
            "context would avoid that; with BALLONET_SPILL=0 it would have been refused."
        )


def reclaim() -> bool:
    """Has torch give back memory of the pool that it caches itself, as it does for `torch.cuda.MemPool`. Returns
    whether that is in use."""
    installed = _installed
    return installed is not None and installed.route is not None and installed.route.renew()


def history() -> dict[str, Any] | None:
    """Returns torch's record of its allocations (`torch.cuda.memory._snapshot`), where the compiled allocator is in
    use; else None: there are no stacks and no traces."""
    installed = _installed
    if installed is None or installed.cuda is None or not installed.cuda.whole:
        return None
    snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    return snapshot


def stock() -> AbstractContextManager[None]:
    """A context in which this thread's CPU allocations come from torch's own allocator (backings, staging)."""
    installed = _installed
    return nullcontext() if installed is None or installed.companion is None else installed.companion.stock()


def stock_everywhere() -> Guarded[None]:
    """A context as `stock()`, for all threads: those that a library starts have memory of torch's own, too."""
    return Guarded(_Everywhere())


class _Everywhere:
    """The context of stock_everywhere."""

    def __init__(self) -> None:
        self._of: tuple[_Installed, Companion] | None = None

    def begin(self) -> None:
        with _lock:
            installed = _installed
            if installed is not None and installed.companion is not None and installed.device.kind != "cuda":
                self._of = installed, installed.companion
                installed.outside.add(self)
                installed.companion.pause_cpu()

    def end(self, failed: bool) -> None:
        if self._of is None:
            return
        with _lock:
            installed, companion = self._of
            installed.outside.discard(self)
            if installed is _installed and not installed.outside and not installed.paused:
                companion.install_cpu()


def _started(asked: Config, settings: Config) -> _Installed:
    """Returns what is installed already, if its settings are those, else a new device, not under torch yet."""
    global _installed
    if _installed is not None and _installed.paused:
        _close()
    if _installed is not None:
        _check_same(asked, _installed)
        return _installed
    versions.require("torch", torch.__version__)
    versions.warn_of_untested()
    late = device_choice.choose(settings, _torch_has_cuda()).kind == "cuda" and cuda_used()
    if late:
        torch.cuda.empty_cache()  # memory that torch caches is not free, and a default budget is made of free memory
    with ExitStack() as undo:
        # torch's own caching allocator would keep a segment that was spilled.
        started = devices.start(settings, _torch_has_cuda(), spill=not late)
        device = started.device
        undo.callback(devices.stop, started.number)
        device.on_spill(spilled)
        if device.kind == "standin" and settings.device == "auto" and torch.version.cuda is not None:
            warn(
                "torch can use no GPU here, so models are served from the CPU (the host stand-in): "
                "`ballonet info` says why",
                UserWarning,
            )
        device.bind()
        undo.callback(device.unbind)
        companion = _companion(settings, device)
        statistics = TorchStatistics(device)
        first = device.kind == "cuda" and not late
        cuda = CudaAllocator(companion, statistics, _torch_allocator(settings, device)) if first else None
        route = mem_pool_route(companion, device.ordinal) if late else None
        _installed = _Installed(started, companion, statistics, cuda, route)
        undo.pop_all()
    return _installed


def _put(installed: _Installed) -> None:
    """Puts a started device under torch, or closes it again."""
    try:
        if installed.cuda is not None:
            if not installed.cuda.in_place:
                torch.cuda.memory.change_current_allocator(installed.cuda)
        elif installed.route is not None:
            if not installed.route.is_open:
                installed.route.open()
                warn(
                    "torch has used CUDA before ballonet.install(): in the pool is what this thread allocates from now "
                    "on, and what manage() moves there. Other threads, and what exists, stay with torch's own "
                    "allocator; install first in a new process to have all in one pool.",
                    UserWarning,
                )
        elif installed.companion is not None and not installed.outside and not installed.companion.install_cpu():
            raise InstallError(
                "another library has put its own CPU allocator over ballonet's since: import or set up that one before "
                "ballonet.install(), in a new process"
            )
        installed.paused = False
        _listen(installed.runtime)
    except BaseException:
        installed.statistics.restore()
        _close()
        raise


def listen() -> None:
    """Has this process listen for looks and budgets from outside (control.py). OSError where it cannot listen."""
    control.start(lambda nbytes, timeout, number: set_budget_of(number, nbytes, timeout))


def _listen(of: Runtime) -> None:
    """Listens for `ballonet budget`."""
    if of.settings.control:
        try:
            listen()
        except OSError as error:
            warn(
                f"`ballonet budget` cannot reach this process: {error}. Set XDG_RUNTIME_DIR to a folder of "
                "yours, or BALLONET_CONTROL=0 to do without"
            )


def _pause(installed: _Installed) -> None:
    control.stop()
    if installed.route is not None:
        installed.route.close()
    if installed.companion is not None:
        installed.companion.pause_cpu()
    installed.paused = True


def _close() -> bool:
    """Closes the device, if nothing of it is in use, and removes what is left of it in torch. Returns whether it
    did."""
    global _installed
    assert _installed is not None
    try:
        devices.stop(_installed.runtime.number)
    except DriverError:
        raise
    except BallonetError:
        return False  # in use: live blocks must still be freed to it
    _installed.device.unbind()
    if _installed.companion is not None:
        _installed.companion.restore_cpu()
    _installed.statistics.restore()
    _installed = None
    return True


def _companion(settings: Config, device: _native.Device) -> Companion | None:
    try:
        return load(cache_dir(settings), _native.core_table(), device.ordinal)
    except CompanionUnavailable as error:
        lost = {
            "cuda": "running out of memory is a RuntimeError, not torch.OutOfMemoryError",
            "standin": "what torch allocates on the CPU (activations) stays outside the pool; weights and KV are in it",
        }[device.kind]
        warn(f"no companion: {error}. So {lost}.")
        return None


def _torch_allocator(settings: Config, device: _native.Device) -> TorchAllocator | None:
    try:
        return load_allocator(cache_dir(settings), _native.core_table(), device.ordinal)
    except CompanionUnavailable as error:
        warn(f"torch's CUDA allocator lacks part of what torch asks of one: {error}. So {WITHOUT}.")
        return None


def _torch_has_cuda() -> bool:
    return torch.version.cuda is not None and torch.cuda.is_available()


def _check_same(asked: Config, installed: _Installed) -> None:
    """Raises InstallError where a setting that was given is not the one in force."""
    device, settings = installed.device, installed.runtime.settings
    snapshot = device.snapshot()
    places = (
        {"cpu"}
        if device.kind == "standin"
        else {f"cuda:{device.ordinal}"} | ({"cuda"} if device.ordinal == 0 else set())
    )
    in_force: dict[str, set[Any]] = {
        "budget": {settings.budget, device.budget},
        "page_size": {settings.page_size, device.page_size},
        "host_budget": {settings.host_budget, snapshot["host_budget"]},
        "peer": {settings.peer, "none" if device.peer is None else f"cuda:{device.peer}"},
        "peer_budget": {settings.peer_budget, snapshot["peer_budget"]},
        "spill": {settings.spill},
        "device": {"auto", settings.device} | places,
    }
    for name, values in in_force.items():
        value = getattr(asked, name)
        if value is not None and value not in values:
            remedy = {"budget": "call ballonet.set_budget(size) to change it"}.get(
                name, "call ballonet.restore() first" if installed.cuda is None else "start a new process to change it"
            )
            raise InstallError(f"ballonet is installed already, with another {name}: {remedy}")
