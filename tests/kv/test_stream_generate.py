"""Real models whose layers take turns in slots for their KV: they say what stock says."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ballonet import testing
from ballonet.allocator import install, runtime
from ballonet.hooks.kv import range as kv_range
from ballonet.offload.governor import kv_read_plan
from ballonet.offload.residency import kv_slots

from .. import models
from ..caches import installed
from ..tuned import Tuned
from .pressure import poison, press, two_thirds

PAGE = 4096


@pytest.fixture(scope="module", autouse=True)
def page() -> Iterator[int]:
    with installed(PAGE, budget=2**22) as size:
        yield size


class Flights:
    """Two thirds of each layer's pages fly, whatever room there is; some more are taken now and then, and pages that
    nobody has are full of what must not be read."""

    def __init__(self) -> None:
        self.random = random.Random(5)
        self.loads = 0

    def act(self) -> None:
        device = runtime.require()
        if self.random.random() < 0.05:
            press(device, 3)
        elif self.random.random() < 0.02:
            poison(device)


@pytest.fixture(autouse=True)
def flights(monkeypatch: pytest.MonkeyPatch, tuned: Tuned) -> Flights:
    flights = Flights()
    append, copies = kv_range.KVRange.append, kv_slots.KVSlots.copies

    def appended(kv_range: Any, *args: Any) -> Any:
        flights.act()
        return append(kv_range, *args)

    def copied(slots: Any, *args: Any) -> Any:
        flights.loads += 1
        return copies(slots, *args)

    monkeypatch.setattr(kv_range.KVRange, "append", appended)
    monkeypatch.setattr(kv_slots.KVSlots, "copies", copied)
    monkeypatch.setattr(kv_read_plan.KVReadPlan, "_choose", two_thirds)
    tuned(kv_reads={"again": 2, "look": 8})
    return flights


def answer(model: Any, way: str) -> models.Output:
    if way == "assisted":
        return models.generate(model, "greedy", models.questions("llama", 1, 150), 40, prompt_lookup_num_tokens=3)
    if way == "chunked":
        return models.generate(model, "greedy", models.prompts(1, 200), 30, prefill_chunk_size=70)
    if way == "continued":
        return models.ask(model, "llama", way, 60)
    return models.generate(model, way, models.prompts(3, 120), 40)


WAYS = ("greedy", "beam", "assisted", "chunked", "continued")


@pytest.mark.parametrize(("way", "chaos"), [*[(way, None) for way in WAYS], ("greedy", 7), ("chunked", 7)])
def test_tokens_are_those_of_stock(way: str, chaos: int | None, flights: Flights) -> None:
    with install.stock():
        model = models.build("llama", num_hidden_layers=4)
        expected = answer(model, way)
    flights.loads = 0
    with testing.manage(model, interval=None, chaos=chaos):
        found = answer(model, way)
    assert torch.equal(found.tokens, expected.tokens)
    assert found.agrees(expected)
    assert flights.loads > 10
    runtime.require().check()
