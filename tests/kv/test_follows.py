"""What layers behind the first are spared: the beginning of an iteration, and calls of the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from ballonet.allocator._native import Device
from ballonet.hooks.forward.lease import ForwardLease
from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.hooks.kv.ranges import CacheRanges, KVRange
from ballonet.offload.manager.kv_tier import KVTier

from ..test_kv import BATCH, HEADS, K_DIM, V_DIM, kv_pages, tokens
from .pressure import hog, press, started

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
        counts = self.iterations, self.short
        self.iterations = self.short = 0
        return counts


@pytest.fixture
def layers(device: Device) -> Iterator[list[ElasticLayer]]:
    """Layers of one cache, each with a range of its own, after a token: its page has room for some more."""
    ranges = CacheRanges(layers=LAYERS, alone=True)
    made = [ElasticLayer(ranges) for _ in range(LAYERS)]
    forward(made)
    yield made
    made.clear()


def one(layers: list[ElasticLayer], count: int = 1) -> None:
    for layer in layers:
        layer.update(*tokens(count, 3))


def forward(layers: list[ElasticLayer], count: int = 1) -> None:
    lease = ForwardLease().open()
    one(layers, count)
    lease.close()


# What is called -> iterations that begin, and tokens that take the short way
CALLED: dict[str, tuple[Callable[[list[ElasticLayer]], object], tuple[int, int]]] = {
    "a forward": (forward, (1, LAYERS - 1)),
    "each layer again in the same forward": (lambda layers: forward(layers * 2), (2, 2 * (LAYERS - 1))),
    "each in a forward of its own": (lambda layers: [forward([layer]) for layer in layers], (1, 0)),
    "outside of forwards": (one, (1, 0)),
}


@pytest.mark.parametrize(
    ("k_dim", "v_dim", "dtype"),
    [
        pytest.param(4, 4, torch.float32, id="keys and values one behind the other"),
        pytest.param(4, 6, torch.float32, id="of different sizes"),
        pytest.param(3, 3, torch.bfloat16, id="with padding between them"),
    ],
)
def test_the_short_way_writes_what_stock_layers_hold(
    device: Device, monkeypatch: pytest.MonkeyPatch, k_dim: int, v_dim: int, dtype: torch.dtype
) -> None:
    counted = Counted(monkeypatch)
    ranges, draw = CacheRanges(layers=LAYERS, alone=True), torch.Generator().manual_seed(0)
    ours, stock = [ElasticLayer(ranges) for _ in range(LAYERS)], [DynamicLayer() for _ in range(LAYERS)]
    for _ in range(4):
        lease = ForwardLease().open()
        for mine, theirs in zip(ours, stock, strict=True):
            sizes = (1, 3, 1, k_dim), (1, 3, 1, v_dim)
            new = [torch.randn(size, generator=draw).to(dtype) for size in sizes]
            for states, expected in zip(mine.update(*new), theirs.update(*new), strict=True):
                assert torch.equal(states, expected)
        lease.close()
    assert counted.short >= 2 * (LAYERS - 1)


@pytest.mark.parametrize("what", CALLED)
def test_all_layers_but_the_first_take_the_short_way(
    layers: list[ElasticLayer], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    counted = Counted(monkeypatch)
    act, expected = CALLED[what]
    act(layers)
    assert counted.taken() == expected


def test_short_way_is_not_taken_while_a_page_is_away(
    device: Device, layers: list[ElasticLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    for count in (3 * PER_PAGE, 1, 1):  # the last page has room for some
        forward(layers, count)
    assert counted.taken() == (3, 2 * (LAYERS - 1))
    other = hog(device, device.available)
    assert press(device, 2) > 0
    forward(layers)
    assert counted.taken() == (1, 0)
    other.close()


# Pages that are mapped before a layer asks (eLLM §5.1)


@pytest.mark.parametrize("missing", [0, 1])  # layers that were announced and do not come
def test_the_prefill_of_all_layers_but_the_first_calls_no_driver(device: Device, missing: int) -> None:
    ranges = CacheRanges(layers=LAYERS, alone=True)
    cache = [ElasticLayer(ranges) for _ in range(LAYERS - missing)]
    pages = 3
    for chunk in range(2):
        for n, layer in enumerate(cache):
            device.reap(wait=True)  # the mapper's thread has done what it can
            before = device.driver_ns()
            layer.update(*tokens(pages * PER_PAGE, LAYERS * chunk + n))
            assert n == 0 or device.driver_ns() == before
    for n, layer in enumerate(cache):
        parts = [tokens(pages * PER_PAGE, LAYERS * chunk + n) for chunk in range(2)]
        assert torch.equal(layer.keys, torch.cat([keys for keys, _ in parts], dim=2))
        assert torch.equal(layer.values, torch.cat([values for _, values in parts], dim=2))
    assert device.snapshot()["ahead"] == missing * pages
    cache.clear()
    del layer
    shared = CacheRanges(layers=LAYERS, expected=2)
    for seed in range(LAYERS):
        cache.append(ElasticLayer(shared))
        cache[-1].update(*tokens(2, seed))
    assert (device.snapshot()["ahead"], kv_pages(device)) == (0, 1), "layers that share a range announce nothing"
