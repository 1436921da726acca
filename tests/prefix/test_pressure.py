"""What is kept when pages are short: it goes to the host, comes back when it is used, and is given up before anyone is
told that memory is out."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import ballonet
from ballonet.allocator import runtime
from ballonet.allocator._native import Device

from ..models import build
from ..pool import bytes_that_exist, in_pool, tiny_layers
from ..tuned import Tuned
from .conversations import sides, words

PAGE = 4096


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tuned: Tuned) -> Iterator[Device]:
    """With so many pages of the device and, where a second number is given, of the host."""
    pages, *host = request.param
    if host:
        monkeypatch.setenv("BALLONET_HOST_BUDGET", str(host[0] * PAGE))
    with tiny_layers(tuned, pages * PAGE, PAGE):
        yield runtime.require()


@pytest.mark.parametrize("device", [(512, 64)], indirect=True)
def test_a_pool_that_is_full_of_prefixes(device: Device) -> None:
    """Nothing else is left, neither on the device nor on the host: the oldest goes, and no request fails."""
    generator = torch.Generator().manual_seed(5)
    with sides() as both:
        for _ in range(28):
            both.model.generate(words(generator, 300), max_new_tokens=2, do_sample=False)
        both.check()
        assert both.store.counts.evicted > 100
        numbers = device.snapshot()
        assert numbers["pages"]["kv"] > 60, "there was room for some"


@pytest.mark.parametrize("device", [(512, 64)], indirect=True)
def test_another_model_gets_the_room_of_prefixes(device: Device) -> None:
    generator = torch.Generator().manual_seed(5)
    with sides() as both:
        for _ in range(18):
            both.model.generate(words(generator, 300), max_new_tokens=2, do_sample=False)
        kept = both.store.pages
        assert kept > 60
        with ballonet.manage(build("llama", intermediate_size=1000)) as other:
            assert other.report().streamed == ()
            assert both.store.pages < kept


@pytest.mark.parametrize("device", [(1024,)], indirect=True)
def test_what_is_kept_is_in_the_pool_and_leaves_it(device: Device) -> None:
    generator = torch.Generator().manual_seed(5)
    with sides() as both:
        both.model.generate(words(generator, 500), max_new_tokens=2, do_sample=False)
        (sequence,) = both.store.contents.index.idle
        assert all(in_pool(layer.part(0, 500)[0]) for layer in sequence.used)
        del sequence
        gc.collect()
        device.trim()
        before, kept = bytes_that_exist(), both.store.nbytes
        assert kept >= 3 * 500 * 128
        both.store.clear()
        device.trim()
        assert bytes_that_exist() <= before - kept


@pytest.mark.parametrize("device", [(512, 64)], indirect=True)
def test_new_tokens_get_the_pages_of_prefixes(device: Device) -> None:
    """All else is in use, on the device and the host."""
    generator = torch.Generator().manual_seed(5)
    with sides() as both:
        both.model.generate(words(generator, 300), max_new_tokens=2, do_sample=False)
        tokens = torch.zeros(1, 2, 64, 8)
        cache = ballonet.KVCache(both.model.config)
        device.trim()
        hogs = [device.reserve(512 * PAGE, "weights", device.group()) for _ in range(2)]
        hogs[0].map(0, device.available)
        hogs[1].map_host(0, 64)
        cache.update(tokens, tokens, 0)
        assert both.store.counts.evicted > 0
        assert both.store.pages == 0 or device.available > 0
        both.check()
        for each in hogs:
            each.close()
