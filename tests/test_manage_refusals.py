"""Models that others have their hands in: managed where that is right, else refused with what to do, never wrong."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import accelerate
import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from accelerate.hooks import SequentialHook, add_hook_to_module, remove_hook_from_submodules
from torch import nn

import ballonet
from ballonet.allocator import install
from ballonet.allocator._native import Device
from ballonet.allocator.errors import ManageError

from . import models, programs
from .models import logits
from .pool import in_pool, installing
from .portrait import Portrait, all_in_pool, none_in_pool, tensors
from .tuned import Tuned

OFFLOADED = r"offloaded by accelerate.*load the model without offloading.*remove_hook_from_submodules"


@pytest.fixture
def device() -> Iterator[Device]:
    with installing(2**24, 4096) as now:
        yield now()


def build() -> Any:
    with install.stock():
        return models.build("llama")


# accelerate


@pytest.mark.parametrize("how", ["with hook", "sequential"])
def test_a_model_that_accelerate_offloads_is_refused_until_it_does_no_more(device: Device, how: str) -> None:
    """Other ways: test_living_with_others.py."""
    model = build()
    expected = logits(model)
    if how == "with hook":
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


# Parallel wrappers


def test_a_model_that_is_copied_to_several_devices_is_refused(device: Device) -> None:
    model = nn.DataParallel(nn.Linear(4, 4))
    with ballonet.manage(model):
        assert model(torch.ones(1, 4)).shape == (1, 4)
    model.device_ids = [0, 1]
    with pytest.raises(ManageError, match=r"DataParallel '0' copies the model to 2 devices.*DistributedDataParallel"):
        ballonet.manage(nn.Sequential(model))


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


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_decoder_layer_that_can_have_no_hooks_does_not_stream(device: Device, tuned: Tuned) -> None:
    tuned(weights={"large": 2**11})  # so that tiny layers have ranges
    model = build()
    with install.stock():
        model.model.layers[1] = torch.jit.trace(nn.Linear(64, 64), torch.ones(1, 64))
    with ballonet.manage(model, interval=1) as managed:
        assert managed.report().streamed == (0, 2)


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


FORKS = """
import os
import torch
import ballonet
from tests import models

ballonet.install("24MiB", device="cpu", page_size=65536)
model, ids = models.build("llama"), torch.tensor([[1, 2, 3]])
managed = ballonet.manage(model)
expected = model(ids).logits
if not os.fork():
    for act in (lambda: model(ids), lambda: ballonet.manage(models.build("llama"))):
        try:
            act()
        except ballonet.ForkedProcess as error:
            print(error, flush=True)
    os._exit(0)
assert os.wait()[1] == 0
assert torch.equal(model(ids).logits, expected)
"""


def test_child_of_a_fork_is_told_to_spawn() -> None:
    said = programs.run(FORKS).splitlines()
    assert len(said) == 2
    assert all("get_context('spawn')" in line for line in said)
