"""What is kept when pages are short: it goes to the host, comes back when it is used, and is given up before anyone is
told that memory is out."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

import ballonet
from ballonet.allocator import runtime
from ballonet.allocator._native import Device
from ballonet.hooks.device import governors
from ballonet.hooks.prefix.store import PrefixStore
from ballonet.offload.policy.ladder import Rung

from ..kv.pressure import poison
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


def copy_behind(store: PrefixStore, draw: random.Random) -> None:
    for sequence in store.contents.index.idle:
        for tier in sequence._tiers():
            tier.client.write_behind(draw.randint(0, 3))


@pytest.mark.parametrize("device", [(1024,)], indirect=True)
@pytest.mark.parametrize("seed", range(2))
def test_what_is_kept_is_taken_poisoned_and_used_again(
    device: Device, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    with sides(monkeypatch, ["llama", "gpt2"][seed], chaos=seed) as both:
        talks = [words(generator, 220)]
        taken: Counter[Rung] = Counter()
        for _ in range(16):
            talk = draw.choice(talks)
            talk = torch.cat([talk[:, : draw.randint(talk.shape[1] // 2, talk.shape[1])], words(generator, 9)], 1)
            talk = both.ask(talk)
            talks.append(talk)
            copy_behind(both.store, draw)
            for rung in (Rung.PREFIX, Rung.IDLE_KV):
                taken[rung] += governors.of(device).ladder.pull(rung, draw.randint(0, 9))
            poison(device)
            both.check()
        assert min(taken[Rung.PREFIX], taken[Rung.IDLE_KV]) > 5
        assert both.store.counts.on_host > 50
        assert both.store.counts.on_device > 100


@pytest.mark.parametrize("device", [(4096,)], indirect=True)
def test_a_limit_in_bytes(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, generator = random.Random(5), torch.Generator().manual_seed(5)
    limit = 30 * PAGE
    with sides(monkeypatch, prefix_cache=limit) as both:
        talks = [words(generator, 50)]
        for _ in range(20):
            talk = draw.choice(talks)
            talk = torch.cat([talk[:, : draw.randint(talk.shape[1] // 2, talk.shape[1])], words(generator, 40)], 1)
            talk = both.ask(talk)
            if talk.shape[1] < 200:
                talks.append(talk)
            both.check()
            assert both.store.nbytes <= limit
            gc.collect()
            device.reap(wait=True)
            assert device.snapshot()["pages"]["kv"] * PAGE == both.store.nbytes
        assert both.store.counts.evicted > 20
        assert both.store.counts.hits > 100
        both.store.clear()
        gc.collect()
        device.reap(wait=True)
        assert device.snapshot()["pages"]["kv"] == 0


@pytest.mark.parametrize("device", [(512, 64)], indirect=True)
def test_a_pool_that_is_full_of_prefixes(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is left, neither on the device nor on the host: the oldest goes, and no request fails."""
    generator = torch.Generator().manual_seed(5)
    with sides(monkeypatch) as both:
        for _ in range(28):
            both.ask(words(generator, 300))
        both.check()
        assert both.store.counts.evicted > 100
        numbers = device.snapshot()
        assert numbers["pages"]["kv"] > 60, "there was room for some"


@pytest.mark.parametrize("device", [(512, 64)], indirect=True)
def test_another_model_gets_the_room_of_prefixes(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    with sides(monkeypatch) as both:
        for _ in range(18):
            both.model.generate(words(generator, 300), max_new_tokens=2, do_sample=False)
        kept = both.store.pages
        assert kept > 60
        with ballonet.manage(build("llama", intermediate_size=700)) as other:
            assert other.report().streamed == ()
            assert both.store.pages < kept


@pytest.mark.parametrize("device", [(1024,)], indirect=True)
def test_what_is_kept_is_in_the_pool_and_leaves_it(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    with sides(monkeypatch) as both:
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
def test_new_tokens_get_the_pages_of_prefixes(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """All else is in use, on the device and the host."""
    generator = torch.Generator().manual_seed(5)
    with sides(monkeypatch) as both:
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
