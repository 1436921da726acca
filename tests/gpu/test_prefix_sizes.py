"""What SwiftCache says of sizes, with real pages: how much a cache stores, what resizing it costs, and what two models
exchange."""

from __future__ import annotations

import gc
from typing import Any

import torch

from ballonet.hooks.kv.grouping import CacheRanges
from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.offload.policy.layer_stream import split
from ballonet.offload.policy.lending import Unit, block_bytes, unit

from .scene import Place, everywhere, play, scene

LAYERS = 4
DEVICE, HOST = 32, 64  # pages
MIB = 2**20


class Cache:
    """So many layers, each of which has the same number in every element of a token."""

    def __init__(self, place: Place, layers: int, heads: int, dim: int, *, alone: bool = True) -> None:
        """`alone`: each layer has a range of its own; else all share one."""
        self._place, self._heads, self._dim = place, heads, dim
        self.tokens = 0
        ranges = CacheRanges(layers=layers, expected=1, alone=alone)
        self.layers = [ElasticLayer(ranges) for _ in range(layers)]

    @property
    def homes(self) -> list[Any]:
        return list({id(layer.home): layer.home for layer in self.layers}.values())

    def add(self, tokens: int, step: int = 64) -> None:
        for start in range(0, tokens, step):
            count = min(step, tokens - start)
            numbers = torch.arange(self.tokens, self.tokens + count, device=self._place.kind) % 1000
            new = numbers.to(torch.float16)[None, None, :, None].expand(1, self._heads, count, self._dim).contiguous()
            for layer in self.layers:
                layer.update(new, new)
            self.tokens += count

    def check(self, step: int = 64) -> None:
        for layer in self.layers:
            length = layer.get_seq_length()
            for start in range(0, length, step):
                end = min(start + step, length)
                right = (torch.arange(start, end, device=self._place.kind) % 1000).to(torch.float16)
                for found in (layer.keys, layer.values):
                    assert bool((found[0, :, start:end] == right[:, None]).all())


@scene(needs_host=True, pages=DEVICE, host_pages=HOST)
def test_a_cache_goes_to_the_limit(place: Place) -> None:
    """A cache grows until it is refused: it stores no less than Eq. 1-5 say, and no more than there are pages."""
    heads, dim = (8, 128) if place.cuda else (2, 64)
    cache = Cache(place, LAYERS, heads, dim)
    per_page = place.page // (2 * heads * dim * 2)
    cache.add(1)
    try:
        for _ in range(4 * (DEVICE + HOST)):
            cache.add(per_page // 4)
    except torch.OutOfMemoryError:
        pass
    else:
        raise AssertionError("it was never refused")
    pieces = min(layer.get_seq_length() for layer in cache.layers) // per_page
    free = (DEVICE - place.pages("activations") - LAYERS) * place.page  # a page of each layer is not full
    alone, streamed = (split(LAYERS, place.page, free, lent).blocks for lent in ([], [HOST * place.page]))
    assert alone < streamed <= pieces <= (DEVICE + HOST) // LAYERS
    cache.check()


CALLS = 5  # for a page: released, made, unmapped, mapped, opened


def calls_of(place: Place) -> int:
    """Of the driver, that make, map, move or release pages."""
    counts: dict[str, int] = place.device.snapshot()["driver_calls"]
    return sum(number for name, number in counts.items() if name.startswith("cuMem"))


def resized(place: Place, pieces: int, by: int) -> tuple[int, int]:
    """Driver calls, and bytes moved, while a cache of so many pages per layer gives some to another one."""
    heads, dim = (8, 128) if place.cuda else (2, 64)
    per_page = place.page // (2 * heads * dim * 2)
    giver, taker = Cache(place, 1, heads, dim), Cache(place, 1, heads, dim)
    giver.add(pieces * per_page)
    taker.add(per_page)
    new = torch.zeros(1, heads, by * per_page, dim, dtype=torch.float16, device=place.kind)
    place.synchronize()
    place.device.reap(wait=True)
    before, moved = calls_of(place), place.device.snapshot()["copied"]
    for layer in giver.layers:
        layer.crop(-by * per_page)
    place.synchronize()
    place.device.reap(wait=True)
    taker.layers[0].update(new, new)
    place.synchronize()
    found, after = calls_of(place) - before, place.device.snapshot()["copied"]
    giver.check()
    assert all(home.range.backing(piece) == "device" for home in taker.homes for piece in range(home.held))
    return found, sum(after.values()) - sum(moved.values())


@scene(pages=200)
def test_resizing_costs_the_same_whatever_there_is(place: Place) -> None:
    """Pages go from one cache to another: some calls of the driver for each, whatever else the caches hold, and no
    copy."""
    for pieces in (4, 40, 4, 40):
        calls, moved = resized(place, pieces, by=2)
        assert 0 < calls <= 2 * CALLS
        assert moved == 0
        gc.collect()


LWM = {"layers": 32, "heads": 32}  # of 128 elements, 2 bytes each
QWEN3_14B = {"layers": 40, "heads": 8}
BLOCK = 16  # tokens


def two_models(place: Place) -> None:
    """5 blocks of LWM are 16 of Qwen3-14B, which are 40 MiB: the pages of the one are those of the other."""
    sizes = [block_bytes(tokens=BLOCK, dim=128, itemsize=2, **each) for each in (QWEN3_14B, LWM)]
    exchanged = unit(*sizes, page=place.page)
    assert exchanged == Unit(40 * MIB, worker=16, master=5)
    pages = exchanged.size // place.page
    for _ in range(2):
        for model, blocks in ((LWM, exchanged.master), (QWEN3_14B, exchanged.worker)):
            cache = Cache(place, model["layers"], model["heads"], 128, alone=False)
            cache.add(1)  # as a sequence begins: a layer of its own would have a page that is mostly empty
            cache.add(blocks * BLOCK - 1)
            assert len(cache.homes) == 1
            assert place.pages("kv") == pages == cache.homes[0].held, "whole pages, and all of them full"
            cache.check()
            assert sum(place.device.snapshot()["copied"].values()) == 0
            del cache
            gc.collect()
            place.synchronize()
            place.device.reap(wait=True)
            assert place.pages("kv") == 0


@everywhere
def test_lwm_and_qwen3_14b_exchange_40_mib(kind: str) -> None:
    pages = 64 * MIB // (2 * MIB if kind == "cuda" else 65536)
    play(two_models, kind, pages=pages)
