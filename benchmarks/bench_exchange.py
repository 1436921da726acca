"""What it costs that memory changes its owner: a GiB of pages, by the size of a page, in the mapper alone.

Rows: free pages become KV; KV becomes free; what lies idle in the activations' heap becomes KV in one call; and, on a
GPU, free pages become KV while a kernel is running, which goes on running. `waits` counts the calls of the driver in
which a thread waits for the device, a stream or an event.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from common import MIB, Figure, Options, options, report

from ballonet.allocator import device_choice
from ballonet.allocator._native import Device, Range
from ballonet.allocator.config import Config

PAGES = {True: (2, 8, 32), False: (1, 2, 8)}  # MiB, on a GPU and elsewhere
BLOCKS = 64  # that the idle activations were
WAITS = ("cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize")
LIMIT = 10  # ms per GiB at the default page size on a GPU
KERNEL_CYCLES = 2_000_000_000  # about a second

Timed = tuple[float, int, int]  # ms per GiB, driver calls, waits


def main() -> None:
    chosen = options("exchange", __doc__)
    gib = 64 * MIB if chosen.tiny else 1024 * MIB
    default = device_choice.page_size(Config.from_env(), "cuda" if chosen.cuda else "standin")
    rows = []
    for mib in PAGES[chosen.cuda]:
        page = mib * MIB
        device = device_choice.open_device(Config.from_env().merge(budget=gib, page_size=page, host_budget=4 * page))
        try:
            for what, taken in measure(device, gib, chosen).items():
                ms = Figure.of([each[0] for each in taken])
                if chosen.cuda and page == default:
                    ms = ms.at_most(LIMIT)
                waits = Figure.of([float(each[2]) for each in taken]).at_most(0)
                calls = Figure.of([float(each[1]) for each in taken])
                row = {"what": what, "MiB per page": mib, "ms per GiB": ms, "driver calls": calls, "waits": waits}
                rows.append(row)
        finally:
            device.close()
    report(chosen, "exchange", "pages change their owner: ms of the mapper per GiB", rows)


def measure(device: Device, nbytes: int, chosen: Options) -> dict[str, list[Timed]]:
    """The exchanges in turn, once more than counts. At the end of each round every page is free."""
    taken: dict[str, list[Timed]] = {}
    for repetition in range(chosen.repetitions + 1):
        for what, result in round_of(device, nbytes, chosen):
            if repetition:
                taken.setdefault(what, []).append(result)
    return taken


def round_of(device: Device, nbytes: int, chosen: Options) -> Iterator[tuple[str, Timed]]:
    begin_with_free_pages(device, nbytes)
    held = device.reserve(nbytes, "kv", device.group())
    yield "free to KV", timed(device, nbytes, lambda: held.map(0, held.pieces))
    yield "KV to free", timed(device, nbytes, lambda: give_back(device, held))
    held.close()
    if chosen.cuda:
        held = device.reserve(nbytes, "kv", device.group())
        with running_kernel(device) as running:
            result = timed(device, nbytes, lambda: held.map(0, held.pieces))
            waited = not running()
        yield "free to KV after a kernel, which it waited for" if waited else "free to KV beside a kernel", result
        held.close()
        device.reap(wait=True)
    use_for_activations(device, nbytes)
    held = device.reserve(nbytes, "kv", device.group())
    yield "idle activations to KV", timed(device, nbytes, lambda: held.map(0, held.pieces))
    held.close()
    device.reap(wait=True)


def timed(device: Device, nbytes: int, work: Callable[[], object]) -> Timed:
    before = device.snapshot()["driver_calls"]
    begin = time.perf_counter()
    work()
    ms = (time.perf_counter() - begin) * 1e3 * 1024 * MIB / nbytes
    calls = {name: count - before[name] for name, count in device.snapshot()["driver_calls"].items()}
    return ms, sum(calls.values()), sum(calls[name] for name in WAITS)


def begin_with_free_pages(device: Device, nbytes: int) -> None:
    """Every page exists, and none is in use."""
    held = device.reserve(nbytes, "kv", device.group())
    held.map(0, held.pieces)
    held.close()
    device.reap(wait=True)


def use_for_activations(device: Device, nbytes: int) -> None:
    """Blocks are made and freed: their pages stay with the heap."""
    blocks = [device.allocate(nbytes // BLOCKS - 512) for _ in range(BLOCKS)]
    for block in blocks:
        device.deallocate(block)


def give_back(device: Device, held: Range) -> None:
    """Asks until every stream has passed, without ever waiting."""
    held.retire(0, held.pieces)
    while device.snapshot()["pages"]["retiring"]:
        device.reap()


@contextmanager
def running_kernel(device: Device) -> Iterator[Callable[[], bool]]:
    """A kernel of about a second on a stream that the device knows. Yields what says whether it is still running."""
    import torch

    stream: Any = torch.cuda.Stream()
    device.note_stream(stream.cuda_stream)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(KERNEL_CYCLES)
        done: Any = torch.cuda.Event()
        done.record()
    yield lambda: not done.query()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
