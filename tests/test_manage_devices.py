"""The life of a managed model by the same code on every kind of device, in a process of its own: what GPUs need."""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import ballonet
from ballonet import testing
from ballonet.allocator._native import Range
from ballonet.testing import chaos_of

from . import models
from .gpu.scene import Captured, Place, everywhere, play
from .portrait import Portrait, tensors
from .tuned import tuning


@everywhere
def test_a_life(kind: str) -> None:
    play(live, kind, pages=128)


def lies_in(model: nn.Module, ranges: Sequence[Range]) -> bool:
    return all(
        any(0 <= tensor.data_ptr() - range_.address < range_.nbytes for range_ in ranges)
        for tensor in tensors(model).values()
    )


def convert(model: Any, inputs: Mapping[str, torch.Tensor]) -> None:
    """While it is managed: the old weights' pages go, the new weights get pages at the next forward."""
    twin = copy.deepcopy(model).bfloat16()
    expected = models.generate(twin, "greedy", inputs)
    with testing.manage(model, chaos=4) as managed:
        model.bfloat16()
        assert managed.report().pages == ballonet.stats().pages.weights == 0
        output = models.generate(model, "greedy", inputs)
        assert torch.equal(output.tokens, expected.tokens)
        assert lies_in(model, managed._weights.all_ranges())
        assert not managed.report().unmanaged_tensors
    assert torch.equal(models.generate(model, "greedy", inputs).tokens, expected.tokens)
    model.float()


def live(place: Place) -> None:
    with tuning(weights={"large": 2**13}):  # so that the matrices of tiny layers have ranges of their own
        lives(place)


def lives(place: Place) -> None:
    device = place.device
    model = models.build("llama", hidden_size=64, intermediate_size=96).to(place.kind)
    inputs = {name: tensor.to(place.kind) for name, tensor in models.prompts(2, 9).items()}
    before = Portrait(model)
    expected = {mode: models.generate(model, mode, inputs) for mode in models.MODES}
    for chaos in (None, 4):
        managed = testing.manage(model, chaos=chaos)
        assert before.is_of(model, hooks=False)
        assert managed._weights.ranges.keys() == {None, 0, 1, 2}
        ranges = managed._weights.all_ranges()
        assert lies_in(model, ranges)
        weights = [range_.page(piece) for range_ in ranges for piece in range(range_.pieces)]
        assert ballonet.stats().pages.weights == managed.report().pages == len(set(weights))
        for mode, result in expected.items():
            output = models.generate(model, mode, inputs)
            assert torch.equal(output.tokens, result.tokens), (mode, chaos)
        if chaos_of(managed) is not None:
            assert chaos_of(managed).moved["weights"] > managed.report().pages
            assert chaos_of(managed).moved["kv_device"] > 0
            assert chaos_of(managed).moved["kv_host"] > 0 or not device.host_pages
            assert ballonet.stats().copied.weights_d2h == 0
        managed.release()
        assert before.is_of(model)
        del output
        gc.collect()
        device.trim()
        device.reap(wait=True)
        device.check()
        pages = ballonet.stats().pages
        assert pages.weights == pages.kv == pages.pending_free == 0, pages
    convert(model, inputs)
    if not place.cuda:
        return
    # Graph capture runs the hooks once; replay reads the same addresses whatever page is behind them. Stock is captured
    # as well: transformers masks otherwise then, so the last bits may differ.

    def work() -> tuple[torch.Tensor, ...]:
        return (model(inputs["input_ids"], use_cache=False).logits,)

    with torch.no_grad():
        right = Captured(place, work).replay()[0]
        managed = ballonet.manage(model)
        captured = Captured(place, work)
    assert torch.equal(captured.replay()[0], right)
    for range_ in managed._weights.all_ranges():
        for piece in range(range_.pieces):
            assert range_.move(piece, "device")
    assert torch.equal(captured.replay()[0], right)
    del captured
    managed.release()
