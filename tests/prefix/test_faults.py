"""Every call of the driver in a turn fails once: the turn fails as it says, or is right, and so are those after it.

In a process of its own: faults that were armed and not met must not fire in another test.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import runtime
from ballonet.hooks.kv import room
from ballonet.offload.decide import layout

from ..test_manage_faults import ERRORS, arm, calls, count
from .conversations import sides, words


def test_a_fault_at_any_driver_call() -> None:
    code = "from tests.prefix.test_faults import run; run()"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def run() -> None:
    torch.set_num_threads(1)
    layout.LARGE = 2**11  # type: ignore[misc]
    room.PATIENCE = 0.1  # type: ignore[misc]
    ballonet.install(budget=2**23, page_size=4096, device="cpu")
    device = runtime.require()
    generator = torch.Generator().manual_seed(1)
    with pytest.MonkeyPatch.context() as patch, sides(patch) as both:
        ids = both.ask(words(generator, 100))
        ways: dict[str, Callable[[], torch.Tensor]] = {
            "goes on": lambda: torch.cat([ids, words(generator, 40)], 1),
            "branches": lambda: torch.cat([ids[:, :70], words(generator, 40)], 1),
        }
        for name, way in ways.items():
            turn: Callable[[], Any] = lambda way=way: both.ask(way())  # noqa: E731
            for _ in range(2):
                count(device, turn)
            numbers, _ = count(device, turn)
            places = [(function, nth) for function, number in numbers.items() for nth in {1 + number // 2}]
            assert len(places) > 5, places
            cost = count(device, lambda: arm([]))[0]
            failures, fired = 0, device.snapshot()["faults"]
            for function, nth in places:
                print(name, function, nth, flush=True)
                arm([(function, calls(device)[function] + cost.get(function, 0) + nth)])
                for _ in range(4):  # a fault that was armed earlier and not met may fire now
                    try:
                        turn()
                        break
                    except ERRORS:
                        failures += 1
                        gc.collect()
                        both.check()
                else:
                    raise AssertionError("it fails again and again")
                both.check()
                assert not any(each.readers or each.out for each in both.store._shelf.at_rest)
            assert device.snapshot()["faults"] > fired
            print(name, failures, len(places))
        assert both.store.counts.moves + both.store.counts.copies > 10
    gc.collect()
    device.reap(wait=True)
    device.check()
    assert device.snapshot()["pages"]["kv"] == 0
