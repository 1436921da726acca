"""Models that others have their hands in: managed where that is right, else refused with what to do, never wrong."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook, disk_offload, dispatch_model
from accelerate.hooks import SequentialHook, add_hook_to_module, remove_hook_from_submodules
from torch import nn

import ballonet
from ballonet.allocator import install
from ballonet.allocator._native import Device
from ballonet.allocator.errors import AlreadyManaged, ManageError

from . import models
from .pool import in_pool, installing
from .portrait import Portrait, all_in_pool, none_in_pool, tensors
from .programs import run

OFFLOADED = r"offloaded by accelerate.*load the model without offloading.*remove_hook_from_submodules"


@pytest.fixture
def device() -> Iterator[Device]:
    with installing(2**24, 4096) as now:
        yield now()


def build() -> Any:
    with install.stock():
        return models.build("llama")


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(**models.prompts(2, 7)).logits
    return found


# accelerate


@pytest.mark.parametrize("how", ["cpu", "disk", "with hook", "sequential"])
def test_a_model_that_accelerate_offloads_is_refused_until_it_does_no_more(
    device: Device, how: str, tmp_path: Path
) -> None:
    model = build()
    expected = logits(model)
    if how == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    elif how == "disk":
        disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    elif how == "with hook":
        cpu_offload_with_hook(model, execution_device=torch.device("cpu"))
    else:
        cpu_offload(model, execution_device=torch.device("cpu"))
        add_hook_to_module(model.lm_head, SequentialHook(accelerate.hooks.ModelHook()), append=True)
    with pytest.raises(ManageError, match=OFFLOADED):
        ballonet.manage(model)
    assert ballonet.stats().pages.weights == 0
    assert torch.equal(logits(model), expected)
    remove_hook_from_submodules(model)
    if how == "with hook":
        accelerate.hooks.remove_hook_from_module(model)
    with ballonet.manage(model):
        assert all_in_pool(model)
        assert torch.equal(logits(model), expected)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_a_managed_model_that_is_offloaded_later_runs_and_comes_back(device: Device, to: str, tmp_path: Path) -> None:
    model = build()
    expected = logits(model)
    with ballonet.manage(model) as managed:
        with install.stock():
            if to == "cpu":
                cpu_offload(model, execution_device=torch.device("cpu"))
            else:
                disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
        for _ in range(2):
            assert torch.equal(logits(model), expected)
        if to == "disk":  # on the CPU what is offloaded to it keeps its memory, so that nothing has changed
            assert managed.report().pages == 1  # of the buffers
            assert "offloaded by accelerate" in managed.report().unmanaged_tensors["lm_head.weight"]
        remove_hook_from_submodules(model)
        assert torch.equal(logits(model), expected)
        assert all_in_pool(model)
        assert not managed.report().unmanaged_tensors
    assert torch.equal(logits(model), expected)


def test_a_model_on_one_device_by_its_map_is_managed(device: Device) -> None:
    model = build()
    expected = logits(model)
    model = dispatch_model(model, {"": "cpu"}, force_hooks=True)
    with ballonet.manage(model):
        assert all_in_pool(model)
        assert torch.equal(logits(model), expected)


# Weights of other classes


class Packed(nn.Parameter):
    """Two weights of four bits in a byte, whose scale lies outside of it, as bitsandbytes has them."""

    scale: torch.Tensor

    @staticmethod
    def of(weight: torch.Tensor) -> Packed:
        scale = weight.abs().max() / 7
        whole = torch.clamp((weight / scale).round() + 8, 0, 15).to(torch.uint8)
        packed: Packed = torch.Tensor._make_subclass(Packed, whole[:, ::2] * 16 + whole[:, 1::2], False)  # type: ignore[assignment]
        packed.scale = scale
        return packed

    def unpacked(self) -> torch.Tensor:
        both = torch.stack((self.data >> 4, self.data & 15), -1)
        return (both.flatten(1).float() - 8) * self.scale


class PackedLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = Packed.of(linear.weight.detach())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.weight, Packed)
        return inputs @ self.weight.unpacked().t()


def test_quantized_weights_keep_the_state_that_lies_outside_of_them(device: Device) -> None:
    model = build()
    with install.stock():
        for layer in model.model.layers:
            layer.mlp.down_proj = PackedLinear(layer.mlp.down_proj)
    expected = logits(model)
    with ballonet.manage(model, chaos=1):
        weight = model.model.layers[0].mlp.down_proj.weight
        assert type(weight) is Packed
        assert in_pool(weight)
        assert not in_pool(weight.scale)
        assert torch.equal(logits(model), expected)
        with install.stock():
            model.model.layers[1].mlp.up_proj = PackedLinear(model.model.layers[1].mlp.up_proj)
        changed = logits(model)
        assert in_pool(model.model.layers[1].mlp.up_proj.weight)
    assert torch.equal(logits(model), changed)


# Parallel wrappers


def test_a_model_that_is_copied_to_several_devices_is_refused(device: Device) -> None:
    model = nn.DataParallel(nn.Linear(4, 4))
    with ballonet.manage(model):
        assert model(torch.ones(1, 4)).shape == (1, 4)
    model.device_ids = [0, 1]
    with pytest.raises(ManageError, match=r"DataParallel '0' copies the model to 2 devices.*DistributedDataParallel"):
        ballonet.manage(nn.Sequential(model))


def test_wrappers_of_torch_distributed() -> None:
    run("from tests.test_manage_refusals import distribute; distribute()")


def distribute() -> None:
    """In a process of its own, with a process group of one."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ballonet.install(budget=2**25, page_size=4096, device="cpu")

    def train(model: Any) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch, losses = models.prompts(2, 9), []
        for _ in range(3):
            loss = model(**batch, labels=batch["input_ids"]).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    expected = train(DistributedDataParallel(build()))
    inside = DistributedDataParallel(build())
    with ballonet.manage(inside):  # around DDP
        assert all_in_pool(inside)
        assert train(inside) == expected
    model = build()
    with ballonet.manage(model) as managed:  # inside DDP
        outside = DistributedDataParallel(model)
        assert train(outside) == expected
        assert all_in_pool(model)
        assert not managed.report().unmanaged_tensors
        with pytest.raises(AlreadyManaged):
            ballonet.manage(outside)
    assert none_in_pool(model)

    sharded = build()
    fully_shard(sharded)
    with pytest.raises(ManageError, match="sharded by FSDP"):
        ballonet.manage(sharded)
    expected = train(sharded)
    later = build()
    with ballonet.manage(later) as managed:
        fully_shard(later)
        assert train(later) == expected
        unmanaged = managed.report().unmanaged_tensors
        assert set(unmanaged.values()) == {unmanaged["lm_head.weight"]}
        assert "sharded by FSDP" in unmanaged["lm_head.weight"]
    dist.destroy_process_group()


# What is compiled or traced


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("how", ["script", "trace"])
def test_scripted_modules_inside_a_model(device: Device, how: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    inputs = torch.ones(2, 8)
    expected = model(inputs)
    model[2] = torch.jit.script(model[2]) if how == "script" else torch.jit.trace(model[2], inputs)
    before = Portrait(model)
    with ballonet.manage(model):
        assert all_in_pool(model)
        assert torch.equal(model(inputs), expected)
        model[0] = copy.deepcopy(model[0])
        assert torch.equal(model(inputs), expected)
    assert none_in_pool(model)
    assert before.bits == Portrait(model).bits
    assert torch.equal(model(inputs), expected)


# What is not loaded yet


def test_lazy_modules_and_meta_devices_that_come_later(device: Device) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with ballonet.manage(model) as managed:
        model.append(nn.LazyLinear(3))
        model.append(nn.Linear(3, 2, device="meta"))
        with pytest.raises(Exception, match=r"[Mm]eta"):
            model(torch.ones(1, 4)).tolist()
        assert managed.report().unmanaged_tensors.keys() == {"1.weight", "1.bias", "2.weight", "2.bias"}
        assert "run the model once" in managed.report().unmanaged_tensors["1.weight"]
        assert "meta device" in managed.report().unmanaged_tensors["2.bias"]
        with install.stock():
            model[2] = nn.Linear(3, 2)
        assert model(torch.ones(1, 4)).shape == (1, 2)
        assert not managed.report().unmanaged_tensors
        assert all(in_pool(tensor) for tensor in tensors(model).values())
