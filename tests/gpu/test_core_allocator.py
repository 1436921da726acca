"""The pool as torch's allocator under real streams, threads and graphs: nothing is given to two at once."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from .scene import Captured, Place, everywhere, play, scene
from .stress import threads_and_streams


@everywhere
def test_threads_and_streams(kind: str) -> None:
    if kind == "cuda":
        # 24 streams hold a page of small blocks and one of large ones each, whatever they free
        play(threads_and_streams, kind, pages=128, threads=8, operations=1500, largest=2**21)
    else:
        play(threads_and_streams, kind, pages=64, threads=2, operations=150, largest=2**16)


@scene()
def test_running_out(place: Place) -> None:
    """An allocation beyond the budget is torch's own error, says what to do, and harms nothing."""
    nbytes = place.device.budget
    kept = torch.full((1000,), 7, dtype=torch.int32, device=place.kind)
    for _ in range(3):
        blocks: list[torch.Tensor] = []
        with pytest.raises(torch.OutOfMemoryError, match="set_budget"):
            fill(place, blocks)
        assert len(blocks) * place.page > nbytes * 3 // 4
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * nbytes, dtype=torch.uint8, device=place.kind)
        blocks.clear()
        most = torch.full((nbytes * 5 // 32,), 2, dtype=torch.int32, device=place.kind)  # five eighths in one
        assert most.eq(2).all().item()
        del most
    assert place.pages("activations") > 32
    place.empty_cache()
    assert place.pages("activations") + place.pages("free") < 8
    assert kept.eq(7).all().item()
    place.device.check()


def fill(place: Place, blocks: list[torch.Tensor]) -> None:
    while True:
        blocks.append(torch.full((place.page,), 1, dtype=torch.uint8, device=place.kind))


@scene()
def test_kv_takes_what_activations_left(place: Place) -> None:
    """Pages that lie idle in the heap become KV without being asked for, and come back."""
    budget = place.device.budget // place.page
    torch.full((place.device.budget - 2 * place.page,), 1, dtype=torch.uint8, device=place.kind)
    assert place.pages("activations") >= budget - 2
    held = place.range(budget - 4)
    assert place.pages("kv") == budget - 4
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(8 * place.page, dtype=torch.uint8, device=place.kind)
    held.close()
    again = torch.full((place.device.budget * 5 // 32,), 3, dtype=torch.int32, device=place.kind)
    assert again.eq(3).all().item()


def graphs_keep_their_memory(place: Place, rounds: int, size: int) -> None:
    """Graphs, two of which share a pool, are replayed among allocations that would take any page they could get."""
    torch.manual_seed(0)
    x = torch.randn(size, size, device=place.kind)

    def powers(count: int) -> tuple[torch.Tensor, ...]:
        y = x
        for _ in range(count):
            y = torch.tanh(y @ x)
        return (y,)

    graphs = [Captured(place, partial(powers, 1))]
    graphs.append(Captured(place, partial(powers, 2), pool=graphs[0].pool))
    graphs.append(Captured(place, partial(powers, 3)))
    right = [graph.replay()[0] for graph in graphs]
    held: list[tuple[torch.Tensor, int]] = []
    for step in range(rounds):
        if step == rounds // 2:
            x.normal_()
            right = [graph.replay()[0] for graph in graphs]
        held.append(
            (torch.full((place.page * (1 + step % 7) // 16,), step, dtype=torch.int32, device=place.kind), step)
        )
        place.empty_cache()
        assert torch.equal(graphs[step % 3].replay()[0], right[step % 3]), step
        if step % 3 == 2:
            tensor, number = held.pop(step % len(held))
            assert tensor.eq(number).all().item(), step
    assert all(tensor.eq(number).all().item() for tensor, number in held)
    before = place.pages("activations")
    del graphs, right, held, tensor
    place.synchronize()
    place.empty_cache()
    assert place.pages("activations") < before


@everywhere
def test_graphs_keep_their_memory(kind: str) -> None:
    if kind == "cuda":  # cuBLAS takes 32 MiB for each stream
        play(graphs_keep_their_memory, kind, pages=512, rounds=60, size=512)
    else:
        play(graphs_keep_their_memory, kind, pages=128, rounds=12, size=96)


@scene(only="cuda")
def test_statistics_are_torchs(place: Place) -> None:
    """torch's own questions about memory are answered with the pool's numbers."""
    kept = torch.ones(2**20, device="cuda")
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] == torch.cuda.memory_allocated() >= 2**22
    assert torch.cuda.memory_reserved() == place.device.snapshot()["created"] * place.page
    assert torch.cuda.max_memory_reserved() >= torch.cuda.memory_reserved() >= torch.cuda.memory_allocated()
    assert "Allocated memory" in torch.cuda.memory_summary()
    free, total = torch.cuda.mem_get_info()
    assert free <= place.device.budget < total
    held = place.range(8)
    assert torch.cuda.mem_get_info()[0] == free - 8 * place.page
    assert torch.cuda.memory_allocated() >= stats["allocated_bytes.all.current"] + 8 * place.page
    held.close()
    place.device.reap(wait=True)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    calls = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.empty(10, device="cuda")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == calls + 1
    assert kept.sum().item() == 2**20
