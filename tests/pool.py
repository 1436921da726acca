"""What the kernel says of the stand-in's memory: from /proc and the memfd, never from ballonet's own statistics."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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


def given_back(patience: float = 30.0) -> bool:
    """Takes out what is installed, once nothing of it is in use: a thread behind may hold a model for a moment."""
    deadline = time.monotonic() + patience
    while runtime.current() is not None and time.monotonic() < deadline:
        gc.collect()
        ballonet.restore()
    return runtime.current() is None


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
    assert given_back(), "memory of the pool is still in use"


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
