"""Pages of KV that are taken while they are in use: layers say what those of transformers say, whatever is taken."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from ballonet.allocator._native import Device
from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.hooks.kv.ranges import CacheRanges

from ..test_kv import tokens
from .pressure import Taker, kv_ranges, started

PAGE = 4096


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[Device]:
    with started(budget=256 * PAGE, host_budget=256 * PAGE, page_size=PAGE) as opened:
        yield opened


class Fuzz:
    """Layers of one cache, each beside a stock one to which the same is done, and views that are held for a while."""

    def __init__(self, device: Device, seed: int, group: int, layers: int = 2) -> None:
        self.random = random.Random(seed)
        self.taker = Taker(device, seed)
        self.ranges = CacheRanges(layers=group, expected=1 if group > 1 else 200)
        self.pairs: list[tuple[Any, Any]] = [(ElasticLayer(self.ranges), DynamicLayer()) for _ in range(layers)]
        self.held: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.batch = 2
        self.steps = 0

    def update(self, most: int = 60) -> None:
        count = self.random.choice([1, 1, 1, self.random.randint(1, most)])
        for index, pair in enumerate(self.pairs):
            self.steps += 1
            new = tokens(count, self.steps, self.batch)
            ours, theirs = (cache.update(*new) for cache in pair)
            assert all(map(torch.equal, ours, theirs)), index
            del ours  # attention has read it
            self.act()

    def prefill(self) -> None:
        self.update(200)

    def crop(self) -> None:
        count = self.random.choice([1, 3, self.random.randint(0, 60)])
        for pair in self.pairs:
            for layer in pair:
                if layer.is_initialized:
                    layer.crop(-count)
            self.act()

    def reorder(self) -> None:
        rows = torch.tensor([self.random.randrange(self.batch) for _ in range(self.batch)])
        for pair in self.pairs:
            for layer in pair:
                layer.reorder_cache(rows)
            self.act()

    def repeat(self) -> None:
        if self.batch == 2 and 0 < self.pairs[0][1].get_seq_length() < 200:
            self.batch = 4
            for pair in self.pairs:
                for layer in pair:
                    layer.batch_repeat_interleave(2)
                self.act()

    def select(self) -> None:
        self.batch = 2
        for pair in self.pairs:
            for layer in pair:
                layer.batch_select_indices(torch.tensor([1, 0]))
            self.act()

    def replace(self) -> None:
        how: Callable[[Any], Any] = self.random.choice(
            [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))]
        )
        copies = [how(elastic) for elastic, _ in self.pairs]
        self.act()
        for twin, (_, stock) in zip(copies, self.pairs, strict=True):
            if stock.is_initialized:
                assert torch.equal(twin.keys, stock.keys)
        if not isinstance(copies[0], ElasticLayer) or self.random.random() < 0.5:
            return
        self.pairs = [(layer, stock) for layer, (_, stock) in zip(copies, self.pairs, strict=True)]

    def hold(self) -> None:
        for elastic, stock in self.pairs:
            if stock.is_initialized:
                self.held.append((elastic.keys, stock.keys.clone()))

    def let_go(self) -> None:
        self.held.clear()

    def reset(self) -> None:
        if self.random.random() < 0.2:
            for index, (elastic, _) in enumerate(self.pairs):
                elastic.reset()
                self.pairs[index] = elastic, DynamicLayer()
            self.batch = 2

    def act(self) -> None:
        self.taker.act(kv_ranges(elastic for elastic, _ in self.pairs))

    def check(self) -> None:
        for elastic, stock in self.pairs:
            assert elastic.get_seq_length() == stock.get_seq_length()
            if stock.is_initialized:
                assert torch.equal(elastic.keys, stock.keys)
                assert torch.equal(elastic.values, stock.values)
        for view, before in self.held:
            assert torch.equal(view, before)


@pytest.mark.parametrize(("seed", "group"), [(0, 1), (1, 2)])
def test_any_sequence_of_calls_equals_stock(device: Device, seed: int, group: int) -> None:
    fuzz = Fuzz(device, seed, group)
    ways = [fuzz.update] * 12 + [fuzz.prefill, fuzz.crop, fuzz.crop, fuzz.reorder, fuzz.repeat, fuzz.select]
    ways += [fuzz.replace, fuzz.hold, fuzz.let_go, fuzz.let_go, fuzz.reset]
    for _ in range(200):
        fuzz.random.choice(ways)()
        fuzz.check()
        device.check()
        if fuzz.pairs[0][1].get_seq_length() > 500:
            fuzz.held.clear()
            for pair in fuzz.pairs:
                for layer in pair:
                    layer.crop(-400)
    assert min(fuzz.taker.done.values()) > 10, fuzz.taker.done
