"""Models that lie in the pool already when they are managed, and fill it, or more than it."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import devices, install

from .models import build, generate, prompts
from .pool import bytes_that_exist, take_out
from .tuned import Tuned

pytestmark = pytest.mark.chaos


SHAPE = {"num_hidden_layers": 8, "hidden_size": 128, "intermediate_size": 256}
PAGE = 4096
INPUTS = prompts(batch=1, longest=5)


@pytest.fixture(autouse=True)
def tiny(tuned: Tuned) -> Iterator[None]:
    tuned(weights={"large": 2**14})  # so that tiny layers have ranges
    yield
    take_out()


def weights(model: Any) -> int:
    """Bytes."""
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("part", [1.1, 0.6])
def test_layers_that_stream_make_room_for_all_else(part: float) -> None:
    with install.stock():
        original = build("llama", **SHAPE)
    stock = generate(original, "greedy", INPUTS, 4)
    budget = int(part * weights(original)) // PAGE * PAGE
    ballonet.install(budget, page_size=PAGE, host_budget=2**24, device="cpu", spill=part < 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a spill
        model = copy.deepcopy(original)
    device = devices.require()
    assert (device.snapshot()["spilled"] > 0) == (part < 1)
    with ballonet.manage(model) as managed:
        assert managed.report().streamed
        assert device.snapshot()["spilled"] == 0
        assert bytes_that_exist() <= budget
        assert generate(model, "greedy", INPUTS, 4).agrees(stock)
    assert all(torch.equal(value, original.state_dict()[name]) for name, value in model.state_dict().items())
    del model, managed
    gc.collect()


def test_model_that_does_not_fit_is_a_typed_error_and_unchanged() -> None:
    with install.stock():
        original = build("llama", **SHAPE)
    ballonet.install(weights(original) + 24 * PAGE, page_size=PAGE, host_budget=2 * PAGE, device="cpu", spill=False)
    model = copy.deepcopy(original)
    with pytest.raises((ballonet.BallonetError, torch.OutOfMemoryError)):
        ballonet.manage(model)
    assert all(torch.equal(value, original.state_dict()[name]) for name, value in model.state_dict().items())
    devices.require().check()
    del model
    gc.collect()
