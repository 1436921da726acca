"""One device of small pages for models whose layers stream, and a tiny model whose layers do."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import ballonet
from ballonet import testing
from ballonet.allocator import devices, install
from ballonet.allocator._native import Range
from ballonet.offload.policy import plan

from ..models import Output, build, generate, prompts
from ..pool import take_out
from ..tuned import Tuned

LAYERS = 4
INPUTS = prompts(batch=2, longest=9)
BUDGET = 2**22
PAGE = 4096


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    ballonet.install(BUDGET, page_size=PAGE, host_budget=BUDGET, device="cpu")
    yield
    gc.collect()
    devices.require().check()
    take_out()


@pytest.fixture(autouse=True)
def tiny(tuned: Tuned) -> None:
    tuned(weights={"large": 2**11})  # so that tiny layers have ranges


@pytest.fixture(scope="module")
def original() -> Any:
    with install.stock():
        return build("llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def stock(original: Any) -> Output:
    """What it says."""
    with install.stock():
        return say(original)


@pytest.fixture(scope="module")
def larger() -> Any:
    """The other model."""
    with install.stock():
        return build("llama", num_hidden_layers=2 * LAYERS)


def say(model: Any, mode: str = "greedy") -> Output:
    return generate(model, mode, INPUTS)


def streamed(model: Any, m: int, slots: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> ballonet.Managed:
    """Managed with just these many layers in so many slots."""
    monkeypatch.setattr(
        plan, "at_interval", lambda pages, interval: plan.streaming(pages, plan.spread(pages, m), slots)
    )
    return testing.manage(model, interval=1, **options)


def as_stock(original: Any, act: Callable[[Any], object] = lambda model: None, ask: Callable[[Any], Any] = say) -> Any:
    """What a copy says that `act` has changed, all of it in torch's own memory."""
    with install.stock():
        changed = copy.deepcopy(original)
        act(changed)
        return ask(changed)


def fly(model: Any, managed: ballonet.Managed) -> None:
    """Slots hold what they may."""
    assert streams(managed, lambda: say(model))


@contextmanager
def taken(pages: int, place: str = "device") -> Iterator[None]:
    """Within it somebody else has so many pages of the device, or of the host."""
    device = devices.require()
    filler = device.reserve(pages * PAGE, "kv", device.group())
    {"device": filler.map, "host": filler.map_host}[place](0, pages)
    try:
        yield
    finally:
        filler.close()
        device.reap(wait=True)


@contextmanager
def full(but: int) -> Iterator[None]:
    """Within it no more than so many pages are free."""
    device = devices.require()
    gc.collect()
    device.trim()
    device.reap(wait=True)
    used = sum(count for owner, count in device.snapshot()["pages"].items() if owner != "free")
    with taken(BUDGET // PAGE - used - but):
        yield


def streams(managed: ballonet.Managed, act: Callable[[], object]) -> bool:
    """Does this have layers read from slots?"""
    ring = managed._weights.ring
    enter, entered = ring.enter, list[Range | None]()

    def counted(layer: int, stream: int) -> Range | None:
        entered.append(enter(layer, stream))
        return entered[-1]

    ring.enter = counted  # type: ignore[method-assign]
    try:
        act()
    finally:
        del ring.enter
    return any(range_ is not None for range_ in entered)


@pytest.fixture
def model(original: Any) -> Any:
    with install.stock():
        return copy.deepcopy(original)
