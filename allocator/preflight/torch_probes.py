"""Probes of torch over ballonet's own pages: its copies, its kernels and its graphs, where pages lie on the host.

They open a device of the core and install nothing. On the stand-in torch computes on the CPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.dlpack import from_dlpack

from .. import device_choice
from .._native import Device, Range
from ..config import Config
from .driver_probes import MIB, Tell, answered

_BYTES = 1, 8  # DLPack: unsigned integers of 8 bits
PAGES = 8  # of a range


@dataclass(frozen=True, slots=True)
class ProbePlace:
    """Pages of one place behind an address, as torch sees them."""

    range: Range
    tensor: torch.Tensor  # bytes


@contextmanager
def opened(library: str, ordinal: int) -> Iterator[Device]:
    """Opens a device of the core with a few pages, whatever an earlier preflight chose. DriverUnavailable where torch
    cannot use it."""
    given = Config.from_env().merge(budget=64 * 8 * MIB, host_budget=64 * 8 * MIB)
    named = replace(given, device=f"cuda:{ordinal}", libcuda=library)
    settings = replace(named, host_pages=True, peer="none", peer_budget=None, faults=())
    device = device_choice.open_device(settings, torch.version.cuda is not None and torch.cuda.is_available())
    if device.kind == "cuda":
        torch.cuda.init()
        torch.cuda.set_device(device.ordinal)
    yield device


def place(device: Device, where: str, pages: int = PAGES) -> ProbePlace:
    nbytes = pages * device.page_size
    made = device.reserve(nbytes, "activations", device.group(), reuse=False)
    (made.map_host if where == "host" else made.map)(0, pages)
    return ProbePlace(made, from_dlpack(made.tensor(0, (nbytes,), (1,), *_BYTES)))


def wait(device: Device) -> None:
    if device.kind == "cuda":
        torch.cuda.synchronize()
    device.synchronize()


def _random(nbytes: int, seed: int) -> torch.Tensor:
    """Returns random bytes in CPU memory."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def torch_copies(tell: Tell, library: str, ordinal: int) -> None:
    """Are torch's copies to and from pages of the host right? To torch they are memory of the device, so it says so to
    the driver."""
    with opened(library, ordinal) as device:
        host, other, here = place(device, "host"), place(device, "host"), place(device, "device")
        nbytes = host.tensor.numel()
        data = _random(nbytes, 1)
        pinned = data.pin_memory() if device.kind == "cuda" else data.clone()

        def same(tensor: torch.Tensor) -> bool:
            wait(device)
            return torch.equal(tensor.cpu(), data)

        def moved(to: torch.Tensor, source: torch.Tensor) -> Callable[[], bool]:
            def ask() -> bool:
                to.zero_()
                wait(device)
                to.copy_(source, non_blocking=True)
                return same(to)

            return ask

        host.tensor.copy_(data)
        here.tensor.copy_(data)
        wait(device)
        tell("filled", bool(same(host.tensor) and same(here.tensor)))
        answered(tell, "host_to_device", moved(here.tensor, host.tensor))
        answered(tell, "device_to_host", moved(host.tensor, here.tensor))
        answered(tell, "host_to_host", moved(other.tensor, host.tensor))
        answered(tell, "pinned_to_host", moved(host.tensor, pinned))
        answered(tell, "host_to_pinned", moved(pinned.clone(), host.tensor))
        answered(tell, "clone", lambda: same(host.tensor.clone()))
        answered(
            tell,
            "storage_clone",
            lambda: same(
                torch.tensor([], dtype=torch.uint8, device=host.tensor.device).set_(
                    host.tensor.untyped_storage().clone()
                )[:nbytes]
            ),
        )
        rows = host.tensor.view(-1, 4096)[::3]
        answered(tell, "strided", lambda: bool(torch.equal(rows.clone().cpu(), data.view(-1, 4096)[::3])))


def kernels(tell: Tell, library: str, ordinal: int) -> None:
    """Do kernels that read pages of the host give the same bits, and how fast do they read?"""
    with opened(library, ordinal) as device:
        host, here = place(device, "host"), place(device, "device")
        dtype = torch.bfloat16
        values = torch.randn(here.tensor.numel() // 2, generator=torch.Generator().manual_seed(2)).to(dtype)
        columns = 2048
        for memory in (host, here):
            memory.tensor.view(dtype).copy_(values)
        weights = [area.tensor.view(dtype).view(-1, columns) for area in (here, host)]
        wait(device)
        for rows in (1, 16, 64, 512):

            def ask(rows: int = rows) -> dict[str, Any]:
                given = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)
                given = given.to(weights[0].device)
                answers = [given @ weight.T for weight in weights]
                wait(device)
                seconds = _seconds(device, lambda: given @ weights[1].T)
                nbytes = weights[1].numel() * 2
                return {"equal": torch.equal(*answers), "gb_per_s": round(nbytes / seconds / 1e9, 2)}

            answered(tell, f"matmul_{rows}", ask)

        def attention() -> dict[str, Any]:
            heads, size = 8, 128
            tokens = values.numel() // 2 // (heads * size)
            query = torch.randn(1, heads, 1, size, generator=torch.Generator().manual_seed(3)).to(dtype)
            query = query.to(weights[0].device)

            def run(area: ProbePlace) -> torch.Tensor:
                keys, rest = area.tensor.view(dtype).view(2, 1, tokens, heads, size).transpose(2, 3)
                return torch.nn.functional.scaled_dot_product_attention(query, keys, rest)

            answers = [run(area) for area in (here, host)]
            wait(device)
            seconds = _seconds(device, lambda: run(host))
            return {"equal": torch.equal(*answers), "gb_per_s": round(values.numel() * 2 / seconds / 1e9, 2)}

        answered(tell, "attention", attention)
        answered(tell, "sum", lambda: torch.equal(here.tensor.sum(), host.tensor.sum()))


def _seconds(device: Device, run: Callable[[], object]) -> float:
    taken: list[float] = []
    while len(taken) < 4 and sum(taken) < 1:  # a slow one is not run again
        wait(device)
        begin = time.perf_counter()
        run()
        wait(device)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:] or taken)


def torch_graphs(tell: Tell, library: str, ordinal: int) -> None:
    """Is a graph of torch's right that is replayed after the page it reads moved to the host and back? Are several that
    share a pool, with eager code between them, as a model decodes by (hooks/pieces)?"""
    with opened(library, ordinal) as device:
        here = place(device, "device", 1)
        weight = here.tensor.view(torch.bfloat16).view(-1, 1024)
        weight.copy_(torch.randn(weight.shape))
        given = torch.randn(4, 1024, device="cuda", dtype=torch.bfloat16)
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        wait(device)  # the stream reads what was written on another one
        with torch.cuda.stream(side):
            expected = given @ weight.T  # loads the kernel
        wait(device)
        with torch.cuda.graph(graph):
            answer = given @ weight.T

        def replay() -> bool:
            answer.zero_()
            graph.replay()
            wait(device)
            return torch.equal(answer, expected)

        answered(tell, "as_captured", replay)
        pieces: list[Callable[[], bool]] = []

        def in_pieces() -> bool:
            pieces.append(_in_pieces(device, weight, given))
            return pieces[0]()

        answered(tell, "in_pieces", in_pieces)
        places: tuple[Literal["host", "device"], ...] = ("host", "device")
        for where in places:
            moved = answered(tell, f"moved_to_{where}", partial(here.range.move, 0, where))
            if moved:
                answered(tell, f"on_{where}", replay)
                for replay_pieces in pieces:
                    answered(tell, f"in_pieces_on_{where}", replay_pieces)


def _in_pieces(device: Device, weight: torch.Tensor, given: torch.Tensor) -> Callable[[], bool]:
    """Captures two graphs into one pool, and returns what replays them with an eager call between, for inputs that
    change, and says whether both times the results are those of eager code."""
    inputs, given = [given, given.flip(0)], given.clone()
    crossing = torch.empty((given.shape[0], weight.shape[0]), device=given.device, dtype=given.dtype)
    pool, stream = torch._C._graph_pool_handle(), torch.cuda.Stream()
    graphs = [torch._C._CUDAGraph() for _ in range(2)]

    def first() -> torch.Tensor:
        return given @ weight.T + 1

    def second() -> torch.Tensor:
        return crossing @ weight

    def captured(graph: Any, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        made = compute()
        graph.capture_end()
        graph.replay()
        return made

    def run(one: Callable[[], torch.Tensor], other: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        results = []
        for values in inputs:
            given.copy_(values)
            crossing.copy_(one() * 2)
            results.append(other().clone())
        return results

    def replayed(graph: Any, made: torch.Tensor) -> torch.Tensor:
        graph.replay()
        return made

    wait(device)
    with torch.cuda.stream(stream):
        expected = run(first, second)  # also loads the kernels, on this stream
        made = captured(graphs[0], first)
        crossing.copy_(made * 2)
        answer = captured(graphs[1], second)
    wait(device)

    def replay() -> bool:
        with torch.cuda.stream(stream):
            results = run(partial(replayed, graphs[0], made), partial(replayed, graphs[1], answer))
        wait(device)
        return all(map(torch.equal, results, expected))

    return replay
