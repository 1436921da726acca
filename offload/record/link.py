"""The host link of a device: its measured speed, and its kind and traffic from NVML.

Note [Measuring the link]
    The copies are those of streaming: host pages to device pages, by the device's own engine, in few large copies. The
    pages are free ones, so no client has to give any up. Little is copied often where little is free; each time is long
    enough for its beginning and end not to count, and on a slow link not longer. The best of several counts:
    disturbances make a measurement slower.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from statistics import median
from types import ModuleType
from typing import Any, Final, Literal, TypeVar

from ...allocator._native import Device, Done, Transfer
from ...allocator.errors import PoolExhausted

_Answer = TypeVar("_Answer")

# Bytes that are taken of either side. Measured: a copy of 8 MiB has 53 of 55 GB/s, of 1 MiB 48. By a copy of `_FIRST`
# it is known how much to copy at a time.
_MOST: Final = 8 * 2**20
_FIRST: Final = 2**20
# Seconds of one measurement, 2,000 times what a copy takes beside its bytes (`KVReads.copy`), and its copies. Chosen.
_SECONDS: Final = 0.02
_COPIES: Final = 256
_ROUNDS: Final = 4  # measurements of which the best, or the median, counts. Chosen
# Bytes that are copied beside an operator. Measured (2 cores, 32 MiB of cache): with 8 MiB an operator loses 0.20 to
# 0.34 of its time, with 32 and more 0.35 to 0.39.
_WIDE: Final = 64 * 2**20


def measure(
    device: Device,
    clock: Callable[[], float] = time.perf_counter,
    leave: int = 0,
    place: Literal["host", "peer"] = "host",
) -> float | None:
    """Measures the bytes per second from pages of the host, or of the peer, to the device; see Note [Measuring the
    link]. Takes 0.1 s as a rule. `leave`: device pages that stay free.

    None where there are no such pages, or none is free on either side. The copies are not counted in `Stats.copied`.
    DriverError.
    """
    with _copying(device, leave, place, _MOST) as link:
        if link is None:
            return None

        def seconds(nbytes: int, copies: int) -> float:
            begun = clock()
            link.copy(nbytes, copies).wait()
            return clock() - begun

        first = min(_FIRST, link.nbytes)
        seconds(first, 1)  # the way there
        rate = first / seconds(first, 1)
        nbytes = max(first, min(link.nbytes, int(rate * _SECONDS)))
        copies = max(1, min(_COPIES, int(rate * _SECONDS) // nbytes))
        seconds(nbytes, 1)  # every page has been written to
        return nbytes * copies / min(seconds(nbytes, copies) for _ in range(_ROUNDS))


def lost(
    device: Device,
    bandwidth: float,
    work: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
    layer: int = 3 * 2**20,
    beside: float = 0.1,
) -> float:
    """Measures the seconds that `work`, a short call that is repeated, loses to each second of copies beside it. 0
    where no page is free. `bandwidth`: of the link; `layer`: bytes of a copy; `beside`: seconds of
    copies, some tens of operators of a millisecond (chosen). Takes 1 s as a rule. DriverError."""
    with _copying(device, 0, "host", _WIDE) as link:
        if link is None:
            return 0.0
        copies = max(1, int(bandwidth * beside) // layer)
        losses = []
        for _ in range(_ROUNDS):
            begun = clock()
            count = _stream(link, copies, layer, work)
            both, begun = clock() - begun, clock()
            for _ in range(count):
                work()
            computing, begun = clock() - begun, clock()
            _stream(link, copies, layer, None)
            copying = clock() - begun
            losses.append((both - computing) / copying)
    return max(0.0, median(losses))


def _stream(link: _Link, copies: int, nbytes: int, work: Callable[[], object] | None) -> int:
    """Makes so many copies of `nbytes`, as layers are copied to two slots: one under way, and one queued behind it.
    Repeats `work` until the last has ended; returns how often."""
    count, submitted, on_their_way = 0, 0, deque[Done]()
    while submitted < copies or on_their_way:
        while submitted < copies and len(on_their_way) < 2:
            on_their_way.append(link.copy(min(nbytes, link.nbytes), 1, submitted * nbytes))
            submitted += 1
        if work is None:
            on_their_way.popleft().wait()
            continue
        work()
        count += 1
        while on_their_way and on_their_way[0].passed():
            on_their_way.popleft()
    return count


class _Link:
    """Host pages and device pages that `copy` copies between, at most `nbytes` at a time."""

    def __init__(self, device: Device, there: int, here: int, nbytes: int) -> None:
        """`there`, `here`: the addresses of the pages of the device and of the others."""
        self.nbytes = nbytes
        self._pages = there, here
        self._transfer = Transfer(device)

    def copy(self, nbytes: int, copies: int, offset: int = 0) -> Done:
        """Submits so many copies of the same bytes, at this offset or, as there are no more, from the start again."""
        offset %= max(1, self.nbytes - nbytes + 1)
        there, here = (page + offset for page in self._pages)
        return self._transfer.copy([(there, here, nbytes)] * copies, after=0, owner="activations", to="device")


@contextmanager
def _copying(device: Device, leave: int, place: Literal["host", "peer"], most: int) -> Iterator[_Link | None]:
    """Maps pages to measure with, of `most` bytes on either side, and gives them back in the end; None where there are
    none. Other parameters as for `measure`."""
    page = device.page_size
    there_is = device.host_pages if place == "host" else device.peer is not None
    pages = min(max(1, most // page), _free(device) - leave) if there_is else 0
    if pages < 1:
        yield None
        return
    with ExitStack() as undo:
        group = device.group()
        undo.callback(device.reap, wait=True)
        there, here = (device.reserve(pages * page, "weights", group) for _ in range(2))
        undo.callback(there.close)
        undo.callback(here.close)
        pages = _mapped(here.map_host if place == "host" else here.map_peer, pages)
        pages = _mapped(there.map, pages)
        yield _Link(device, there.address, here.address, pages * page) if pages else None


def _free(device: Device) -> int:
    """Device pages that nothing holds."""
    snapshot = device.snapshot()
    held = sum(count for owner, count in snapshot["pages"].items() if owner != "free")
    free: int = snapshot["budget"] // device.page_size - held
    return max(0, free)


def _mapped(mapping: Callable[[int, int], None], pages: int) -> int:
    """Maps as many pages as there are, up to a factor of two, and returns how many."""
    while pages:
        try:
            mapping(0, pages)
            break
        except PoolExhausted:
            pages //= 2
    return pages


def described(uuid: str) -> str:
    """Returns the kind of a GPU's link, "PCIe 5 x16" (as it is fitted, not as it idles); empty where not known."""

    def ask(nvml: ModuleType) -> str:
        gpu = _gpu(nvml, uuid)
        return f"PCIe {nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu)} x{nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu)}"

    return _asked(ask) or ""


def driver(uuid: str) -> str:
    """Returns the version of the NVIDIA driver under a GPU, empty where not known."""

    def ask(nvml: ModuleType) -> str:
        _gpu(nvml, uuid)
        version = nvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)

    return _asked(ask) or ""


def received(uuid: str) -> int | None:
    """Returns the bytes per second that a GPU received from the host, from all senders; the ledger's `traffic` is that
    less ballonet's own. None where not known: no NVIDIA driver, a virtual GPU, part of one. `uuid` as NVML writes it,
    "GPU-…". Takes 20 ms, so not for a forward thread.
    """

    def ask(nvml: ModuleType) -> int:
        kilobytes: int = nvml.nvmlDeviceGetPcieThroughput(_gpu(nvml, uuid), nvml.NVML_PCIE_UTIL_RX_BYTES)
        return kilobytes * 1024  # NVML does not say which kilo; the larger one leaves less to ballonet

    return _asked(ask)


def _asked(ask: Callable[[ModuleType], _Answer]) -> _Answer | None:
    """Asks NVML; None where there is none, or it does not know."""
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return None
    try:
        return ask(nvml)
    except nvml.NVMLError:
        return None


@cache
def _gpu(nvml: ModuleType, uuid: str) -> Any:
    """Returns the handle of a GPU. NVML stays open, as opening takes longer than a query."""
    nvml.nvmlInit()
    return nvml.nvmlDeviceGetHandleByUUID(uuid)
