"""Modules that are not transformers' models: blocks in lists, nested and not, from the CPU, pipelines of several."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ballonet
from ballonet.allocator import install
from ballonet.allocator._native import Device
from ballonet.allocator.errors import BudgetError, ManageError, WrongDevice
from ballonet.hooks.pipeline import modules_of
from ballonet.hooks.weights.model_parts import decoder_layers

from .pool import installing
from .portrait import Portrait, all_in_pool
from .tuned import Tuned

PAGE = 4096
BUDGET = 2**24
WIDE = 64


@pytest.fixture(autouse=True)
def device(tuned: Tuned) -> Iterator[Device]:
    tuned(weights={"large": 2**11})
    with installing(BUDGET, PAGE) as now:
        yield now()


class Block(nn.Module):
    """Half of a down or up block of a UNet: layers in two lists, which run alternately."""

    def __init__(self) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(2))
        self.resnets = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for resnet, attention in zip(self.resnets, self.attentions, strict=True):
            x = torch.tanh(attention(torch.relu(resnet(x))))
        return x


class UNet(nn.Module):
    """Blocks in two lists, one outside of them, and skips."""

    def __init__(self, levels: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDE, WIDE)
        self.down_blocks = nn.ModuleList(Block() for _ in range(levels))
        self.up_blocks = nn.ModuleList(Block() for _ in range(levels))
        self.mid_block = Block()
        self.leave = nn.Linear(WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.enter(x), []
        for block in self.down_blocks:
            skips.append(x := block(x))
        x = self.mid_block(x)
        for block in self.up_blocks:
            x = block(x + skips.pop())
        return self.leave(x)


class Lopsided(nn.Module):
    """A list of which one block has most of the weights, in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        large = nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(6)))
        self.stages = nn.ModuleList([nn.Linear(WIDE, WIDE), large, nn.Linear(WIDE, WIDE)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = torch.tanh(stage(x))
        return x


def made(kind: Any, *arguments: Any) -> Any:
    with install.stock():
        torch.manual_seed(0)
        return kind(*arguments).eval()


def vision(blocks: int = 6) -> nn.Module:
    """As timm's: blocks in an nn.Sequential."""
    each = [nn.Sequential(nn.LayerNorm(WIDE), nn.Linear(WIDE, WIDE), nn.GELU()) for _ in range(blocks)]
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.Sequential(*each), nn.Linear(WIDE, WIDE))


KINDS = {"unet": UNet, "vision": vision, "lopsided": Lopsided, "torch": lambda: nn.TransformerEncoder(
    nn.TransformerEncoderLayer(WIDE, 4, WIDE, batch_first=True), 6, enable_nested_tensor=False
)}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "layers"), [("unet", 12), ("vision", 6), ("lopsided", 6), ("torch", 6)], ids=lambda value: str(value)
)
def test_blocks_of_any_module_stream_and_give_the_same_bits(device: Device, kind: str, layers: int) -> None:
    model, x = made(KINDS[kind]), torch.randn(3, 5, WIDE)
    weights = sum(weight.nbytes for weight in model.parameters())
    with torch.no_grad():
        expected = model(x)
    before = Portrait(model)
    assert len(decoder_layers(model)) == layers
    ballonet.set_budget(device.snapshot()["created"] * PAGE + 8 * PAGE)
    with pytest.raises(BudgetError) as refused:
        ballonet.manage(model)
    assert refused.value.smallest < refused.value.others + weights
    ballonet.set_budget(refused.value.smallest)
    with ballonet.manage(model) as managed:
        assert managed.report().streamed, "it is larger than its budget"
        with torch.no_grad():
            for _ in range(3):
                assert torch.equal(model(x), expected)
        assert before.is_of(model, hooks=False)
        managed.sleep()
        with torch.no_grad():
            assert torch.equal(model(x), expected)
    assert before.is_of(model)


def test_a_gradient_is_right_though_blocks_stream(device: Device) -> None:
    model, x = made(UNet), torch.randn(3, WIDE)
    model(x).sum().backward()
    expected = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    with ballonet.manage(model, interval=1):
        model(x).sum().backward()
        assert all(torch.equal(weight.grad, grad) for weight, grad in zip(model.parameters(), expected, strict=True))
        model.zero_grad()


def test_a_model_on_the_cpu_is_taken_to_the_device_and_goes_back(device: Device) -> None:
    model, x = made(UNet), torch.randn(3, WIDE)
    with torch.no_grad():
        expected = model(x)
    before = Portrait(model)
    with ballonet.manage(model, device="cpu"):  # the stand-in's device; of a GPU see tests/gpu
        assert all_in_pool(model)
        with torch.no_grad():
            assert torch.equal(model(x), expected)
    assert before.is_of(model)
    with pytest.raises(WrongDevice, match="installed for cpu, not for cuda"):
        ballonet.manage(model, device="cuda")


def test_a_model_from_the_cpu_that_does_not_fit_stays_as_it_is(device: Device) -> None:
    model = made(UNet, 8)
    before = Portrait(model)
    ballonet.set_budget(device.snapshot()["created"] * PAGE + 8 * PAGE)
    with pytest.raises(BudgetError):
        ballonet.manage(model, device="cpu")
    assert before.is_of(model)


def test_each_module_of_a_pipeline_is_managed_and_idle_ones_give_to_the_one_that_runs(device: Device) -> None:
    parts = {"text_encoder": made(vision), "unet": made(UNet), "scheduler": object()}
    pipeline, x = SimpleNamespace(components=parts), torch.randn(3, 5, WIDE)
    models = [part for part in parts.values() if isinstance(part, nn.Module)]
    with torch.no_grad():
        expected = [model(x) for model in models]
    weights = sum(weight.nbytes for model in models for weight in model.parameters())
    ballonet.set_budget(device.snapshot()["created"] * PAGE + weights)
    with ballonet.manage(pipeline) as managed, torch.no_grad():
        assert list(managed.parts) == ["text_encoder", "unet"]
        for _ in range(3):
            assert all(torch.equal(model(x), result) for model, result in zip(models, expected, strict=True))
        assert any(report.streamed for report in managed.report().values())
        managed.sleep()
        assert ballonet.stats().pages.weights == 0
        assert [handle.asleep for handle in managed.parts.values()] == [1, 1]
        assert all(torch.equal(model(x), result) for model, result in zip(models, expected, strict=True))
    assert ballonet.stats().pages.weights == 0


def test_a_pipeline_is_managed_as_a_whole_or_not_at_all(device: Device) -> None:
    pipeline = SimpleNamespace(components={"first": made(vision), "second": made(UNet, 40)})
    ballonet.set_budget(device.snapshot()["created"] * PAGE + 60 * PAGE)
    with pytest.raises(BudgetError):
        ballonet.manage(pipeline)
    assert ballonet.stats().pages.weights == 0


def test_modules_of_a_pipeline_are_found_once_and_not_within_each_other() -> None:
    unet = UNet(1)
    named = SimpleNamespace(model=unet, again=unet, part=unet.mid_block, tokenizer=object())
    assert list(modules_of(named)) == ["model"]
    assert modules_of(object()) == {}
    with pytest.raises(ManageError, match="a pipeline of such, not int"):
        ballonet.manage(3)


def test_a_pipeline_of_diffusers_gives_the_images_of_stock_and_of_group_offloading(device: Device) -> None:
    diffusers = pytest.importorskip("diffusers")
    with install.stock():
        torch.manual_seed(0)
        unet = diffusers.UNet2DModel(
            sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 64),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=8,
        ).eval()  # fmt: skip
        pipeline = diffusers.DDIMPipeline(unet, diffusers.DDIMScheduler())
        offloaded = diffusers.DDIMPipeline(copy.deepcopy(unet), diffusers.DDIMScheduler())
    for one in (pipeline, offloaded):
        one.set_progress_bar_config(disable=True)
    cpu = torch.device("cpu")
    diffusers.hooks.apply_group_offloading(offloaded.unet, cpu, cpu, offload_type="leaf_level")

    def images(pipeline: Any = pipeline) -> torch.Tensor:
        made = pipeline(
            batch_size=1, generator=torch.Generator().manual_seed(3), num_inference_steps=3, output_type="np"
        )
        return torch.from_numpy(made.images)

    expected = images()
    assert torch.equal(images(offloaded), expected)
    weights = sum(weight.nbytes for weight in unet.parameters())
    ballonet.set_budget(device.snapshot()["created"] * PAGE + 2 * weights)
    with ballonet.manage(pipeline, interval=1) as managed:
        assert managed.parts["unet"].report().streamed
        assert torch.equal(images(), expected)
        managed.sleep()
        assert torch.equal(images(), expected)
