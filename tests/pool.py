"""What the kernel says of the stand-in's memory: from /proc and the memfd, never from ballonet's own statistics."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, GeneratorType

import pytest
import torch

import ballonet
from ballonet.allocator import devices
from ballonet.allocator._native import Device
from ballonet.allocator.errors import BallonetError

from .tuned import Tuned


def cache_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`folder`, to be made, is BALLONET_CACHE_DIR: nothing was measured of any model. What tests before have compiled
    for torch is in it, as that takes a second."""
    folder.mkdir(0o700)
    for compiled in Path(os.environ["BALLONET_CACHE_DIR"]).glob("*.so"):
        if not compiled.name.startswith("."):
            shutil.copy2(compiled, folder)
    monkeypatch.setenv("BALLONET_CACHE_DIR", str(folder))


def mapped(*places: str) -> list[tuple[int, int]]:
    """The addresses [first, end) that lead to the memfd of the device, or of these `places`."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = tuple(f"memfd:ballonet-{place}" for place in places or ("device",))
    bounds = (line.split()[0].split("-") for line in lines if any(name in line for name in names))
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
    """What the memfds of the device, or of the "host" or the "peer", hold, as the kernel counts it."""
    sizes = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # another thread may close one between the listing and the look
            if f"memfd:ballonet-{place}" in os.readlink(link):
                status = os.stat(link)
                sizes[status.st_ino] = status.st_blocks * 512
    assert sizes, f"there is no memfd named ballonet-{place}"
    return sum(sizes.values())


def take_out_leftovers() -> None:
    """Takes out what a test that failed has left installed, so that those after it do not fail too."""
    if devices.current() is not None:
        with suppress(pytest.fail.Exception):  # it was said already
            take_out(patience=1.0)


def take_out(patience: float = 30.0) -> None:
    """Takes out what is installed. A thread behind may hold a model for a moment; what is in use after that fails the
    test, and is told with those who refer to it."""
    gc.collect()
    ballonet.restore()
    if devices.current() is None:
        return
    gc.unfreeze()  # see conftest.py: what was frozen may have become garbage since
    deadline = time.monotonic() + patience
    while devices.current() is not None and time.monotonic() < deadline:
        gc.collect()
        ballonet.restore()
    if devices.current() is not None:
        pytest.fail("memory of the pool is still in use\n" + in_use())


def in_use() -> str:
    """Why the device cannot be closed: who owns pages, which tensors lie in the pool and what has ranges of it, who
    refers to those, and what every thread does."""
    device, by = devices.require(), mapped()
    lines = [str(device.snapshot())]
    try:
        device.close()
    except BallonetError as error:
        lines.append(f"{error}; published: {device.published}")
    everything = gc.get_objects()
    tensors = [thing for thing in everything if issubclass(type(thing), torch.Tensor) and _in_pool(thing, by)]
    ours = [thing for thing in everything if str(type(thing).__module__).startswith("ballonet.")]
    names = Counter(f"{type(thing).__module__}.{type(thing).__qualname__}" for thing in ours)
    lines.append(", ".join(f"{count} {name}" for name, count in sorted(names.items())))
    having = [thing for thing in ours if type(thing).__name__ in _HAVING or isinstance(thing, BaseException)]
    having.sort(key=lambda each: sum(type(each) is type(other) for other in having))  # what is rare says most
    chosen = [*tensors[:8], *having[:8]]
    holders = _holders(chosen, (everything, tensors, ours, having))
    lines += [line for thing in chosen for line in (_told(thing), *_tree(thing, holders))]
    called = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        lines.append(f"thread {called.get(ident, ident)}\n" + "".join(traceback.format_stack(frame)))
    return "\n".join(lines)


# classes whose objects have ranges, or refer to such
_HAVING = ("ModelResidency", "Backing", "Slot", "KVRange", "KVExtent", "CachedSequence", "_Request", "Lookup")


def _in_pool(tensor: torch.Tensor, by: list[tuple[int, int]]) -> bool:
    with suppress(RuntimeError, NotImplementedError):  # of those that have no memory
        return tensor.device.type == "cpu" and any(low <= tensor.data_ptr() < end for low, end in by)
    return False


def _told(each: object) -> str:
    if isinstance(each, torch.Tensor):
        return f"{type(each).__name__} {tuple(each.shape)} {each.dtype} at {each.data_ptr():#x}"
    if isinstance(each, FrameType):
        return f"frame of {each.f_code.co_qualname} at {each.f_code.co_filename}:{each.f_lineno}"
    return f"{type(each).__module__}.{type(each).__qualname__} at {id(each):#x}"


def _holders(of: list[object], but: tuple[object, ...]) -> dict[int, list[object]]:
    """By id of each of them, three of those who refer to it; of those, too; and so on. All are looked for at once, as
    each time all objects that there are are looked through."""
    held_by: dict[int, list[object]] = {}
    looked = {id(thing) for thing in (*but, of, held_by)}
    while of and len(held_by) < 64:
        wanted, following = {id(thing) for thing in of}, []
        looked |= {id(thing) for thing in (of, following, wanted, *held_by.values())}
        for referrer in gc.get_referrers(*of):
            if id(referrer) not in looked and not _looks(referrer):
                for held in {*map(id, gc.get_referents(referrer))} & wanted:
                    held_by.setdefault(held, [])
                    if len(held_by[held]) < 3:
                        held_by[held].append(referrer)
                        following.append(referrer)
        of = list({id(thing): thing for thing in following if id(thing) not in held_by}.values())[:24]
    return held_by


def _tree(of: object, holders: dict[int, list[object]], depth: int = 5) -> Iterator[str]:
    """One line each, and theirs further to the right."""
    for holder in holders.get(id(of), ()) if depth else ():
        keys = [str(key) for key, value in holder.items() if value is of] if type(holder) is dict else []
        yield f"    {_told(holder)} {', '.join(keys)}"[:200]
        yield from (f"    {line}" for line in _tree(holder, holders, depth - 1))


def _looks(each: object) -> bool:
    """Is it of the search itself?"""
    if isinstance(each, GeneratorType):
        return each.gi_code.co_filename == __file__
    return isinstance(each, FrameType) and each.f_code.co_filename == __file__


@contextmanager
def installing(budget: int, page_size: int) -> Iterator[Callable[[], Device]]:
    """Hands out what installs; what was installed is taken out at the end, by when nothing of it may be in use."""

    def install() -> Device:
        ballonet.install(budget=budget, page_size=page_size, device="cpu")
        return devices.require()

    take_out_leftovers()
    yield install
    gc.collect()
    if (runtime := devices.current()) is not None:
        runtime.device.check()
        assert bytes_that_exist() <= budget
    del runtime
    take_out()


@contextmanager
def tiny_layers(tuned: Tuned, budget: int, page_size: int) -> Iterator[None]:
    """A device is installed, and layers of tiny models have ranges."""
    tuned(weights={"large": 2**11})
    with installing(budget, page_size) as now:
        now()
        yield
