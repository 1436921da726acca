"""The short way of a token: which layers take it, and when an iteration begins nevertheless."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ballonet.allocator._native import Device
from ballonet.hooks.forward.lease import ForwardLease
from ballonet.hooks.kv.grouping import CacheRanges
from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.hooks.kv.range import KVRange
from ballonet.offload.governor.kv_tier import KVTier

from ..test_kv import BATCH, HEADS, K_DIM, V_DIM, tokens
from .pressure import press, started

PAGE = 4096
LAYERS = 4
PER_PAGE = PAGE // (BATCH * HEADS * (K_DIM + V_DIM) * 4)  # tokens


@pytest.fixture
def device() -> Iterator[Device]:
    with started(budget=256 * PAGE, host_budget=256 * PAGE, page_size=PAGE, spill=True) as opened:
        yield opened


class Counted:
    """Iterations that began, and tokens that took the short way, from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.iterations = self.short = 0
        iteration, append_next = KVTier.iteration, KVRange.append_next

        def counted(tier: KVTier, stream: int, rows: int = 1, more: int = 0, forward: int = 0) -> None:
            self.iterations += 1
            iteration(tier, stream, rows, more, forward)

        def followed(kv_range: KVRange, place: int, keys: object, values: object) -> object:
            pair = append_next(kv_range, place, keys, values)  # type: ignore[arg-type]
            self.short += pair is not None
            return pair

        monkeypatch.setattr(KVTier, "iteration", counted)
        monkeypatch.setattr(KVRange, "append_next", followed)

    def taken(self) -> tuple[int, int]:
        found = self.iterations, self.short
        self.iterations = self.short = 0
        return found


@pytest.fixture
def layers(device: Device) -> Iterator[list[ElasticLayer]]:
    """Layers of one cache, each with a range of its own, after a token: its page has room for some more."""
    ranges = CacheRanges(layers=LAYERS, alone=True)
    found = [ElasticLayer(ranges) for _ in range(LAYERS)]
    lease = ForwardLease().open()
    one(found)
    lease.close()
    yield found
    found.clear()


def one(layers: list[ElasticLayer]) -> None:
    for each in layers:
        each.update(*tokens(1, 3))


def test_all_layers_but_the_first_take_the_short_way(
    layers: list[ElasticLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    lease = ForwardLease().open()
    one(layers)
    lease.close()
    assert counted.taken() == (1, LAYERS - 1)


def test_a_layer_that_comes_again_in_the_same_forward_begins_an_iteration(
    layers: list[ElasticLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    lease = ForwardLease().open()
    one(layers)
    one(layers)
    lease.close()
    assert counted.taken() == (2, 2 * (LAYERS - 1))


def test_layers_that_are_called_by_themselves_are_one_iteration(
    layers: list[ElasticLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in a forward of its own: none follows another."""
    counted = Counted(monkeypatch)
    for each in layers:
        lease = ForwardLease().open()
        one([each])
        lease.close()
    assert counted.taken() == (1, 0)


def test_outside_of_forwards_nobody_takes_it(layers: list[ElasticLayer], monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    one(layers)
    assert counted.taken() == (1, 0)


def test_nobody_takes_it_while_a_page_is_away(
    device: Device, layers: list[ElasticLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    for count in (3 * PER_PAGE, 1, 1):  # the last page has room for some
        lease = ForwardLease().open()
        for each in layers:
            each.update(*tokens(count, 3))
        lease.close()
    assert counted.taken() == (3, 2 * (LAYERS - 1))
    hog = device.reserve(device.budget, "weights", device.group())
    hog.map(0, device.available)
    assert press(device, 2) > 0
    lease = ForwardLease().open()
    one(layers)
    lease.close()
    assert counted.taken() == (1, 0)
    hog.close()
