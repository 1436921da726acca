"""Calls of the driver in a turn fail once: the turn fails as it says, or is right, and so are those after it.

In a process of its own, as what has failed must not matter to another test. With BALLONET_SOAK, which takes some ten
minutes, each call fails; else of each function the one in the middle.
"""

from __future__ import annotations

import gc
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import devices
from ballonet.allocator._native import Device
from ballonet.hooks.device import managers
from ballonet.hooks.kv.ranges import KVRange
from ballonet.offload.manager import kv_read_plan
from ballonet.offload.policy.reclaim_order import PageSource
from ballonet.offload.residency.kv_slots import KVSlots

from .. import programs
from ..faulting import Begin, at_each_call
from ..kv.pressure import around_appends, two_thirds
from ..tuned import tuning
from .conversations import Sides, sides, words


def test_a_fault_at_any_driver_call() -> None:
    programs.run("from tests.prefix.test_faults import run; run()")


def run() -> None:
    torch.set_num_threads(1)
    gc.freeze()
    ballonet.install(budget=2**23, page_size=4096, host_budget=2**22, device="cpu")
    device = devices.require()
    with (
        tuning(weights={"large": 2**11}, waiting={"room": 0.1}, kv_reads={"again": 2, "look": 8}),
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
        sides(prefix_dir=folder) as both,
    ):
        for name, begin, turn in ways(device, both, patch):
            print(name)
            for _, done in at_each_call(begin, lambda _: turn(), most=1, least=2):  # noqa: B023
                gc.collect()
                both.store.get_num_new_matched_tokens(
                    [1]
                )  # an index whose change was broken off is mended by who looks
                both.check()
                if not done:
                    turn()
                    both.check()
        counts = both.store.counts
        print(counts)
        assert min(counts.moves, counts.copies, counts.evicted, counts.on_host, counts.on_disk) > 10
    gc.collect()
    device.reap(wait=True)
    device.check()
    assert device.snapshot()["pages"]["kv"] == 0


Act = Callable[[], object]


def ways(device: Device, both: Sides, patch: pytest.MonkeyPatch) -> Iterator[tuple[str, Begin[object], Act]]:
    """Name, what is done before a turn, and the turn, each in a conversation of its own."""
    generator = torch.Generator().manual_seed(1)
    said: list[torch.Tensor] = []
    loads: Counter[str] = Counter()
    copies = KVSlots.copies

    def begun() -> None:
        """Always the same, as then the calls of a turn are."""
        both.store.clear()
        both.known.clear()
        loads["appended"] = 0
        said.append(both.ask(words(generator, 100)))

    def ask(ids: torch.Tensor, new: int = 3) -> torch.Tensor:
        ids = torch.cat([ids, words(generator, 40)], 1)
        return both.ask(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new)

    def goes_on(new: int = 3) -> None:
        said[-1] = ask(said[-1], new)

    def branches() -> None:
        ask(said[-1][:, :70])

    def away() -> None:
        begun()
        for sequence in both.store.contents.index.idle:
            for tier in sequence._tiers():
                tier.client.write_behind(9)
        for level in (PageSource.PREFIX, PageSource.IDLE_KV):
            managers.of(device).sources.reclaim(level, 999)

    def forgotten() -> None:
        begun()
        both.store.flush(60)
        both.store.clear()

    def over_the_limit() -> None:
        try:
            both.store.limit = 8 * 4096
            goes_on()
        finally:
            both.store.contents.limit = None  # as a fault must not strike here

    def saves() -> None:
        goes_on()
        both.store.flush(60)

    def copied(slots: Any, *args: Any) -> Any:
        loads["slots"] += 1
        return copies(slots, *args)

    def appended(_: KVRange) -> None:
        loads["appended"] += 1
        if loads["appended"] % 7 == 0:
            managers.of(device).sources.reclaim(PageSource.RUNNING_KV, 6)

    def streams() -> None:
        with patch.context() as here:
            here.setattr(KVSlots, "copies", copied)
            around_appends(here, appended)
            here.setattr(kv_read_plan.KVReadPlan, "_choose", two_thirds)
            before = loads["slots"]
            goes_on(6)
            loads["turns"] += 1
            loads["through slots"] += loads["slots"] > before

    scenes = {
        "goes on": (begun, goes_on),
        "branches": (begun, branches),
        "from the host": (away, goes_on),
        "copies from the host": (away, branches),
        "from files": (forgotten, goes_on),
        "to files": (begun, saves),
        "evicts": (begun, over_the_limit),
        "through buffers": (begun, streams),
    }
    for name, (before, turn) in scenes.items():
        yield name, lambda: nullcontext((before(), device.trim())), turn  # noqa: B023
    # After faults layers may be shy of buffers for a while.
    assert loads["through slots"] > loads["turns"] // 2, loads
