"""`Managed.held`: who keeps the layers of a model at rest, told by name."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ballonet

from ..models import generate
from .conftest import INPUTS


@pytest.fixture
def managed(model: Any) -> Iterator[ballonet.Managed]:
    with ballonet.manage(model, interval=2) as it:
        generate(model, "greedy", INPUTS)
        assert it.flying
        assert it.held == {}
        yield it


def weight(model: Any) -> torch.nn.Parameter:
    found: torch.nn.Parameter = model.model.layers[1].mlp.up_proj.weight
    return found


NAME = "model.layers.1.mlp.up_proj.weight"


class Keeper:
    def __init__(self, held: object) -> None:
        self.held = {"here": [held]}


WAYS: dict[str, tuple[Callable[[Any], object], str]] = {
    "a weight": (lambda it: weight(it), "someone outside of the model refers to it"),
    "in a list": (lambda it: [weight(it)], "someone outside of the model refers to it"),
    "an object": (lambda it: Keeper(weight(it)), "Keeper"),
    "an optimizer": (lambda it: torch.optim.SGD(it.parameters(), lr=1.0), "torch.optim.sgd.SGD"),
    "a view": (lambda it: weight(it).data[1:], "someone holds a view of it, or its memory"),
    "a graph": (lambda it: it(INPUTS["input_ids"]).logits, "torch holds it, as an autograd graph does"),
}


@pytest.mark.parametrize("how", WAYS)
def test_whoever_keeps_layers_at_rest_is_named(model: Any, managed: ballonet.Managed, how: str) -> None:
    act, why = WAYS[how]
    it = [act(model)]
    generate(model, "greedy", INPUTS)
    assert not managed.flying
    found = managed.held
    assert why in found[NAME]
    assert all("layers.1." in name or "layers.3." in name for name in found)
    assert (len(found) > 1) == (how in ("an optimizer", "a graph"))
    it.clear()
    del found
    gc.collect()
    generate(model, "greedy", INPUTS)
    assert managed.flying
    assert managed.held == {}


def test_memory_that_a_weight_had_before(model: Any, managed: ballonet.Managed) -> None:
    memory = weight(model).data
    weight(model).data = memory * 2
    generate(model, "greedy", INPUTS)
    assert not managed.flying
    assert set(managed.held.values()) == {"it has been given other memory"}
    del memory
    gc.collect()
    generate(model, "greedy", INPUTS)
    generate(model, "greedy", INPUTS)
    assert managed.held == {}
    assert managed.flying
