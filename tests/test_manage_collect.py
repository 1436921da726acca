"""Models that are dropped: whatever goes with them, their pages come back, and nothing grows with their number."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules import module as torch_module

import ballonet
from ballonet import testing
from ballonet.allocator import devices
from ballonet.allocator._native import Device
from ballonet.hooks import managed
from ballonet.hooks.kv import generation
from ballonet.hooks.programs.first_use import FirstUse
from ballonet.hooks.weights import follow

from . import models
from .pool import in_pool, installing
from .threads import elsewhere

pytestmark = pytest.mark.chaos


PAGE = 4096
COUNT = 12


@pytest.fixture
def device() -> Iterator[Device]:
    with installing(2**24, PAGE) as now:
        yield now()


def generate(model: Any) -> torch.Tensor:
    tokens: torch.Tensor = model.generate(**models.prompts(1, 5), max_new_tokens=3, do_sample=False)
    return tokens


def weight_pages(device: Device) -> int:
    gc.collect()
    device.reap(wait=True)
    device.check()
    pages: int = device.snapshot()["pages"]["weights"]
    return pages


class Scene:
    """What is left of a model that was used, beside what `keep` says."""

    def __init__(self, keep: Callable[[Any], object]) -> None:
        model = models.build("llama")
        self.managed = ballonet.manage(model)
        generate(model)
        self.kept = keep(model)
        self.alive = weakref.ref(model)


def cycle(model: Any) -> None:
    model.itself = [model]
    model.model.layers[1].owner = (model,)


def traceback_of(model: Any) -> BaseException:
    """An error from the middle of a forward, whose frames hold the model."""

    def fail(*_: Any) -> None:
        raise ValueError("in the middle")

    model.model.layers[1].mlp.register_forward_pre_hook(fail)
    try:
        model(**models.prompts(1, 5))
    except ValueError as error:
        return error
    raise AssertionError


@torch.no_grad()
def cache_of(model: Any) -> Any:
    return model(**models.prompts(1, 5)).past_key_values


DROPPED: dict[str, Callable[[Any], object]] = {
    "nothing": lambda model: None,
    "a cycle": cycle,
    "a cache": cache_of,
    "a thread that used it": lambda model: elsewhere(lambda: generate(model)) is None,
}


@pytest.mark.parametrize("name", DROPPED)
def test_pages_come_back_with_the_model(device: Device, name: str) -> None:
    scene = Scene(DROPPED[name])
    assert weight_pages(device) == 0
    assert scene.alive() is scene.managed.model is None
    assert scene.managed.report().released
    assert "collected" in repr(scene.managed)


def test_pages_come_back_with_the_traceback_that_held_the_model(device: Device) -> None:
    scene = Scene(traceback_of)
    assert weight_pages(device) > 0
    assert scene.alive() is not None
    scene.kept = None
    assert weight_pages(device) == 0
    assert scene.alive() is None


KEPT: dict[str, Callable[[Any], Any]] = {
    "a weight": lambda model: model.lm_head.weight,
    "a layer": lambda model: model.lm_head,
    "a graph": lambda model: model.lm_head.weight.square().sum(),
}


@pytest.mark.parametrize("name", KEPT)
def test_kept_part_keeps_its_own_pages_only(device: Device, name: str) -> None:
    scene = Scene(KEPT[name])
    size = models.VOCABULARY * 32 * 4
    assert 0 < weight_pages(device) <= size // PAGE + 2
    assert scene.alive() is None
    if name == "a layer":
        assert scene.kept(torch.ones(1, 32)).shape == (1, models.VOCABULARY)
        with ballonet.manage(scene.kept):
            assert in_pool(scene.kept.weight)
    scene.kept = None
    assert weight_pages(device) == 0


def test_a_decoder_layer_that_outlives_its_model_works_and_has_no_hooks(device: Device) -> None:
    scene = Scene(lambda model: model.model.layers[0])
    assert weight_pages(device) > 0
    assert scene.alive() is None
    assert not scene.kept._forward_pre_hooks
    assert scene.kept.mlp(torch.ones(1, 1, 32)).shape == (1, 1, 32)


def _numbers(device: Device) -> Counter[str]:
    """What must not grow with the number of models."""
    weight_pages(device)
    device.trim()
    snapshot = device.snapshot()
    handles = (*torch_module._global_parameter_registration_hooks, *torch_module._global_forward_hooks)
    return Counter(
        {
            "created": snapshot["created"],
            "heap": snapshot["heap"]["live"],
            "maps": len(Path("/proc/self/maps").read_text().splitlines()),
            "files": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "tasks": len(os.listdir("/proc/self/task")),
            "managed": len(managed.models) + len(generation._attached.users) + len(follow._followers.users),
            "hooks": len(handles),
            "finalizers": sum(finalizer.alive for finalizer in list(weakref.finalize._registry)),  # type: ignore[attr-defined]
            "patches": len(sys.meta_path),
        }
    )


def by_hand(index: int) -> None:
    model = models.build("llama", num_hidden_layers=2)
    with ballonet.manage(model) if index % 3 else testing.manage(model, chaos=index):
        generate(model)
        if index % 4 == 0:
            model.bfloat16()
            generate(model)


def dropped(index: int) -> None:
    model = models.build(("llama", "gpt2")[index % 2], **({"num_hidden_layers": 2} if index % 2 == 0 else {}))
    ballonet.manage(model)
    generate(model)


def unasked(index: int) -> None:
    """As `ballonet run` has it: nobody holds the handle."""
    model = models.build("llama", num_hidden_layers=2)
    if index % 2:
        model(**models.prompts(1, 5))
    else:
        generate(model)
    assert in_pool(model.lm_head.weight)


@pytest.mark.parametrize("life", [by_hand, dropped, unasked])
def test_models_by_the_dozen(device: Device, life: Callable[[int], None]) -> None:
    watching = FirstUse() if life is unasked else None
    for index in range(4):  # what is made once only
        life(index)
    before = _numbers(device)
    for index in range(COUNT):
        life(index)
        if index % 10 == 0:
            gc.collect(0)
    after = _numbers(device)
    if watching is not None:
        assert watching.managed == []
        watching.close()
    grown = {name: (before[name], after[name]) for name in after if after[name] > before[name]}
    grown.pop("maps", None)  # of the interpreter's own heap, too
    assert not grown
    assert after["maps"] <= before["maps"] + 12
    assert devices.require().snapshot()["physical_peak"] <= 2**24
