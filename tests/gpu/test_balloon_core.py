"""Pages that are mapped ahead, spilled to the host, or wanted during a capture, on the device itself."""

from __future__ import annotations

import gc

import pytest
import torch

import ballonet

from .. import models
from .scene import Place, scene

PAGE_CALLS = ("cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuMemcpyAsync")


@scene(needs_host=True, spill=True, pages=64, host_pages=128)
def test_spilled_block_computes_the_same(place: Place) -> None:
    """A block beyond the budget lies on host pages: slow, and valid; freed, it leaves nothing there."""
    count = 24 * place.page // 4
    held = [torch.full((count,), number, dtype=torch.float32, device=place.kind) for number in range(4)]
    assert ballonet.stats().spilled > 0
    assert place.device.snapshot()["created"] <= 64
    right = torch.arange(4, dtype=torch.float32, device=place.kind)
    for _ in range(2):
        sums = torch.stack([block.double().mean().float() for block in held])
        assert torch.equal(sums, right)
        held[3].copy_(held[0]).add_(held[1]).add_(held[2])
        right[3] = 3
    del held
    place.synchronize()
    place.empty_cache()
    assert ballonet.stats().spilled == 0


@scene(spill=True, pages=256)
def test_requests_come_to_call_the_driver_no_more(place: Place) -> None:
    """Served one after the other, they find the pages of those before them where they were; and no more than 50 MB, or
    a page, are ever mapped ahead."""
    model = models.build("llama", hidden_size=256, max_position_embeddings=4096).to(place.kind)
    inputs = {name: tensor.to(place.kind) for name, tensor in models.prompts(4, 40).items()}
    ahead, made = [], []

    def calls() -> int:
        calls = ballonet.stats().driver_calls
        return sum(calls[name] for name in PAGE_CALLS)

    def look(*_: object) -> None:
        ahead.append(place.device.snapshot()["ahead"] * place.page)

    hook = model.register_forward_hook(look)
    with ballonet.manage(model):
        while not made or made[-1] > 0:
            assert len(made) < 16, f"calls that map or unmap, request by request: {made}"
            gc.collect()
            place.synchronize()
            place.device.reap(wait=True)
            before = calls()
            models.generate(model, "greedy", inputs, 60)
            made.append(calls() - before)
    hook.remove()
    assert max(ahead) <= max(place.page, 50_000_000)


@scene(only="cuda", spill=True, pages=64, host_pages=128)
def test_a_capture_pulls_no_source(place: Place) -> None:
    """What does not fit while a graph is captured is refused, with everything where it was; afterwards it fits."""
    model = models.build("llama", hidden_size=256).to(place.kind)
    inputs = {name: tensor.to(place.kind) for name, tensor in models.prompts(2, 16).items()}
    with ballonet.manage(model):
        models.generate(model, "greedy", inputs, 4)
        gc.collect()
        place.synchronize()
        free = 64 - sum(pages for owner, pages in ballonet.stats().pages.items() if owner != "free")
        before = ballonet.stats()
        graph = torch.cuda.CUDAGraph()
        with pytest.raises((torch.OutOfMemoryError, RuntimeError)), torch.cuda.graph(graph):
            torch.empty((free + 8) * place.page, dtype=torch.uint8, device="cuda")
        del graph
        place.synchronize()
        after = ballonet.stats()
        assert after.reclaimed == before.reclaimed
        assert after.spilled == before.spilled == 0
        held = torch.empty((free + 8) * place.page, dtype=torch.uint8, device="cuda")
        held.fill_(1)
        assert held[:: place.page].sum().item() == free + 8
        del held
