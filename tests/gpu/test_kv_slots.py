"""Layers whose KV is streamed through slots, and is restored one after the other: tokens are stock's."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import ballonet
from ballonet.allocator import install
from ballonet.hooks.kv import ranges as kv_range
from ballonet.offload.manager import kv_read_plan
from ballonet.offload.manager.memory_manager import MemoryManager
from ballonet.offload.residency import kv_slots
from ballonet.testing.movable import MovableKV

from .. import models
from ..kv.pressure import two_thirds
from ..tuned import tuning
from .scene import Place, scene
from .stock import differences

TOKENS = 30
LARGE = {"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}


def repeatable(place: Place) -> AbstractContextManager[object]:
    """Leaves out cuDNN's attention, the first choice for bfloat16 on Hopper: with it a second run of stock gave other
    tokens than the first (an H200, torch 2.11, two of two processes), without it or in float32 the same."""
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(kernels) if place.cuda else nullcontext()


@scene(needs_host=True, pages=2048, host_pages=1024)
@pytest.mark.parametrize(("mode", "chunk"), [("beam", None), ("greedy", 20)])
def test_tokens_are_stocks(place: Place, mode: str, chunk: int | None) -> None:
    """Two thirds of each layer's pages fly; pages leave and are restored all the while."""
    length = 500 if place.cuda else 25  # several pages of each layer
    dtype = torch.bfloat16 if place.cuda else torch.float32
    drawn, loads = random.Random(1), 0
    append, copies = kv_range.KVRange.append, kv_slots.KVSlots.copies

    def appended(kv_range: Any, at: int, *args: Any) -> Any:
        twin = kv_range.pages._extent
        if twin is not None and twin.held and drawn.random() < 0.1:
            piece = drawn.randrange(twin.held)
            if drawn.random() < 0.6:
                MovableKV(kv_range.pages).displace(piece)
            else:
                MovableKV(kv_range.pages).bring_back(piece)
        return append(kv_range, at, *args)

    def copied(slots: Any, *args: Any) -> Any:
        nonlocal loads
        loads += 1
        return copies(slots, *args)

    with pytest.MonkeyPatch.context() as patch, repeatable(place):
        with install.stock():
            model = models.build("llama", **LARGE).to(place.kind, dtype)
            inputs = {name: tensor.to(place.kind) for name, tensor in models.prompts(3, length).items()}
            more = {} if chunk is None else {"prefill_chunk_size": chunk}
            expected = models.generate(model, mode, inputs, TOKENS, **more)
            said = differences(models.generate(model, mode, inputs, TOKENS, **more), expected)
        assert not said, f"stock differs from itself: {said}"
        patch.setattr(kv_range.KVRange, "append", appended)
        patch.setattr(kv_slots.KVSlots, "copies", copied)
        patch.setattr(kv_read_plan.KVReadPlan, "_choose", two_thirds)
        patch.setattr(MemoryManager, "restorable_pages", lambda *_: 0)  # what is restored does not depend on the time
        with tuning(kv_reads={"again": 2, "look": 8}), ballonet.manage(model, interval=None):
            actual = models.generate(model, mode, inputs, TOKENS, **more)
        said = differences(actual, expected)
        assert not said, said
        assert loads > 3
        place.device.check()
