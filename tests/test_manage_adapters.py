"""Adapters on a managed model: attached, merged, taken off again, and after each step what an unmanaged twin is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import install
from ballonet.allocator._native import Device

from . import models
from .pool import installing
from .portrait import all_in_pool, conserved, contents, none_in_pool
from .tuned import Tuned

pytestmark = pytest.mark.chaos


PAGE = 4096
TARGETS = ("q_proj", "v_proj")


@pytest.fixture(autouse=True)
def device(tuned: Tuned) -> Iterator[Device]:
    tuned(weights={"large": 2**13})
    with installing(2**24, PAGE) as now:
        yield now()


def build() -> Any:
    with install.stock():
        return models.build("llama", hidden_size=64, intermediate_size=96)


def tokens(model: Any) -> torch.Tensor:
    return models.generate(model, "greedy", models.prompts(2, 7), tokens=5).tokens


@pytest.fixture
def peft() -> Any:
    with install.stock():  # it makes tensors when it is imported
        return pytest.importorskip("peft", "0.20", reason="peft is not installed: pip install 'peft>=0.20'")


def lora(peft: Any, **more: Any) -> Any:
    return peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=list(TARGETS), init_lora_weights=False, task_type="CAUSAL_LM", **more
    )


@pytest.mark.counts
@pytest.mark.parametrize(("managed_when", "chaos"), [("before", 8), ("after", None)])
def test_peft_attached_merged_and_unloaded(device: Device, peft: Any, managed_when: str, chaos: int | None) -> None:
    model, twin = build(), build()
    managed = ballonet.manage(model, chaos=chaos) if managed_when == "before" else None
    with install.stock():
        torch.manual_seed(1)
        wrapped = peft.get_peft_model(model, lora(peft))
        torch.manual_seed(1)
        other = peft.get_peft_model(twin, lora(peft))
    if managed is None:
        managed = ballonet.manage(wrapped)
    steps: dict[str, Callable[[Any], object]] = {
        "attached": lambda one: None,
        "off for a while": lambda one: one.disable_adapter_layers(),
        "on again": lambda one: one.enable_adapter_layers(),
        "merged": lambda one: one.merge_adapter(),
        "unmerged": lambda one: one.unmerge_adapter(),
        "a second one": lambda one: (torch.manual_seed(2), one.add_adapter("two", lora(peft)), one.set_adapter("two")),
        "the second gone": lambda one: (one.set_adapter("default"), one.delete_adapter("two")),
    }
    for name, step in steps.items():
        for one in (wrapped, other):
            with install.stock():
                step(one)
        assert torch.equal(tokens(wrapped), tokens(other)), name
        assert contents(wrapped) == contents(other), name
        assert all_in_pool(wrapped, "device", *(["host"] if chaos else [])), name
        assert not managed.report().unmanaged_tensors
        assert conserved(device, managed), name
    with install.stock():
        base, stock = wrapped.merge_and_unload(), other.merge_and_unload()
    assert torch.equal(tokens(base), tokens(stock))
    assert contents(base) == contents(stock)
    managed.release()
    assert none_in_pool(base)
    assert contents(base) == contents(stock)
    assert ballonet.stats().pages.weights == 0


@pytest.mark.counts
def test_the_adapters_of_transformers(peft: Any) -> None:
    model, twin = build(), build()
    managed = ballonet.manage(model)
    steps: list[Callable[[Any], object]] = [
        lambda one: (torch.manual_seed(1), one.add_adapter(lora(peft), adapter_name="first")),
        lambda one: one.disable_adapters(),
        lambda one: one.enable_adapters(),
        lambda one: one.delete_adapter("first"),
    ]
    for step in steps:
        for one in (model, twin):
            with install.stock():
                step(one)
        assert torch.equal(tokens(model), tokens(twin))
        assert all_in_pool(model)
    assert contents(model) == contents(twin)
    managed.release()
    assert none_in_pool(model)


def test_an_adapter_is_trained_in_the_pool(peft: Any) -> None:
    def train(model: Any) -> list[float]:
        with install.stock():
            torch.manual_seed(6)
            adapted = peft.get_peft_model(model, lora(peft))
        optimizer = torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=0.5)
        batch = models.prompts(2, 9)
        losses = []
        for _ in range(3):
            loss = adapted(**batch, labels=batch["input_ids"]).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    twin, model = build(), build()
    expected = train(twin)
    assert expected[0] > expected[-1]
    with ballonet.manage(model):
        assert train(model) == expected
        assert all_in_pool(model)
        assert contents(model) == contents(twin)
