"""The layers of a cache that is new find their pages mapped, all but the first (eLLM §5.1)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ballonet.allocator import runtime
from ballonet.allocator._native import Device
from ballonet.hooks.kv.grouping import CacheRanges
from ballonet.hooks.kv.layer import ElasticLayer

from ..caches import installed, kv_pages

PAGE = 4096
TOKENS = 40  # of one layer: five pages
LAYERS = 6


@pytest.fixture
def device() -> Iterator[Device]:
    with installed(PAGE):
        yield runtime.require()


def some(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(1, 4, tokens, 16, generator=generator), torch.rand(1, 4, tokens, 16, generator=generator)


def updated_without_driver(device: Device, layer: ElasticLayer, tokens: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Once the mapper's thread has done what it can."""
    device.reap(wait=True)
    before = device.driver_ns()
    layer.update(*tokens)
    assert device.driver_ns() == before


@pytest.mark.parametrize("layers", [LAYERS, LAYERS - 1])  # as many as were announced, and fewer
def test_the_prefill_of_all_layers_but_the_first_calls_no_driver(device: Device, layers: int) -> None:
    ranges = CacheRanges(layers=LAYERS, alone=True)
    cache = [ElasticLayer(ranges) for _ in range(layers)]
    prompt = [some(TOKENS, seed) for seed in range(layers)]
    cache[0].update(*prompt[0])
    for layer, tokens in zip(cache[1:], prompt[1:], strict=True):
        updated_without_driver(device, layer, tokens)
    chunk = [some(TOKENS, LAYERS + seed) for seed in range(layers)]
    cache[0].update(*chunk[0])
    for layer, tokens in zip(cache[1:], chunk[1:], strict=True):
        updated_without_driver(device, layer, tokens)
    for layer, one, other in zip(cache, prompt, chunk, strict=True):
        assert torch.equal(layer.keys, torch.cat((one[0], other[0]), 2))
        assert torch.equal(layer.values, torch.cat((one[1], other[1]), 2))
    assert kv_pages(device) == layers * 10
    assert device.snapshot()["ahead"] == (LAYERS - layers) * 5


def test_layers_that_share_a_range_announce_nothing(device: Device) -> None:
    ranges = CacheRanges(layers=LAYERS, expected=2)
    cache = [ElasticLayer(ranges) for _ in range(LAYERS)]
    for seed, layer in enumerate(cache):
        layer.update(*some(2, seed))
        device.reap(wait=True)
    found = device.snapshot()
    assert (found["ahead"], found["kept"], found["pages"]["free"], kv_pages(device)) == (0, 0, 0, 2)
