"""What the kernel says of the stand-in's memory: from /proc and the memfd, never from ballonet's own statistics."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import pytest
import torch

import ballonet
from ballonet.allocator import runtime
from ballonet.allocator._native import Device
from ballonet.offload.decide import layout


def mapped() -> list[tuple[int, int]]:
    """The addresses [first, end) that lead to the device's memfd."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    bounds = (line.split()[0].split("-") for line in lines if "memfd:ballonet-device" in line)
    return [(int(first, 16), int(end, 16)) for first, end in bounds]


def covered(first: int, end: int, by: list[tuple[int, int]]) -> bool:
    """Whether every address of [first, end) is in one of `by`."""
    for low, high in sorted(by):
        if low <= first < high:
            first = high
    return first >= end


def in_pool(tensor: torch.Tensor, by: list[tuple[int, int]] | None = None) -> bool:
    """Whether the whole storage of the tensor is mapped from the device's memfd."""
    storage = tensor.untyped_storage()
    first = storage.data_ptr()
    return covered(first, first + max(1, storage.nbytes()), mapped() if by is None else by)


def bytes_that_exist(place: str = "device") -> int:
    """What the memfds of the device, or of the "host", hold, as the kernel counts it."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # another thread may close one between the listing and the look
            if f"memfd:ballonet-{place}" in os.readlink(link):
                status = os.stat(link)
                found[status.st_ino] = status.st_blocks * 512
    assert found, f"there is no memfd named ballonet-{place}"
    return sum(found.values())


def take_out(patience: float = 30.0) -> None:
    """Takes out what is installed. A thread behind may hold a model for a moment; what is in use after that fails the
    test, and is told with those who refer to it."""
    gc.collect()
    ballonet.restore()
    if runtime.current() is None:
        return
    gc.unfreeze()  # see conftest.py: what was frozen may have become garbage since
    deadline = time.monotonic() + patience
    while runtime.current() is not None and time.monotonic() < deadline:
        gc.collect()
        ballonet.restore()
    if runtime.current() is not None:
        pytest.fail("memory of the pool is still in use\n" + in_use())


def in_use() -> str:
    """Who owns pages, which tensors lie in the pool and who refers to them, and what every thread does."""
    device, by = runtime.require(), mapped()
    lines = [str(device.snapshot())]
    everything = gc.get_objects()
    tensors = [each for each in everything if issubclass(type(each), torch.Tensor) and each.device.type == "cpu"]
    found = [each for each in tensors if in_pool(each, by)]
    ours = [each for each in everything if type(each).__module__.startswith("ballonet.")]
    for each in found[:8]:
        lines.append(f"{type(each).__name__} {tuple(each.shape)} {each.dtype} at {each.data_ptr():#x}")
        lines += (f"    {line}" for line in _referrers(each, (everything, tensors, found, ours)))
    names = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in ours)
    lines.append(", ".join(f"{count} {name}" for name, count in sorted(names.items())))
    for each in ours:
        if type(each).__name__ in ("Elastic", "Managed", "Weights", "Range", "KeptSequence"):
            lines.append(repr(each))
            lines += (f"    {line}" for line in _referrers(each, (everything, tensors, found, ours)))
    called = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        lines.append(f"thread {called.get(ident, ident)}\n" + "".join(traceback.format_stack(frame)))
    return "\n".join(lines)


def _referrers(of: object, but: tuple[object, ...], depth: int = 3) -> Iterator[str]:
    """One line each, and theirs further to the right."""
    skipped = {id(each) for each in but}
    found = [each for each in gc.get_referrers(of) if id(each) not in skipped and not isinstance(each, FrameType)]
    for each in found[:6]:
        keys = [str(key) for key, value in each.items() if value is of] if isinstance(each, dict) else []
        yield f"{type(each).__module__}.{type(each).__qualname__} {keys or repr(type(each))}"[:150]
        if depth > 1:
            yield from (f"    {line}" for line in _referrers(each, (*but, found), depth - 1))


@contextmanager
def installing(budget: int, page_size: int) -> Iterator[Callable[[], Device]]:
    """Hands out what installs; what was installed is taken out at the end, by when nothing of it may be in use."""

    def install() -> Device:
        ballonet.install(budget=budget, page_size=page_size, device="cpu")
        return runtime.require()

    yield install
    gc.collect()
    if (device := runtime.current()) is not None:
        device.check()
        assert bytes_that_exist() <= budget
    del device
    take_out()


@contextmanager
def tiny_layers(monkeypatch: pytest.MonkeyPatch, budget: int, page_size: int) -> Iterator[None]:
    """A device is installed, and layers of tiny models have ranges."""
    monkeypatch.setattr(layout, "LARGE", 2**11)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny operators: a second thread only waits
    with installing(budget, page_size) as now:
        now()
        yield
    torch.set_num_threads(threads)
