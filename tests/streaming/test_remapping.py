"""Weights give their pages to a KV cache that finds no others, and take them back (Oneiros §5), end to end."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import install, runtime
from ballonet.hooks.device import governors

from ..models import build
from ..pool import bytes_that_exist
from ..tuned import Clock, Tuned
from .conftest import BUDGET, LAYERS, PAGE
from .test_streaming import Output, say

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def stock(original: Any) -> Output:
    with install.stock():
        return say(original)


@pytest.fixture(scope="module")
def larger() -> Any:
    """The other model."""
    with install.stock():
        return build("llama", num_hidden_layers=2 * LAYERS)


@pytest.fixture(scope="module")
def stock_of_larger(larger: Any) -> Output:
    with install.stock():
        return say(larger)


@pytest.fixture
def idle(larger: Any) -> Any:
    with install.stock():
        return copy.deepcopy(larger)


@pytest.fixture(autouse=True)
def clock(tuned: Tuned) -> Clock:
    """The governor's, which stands still."""
    clock = Clock()
    tuned(clock=clock)
    governors.of(runtime.require()).link.bandwidth = 1e12  # so that every layer's copy is hidden
    return clock


@contextmanager
def full(but: int) -> Iterator[None]:
    """Within it no more than so many pages are free."""
    device = runtime.require()
    gc.collect()
    device.trim()
    device.reap(wait=True)
    used = sum(count for owner, count in device.snapshot()["pages"].items() if owner != "free")
    filler = device.reserve((BUDGET // PAGE - used - but) * PAGE, "kv", device.group())
    filler.map(0, filler.pieces)
    try:
        yield
    finally:
        filler.close()
        device.reap(wait=True)


IDS = torch.arange(2 * 120).reshape(2, 120) % 190


@pytest.fixture(scope="module")
def long(original: Any) -> torch.Tensor:
    """What stock says to a text that needs more pages than there are."""
    with install.stock(), torch.no_grad():
        logits: torch.Tensor = original(IDS).logits
    return logits


def read_on(model: Any, long: torch.Tensor) -> None:
    with torch.no_grad():
        assert torch.equal(model(IDS, use_cache=True).logits, long)


@pytest.mark.counts
def test_an_idle_model_gives_and_gets_back(
    model: Any, idle: Any, stock: Output, stock_of_larger: Output, long: torch.Tensor, clock: Clock
) -> None:
    with ballonet.manage(model) as active, ballonet.manage(idle) as other:
        say(idle)
        say(model)
        whole = other.report().pages
        clock.now += 5
        with full(but=200):
            say(idle)
            say(model)
            clock.now += 5
            say(model)
            assert other.report().streamed == () == active.report().streamed, "nothing is remapped while pages are free"
            assert other.report().host_pages == 0, "nor prepared"
        moved = ballonet.stats().copied.weights_d2h
        with full(but=72):
            read_on(model, long)
            assert 0 < len(other.report().streamed) < 2 * LAYERS, "never a whole model"
            assert active.report().streamed == ()
            assert bytes_that_exist() <= BUDGET
            gone = sum(other._elastic.arrangement.pages[layer] for layer in other.report().streamed)
            assert ballonet.stats().copied.weights_d2h - moved == gone * PAGE, "once, when they leave"
        clock.now += 5
        assert say(idle).agrees(stock_of_larger)
        for _ in range(3):
            clock.now += 20
            assert say(model).agrees(stock)
            assert say(idle).agrees(stock_of_larger)
        assert other.report().streamed == ()
        assert other.report().pages == whole
