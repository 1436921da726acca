"""What SwiftCache says of sizes, with real pages: how much a cache stores, what resizing it costs, and what two models
exchange."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.hooks.kv.ranges import CacheRanges
from ballonet.offload.policy.lending import Unit, unit

from ..swiftcache import block_bytes, split
from .scene import Place, scene

LAYERS = 4
DEVICE, HOST = 32, 64  # pages
CALLS = 5  # for a page: released, made, unmapped, mapped, opened
MIB = 2**20
LWM = {"layers": 32, "heads": 32}  # of 128 elements, 2 bytes each
QWEN3_14B = {"layers": 40, "heads": 8}
BLOCK = 16  # tokens
STEP = 64  # tokens that are added or read at once


class Cache:
    """Layers, each of which has the same number in every element of a token."""

    def __init__(self, place: Place, layers: int, heads: int, dim: int, *, alone: bool = True) -> None:
        """`alone`: each layer has a range of its own; else all share one."""
        self._place, self._heads, self._dim = place, heads, dim
        self.per_page = place.page // (2 * heads * dim * 2)  # tokens of a layer
        ranges = CacheRanges(layers=layers, expected=1, alone=alone)
        self.layers = [ElasticLayer(ranges) for _ in range(layers)]

    @property
    def kv_ranges(self) -> list[Any]:
        return list({id(layer.kv_range): layer.kv_range for layer in self.layers}.values())

    def numbers(self, start: int, end: int) -> torch.Tensor:
        return (torch.arange(start, end, device=self._place.kind) % 1000).to(torch.float16)[:, None]

    def add(self, tokens: int, step: int = STEP) -> None:
        first = self.layers[-1].get_seq_length()
        for start in range(first, first + tokens, step):
            numbers = self.numbers(start, min(start + step, first + tokens))
            new = numbers.expand(1, self._heads, -1, self._dim).contiguous()
            for layer in self.layers:
                layer.update(new, new)

    def check(self) -> None:
        for layer in self.layers:
            length = layer.get_seq_length()
            for start in range(0, length, STEP):
                end = min(start + STEP, length)
                for states in (layer.keys, layer.values):
                    assert bool((states[0, :, start:end] == self.numbers(start, end)).all())


@scene(needs_host=True, pages=DEVICE, host_pages=HOST)
def test_a_cache_goes_to_the_limit(place: Place) -> None:
    """A cache grows until it is refused: it stores no less than Eq. 1-5 say, and no more than there are pages."""
    cache = Cache(place, LAYERS, *((8, 128) if place.cuda else (2, 64)))
    cache.add(1)
    with pytest.raises(torch.OutOfMemoryError):
        cache.add((DEVICE + HOST) * cache.per_page, step=cache.per_page // 4)
    pieces = min(layer.get_seq_length() for layer in cache.layers) // cache.per_page
    free = (DEVICE - place.pages("activations") - LAYERS) * place.page  # a page of each layer is not full
    alone, streamed = (split(LAYERS, place.page, free, lent).blocks for lent in ([], [HOST * place.page]))
    assert alone < streamed <= pieces <= (DEVICE + HOST) // LAYERS
    cache.check()


@scene(pages=200)
def test_resizing_costs_the_same_whatever_there_is(place: Place) -> None:
    """Pages go from one cache to another: some calls of the driver for each, whatever else the caches hold, and no
    copy."""

    def spent() -> tuple[int, int]:
        """Driver calls that make, map, move or release pages, and bytes moved, so far."""
        place.synchronize()
        place.device.reap(wait=True)
        snapshot = place.device.snapshot()
        calls = sum(number for name, number in snapshot["driver_calls"].items() if name.startswith("cuMem"))
        return calls, sum(snapshot["copied"].values())

    for pieces in (4, 40, 4):
        giver, taker = (Cache(place, 1, *((8, 128) if place.cuda else (2, 64))) for _ in range(2))
        giver.add(pieces * giver.per_page)
        taker.add(taker.per_page)
        more = 2 * taker.per_page
        calls, moved = spent()
        giver.layers[0].crop(-more)
        spent()
        taker.add(more, step=more)
        calls_now, moved_now = spent()
        giver.check()
        assert all(
            kv_range.range.leads_to(piece) == "device" for kv_range in taker.kv_ranges for piece in range(kv_range.held)
        )
        assert 0 < calls_now - calls <= 2 * CALLS
        assert moved_now == moved


@scene(pages=1024)
def test_lwm_and_qwen3_14b_exchange_40_mib(place: Place) -> None:
    """5 blocks of LWM are 16 of Qwen3-14B, which are 40 MiB: the pages of the one are those of the other."""
    sizes = [block_bytes(tokens=BLOCK, dim=128, itemsize=2, **shape) for shape in (QWEN3_14B, LWM)]
    exchanged = unit(*sizes, page=place.page)
    assert exchanged == Unit(40 * MIB, worker=16, master=5)
    for _ in range(2):
        for model, blocks in ((LWM, exchanged.master), (QWEN3_14B, exchanged.worker)):
            cache = Cache(place, model["layers"], model["heads"], 128, alone=False)
            cache.add(1)  # as a sequence begins: a layer of its own would have a page that is mostly empty
            cache.add(blocks * BLOCK - 1)
            (kv_range,) = cache.kv_ranges
            assert place.pages("kv") == kv_range.held == exchanged.size // place.page, (
                "whole pages, and all of them full"
            )
            cache.check()
            assert sum(place.device.snapshot()["copied"].values()) == 0
            del cache, kv_range
            gc.collect()
            place.synchronize()
            place.device.reap(wait=True)
            assert place.pages("kv") == 0
