"""What a decode step costs in Python: where everything is resident, calls of ballonet, by layer and before the layers;
where layers stream, all calls against stock's.

Stock's own calls, of torch and transformers, are some hundreds per layer. Counts do not depend on load: those of most
steps are taken, as some learn what the last ones took.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count, pairwise
from statistics import median
from types import FrameType

import pytest
import torch

import ballonet
from ballonet.allocator import devices
from ballonet.hooks.weights.follow import _registered

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
    devices.require().check()
    take_out()


class Calls:
    """Calls of ballonet so far, up to the hook of the first layer's beginning and in all; and those in which torch
    tells of a module of the list that transformers makes of a model's layers in each forward."""

    def __init__(self) -> None:
        self.before = self.all = self.told = 0

    def count(self, frame: FrameType) -> None:
        if frame.f_globals.get("__name__", "").startswith("ballonet."):
            if frame.f_code is _registered.__code__:
                self.told += 1
                return
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
            assert calls.told == layers, "one for each, and no more"
        assert managed.report().streamed == ()
    ((usual, _),) = seen.most_common(1)
    return usual


def test_a_resident_layer_costs_few_calls_and_what_comes_before_the_first_does_not_depend_on_them() -> None:
    few, many = decoding(4), decoding(24)
    assert (many[1] - few[1]) / 20 + 1 <= 12, "with what torch tells of it"
    assert few[0] == many[0] <= 25


class Everybodys(Calls):
    """Calls of anybody."""

    def count(self, frame: FrameType) -> None:
        self.all += 1


def generating(interval: int | None, managed: bool = True) -> int:
    """Python's calls of a decode step of `generate()`, of a model of 16 layers: the median."""
    model = build("llama", num_hidden_layers=16)
    steps = list[int]()
    with ballonet.manage(model, interval=interval) if managed else nullcontext():
        calls = Everybodys()
        noted = model.register_forward_pre_hook(lambda *_: steps.append(calls.all))
        with each_call(calls.count):
            model.generate(prompts(batch=1, longest=9)["input_ids"], max_new_tokens=24, min_new_tokens=24)
        noted.remove()
    return int(median(after - before for before, after in pairwise(steps[4:])))


@pytest.mark.counts
def test_layers_that_stream_cost_a_quarter_of_stock_s_calls_and_all_of_them_as_many_again(tuned: Tuned) -> None:
    tuned(clock=count(0.0, 1e-4).__next__)  # which is no Python call, as other clocks of tests are
    stock = generating(None, managed=False)
    resident, some, all_of_them = (generating(interval) for interval in (None, 4, 1))
    assert stock < resident < some < all_of_them, "else nothing streams"
    assert some <= 1.25 * stock
    assert all_of_them <= 2 * stock
