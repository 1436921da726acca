"""Slots that layers of a cache take turns in, while somebody needs their pages in the middle of an operator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ballonet.allocator._native import Device
from ballonet.allocator.errors import PoolExhausted
from ballonet.hooks.forward.lease import ForwardLease
from ballonet.offload.manager import kv_read_plan

from ..threads import elsewhere
from ..tuned import Tuned
from .pressure import poison, two_thirds
from .test_stream import LAYERS, PAGE, Layers, device, fly, room, small, streamed  # noqa: F401 (fixtures)

pytestmark = [
    pytest.mark.usefixtures("small"),
    pytest.mark.parametrize("device", [{"spill": False}], indirect=True, ids=[""]),  # nothing else helps
]


def nothing_away(layers: Layers) -> int:
    """Full pages that the cache has on the device, beside its slots."""
    return sum(twin.held - twin.away for twin in (kv_range.pages._extent for kv_range in layers.kv_ranges))


def in_slots(layers: Layers) -> int:
    return layers.way().slots * layers.way().slot_pages


@pytest.fixture
def blocks(device: Device) -> Iterator[list[int]]:  # noqa: F811
    """What operators have allocated."""
    addresses: list[int] = []
    yield addresses
    for address in addresses:
        device.deallocate(address)


def test_an_operator_gets_the_pages_of_buffers_after_all_others_of_the_cache(
    streamed: Layers,  # noqa: F811
    device: Device,  # noqa: F811
    blocks: list[int],
) -> None:
    """Where nobody could take a slot, an activation died while two of them held pages."""
    streamed.update()
    others = device.available + nothing_away(streamed) + 1  # one that no layer reads
    slots = in_slots(streamed)
    assert slots > 4
    blocks.append(device.allocate((others - 1) * PAGE))
    assert streamed.flying == LAYERS
    assert sum(slot.range.backed for slot in streamed.tier.client.way.kv_slots._slots) >= slots - 2
    kv = device.snapshot()["pages"]["kv"]
    blocks.append(device.allocate(4 * PAGE))
    assert device.snapshot()["pages"]["kv"] <= kv - 4
    streamed.update()
    device.check()
    rest = sum(slot.range.backed for slot in streamed.tier.client.way.kv_slots._slots)
    if rest:
        blocks.append(device.allocate((device.available + rest) * PAGE))
    for _ in range(3):
        streamed.update()  # in place
    assert streamed.flying == 0
    device.check()
    streamed.check()


def test_pages_another_thread_needs_are_given_between_two_calls(streamed: Layers, device: Device) -> None:  # noqa: F811
    lease = ForwardLease().open()
    streamed.update()
    wanted = (device.available + nothing_away(streamed) + 3) * PAGE
    with pytest.raises(PoolExhausted):
        elsewhere(lambda: device.allocate(wanted))
    assert device.page_request > 0
    assert device.yield_pages() >= 3
    lease.close()
    device.deallocate(elsewhere(lambda: device.allocate(wanted)))
    for _ in range(3):
        streamed.update()
    streamed.check()
    device.check()


@pytest.mark.parametrize("seed", range(2))
def test_tokens_are_those_of_stock_though_operators_take_slots(
    device: Device,  # noqa: F811
    room: Any,  # noqa: F811
    blocks: list[int],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    tuned: Tuned,
) -> None:
    tuned(kv_reads={"again": 1, "look": 4})
    monkeypatch.setattr(kv_read_plan.KVReadPlan, "_choose", two_thirds)
    draw, taken = random.Random(seed), 0
    layers = Layers(100)
    fly(layers)

    def between() -> None:
        nonlocal taken
        slots = layers.tier.client.way.kv_slots
        before = sum(slot.range.backed for slot in slots._slots)
        if blocks and draw.random() < 0.4:
            device.deallocate(blocks.pop(draw.randrange(len(blocks))))
            device.trim()
        elif draw.random() < 0.5:
            try:
                blocks.append(device.allocate(draw.randint(1, 12) * PAGE))
            except PoolExhausted:
                poison(device)
        taken += before - sum(slot.range.backed for slot in slots._slots)
        device.check()

    def append(index: int, elastic: Any, stock: Any, new: Any) -> None:
        try:
            ours = elastic.update(*new)
        except torch.OutOfMemoryError:  # operators have it all
            while blocks:
                device.deallocate(blocks.pop())
            ours = elastic.update(*new)
        theirs = stock.update(*new)
        between()
        assert all(map(torch.equal, ours, theirs)), index

    layers.append = append
    steps = 0
    while steps < 60 or (taken < 20 and steps < 1000):
        steps += 1
        layers.update(draw.choice((1, 1, 1, 9)))
        if layers.pairs[0][1].get_seq_length() > 220:
            layers.both(lambda layer: layer.crop(-100))
        if draw.random() < 0.1:
            layers.check()
    assert taken >= 20
    layers.check()
