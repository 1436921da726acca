"""Layers that are not alike, experts beside dense ones or attention beside recurrent states, stream by their sizes: the
tokens of stock, in slots as large as the largest layer that uses them."""

from __future__ import annotations

from typing import Any

import pytest

import ballonet
from ballonet.allocator import install
from ballonet.offload.policy.plan import spread

from ..models import Output, ask, build
from ..tuned import Tuned
from .conftest import streamed

pytestmark = pytest.mark.chaos


MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_hidden_layers": 5, "first_k_dense_replace": 2},  # dense layers before those with experts
    "jamba": {"num_hidden_layers": 5, "expert_layer_period": 3},  # attention or a state, with experts or without
    "qwen3_next": {},  # attention or a state, all with experts
}
WAYS = ("padded", "beam")


@pytest.fixture(autouse=True)
def small(tuned: Tuned, tiny: None) -> None:
    tuned(weights={"large": 2**10})  # bytes: less than a matrix of these


@pytest.mark.parametrize("name", MODELS)
def test_what_streams_is_chosen_by_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with install.stock():
        model = build(name, **MODELS[name])
        expected: dict[str, Output] = {way: ask(model, name, way) for way in WAYS}
    with ballonet.manage(model, interval=None) as managed:
        pages, resident = managed._elastic.plan.pages, managed.report().pages
    assert name == "qwen3_next" or 2 * max(pages) > 3 * min(pages), "they are alike"
    moved = ballonet.stats().copied.weights_d2h
    for count, slots in ((2, 2), (len(pages), 1), (len(pages), 2)):
        chosen = spread(pages, count)
        largest = [max(pages[layer] for layer in chosen[slot::slots]) for slot in range(slots)]
        with streamed(model, count, slots, monkeypatch) as managed:
            for way in WAYS:
                assert ask(model, name, way).agrees(expected[way]), (count, slots, way)
            assert managed.report().streamed == chosen
            assert all(managed._weights.ring.slot(layer) for layer in chosen), "each has a slot that it fits in"
            assert managed.report().pages == resident - sum(pages[layer] for layer in chosen) + sum(largest)
    assert ballonet.stats().copied.weights_d2h == moved
