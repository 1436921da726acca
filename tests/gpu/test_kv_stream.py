"""A KV cache in use whose pages are on the host: what is copied to where attention reads waits for those who read
before, and who reads waits for what is copied, whatever streams they are on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from transformers.cache_utils import DynamicLayer

from ballonet.hooks.kv.grouping import CacheRanges
from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.offload.decide.layer_stream import Choice, Way
from ballonet.offload.govern import kv_way
from ballonet.offload.govern.governor import Governor

from .scene import Lane, Place, everywhere, play
from .test_weights_streaming import streams_here

LAYERS = 4
PAGES = 8  # of each layer
AWAY = 6  # of these
LEFT = 40  # tokens for which there is room in the last one


def oldest(tensors: Any) -> list[torch.Tensor]:
    """Copies of the first token, which is on a page that is away first."""
    return [each[:, :, 0].clone() for each in tensors]


class Cache:
    """Layers, each beside a stock one. Of what reads them some begins at once and some is slow to begin; at the end it
    says whether it was right."""

    def __init__(self, place: Place) -> None:
        heads, dim, self._dtype = (8, 128, torch.bfloat16) if place.cuda else (2, 16, torch.float32)
        self._shape = 2, heads, dim
        self._place = place
        tokens = PAGES * place.page // (2 * 2 * heads * dim * self._dtype.itemsize) - LEFT  # some will come
        ranges = CacheRanges(layers=LAYERS, expected=tokens + LEFT, alone=True)
        self.pairs = [(ElasticLayer(ranges), DynamicLayer()) for _ in range(LAYERS)]
        self.wrong = torch.zeros((), dtype=torch.int64, device=place.kind)
        for number in range(LAYERS):
            self.update(number, tokens)

    def update(self, number: int, tokens: int = 1) -> None:
        """Of one layer, on the current stream, and its attention."""
        batch, heads, dim = self._shape
        new = torch.randn(batch, heads, tokens, dim, device=self._place.kind).to(self._dtype)
        elastic, stock = self.pairs[number]
        found = elastic.update(new, -new)
        early = oldest(found)
        right = stock.update(new, -new)
        if self._place.cuda:
            torch.cuda._sleep(2_000_000)
        self.compare(found, right)
        self.wrong += sum((mine != theirs).sum() for mine, theirs in zip(early, oldest(right), strict=True))

    def compare(self, found: Any, right: Any) -> None:
        for mine, theirs in zip(found, right, strict=True):
            self.wrong += (mine != theirs).sum()

    @property
    def homes(self) -> list[Any]:
        return [elastic.home for elastic, _ in self.pairs]

    @property
    def tier(self) -> Any:
        return self.homes[0].pages._tier

    def finish(self) -> None:
        self._place.synchronize()
        assert self.wrong.item() == 0
        for elastic, stock in self.pairs:
            assert torch.equal(elastic.keys, stock.keys)
            assert torch.equal(elastic.values, stock.values)
            elastic.reset()
        self.pairs.clear()
        gc.collect()
        self._place.device.reap(wait=True)


@contextmanager
def decided() -> Iterator[None]:
    """Nothing comes home by itself, and what is away takes turns in two buffers."""
    choice = Choice(Way.BUFFERS, AWAY, 2, 0, 0.0, 0.0, 0.0)
    with (
        mock.patch.object(kv_way, "choose", return_value=choice),
        mock.patch.object(Governor, "homecoming", return_value=0),
    ):
        yield


def through_buffers(place: Place, steps: int) -> None:
    """Layers take turns in buffers; streams change between iterations, and in some of them between layers."""
    with torch.no_grad(), decided():
        cache = Cache(place)
        for home in cache.homes:
            assert home.pages.displace(0)
        lanes = [place.lane() for _ in range(3)]
        before: Lane | None = None
        for step in range(steps):
            for number in range(LAYERS):
                lane = lanes[(step + (number if step % 3 == 2 else 0)) % len(lanes)]
                lane.follow(before)
                with lane():
                    cache.update(number)
                before = lane
        streamed = cache.tier.streamed
        assert streamed.way is Way.BUFFERS
        assert streamed.buffers == 2
        assert streamed.away >= LAYERS * AWAY
        assert streamed.copied >= (steps - 2) * LAYERS * AWAY * place.page
        assert before is not None
        before.lead()
        cache.finish()


@everywhere
def test_layers_take_turns_in_buffers(kind: str) -> None:
    streams_here(kind)
    play(through_buffers, kind, pages=256, host_pages=64, steps=30 if kind == "cuda" else 6)


def coming_home(place: Place, rounds: int) -> None:
    """Pages come home while the layers compute, one after the other. In most rounds somebody holds what a layer has
    shown, and reads it on a stream that waits for nobody; copies to the host go on beside it."""
    with torch.no_grad(), decided():
        cache = Cache(place)
        elsewhere, computing = place.lane(), place.lane()
        for step in range(rounds):
            for home in cache.homes:
                assert sum(home.pages.displace(piece) for piece in range(AWAY)) == AWAY
            shown = cache.pairs[step % LAYERS : step % LAYERS + 1] if step % 3 else []
            held = [tensor for elastic, _ in shown for tensor in (elastic.keys, elastic.values)]
            right = [tensor for _, stock in shown for tensor in (stock.keys, stock.values)]
            place.synchronize()
            computing.follow()
            with computing():
                if place.cuda:
                    torch.cuda._sleep(20_000_000)
                assert cache.tier.bring_back(LAYERS * AWAY, cache.homes[0].pages.stream) == LAYERS * AWAY
            with elsewhere():
                apart = oldest(held)
            elsewhere.lead()
            same = [torch.equal(mine, theirs) for mine, theirs in zip(apart, oldest(right), strict=True)]
            assert all(same), "what somebody holds was not there yet"
            del held, right, apart, shown
            with computing():
                for number in range(LAYERS):
                    cache.update(number)
                cache.tier.write_behind(LAYERS)
            computing.lead()
        cache.finish()


@everywhere
def test_pages_come_home_while_layers_compute(kind: str) -> None:
    streams_here(kind)
    play(coming_home, kind, pages=256, host_pages=64, rounds=10 if kind == "cuda" else 3)
