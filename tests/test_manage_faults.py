"""A fault at any driver call of a model's life in the pool: the stock result or a typed error, no page lost, nothing half done."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import runtime
from ballonet.allocator._native import Device

from . import models
from .pool import bytes_that_exist
from .test_manage import PAGE, Portrait, all_in_pool, install, none_in_pool  # noqa: F401  (install is a fixture)

ERRORS = (ballonet.BallonetError, torch.OutOfMemoryError)


def calls(device: Device) -> dict[str, int]:
    counts: dict[str, int] = device.snapshot()["driver_calls"]
    return counts


def scratch(faults: list[tuple[str, int]]) -> None:
    """Opens and closes a device of its own, which arms `faults`: functions and which call of them since the start."""
    Device(
        library=runtime.standin_library(), ordinal=0, page_size=PAGE, budget=4 * PAGE, host_budget=0, faults=faults
    ).close()


class Fault:
    """Makes the nth call of a driver function from now on fail, once."""

    def __init__(self, device: Device) -> None:
        self._device = device
        before = calls(device)
        scratch([])
        self._cost = {name: count - before[name] for name, count in calls(device).items()}

    def arm(self, function: str, nth: int) -> None:
        scratch([(function, calls(self._device)[function] + self._cost[function] + nth)])


def manage(model: Any) -> ballonet.Managed:
    return ballonet.manage(model, chaos=5)


def generate(model: Any) -> torch.Tensor:
    return models.generate(model, "greedy", models.prompts(2, 9), tokens=4)


def count(device: Device, act: Callable[[], Any]) -> tuple[dict[str, int], Any]:
    """How often each driver function is called by `act`, and its result."""
    before = calls(device)
    result = act()
    return {name: number - before[name] for name, number in calls(device).items() if number > before[name]}, result


def settle(device: Device) -> dict[str, int]:
    """Pages by owner once everything that can go has gone."""
    gc.collect()
    device.trim()
    device.reap(wait=True)
    device.trim()
    device.check()
    pages: dict[str, int] = device.snapshot()["pages"]
    return pages


@pytest.mark.parametrize("phase", ["manage", "generate", "release"])
def test_a_fault_at_any_driver_call(install: Callable[[], Device], phase: str) -> None:  # noqa: F811
    expected = generate(models.build("llama"))
    device = install()
    fault = Fault(device)
    model = models.build("llama")
    portrait = Portrait(model)
    # Twice: what is called the first time only is no part of the pattern.
    for _ in range(2):
        managing, managed = count(device, lambda: manage(model))
        generating, _ = count(device, lambda: generate(model))
        releasing, _ = count(device, managed.release)
    places = {"manage": managing, "generate": generating, "release": releasing}[phase]
    assert sum(places.values()) > 3
    before = settle(device)
    fired = 0
    for function, number in places.items():
        for nth in range(1, number + 1):
            at = f"{function}, call {nth} of {number}"
            armed = device.snapshot()["faults"]
            failed = None
            if phase == "manage":
                fault.arm(function, nth)
            try:
                managed = manage(model)
            except ERRORS as error:
                failed = error.with_traceback(None)
                assert none_in_pool(model), at
                assert portrait.is_of(model), at
                managed = manage(model)
            assert all_in_pool(model), at
            if phase == "generate":
                fault.arm(function, nth)
            try:
                assert torch.equal(generate(model), expected), at
            except ERRORS as error:
                failed = error.with_traceback(None)
            assert all_in_pool(model), at
            assert managed._weights.group.leases == 0, at
            assert torch.equal(generate(model), expected), at
            if phase == "release":
                fault.arm(function, nth)
            try:
                managed.release()
            except ERRORS as error:
                failed = error.with_traceback(None)
                assert all_in_pool(model), at
                assert not managed.released, at
                managed.release()
            assert none_in_pool(model), at
            assert portrait.is_of(model), at
            after = settle(device)
            assert after["weights"] == after["kv"] == after["retiring"] == 0, at
            assert after == before, at
            hit = device.snapshot()["faults"] - armed
            fired += hit
            assert hit or failed is None, at
    assert fired >= 0.8 * sum(places.values())
    assert bytes_that_exist() <= (before["activations"] + 2) * PAGE
