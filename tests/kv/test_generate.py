"""Real models whose KV is taken at every append, copied behind and brought back, or whose layers take turns in slots:
they say what stock says."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from ballonet import testing
from ballonet.allocator import devices, install
from ballonet.hooks.kv.ranges import KVRange
from ballonet.offload.manager import kv_read_plan
from ballonet.offload.residency import kv_slots

from .. import models
from ..caches import installed
from ..tuned import Tuned
from .pressure import Taker, around_appends, poison, press, two_thirds


@pytest.fixture(scope="module", autouse=True)
def page() -> Iterator[int]:
    with installed(4096, budget=2**22) as size:
        yield size


def answer(model: Any, name: str, way: str, tokens: int) -> models.Output:
    if way == "assisted":
        asked = models.questions(name, 1, 150)
        return models.generate(model, "greedy", asked, tokens, prompt_lookup_num_tokens=3)
    if way == "chunked":
        return models.generate(model, "greedy", models.prompts(1, 200), tokens, prefill_chunk_size=70)
    if way == "continued":
        return models.ask(model, name, way, 60)
    asked = models.prompts(3, 120) if name == "llama" else models.questions(name, 3, 120)
    return models.generate(model, way, asked, tokens)


def as_stock(name: str, way: str, tokens: int, shape: Mapping[str, int], **options: Any) -> None:
    """A model of that shape says the same when it is managed with these options."""
    with install.stock():
        model = models.build(name, **shape)
        expected = answer(model, name, way, tokens)
    with testing.manage(model, **options):
        output = answer(model, name, way, tokens)
    assert torch.equal(output.tokens, expected.tokens)
    assert output.agrees(expected)
    devices.require().check()


CASES = [
    *[("llama", way) for way in ("beam", "assisted", "continued")],
    ("qwen3_next", "greedy"),
    ("falcon_h1", "beam"),
    ("t5gemma", "greedy"),
]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_tokens_are_those_of_stock(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is done to pages around each append."""
    taker = Taker(devices.require(), 1)
    around_appends(monkeypatch, lambda kv_range: taker.act([kv_range]))
    as_stock(name, way, 60, {})
    assert min(taker.done.values()) > 0, taker.done


WAYS = ("greedy", "beam", "assisted", "chunked", "continued")


@pytest.mark.parametrize(("way", "chaos"), [*[(way, None) for way in WAYS], ("greedy", 7), ("chunked", 7)])
def test_tokens_are_those_of_stock_through_slots(
    way: str, chaos: int | None, monkeypatch: pytest.MonkeyPatch, tuned: Tuned
) -> None:
    """Two thirds of each layer's pages fly, whatever room there is; some more are taken now and then, and pages that
    nobody has are full of what must not be read."""
    drawn, loads = random.Random(5), 0
    append, copies = KVRange.append, kv_slots.KVSlots.copies

    def appended(kv_range: Any, *args: Any) -> Any:
        if drawn.random() < 0.05:
            press(devices.require(), 3)
        elif drawn.random() < 0.02:
            poison(devices.require())
        return append(kv_range, *args)

    def copied(slots: Any, *args: Any) -> Any:
        nonlocal loads
        loads += 1
        return copies(slots, *args)

    monkeypatch.setattr(KVRange, "append", appended)
    monkeypatch.setattr(kv_slots.KVSlots, "copies", copied)
    monkeypatch.setattr(kv_read_plan.KVReadPlan, "_choose", two_thirds)
    tuned(kv_reads={"again": 2, "look": 8}, prices={"returns": math.inf})
    tokens = 30 if way == "chunked" else 40
    as_stock("llama", way, tokens, {"num_hidden_layers": 4}, interval=None, chaos=chaos)
    assert loads > 10
