"""What a decode step costs in Python where everything is resident: calls of ballonet, by layer and before the layers.

Stock's own calls, of torch and transformers, are not counted: some hundreds per layer.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from types import FrameType

import pytest
import torch

import ballonet
from ballonet.allocator import runtime

from .counting import each_call
from .models import build, prompts
from .pool import take_out
from .tuned import Clock, Tuned

PAGE = 65536  # many tokens of KV: the steps that are counted fill none
BUDGET = 2**26


@pytest.fixture(autouse=True)
def installed(tuned: Tuned) -> Iterator[None]:
    tuned(weights={"large": 2**11}, clock=Clock(step=1e-4))  # so that tiny layers have ranges
    ballonet.install(BUDGET, page_size=PAGE, host_budget=BUDGET, device="cpu")
    yield
    gc.collect()
    runtime.require().check()
    take_out()


class Calls:
    """Calls of ballonet so far, up to the hook of the first layer's beginning and in all."""

    def __init__(self) -> None:
        self.before = self.all = 0

    def count(self, frame: FrameType) -> None:
        if frame.f_globals.get("__name__", "").startswith("ballonet."):
            self.all += 1
            if "EnterLayer" in frame.f_code.co_qualname and not self.before:
                self.before = self.all


def decoding(layers: int) -> tuple[int, int]:
    """Calls of a step before the first layer, and of all of it: those that most steps have."""
    model = build("llama", num_hidden_layers=layers)
    seen = Counter[tuple[int, int]]()
    with ballonet.manage(model) as managed, torch.no_grad():
        cache = model(prompts(batch=1, longest=9)["input_ids"], use_cache=True).past_key_values
        for _ in range(24):
            calls = Calls()
            with each_call(calls.count):
                model(torch.tensor([[5]]), past_key_values=cache, use_cache=True)
            seen[calls.before, calls.all] += 1
        assert managed.report().streamed == ()
    ((usual, _),) = seen.most_common(1)
    return usual


def test_a_resident_layer_costs_few_calls() -> None:
    few, many = decoding(4), decoding(12)
    assert (many[1] - few[1]) / 8 <= 12
    # torch tells of each module of the list that the model makes of its layers
    assert few[0] - 4 == many[0] - 12 <= 25
