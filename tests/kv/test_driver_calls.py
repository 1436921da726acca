"""Driver calls per token: while a model decodes, KV through slots is mapped once, and not torn down and rebuilt."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

import ballonet
from ballonet.allocator import devices, install
from ballonet.hooks.device import managers
from ballonet.offload.manager import kv_read_plan
from ballonet.offload.policy.kv_pages import Way

from .. import models
from ..caches import installed
from ..tuned import Clock, Tuned

PAGE = 4096
SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "hidden_size": 64}  # four tokens on a page
TOKENS = 40


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tuned: Tuned) -> None:
    """Layers so small stream as large ones do, pages so small are worth a copy of their own, are always short, and do
    not come back."""
    tuned(
        weights={"large": 2**11},
        pages={"short": 1},
        kv_reads={"copy": 0.0},
        prices={"returns": math.inf},
        clock=Clock(),
    )
    monkeypatch.setattr(
        kv_read_plan.KVReadPlan, "_learn", lambda *_: None
    )  # what is decided does not depend on the time


@pytest.fixture
def budget(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("BALLONET_SPILL", "1")  # a prefill may need more for a moment
    with installed(PAGE, budget=request.param * PAGE):
        yield


def prompt(tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 60, (1, tokens), generator=torch.Generator().manual_seed(4))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class Step(NamedTuple):
    """Driver calls of a decode step, and pages that came to the cache, to activations, to the host."""

    maps: int
    unmaps: int
    cache: int
    activations: int
    host: int

    @property
    def grown(self) -> int:
        return self.cache + max(0, self.activations) + self.host


class Calls:
    """What the driver was asked for by decode steps of a model, from the beginning of one to that of the next."""

    def __init__(self, model: Any) -> None:
        self.steps: list[Step] = []
        self._before: Step | None = None
        self.ways: list[Way] = []
        model.register_forward_pre_hook(self._forward, with_kwargs=True)

    def _forward(self, model: Any, args: Any, kwargs: Any) -> None:
        snapshot = devices.require().snapshot()
        calls, pages = snapshot["driver_calls"], snapshot["pages"]
        caches = [cache for _, cache in managers.of(devices.require())._known.clients.paged]
        held = sum(cache.pages for cache in caches)
        host = snapshot["host_pages"] - snapshot["host_free"]
        now = Step(calls["cuMemMap"], calls["cuMemUnmap"], held, pages["activations"], host)
        if self._before is not None and kwargs["input_ids"].shape[1] == 1:
            self.steps.append(Step(*(after - before for after, before in zip(now, self._before, strict=True))))
            self.ways += [cache.streamed.way for cache in caches]
        self._before = now


@pytest.mark.parametrize(("budget", "layers"), [(900, 4), (1100, 7)], indirect=["budget"])
def test_a_token_maps_nothing_while_kv_goes_through_slots(budget: None, layers: int) -> None:
    """But the page that it lies on, the one that this is copied to on the host, and what attention needs more of. Pages
    are short, and the manager is asked before each forward."""
    with install.stock():
        model = models.build("llama", num_hidden_layers=layers, **SHAPE)
        inputs = prompt(800)
        expected = models.generate(model, "greedy", inputs, TOKENS)
    with ballonet.manage(model):
        calls = Calls(model)
        output = models.generate(model, "greedy", inputs, TOKENS, prefill_chunk_size=64)
        assert managers.of(devices.require()).pages.short, "else nobody would look for pages"
        settled = calls.steps[-20:]
        assert {*calls.ways[-20:]} == {Way.STREAMED}
        grown = sum(step.grown + (step.cache > 0) for step in settled)  # for a page of the heap's that KV took
        assert sum(step.maps for step in settled) <= grown + layers  # mapped ahead
        assert sum(step.unmaps for step in settled) <= grown  # the heap's idle pages
        assert sum(step.maps == 0 for step in settled) >= 5  # a page holds four tokens
    assert torch.equal(output.tokens, expected.tokens)


@pytest.mark.parametrize("budget", [6000], indirect=True)
def test_a_token_maps_nothing_where_all_is_resident(budget: None) -> None:
    with install.stock():
        model = models.build("llama", num_hidden_layers=4, **SHAPE)
    with ballonet.manage(model):
        calls = Calls(model)
        models.generate(model, "greedy", prompt(400), TOKENS)
        settled = calls.steps[-20:]
        assert {*calls.ways} == {Way.RESIDENT}
        assert sum(step.maps for step in settled) <= sum(step.grown for step in settled) + 4
        assert [step.unmaps for step in settled] == [0] * len(settled)
