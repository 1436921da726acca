"""What tests of held layers look at: what a model says, pages that exist, bytes that were copied; and a peer."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

import ballonet
from ballonet.allocator import devices, install
from ballonet.hooks.replicas.held_layers import HeldLayers

from ...models import Output, generate
from ...pool import bytes_that_exist
from ...streaming.conftest import INPUTS, PAGE

LAYERS = 6


def say(model: Any) -> Output:
    return generate(model, "greedy", INPUTS, tokens=5)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        computed: torch.Tensor = model(**INPUTS).logits
    return computed


def loaded(folder: Path) -> Any:
    with install.stock():
        return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def prepared(held: HeldLayers, layers: int = LAYERS) -> HeldLayers:
    assert len(list(held.prepare(range(layers)))) == layers
    return held


def settled() -> int:
    """Device pages that exist, once all that can go has gone: as the kernel counts them."""
    device = devices.require()
    gc.collect()
    for _ in range(2):
        device.trim()
        device.reap(wait=True)
    device.check()
    return bytes_that_exist() // PAGE


def on_host() -> int:
    devices.require().trim()
    return bytes_that_exist("host") // PAGE


def copied(way: str) -> int:
    return int(devices.require().snapshot()["copied"][f"weights_{way}"])


def pages_of(managed: ballonet.Managed) -> tuple[int, ...]:
    return managed._residency.arrangement.pages


def stocks_logits(original: Any, act: Callable[[Any], object] = lambda model: None) -> torch.Tensor:
    with install.stock():
        changed = copy.deepcopy(original)
        act(changed)
        return logits(changed)


def _data(model: Any) -> None:
    model.model.layers[4].mlp.up_proj.weight.data.mul_(2)


def _counted(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[4].mlp.up_proj.weight.mul_(2)


def _replaced(model: Any) -> None:
    old = model.model.layers[4].mlp.up_proj.weight
    model.model.layers[4].mlp.up_proj.weight = torch.nn.Parameter(old.detach() * 2)


def _merged(model: Any) -> None:
    weight = model.model.layers[4].mlp.up_proj.weight
    weight.data += weight.data.clone()


WRITES = {"data": _data, "counted": _counted, "replaced": _replaced, "merged": _merged}


class Peer:
    """Another replica, which is asked for layers."""

    def __init__(
        self, original: Any, act: Callable[[int, dict[str, torch.Tensor]], object] = lambda *each: None
    ) -> None:
        self._layers = original.model.layers
        self._act = act
        self.asked: list[int] = []

    def __call__(self, layer: int) -> Mapping[str, torch.Tensor] | None:
        self.asked.append(layer)
        with install.stock():
            tensors = {name: parameter.detach().clone() for name, parameter in self._layers[layer].named_parameters()}
        tensors |= dict(self._layers[layer].named_buffers())
        return None if self._act(layer, tensors) == "gone" else tensors
