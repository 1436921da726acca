"""Decode steps like the last are begun in one call, until anything happens: then the next one asks the manager, and its
cache looks at its pages."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import devices
from ballonet.hooks.device import managers
from ballonet.offload.manager.kv_tier import KVTier
from ballonet.offload.manager.memory_manager import MemoryManager

from .models import build, prompts
from .pool import take_out
from .tuned import Clock, Tuned

PAGE = 65536
BUDGET = 2**26
TOKEN = torch.tensor([[5]])


@pytest.fixture(autouse=True)
def clock(tuned: Tuned) -> Iterator[Clock]:
    made = Clock(step=1e-4)
    tuned(weights={"large": 2**11}, clock=made)  # so that tiny layers have ranges
    ballonet.install(BUDGET, page_size=PAGE, host_budget=BUDGET, device="cpu")
    yield made
    gc.collect()
    devices.require().check()
    take_out()


class Steps:
    """Decode steps of a model with a cache, and how often they asked the manager and looked at the cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = self.looked = 0
        before, iteration = MemoryManager.before, KVTier.iteration

        def ask(manager: MemoryManager, *args: Any) -> Any:
            self.asked += 1
            return before(manager, *args)

        def look(tier: KVTier, *args: Any) -> None:
            self.looked += 1
            iteration(tier, *args)

        monkeypatch.setattr(MemoryManager, "before", ask)
        monkeypatch.setattr(KVTier, "iteration", look)
        self.model = build("llama", num_hidden_layers=4)
        self.managed = ballonet.manage(self.model)
        self.manager = managers.of(devices.require())
        self.cache = self.prefill()
        for _ in range(3 * self.manager.tuning.weights.sampled):
            if self.step() == (0, 0):
                return
        raise AssertionError("each step asks")

    def prefill(self) -> Any:
        with torch.no_grad():
            return self.model(prompts(batch=1, longest=9)["input_ids"], use_cache=True).past_key_values

    def step(self, cache: Any = None) -> tuple[int, int]:
        """Returns (did it ask the manager, did it look at the cache)."""
        before = self.asked, self.looked
        with torch.no_grad():
            self.model(TOKEN, past_key_values=cache or self.cache, use_cache=True)
        return self.asked - before[0], self.looked - before[1]


def lower_budget(steps: Steps, clock: Clock) -> None:
    ballonet.set_budget(BUDGET - 2 * PAGE)


def take_pages(steps: Steps, clock: Clock) -> None:
    device = devices.require()
    device.take(device.published, 1)


def wait(steps: Steps, clock: Clock) -> None:
    clock.now += steps.manager.tuning.pages.idle


def change_model(steps: Steps, clock: Clock) -> None:
    steps.managed._residency.require(None, None, True)


def add_cache(steps: Steps, clock: Clock) -> None:
    steps.others = steps.prefill()  # type: ignore[attr-defined]


def learn_link(steps: Steps, clock: Clock) -> None:
    steps.manager.link.bandwidth = 1e9


EVENTS = (lower_budget, take_pages, wait, change_model, add_cache, learn_link)


@pytest.mark.counts
@pytest.mark.parametrize("event", EVENTS)
def test_an_event_is_looked_at_by_the_next_step(
    event: Callable[[Steps, Clock], None], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch)
    event(steps, clock)
    assert steps.step()[0] == 1


@pytest.mark.counts
def test_another_cache_and_a_longer_token_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    other = steps.prefill()
    while steps.step() != (0, 0):
        pass
    assert steps.step(other) == (1, 1)
    steps.step()
    while steps.step() != (0, 0):
        pass
    with torch.no_grad():
        before = steps.asked
        steps.model(TOKEN.repeat(1, 3), past_key_values=steps.cache, use_cache=True)
    assert steps.asked == before + 1


@pytest.mark.counts
def test_two_of_sampled_steps_are_looked_at_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    sampled = steps.manager.tuning.weights.sampled
    seen = [steps.step()[0] for _ in range(4 * sampled)]
    assert 0 < sum(seen) <= len(seen) // 4
    assert (1, 1) in set(pairwise(seen)), "a time per token is that between two"
