"""What a decode step costs in Python: where everything is resident, calls of ballonet in the whole of it, and before
the layers; where layers stream, all calls against stock's.

Stock's own calls, of torch and transformers, are some hundreds per layer. Counts do not depend on load: those of most
steps are taken, as some learn what the last ones took.
"""

from __future__ import annotations

import gc
import threading
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
from ballonet.hooks.batching import steps
from ballonet.hooks.weights.follow import _registered

from .counting import each_call
from .models import build, prompts
from .pool import take_out
from .serving.batches import ask, looping
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


def test_a_token_of_a_resident_model_costs_15_calls_and_6_per_layer() -> None:
    few, many = decoding(4), decoding(24)
    for layers, (_, calls) in ((4, few), (24, many)):
        assert calls + layers <= 15 + 6 * layers, "with what torch tells of each layer"
    assert few[0] == many[0] <= 13, "before the first layer"


class StepCalls:
    """Calls of ballonet in each step of a loop, on its thread, but for those of attention by request."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        name = frame.f_globals.get("__name__", "")
        if event != "call" or not name.startswith("ballonet.") or frame.f_code is _registered.__code__:
            return
        if frame.f_code is steps.prepare_step.__code__:
            self.steps.append(0)
        elif self.steps and name != "ballonet.hooks.batching.attention":
            self.steps[-1] += 1


def stepping(layers: int, requests: int) -> int:
    """Calls of a step in which each of so many requests decodes a token: those that most steps have."""
    model, calls = build("llama", num_hidden_layers=layers), StepCalls()
    with ballonet.manage(model):
        threading.setprofile(calls.profile)
        try:
            with looping(model, 64) as manager:
                ask(manager, [[5, 6, 7 + n] for n in range(requests)])
        finally:
            threading.setprofile(None)
    ((usual, _),) = Counter(calls.steps).most_common(1)
    return usual


@pytest.mark.counts
def test_a_step_of_requests_that_decode_costs_30_calls_8_per_layer_and_6_per_request() -> None:
    for layers, requests in ((4, 4), (8, 4), (4, 8)):
        assert stepping(layers, requests) <= 30 + 8 * layers + 6 * requests


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
