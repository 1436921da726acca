"""Adapters on a managed model: attached, merged, taken off again, and after each step what an unmanaged twin is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ballonet
from ballonet.allocator import install
from ballonet.allocator._native import Device

from . import models
from .pool import installing
from .portrait import all_in_pool, conserved, contents, none_in_pool, tensors
from .tuned import Tuned

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


class LoraLinear(nn.Module):
    """LoRA (Hu et al. 2021, §4.1) around a linear layer: W x + s B A x."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)
        self.merged = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.base(inputs)
        return outputs if self.merged else outputs + inputs @ self.a.t() @ self.b.t()

    def merge(self, sign: int = 1) -> None:
        self.base.weight.data += sign * (self.b @ self.a).detach()
        self.merged = sign > 0


def attach(model: Any, rank: int = 4) -> None:
    torch.manual_seed(6)
    for layer in model.model.layers:
        for name in TARGETS:
            setattr(layer.self_attn, name, LoraLinear(getattr(layer.self_attn, name), rank))


def each(model: Any, act: Callable[[LoraLinear], object]) -> None:
    for module in [module for module in model.modules() if isinstance(module, LoraLinear)]:
        act(module)


def detach(model: Any) -> None:
    for layer in model.model.layers:
        for name in TARGETS:
            setattr(layer.self_attn, name, getattr(layer.self_attn, name).base)


def scale(lora: LoraLinear) -> None:
    lora.a.data = lora.a.data * 3


STEPS: dict[str, Callable[[Any], object]] = {
    "attached": attach,
    "converted": lambda model: model.bfloat16(),
    "converted back": lambda model: model.float(),
    "exchanged": lambda model: each(model, scale),
    "merged": lambda model: each(model, LoraLinear.merge),
    "unmerged": lambda model: each(model, lambda lora: lora.merge(-1)),
    "merged again": lambda model: each(model, LoraLinear.merge),
    "off": detach,
    "a larger one": lambda model: attach(model, 16),
    "off again": detach,
}


@pytest.mark.parametrize("chaos", [None, 8])
def test_a_low_rank_adapter_through_its_life(device: Device, chaos: int | None) -> None:
    model, twin = build(), build()
    managed = ballonet.manage(model, chaos=chaos)
    pages = managed.report().pages
    for name, step in STEPS.items():
        addresses = {key: tensor.data_ptr() for key, tensor in tensors(model).items() if "_proj" in key}
        for one in (model, twin):
            with install.stock():
                step(one)
        assert torch.equal(tokens(model), tokens(twin)), name
        assert contents(model) == contents(twin), name
        assert all_in_pool(model), name
        assert not managed.report().unmanaged_tensors, name
        assert conserved(device, managed), name
        if "merged" in name:
            assert addresses == {key: tensor.data_ptr() for key, tensor in tensors(model).items() if "_proj" in key}
        if name.startswith("off"):
            assert managed.report().pages <= pages + 4  # of the conversions
    managed.release()
    assert none_in_pool(model)
    assert contents(model) == contents(twin)
    assert ballonet.stats().pages.weights == 0


def test_a_model_with_an_adapter_is_managed_as_a_whole(device: Device) -> None:
    model, twin = build(), build()
    for one in (model, twin):
        attach(one)
    with ballonet.manage(model):
        assert all_in_pool(model)
        with install.stock():
            for one in (model, twin):
                each(one, LoraLinear.merge)
                detach(one)
        assert torch.equal(tokens(model), tokens(twin))
    assert contents(model) == contents(twin)


def test_an_adapter_is_trained_in_the_pool(device: Device) -> None:
    def train(model: Any) -> list[float]:
        model.requires_grad_(False)
        with install.stock():
            attach(model)
        optimizer = torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=0.5)
        batch = models.prompts(2, 9)
        losses = []
        for _ in range(3):
            loss = model(**batch, labels=batch["input_ids"]).loss
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


# With peft, where it is installed


@pytest.fixture
def peft() -> Any:
    with install.stock():  # it makes tensors when it is imported
        return pytest.importorskip("peft", "0.20", reason="peft is not installed: pip install 'peft>=0.20'")


def lora(peft: Any, **more: Any) -> Any:
    return peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=list(TARGETS), init_lora_weights=False, task_type="CAUSAL_LM", **more
    )


@pytest.mark.parametrize("around", ["managed before", "managed after"])
def test_peft_attached_merged_and_unloaded(device: Device, peft: Any, around: str) -> None:
    model, twin = build(), build()
    managed = ballonet.manage(model) if around == "managed before" else None
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
        assert all_in_pool(wrapped), name
        assert not managed.report().unmanaged_tensors
    with install.stock():
        base, stock = wrapped.merge_and_unload(), other.merge_and_unload()
    assert torch.equal(tokens(base), tokens(stock))
    assert contents(base) == contents(stock)
    assert all_in_pool(base)
    managed.release()
    assert none_in_pool(base)
    assert contents(base) == contents(stock)
    assert ballonet.stats().pages.weights == 0


def test_the_adapters_of_transformers(device: Device, peft: Any) -> None:
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
