"""What is kept when pages are short: it goes to the host, comes back when it is used, and is given up before anyone is
told that memory is out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import ballonet
from ballonet.allocator import devices
from ballonet.allocator._native import Device
from ballonet.hooks.device import managers

from ..models import build
from ..pool import tiny_layers
from ..tuned import Tuned
from .conversations import sides, words

PAGE = 4096


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch, tuned: Tuned) -> Iterator[Device]:
    """With 512 pages, and 64 of the host."""
    monkeypatch.setenv("BALLONET_HOST_BUDGET", str(64 * PAGE))
    with tiny_layers(tuned, 512 * PAGE, PAGE):
        yield devices.require()


def test_a_pool_that_is_full_of_prefixes(device: Device) -> None:
    """Nothing else is left, neither on the device nor on the host: the oldest goes, and no request fails. Another model
    gets their room."""
    generator = torch.Generator().manual_seed(5)
    with sides() as both:
        for _ in range(28):
            both.model.generate(words(generator, 300), max_new_tokens=2, do_sample=False)
        both.check()
        assert both.store.counts.evicted > 100
        numbers = device.snapshot()
        assert numbers["pages"]["kv"] > 60, "there was room for some"
        kept = both.store.pages
        with ballonet.manage(build("llama", intermediate_size=1000)) as other:
            assert other.report().streamed == ()
            assert both.store.pages < kept


@pytest.mark.parametrize("priorities", [(0, 1), (1, 0), (2, 2)])
def test_the_model_with_the_lowest_priority_gives_its_prefixes_first(
    device: Device, priorities: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(5)
    models = [build("llama") for _ in priorities]
    managed = [
        ballonet.manage(model, prefix_cache=True, priority=priority)
        for model, priority in zip(models, priorities, strict=True)
    ]
    for model in models:
        for _ in range(4):
            model.generate(words(generator, 300), max_new_tokens=2, do_sample=False)
    stores = [handle.prefixes for handle in managed]
    first, then = sorted(stores, key=lambda store: priorities[stores.index(store)])
    before = then.pages
    assert first.contents.device_pages > 0
    assert managers.give_up(device, 1) > 0
    assert then.pages == before
    assert managers.give_up(device, 10**6) > 0
    assert (first.contents.device_pages, then.contents.device_pages) == (0, 0)
    for handle in managed:
        handle.release()


def test_new_tokens_get_the_pages_of_prefixes(device: Device) -> None:
    """All else is in use, on the device and the host."""
    with sides() as both:
        both.model.generate(words(torch.Generator().manual_seed(5), 300), max_new_tokens=2, do_sample=False)
        tokens, cache = torch.zeros(1, 2, 64, 8), ballonet.KVCache(both.model.config)
        device.trim()
        hogs = [device.reserve(512 * PAGE, "weights", device.group()) for _ in range(2)]
        hogs[0].map(0, device.available)
        hogs[1].map_host(0, 64)
        cache.update(tokens, tokens, 0)
        assert both.store.counts.evicted > 0
        both.check()
        for hog in hogs:
            hog.close()
