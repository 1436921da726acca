"""A fault at any driver call of a model's life in the pool: the stock result or a typed error, and no page lost.

Each phase runs in a process of its own: faults that were armed and not met must not fire in another test.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import ballonet
from ballonet import testing
from ballonet.allocator import devices
from ballonet.allocator._native import Device

from . import models
from .faulting import at_each_call
from .pool import bytes_that_exist
from .portrait import Portrait, all_in_pool, none_in_pool
from .programs import run

PAGE = 16 * 2**10


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
    lives: list[ballonet.Managed] = []
    settled: list[dict[str, int]] = []

    def manage() -> None:
        lives.append(testing.manage(model, chaos=5))

    def unharmed() -> bool:
        return all_in_pool(model) if lives else none_in_pool(model) and portrait.is_of(model)

    @contextmanager
    def life() -> Iterator[None]:
        if phase != "manage":
            manage()
        yield
        if not lives:
            manage()
        assert all_in_pool(model)
        assert torch.equal(generate(model), expected)
        managed = lives.pop()
        assert managed._weights.group.leases == 0
        managed.release()
        assert managed.report().released
        assert unharmed()
        settled.append(settle(device))
        before, after = settled[0], settled[-1]
        assert after["weights"] == after["kv"] == after["pending_free"] == 0, after
        assert after["activations"] <= before["activations"] + 1, (before, after)
        assert bytes_that_exist() <= sum(after.values()) * PAGE

    tokens: list[torch.Tensor] = []
    acts: dict[str, Callable[[], object]] = {
        "manage": manage,
        "generate": lambda: tokens.append(generate(model)),
        "release": lambda: lives[0].release() or lives.pop(),
    }
    gc.collect()
    gc.freeze()  # what is there now need not be looked at after every fault
    failures = 0
    for _, done in at_each_call(life, lambda _: acts[phase](), most=2, least=20):
        failures += not done
        assert unharmed(), "half done"
        assert not tokens or torch.equal(tokens.pop(), expected)
    assert failures or phase == "release"


def generate(model: Any) -> torch.Tensor:
    return models.generate(model, "greedy", models.prompts(2, 9), tokens=3).tokens


def settle(device: Device) -> dict[str, int]:
    """Pages by owner once everything that can go has gone. Threads that end may let go of some meanwhile."""
    gc.collect()
    end, rounds = time.monotonic() + 60, 0
    while True:
        device.trim()
        device.reap(wait=True)
        device.check()
        rounds += 1
        pages: dict[str, int] = device.snapshot()["pages"]
        if rounds > 1 and (not pages["pending_free"] or time.monotonic() > end):  # an unmap that failed is tried again
            return pages
