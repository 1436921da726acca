"""Models that sleep, and models that come from the CPU, where CPU and device are two."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import ballonet
from ballonet.allocator.errors import ManageError
from ballonet.hooks.managed import weights_of

from .scene import Captured, Place, scene
from .stock import LAYERS, questions, small_layers, tiny


def answer(model: Any, ids: torch.Tensor) -> list[int]:
    tokens: list[int] = model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)[0].tolist()
    return tokens


@scene(needs_host=True, pages=256, host_pages=256)
@pytest.mark.parametrize("level", [1, 2])
def test_a_model_sleeps_and_its_next_use_wakes_it(place: Place, level: int) -> None:
    with tempfile.TemporaryDirectory() as folder, small_layers():
        tiny("llama", place, layers=2 * LAYERS).cpu().save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder).eval().to(place.kind)
        ids = questions("llama", place.kind)["input_ids"][:1]
        with ballonet.manage(model) as managed:
            expected = answer(model, ids)
            for _ in range(3):
                managed.sleep(level)
                assert place.pages("weights") == place.pages("kv") == 0
                assert answer(model, ids) == expected
                assert answer(model, ids) == expected
                assert not weights_of(managed).on_host()
            managed.sleep(level)
            with torch.no_grad():
                model.lm_head.weight.mul_(-1)
            assert answer(model, ids) != expected
            managed.sleep(level)
            assert model.lm_head.weight.cpu().sum() == model.lm_head.weight.sum().cpu()


@scene(needs_host=True, pages=256, host_pages=256)
def test_a_model_in_a_graph_of_the_program_does_not_sleep(place: Place) -> None:
    model = tiny("llama", place)
    ids = questions("llama", place.kind)["input_ids"]

    def work() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return (model(ids, use_cache=False).logits,)

    with small_layers(), ballonet.manage(model) as managed:
        captured = Captured(place, work)
        expected = captured.replay()[0]
        if place.cuda:
            with pytest.raises(ManageError, match="a CUDA graph that the program has captured"):
                managed.sleep()
        assert managed.asleep == 0
        assert torch.equal(captured.replay()[0], expected)
        del captured


@scene(needs_host=True, pages=256, host_pages=256)
def test_a_model_on_the_cpu_comes_to_the_device_tensor_by_tensor_and_goes_back(place: Place) -> None:
    """The model is larger than what is free of the budget."""
    with small_layers():
        model = tiny("llama", place, layers=6 * LAYERS).cpu()
        ids = questions("llama", "cpu")["input_ids"][:1]
        expected = answer(model, ids)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        place.empty_cache()
        created = place.device.snapshot()["created"]
        weights = sum(tensor.nbytes for tensor in before.values()) // place.page
        ballonet.set_budget((created + max(12, weights * 2 // 3)) * place.page)
        with ballonet.manage(model, device=place.kind) as managed:
            assert {tensor.device.type for tensor in model.state_dict().values()} == {place.kind}
            assert answer(model, ids.to(place.kind)) == expected
            assert managed.report().unmanaged_tensors == {}
        assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert answer(model, ids) == expected
