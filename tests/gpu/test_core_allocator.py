"""The pool as torch's allocator under real streams, threads and graphs: nothing is given to two at once."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from .scene import Captured, Place, scene
from .stress import threads_and_streams


@scene(pages=128)
def test_threads_and_streams(place: Place) -> None:
    if place.cuda:
        # 24 streams hold a page of small blocks and one of large ones each, whatever they free
        threads_and_streams(place, threads=8, operations=1500, largest=2**21)
    else:
        threads_and_streams(place, threads=2, operations=150, largest=2**17)


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
    held = place.range(60)  # pages that lie idle in the heap become KV without being asked for, and come back
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(8 * place.page, dtype=torch.uint8, device=place.kind)
    held.close()
    again = torch.full((nbytes * 5 // 32,), 3, dtype=torch.int32, device=place.kind)
    assert again.eq(3).all().item()
    del again
    place.empty_cache()
    assert place.pages("activations") + place.pages("free") < 8
    assert kept.eq(7).all().item()
    place.device.check()


def fill(place: Place, blocks: list[torch.Tensor]) -> None:
    while True:
        blocks.append(torch.full((place.page,), 1, dtype=torch.uint8, device=place.kind))


@scene(pages=512)  # cuBLAS takes 32 MiB for each stream
def test_graphs_keep_their_memory(place: Place) -> None:
    """Graphs, two of which share a pool, are replayed among allocations that would take any page they could get."""
    torch.manual_seed(0)
    rounds, size = (60, 512) if place.cuda else (12, 96)
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
