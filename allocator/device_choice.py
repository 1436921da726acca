"""Opens a device by the settings: which driver, which device, how much of it. No torch.

Note [Page size]
    A call of the driver costs the same for a page of any size (create and map about 8 µs, access 20 µs, unmap 14 µs on
    an H200), so large pages make mapping cheap: 31 ms per GiB at 2 MiB, 7.3 ms at 8 MiB, 1.8 ms at 32 MiB. Their cost
    is waste: the last page of every range, of every cache and of the activations is partly empty. The layers of an 8B
    model are 416 MiB, which wastes nothing at 8 or at 32 MiB, but a cache of 1,000 tokens with a range per layer wastes
    131 MiB at 8 MiB and 899 MiB at 32 MiB. On CUDA the default is therefore 8 MiB. On the stand-in most of a mapping's
    time goes into the bytes, so that nothing is won beyond 1 MiB, and the models are small: 2 MiB, the smallest page
    that CUDA has.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from . import _native, defaults, findings, ram
from .config import Config, format_size
from .errors import ConfigError, DriverUnavailable
from .notices import warn

GRANULARITY: Final = {"cuda": 2 * 2**20, "standin": 4096}
LIBCUDA: Final = "libcuda.so.1"


@dataclass(frozen=True, slots=True)
class Target:
    """A driver's library, a device of it, and its `facts` from `_native.probe`."""

    library: str
    ordinal: int
    facts: dict[str, Any]

    @property
    def kind(self) -> Literal["cuda", "standin"]:
        kind: Literal["cuda", "standin"] = self.facts["kind"]
        return kind


def standin_library() -> str:
    """Returns the path of the host stand-in, which is built beside the core. DriverUnavailable where it is missing."""
    path = Path(_native.__file__).with_name("_standin.so")
    if not path.exists():
        raise DriverUnavailable(
            f"{path}, the host stand-in, is missing: build ballonet again (pip install, or make build)"
        )
    return str(path)


def choose(config: Config, torch_has_cuda: bool | None = None) -> Target:
    """Chooses the device that `config` asks for. `torch_has_cuda`: can torch use a GPU? None where torch is not
    involved.

    `auto` takes the first GPU where there is one that torch can use, else the stand-in. A library named by
    BALLONET_LIBCUDA that is itself the stand-in is used as such. Raises DriverUnavailable, ConfigError.
    """
    if config.device == "cpu":
        return _standin()
    wanted = config.device != "auto"
    ordinal = int(config.device.partition(":")[2] or 0)
    try:
        target = _probe(config.libcuda or LIBCUDA, ordinal)
        if ordinal >= target.facts["devices"]:
            raise DriverUnavailable(
                f"there is no device {ordinal}: {target.library} has {target.facts['devices']}, counted from 0"
            )
    except DriverUnavailable as error:
        if wanted or config.libcuda is not None:
            raise DriverUnavailable(f"{error}; BALLONET_DEVICE=cpu runs on the host stand-in") from error
        return _standin()
    if target.kind == "cuda" and torch_has_cuda is False:
        if wanted:
            raise DriverUnavailable(
                f"device {config.device!r} was asked for but this torch is built without CUDA: install a CUDA build of "
                "torch, or use device='cpu'"
            )
        return _standin()
    if not target.facts["virtual_memory"]:
        raise DriverUnavailable(
            f"{target.facts['name']} offers no virtual memory management (some vGPU and WSL2 set-ups refuse it), which "
            "ballonet is built on: use torch's own allocator there, or device='cpu' for models on the CPU"
        )
    return target


def open_device(config: Config, torch_has_cuda: bool | None = None, *, spill: bool = True) -> _native.Device:
    """Opens a device, with every default filled in, which the caller closes.

    `spill`: may its blocks be spilled, where the settings allow it? Raises ConfigError, DriverUnavailable, DriverError.
    """
    return opened(config, choose(config, torch_has_cuda), spill)


def open_unbacked(config: Config, page: int, budget: int) -> _native.Device:
    """Opens a stand-in of so many bytes whose pages take no memory, as nobody reads or writes them. It is apart from
    the one that this process computes on. DriverError."""
    return _native.Device(
        library=_standin_apart(),
        ordinal=0,
        page_size=page,
        budget=budget,
        host_budget=0,
        host_pages=False,
        faults=list(config.faults),
        unbacked=budget,
    )


@functools.cache
def _standin_apart() -> str:
    """Returns the path of a copy of the stand-in: how large a device is, is said to a loaded library for good."""
    descriptor = os.memfd_create("ballonet-standin-apart")
    with open(descriptor, "wb", closefd=False) as copy:  # stays open: the loader knows a library by its file
        copy.write(Path(standin_library()).read_bytes())
    return f"/proc/self/fd/{descriptor}"


def opened(config: Config, target: Target, spill: bool) -> _native.Device:
    """Opens the device, as `open_device`; warns where it has no host pages, or no peer."""
    config = findings.applied(config, target.facts)
    page = page_size(config, target.kind)
    given = None if config.budget is None else whole_pages(config.budget, page, "the budget")
    if given is not None and given > target.facts["total_memory"]:
        raise ConfigError(
            f"the budget is {format_size(given)} but {target.facts['name']} has "
            f"{format_size(target.facts['total_memory'])}: ask for less"
        )
    peer, wanted = peer_ordinal(config, target), config.host_pages is not False and config.host_budget != 0
    # Free memory is known only once the device's context exists, so a default budget comes second.
    device = _native.Device(
        library=target.library,
        ordinal=target.ordinal,
        page_size=page,
        budget=given or defaults.SMALLEST_BUDGET * page,
        host_budget=host_budget(config, target.kind, page),
        peer=peer,
        peer_budget=0 if peer is None else peer_budget(config, target, peer, page),
        link_bandwidth=config.link_bandwidth,
        link_latency_ns=round(config.link_latency * 1e9),
        peer_bandwidth=config.peer_bandwidth,
        spill=spill and config.spill is not False,
        host_pages=wanted,
        faults=list(config.faults),
    )
    if device.host_refused and wanted:
        warn(
            f"no host pages: {device.host_refused}. Weights can stream from their files only, and "
            "KV and activations cannot lie on the host. In a container it often helps to allow get_mempolicy "
            "(docker run --cap-add SYS_NICE)"
        )
    if device.peer_refused:
        warn(
            f"no peer: {device.peer_refused}. KV that leaves the device goes to the host. "
            "BALLONET_PEER=same has a second pool on the device itself, BALLONET_PEER=none none"
        )
    if given is None:
        device.set_budget(default_budget(device))
    return device


def peer_ordinal(config: Config, target: Target) -> int | None:
    """Returns the number of the device that pages of the peer are on: the device's own one for a second pool, None for
    no peer. `auto` takes the first device whose memory this one can reach, else a second pool. ConfigError."""
    wanted = config.peer or ("none" if config.peer_budget is None else "auto")
    if wanted == "none":
        return None
    if wanted == "auto":
        others: list[int] = target.facts["peers"]
        return others[0] if others else target.ordinal
    if wanted == "same":
        return target.ordinal
    if target.kind == "standin":
        raise ConfigError(f"the peer is {wanted!r}, and there is no GPU here: write 'auto', 'same' or 'none'")
    return int(wanted.partition(":")[2])


def peer_budget(config: Config, target: Target, peer: int, page: int) -> int:
    """Returns the bytes of pages of the peer: the setting, else half of the other device's memory; for a second pool,
    and on the stand-in, a quarter of the device's budget, or where that is not given an eighth of the memory that is
    there."""
    nbytes = config.peer_budget
    if nbytes is None and target.kind == "cuda" and peer != target.ordinal and peer < target.facts["devices"]:
        nbytes = _native.probe(target.library, peer)["total_memory"] // defaults.PEER_OF_DEVICE
    elif nbytes is None and config.budget is not None:
        nbytes = config.budget // defaults.PEER_OF_BUDGET
    elif nbytes is None:
        there = ram.available() if target.kind == "standin" else target.facts["total_memory"]
        nbytes = there // defaults.PEER_OF_ALL
    return int(nbytes) // page * page


def page_size(config: Config, kind: Literal["cuda", "standin"]) -> int:
    """Returns the bytes per page: the setting, if the device can do it, else the device's default. ConfigError."""
    size = config.page_size or defaults.PAGE_SIZE[kind]
    if size % GRANULARITY[kind]:
        raise ConfigError(
            f"the page size is {size} bytes, which this device cannot do: use a multiple of "
            f"{format_size(GRANULARITY[kind])}"
        )
    return size


def whole_pages(nbytes: int, page: int, what: str) -> int:
    """Returns `nbytes` rounded down to pages; ConfigError where that leaves too few to run anything."""
    if nbytes < defaults.SMALLEST_BUDGET * page:
        raise ConfigError(
            f"{what} is {format_size(nbytes)}, which is less than {defaults.SMALLEST_BUDGET} pages of "
            f"{format_size(page)}: give more, or choose a smaller page size"
        )
    return nbytes // page * page


def default_budget(device: _native.Device) -> int:
    """Returns the default budget. CUDA: free memory, less room for memory outside every pool. Stand-in: half of the
    available memory."""
    if device.kind == "standin":
        return whole_pages(ram.available() // defaults.STANDIN_BUDGET, device.page_size, "half of the available memory")
    free, _ = device.free_memory()
    room = free - max(defaults.OUTSIDE_BYTES, int(defaults.OUTSIDE_SHARE * free))
    if device.peer == device.ordinal:
        room -= device.snapshot()["peer_budget"]
    return whole_pages(
        max(0, room), device.page_size, "the free device memory, less room for what lives outside the pool,"
    )


def host_budget(config: Config, kind: Literal["cuda", "standin"], page: int) -> int:
    """Returns the bytes of host pages: a quarter of the memory that this process may use and no more than half of what
    is left of it; on the stand-in half of what the device budget leaves."""
    if config.host_budget is not None:
        return config.host_budget // page * page
    if kind == "cuda":
        return min(ram.total() // defaults.HOST_OF_ALL, ram.available() // defaults.HOST_OF_AVAILABLE) // page * page
    available = ram.available()
    left = available - (config.budget or available // defaults.STANDIN_BUDGET)
    return max(0, left) // defaults.STANDIN_HOST // page * page


def _standin() -> Target:
    return _probe(standin_library(), 0)


def _probe(library: str, ordinal: int) -> Target:
    return Target(library, ordinal, _native.probe(library, ordinal))
