"""Real models whose KV is taken at every append, copied behind and brought back: they say what stock says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import install, runtime

from .. import models
from ..caches import installed
from .pressure import Taker, around_appends


@pytest.fixture(scope="module", autouse=True, params=[4096], ids=["4KiB"])
def page(request: pytest.FixtureRequest) -> Iterator[int]:
    with installed(request.param, budget=2**22) as size:
        yield size


@pytest.fixture
def taker(monkeypatch: pytest.MonkeyPatch) -> Taker:
    """Acts around each append."""
    taker = Taker(runtime.require(), 1)
    around_appends(monkeypatch, lambda kv_range: taker.act([kv_range]))
    return taker


def answer(model: Any, name: str, way: str) -> models.Output:
    if way == "assisted":
        return models.generate(model, "greedy", models.questions(name, 1, 150), 60, prompt_lookup_num_tokens=3)
    if way == "continued":
        return models.ask(model, name, way, 60)
    if name == "llama":
        return models.generate(model, way, models.prompts(3, 120), 60)
    return models.generate(model, way, models.questions(name, 3, 120), 60)


CASES = [
    *[("llama", way) for way in ("beam", "assisted", "continued")],
    ("qwen3_next", "greedy"),
    ("falcon_h1", "beam"),
    ("t5gemma", "greedy"),
]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_tokens_are_those_of_stock(page: int, name: str, way: str, taker: Taker) -> None:
    with install.stock():
        model = models.build(name)
        expected = answer(model, name, way)
    with ballonet.manage(model):
        found = answer(model, name, way)
    assert torch.equal(found.tokens, expected.tokens)
    assert found.agrees(expected)
    assert page == 65536 or min(taker.done.values()) > 0, taker.done
    runtime.require().check()
