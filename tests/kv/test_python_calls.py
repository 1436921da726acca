"""Python's work per token and per chunk of a prefill, in calls: what a layer costs, and that it does not grow with the
pages of KV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ballonet.allocator._native import Device
from ballonet.hooks.forward.lease import ForwardLease
from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.hooks.kv.ranges import CacheRanges
from ballonet.offload.manager import kv_read_plan
from ballonet.offload.policy.kv_pages import Way
from ballonet.offload.policy.tuning import DEFAULT

from ..counting import each_call
from ..test_kv import BATCH, HEADS, K_DIM, V_DIM, tokens
from ..tuned import Tuned
from .pressure import hog, kv_ranges, press, started, tiers, two_thirds

PAGE = 4096
LAYERS = 8
PER_PAGE = PAGE // (BATCH * HEADS * (K_DIM + V_DIM) * 4)


@pytest.fixture(autouse=True)
def pinned(monkeypatch: pytest.MonkeyPatch, tuned: Tuned) -> None:
    """What is decided does not depend on the time."""
    tuned(kv_reads={"copy": 0.0})
    monkeypatch.setattr(kv_read_plan.KVReadPlan, "_learn", lambda *_: None)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Python's calls within it, as ["calls"] of what it hands over."""
    counts = Counter[str]()
    with each_call(lambda _: counts.update(calls=1)):
        yield counts


class Cache:
    """A cache with so many pages in all layers, most of them full."""

    def __init__(self, pages: int) -> None:
        self.ranges = CacheRanges(layers=LAYERS, expected=pages * PER_PAGE, alone=True)
        self.layers = [ElasticLayer(self.ranges) for _ in range(LAYERS)]
        self.seed = 0
        self.forward(pages // LAYERS * PER_PAGE)

    def forward(self, count: int) -> None:
        """An iteration, in a forward of its own."""
        lease = ForwardLease().open()
        new = tokens(count, 3)
        for layer in self.layers:
            layer.update(*new)
        lease.close()

    @property
    def tier(self) -> Any:
        (tier,) = tiers(kv_ranges(self.layers))
        return tier


@contextmanager
def device_of(pages: int) -> Iterator[Device]:
    with started(budget=pages * PAGE, host_budget=20000 * PAGE, page_size=PAGE, spill=True) as device:
        yield device


def decoding(pages: int, way: Way, monkeypatch: pytest.MonkeyPatch, tuned: Tuned) -> int:
    """Calls of a decode step that fills no page, with so many pages of KV."""
    monkeypatch.setattr(kv_read_plan.KVReadPlan, "_choose", two_thirds)
    tuned(kv_reads={"look": 10**9})
    with device_of(2 * pages) as device:
        return _decoded(device, pages, way)


def _decoded(device: Device, pages: int, way: Way) -> int:
    cache = Cache(pages)
    other = None if way is Way.RESIDENT else hog(device, pages)
    if other is not None:
        press(device, pages // 2)
    for _ in range(3 * DEFAULT.kv_reads.again):
        cache.forward(1)
    steps = []
    for _ in range(6):
        with counted() as counts:
            cache.forward(1)
        steps.append(counts["calls"])
    assert cache.tier.client.streamed.way is way
    if other is not None:
        other.close()
    return min(steps)


@pytest.mark.parametrize("way", [Way.RESIDENT, Way.STREAMED])
def test_a_token_costs_the_same_with_eight_times_as_many_pages(
    way: Way, monkeypatch: pytest.MonkeyPatch, tuned: Tuned
) -> None:
    assert decoding(8000, way, monkeypatch, tuned) <= 1.02 * decoding(1000, way, monkeypatch, tuned)


def prefilling(pages: int) -> tuple[int, int]:
    """Calls and reclaim lists before a layer of a prefill under pressure, with so many pages of KV, half of them
    away."""
    with device_of(pages + 200) as device:
        return _prefilling(device, pages)


def _prefilling(device: Device, pages: int) -> tuple[int, int]:
    cache, tier = Cache(pages), None
    press(device, device.available + pages // 2)
    other = hog(device, device.available - 4)
    tier = cache.tier
    tier.extents.look()
    assert tier.client.displaced >= pages // 3
    tier.prefilling(8)  # an eighth of all pages begins to be copied behind, which is once
    counts = []
    for _ in range(6):  # what comes of those copies is found in one or the other
        before = tier.manager._known.list.published
        with counted() as calls:
            tier.prefilling(8)
        counts.append((calls["calls"], tier.manager._known.list.published - before))
    other.close()
    return min(counts)


def test_a_layer_of_a_prefill_under_pressure_costs_the_same_with_eight_times_as_many_pages() -> None:
    """In how many runs pages lie that were taken, and whether one list is published or two, depends on how far a copy
    was: the better one of two counts, and eight times the pages are far from twice as much."""
    few, many = (min(prefilling(pages), prefilling(pages)) for pages in (1000, 8000))
    assert many[0] <= 2 * few[0]
    assert min(few[1], many[1]) >= 1
