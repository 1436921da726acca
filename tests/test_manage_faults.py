"""A fault at any driver call of a model's life in the pool: the stock result or a typed error, and no page lost.

Each phase runs in a process of its own: faults that were armed and not met must not fire in another test.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ballonet
from ballonet import testing
from ballonet.allocator import devices
from ballonet.allocator._native import Device

from . import models
from .core import arm, calls
from .pool import bytes_that_exist
from .portrait import Portrait, all_in_pool, none_in_pool
from .programs import run

PAGE = 16 * 2**10
ERRORS = (ballonet.BallonetError, torch.OutOfMemoryError)
FEW = 2  # calls of one function that fail, of those that are called hundreds of times


@pytest.mark.parametrize("phase", ["manage", "generate", "release"])
def test_a_fault_at_any_driver_call(phase: str) -> None:
    run(f"from tests.test_manage_faults import live; live({phase!r})")


def live(phase: str) -> None:
    """In a process of its own: lives of a model, one for each fault."""
    expected = generate(models.build("llama"))
    ballonet.install(budget=2**25, page_size=PAGE, device="cpu")
    device = devices.require()
    model = models.build("llama")
    portrait = Portrait(model)
    for _ in range(2):  # what is called the first time only is no part of the pattern
        managing, managed = count(lambda: testing.manage(model, chaos=5))
        generating, _ = count(lambda: generate(model))
        releasing, _ = count(managed.release)
    numbers = {"manage": managing, "generate": generating, "release": releasing}[phase]
    places = [(name, nth) for name, number in numbers.items() for nth in some(number)]
    assert len(places) > 20, places
    before = settle(device)
    fired = device.snapshot()["faults"]
    gc.collect()
    gc.freeze()  # what is there now need not be looked at after every fault
    failures = {"manage": 0, "generate": 0, "release": 0}

    def attempt(what: str, act: Callable[[], Any], unharmed: Callable[[], bool]) -> Any:
        """Runs `act`, with the fault armed if this is its phase; again if it fails, which must leave all `unharmed`."""
        if what == phase:
            name, nth = place
            arm(name, nth)
        for _ in range(3):  # a fault that was armed earlier and not met may fire now
            try:
                return act()
            except ERRORS:
                failures[what] += 1
                assert unharmed(), "half done"
        raise AssertionError("it fails again and again")

    for place in places:
        print(phase, place, flush=True)
        untouched = lambda: none_in_pool(model) and portrait.is_of(model)  # noqa: E731
        managed = attempt("manage", lambda: testing.manage(model, chaos=5), untouched)
        assert all_in_pool(model)
        tokens = attempt("generate", lambda: generate(model), lambda: all_in_pool(model))
        assert managed._weights.group.leases == 0
        assert torch.equal(tokens, expected)
        assert all_in_pool(model)
        del tokens
        attempt("release", managed.release, lambda: all_in_pool(model))
        assert managed.report().released
        assert none_in_pool(model)
        assert portrait.is_of(model)
        after = settle(device)
        assert after["weights"] == after["kv"] == after["retiring"] == 0, after
        assert after["activations"] <= before["activations"] + 1, (before, after)
        assert bytes_that_exist() <= sum(after.values()) * PAGE
    assert device.snapshot()["faults"] - fired >= 0.8 * len(places)
    assert failures[phase] or phase == "release", failures


def some(number: int) -> list[int]:
    """Which of `number` calls fail: the first, the last, and those that part the rest evenly."""
    return sorted({1 + (number - 1) * part // FEW for part in range(FEW + 1)})


def generate(model: Any) -> torch.Tensor:
    return models.generate(model, "greedy", models.prompts(2, 9), tokens=3).tokens


def count(act: Callable[[], Any]) -> tuple[dict[str, int], Any]:
    """How often each driver function is called by `act`, and its result."""
    before = calls()
    result = act()
    return {name: number - before[name] for name, number in calls().items() if number > before[name]}, result


def settle(device: Device) -> dict[str, int]:
    """Pages by owner once everything that can go has gone."""
    gc.collect()
    for _ in range(2):  # an unmap that failed is tried again
        device.trim()
        device.reap(wait=True)
    device.check()
    pages: dict[str, int] = device.snapshot()["pages"]
    return pages
