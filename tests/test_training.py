"""A managed model that is trained: stock's gradients to the bit, with a cache or without; generation in between."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import ballonet
from ballonet import testing
from ballonet.allocator import devices, install
from ballonet.hooks.kv.cache import KVCache
from ballonet.hooks.kv.layer import ElasticLayer

from .caches import fresh
from .models import build, generate, prompts
from .pool import in_pool

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("large_pages")]


INPUTS = prompts(batch=2, longest=10)
LABELS = INPUTS["input_ids"].masked_fill(INPUTS["attention_mask"] == 0, -100)


def plain(model: Any) -> list[torch.Tensor]:
    return [model(**INPUTS, labels=LABELS, use_cache=False).loss]


def with_a_cache(model: Any) -> list[torch.Tensor]:
    """Gradients flow through the keys of the first half into the second."""
    first = model(INPUTS["input_ids"][:, :6], use_cache=True)
    second = model(INPUTS["input_ids"][:, 6:], past_key_values=first.past_key_values)
    return [first.logits.square().mean() + second.logits.square().mean()]


def behind_a_prompt_that_is_not_trained(model: Any) -> list[torch.Tensor]:
    """What is in the cache is elastic and takes no gradients; what comes behind it does."""
    cache = KVCache(model.config) if any(m._forward_pre_hooks for m in model.modules()) else DynamicCache()
    with torch.no_grad():
        model(INPUTS["input_ids"][:, :6], past_key_values=cache)
    out = model(INPUTS["input_ids"][:, 6:], past_key_values=cache)
    return [out.logits.square().mean()]


def twice(model: Any) -> list[torch.Tensor]:
    loss = with_a_cache(model)[0]
    loss.backward(retain_graph=True)
    return [loss]


def train(model: Any, losses: Callable[[Any], list[torch.Tensor]], checkpointing: bool) -> list[torch.Tensor]:
    """Two steps of Adam; what the loss and every gradient and parameter were."""
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tensors = []
    for _ in range(2):
        optimizer.zero_grad()
        for loss in losses(model):
            loss.backward()
            tensors.append(loss.detach())
        tensors += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
    model.eval()
    if checkpointing:
        model.gradient_checkpointing_disable()
    return tensors + [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("losses", "checkpointing", "chaos"),
    [
        (plain, False, None),
        (plain, True, 2),
        (with_a_cache, False, 2),
        (behind_a_prompt_that_is_not_trained, False, None),
        (behind_a_prompt_that_is_not_trained, False, 2),
        (twice, False, 2),
    ],
)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")
def test_two_steps_of_training(
    losses: Callable[[Any], list[torch.Tensor]], checkpointing: bool, chaos: int | None
) -> None:
    with install.stock():
        model = build("llama", attention_dropout=0.0)
        expected = train(model, losses, checkpointing)
        tokens = generate(model, "greedy", INPUTS)
        model = build("llama", attention_dropout=0.0)
    with testing.manage(model, chaos=chaos):
        weights = [parameter.data_ptr() for parameter in model.parameters()]
        before = generate(model, "greedy", INPUTS)
        tensors = train(model, losses, checkpointing)
        assert all(torch.equal(*pair) for pair in zip(tensors, expected, strict=True))
        assert [parameter.data_ptr() for parameter in model.parameters()] == weights
        after = generate(model, "greedy", INPUTS)
        assert after.agrees(tokens)
        assert not torch.equal(after.logits, before.logits)


def test_one_cache_with_gradients_without_and_in_inference_mode() -> None:
    """The layer is elastic whenever it can be, and what it held with gradients comes along."""
    modes = [torch.no_grad, torch.inference_mode, torch.enable_grad, torch.no_grad, torch.enable_grad, torch.no_grad]
    with install.stock():
        model = build("llama")

    def run(cache: Any) -> tuple[list[torch.Tensor], list[bool]]:
        outputs, elastic = [], []
        for index, mode in enumerate(modes):
            with mode():
                ids = INPUTS["input_ids"][:, index : index + 2]
                outputs.append(model(ids, past_key_values=cache).logits.detach().clone())
            elastic.append(all(getattr(layer, "elastic", False) for layer in cache.layers))
            if mode is torch.enable_grad:
                for layer in cache.layers:  # as programs do that keep a cache from step to step
                    layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        return outputs, elastic

    expected, _ = run(DynamicCache(config=model.config))
    with ballonet.manage(model):
        results, elastic = run(KVCache(model.config))
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
    assert elastic == [True, True, False, True, False, True]


def tangents(layer: Any) -> torch.Tensor:
    """Forward mode: what a change of the new keys does to the sum of squares of all keys."""
    keys, values = fresh(1, 2)
    with torch.no_grad(), forward_ad.dual_level():
        all_keys, _ = layer.update(forward_ad.make_dual(keys, torch.ones_like(keys)), values)
        return forward_ad.unpack_dual((all_keys * all_keys).sum()).tangent


def total(layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of the new keys, of tokens behind those that a layer of that kind has."""
    before, (_, values) = fresh(5, 1), fresh(1, 2)

    def found(new: torch.Tensor) -> torch.Tensor:
        copied = type(layer)()
        copied.update(*before)
        squares: torch.Tensor = copied.update(new, values)[0].square().sum()
        return squares

    return found


def transformed(layer: Any) -> torch.Tensor:
    """torch.func: the gradient by the new keys."""
    gradient: torch.Tensor = torch.func.grad(total(layer))(fresh(1, 2)[0])
    return gradient


def mapped(layer: Any) -> torch.Tensor:
    """torch.func: one update for each of many keys."""
    values: torch.Tensor = torch.func.vmap(total(layer))(torch.stack([fresh(1, seed)[0] for seed in range(3)]))
    return values


@pytest.mark.parametrize("derive", [tangents, transformed, mapped])
def test_other_derivatives_go_through_the_stock_path(derive: Callable[[Any], torch.Tensor]) -> None:
    derivatives = []
    for layer in (ElasticLayer(), DynamicLayer()):
        layer.update(*fresh(5, 1))
        derivatives.append(derive(layer))
    assert derivatives[0] is not None
    assert torch.equal(*derivatives)


def test_gradients_lie_in_the_pool_and_are_given_back() -> None:
    device = devices.require()
    with install.stock():
        model = build("llama")
    with ballonet.manage(model):
        plain(model)[0].backward()
        assert all(in_pool(parameter.grad) for parameter in model.parameters())
        model.zero_grad(set_to_none=True)
    del model
    gc.collect()
    device.check()
