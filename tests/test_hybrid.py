"""Layers with a state beside keys and values: the elastic one does in lockstep what the stock one does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer

from ballonet.allocator._native import Device
from ballonet.hooks.kv.cache import KVCache
from ballonet.hooks.kv.hybrid import ElasticHybridLayer

from .kv.pressure import started
from .models import build
from .pool import in_pool

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[Device]:
    with started(budget=2**24, page_size=4096) as opened:
        yield opened


class Pair:
    """The two layers, to which the same happens."""

    def __init__(self) -> None:
        self.stock = LinearAttentionAndFullAttentionLayer(number_of_states=2)
        self.elastic = ElasticHybridLayer(number_of_states=2)
        self.random = torch.Generator().manual_seed(5)

    def both(self, act: Callable[[Any], Any]) -> None:
        act(self.stock)
        act(self.elastic)
        self.compare()

    def step(self, tokens: int, batch: int = 3) -> None:
        keys, values, conv, state = (
            torch.randn(size, generator=self.random)
            for size in ((batch, 2, tokens, 6), (batch, 2, tokens, 4), (batch, 5, max(3, tokens)), (batch, 5, 7))
        )
        pairs = [layer.update(keys, values) for layer in (self.stock, self.elastic)]
        assert all(torch.equal(*each) for each in zip(*pairs, strict=True))
        for index in range(2):
            convolved = [
                layer.update_conv_state(conv * (index + 1), index, conv_kernel_size=3)
                for layer in (self.stock, self.elastic)
            ]
            assert torch.equal(*convolved)
            self.both(lambda layer, index=index: layer.update_recurrent_state(state - index, index))
        self.compare()

    def compare(self) -> None:
        stock, elastic = self.stock, self.elastic
        assert elastic.get_seq_length() == stock.get_seq_length()
        assert elastic.get_mask_sizes(1) == stock.get_mask_sizes(1)
        assert elastic.is_initialized == stock.is_initialized
        assert elastic.has_previous_state == stock.has_previous_state
        assert elastic.is_croppable == stock.is_croppable
        assert elastic.is_compileable == stock.is_compileable
        assert elastic.get_max_length() == stock.get_max_length()
        pairs = [(elastic.keys, stock.keys), (elastic.values, stock.values)]
        for index in range(2):
            pairs.append((elastic.conv_states[index], stock.conv_states[index]))
            pairs.append((elastic.recurrent_states[index], stock.recurrent_states[index]))
        for mine, theirs in pairs:
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine, theirs)


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_everything_that_happens_to_a_layer(pair: Pair) -> None:
    pair.compare()
    for tokens in (9, 1, 1, 4):
        pair.step(tokens)
    assert pair.elastic.elastic
    assert in_pool(pair.elastic.keys)
    order = torch.tensor([2, 0, 0])
    pair.both(lambda layer: layer.reorder_cache(order))
    pair.step(1)
    pair.both(lambda layer: layer.reset())
    assert not pair.elastic.elastic
    pair.step(5)
    pair.both(lambda layer: layer.batch_repeat_interleave(2))
    pair.both(lambda layer: layer.batch_select_indices(torch.tensor([0, 3, 5])))
    pair.step(1)
    pair.both(lambda layer: (layer.offload(), layer.prefetch()))
    pair.step(1)
    assert pair.elastic.elastic


def test_crop_takes_back_tokens_and_the_state_of_the_convolution(pair: Pair) -> None:
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        pair.elastic.crop(-1)
    pair.both(lambda layer: layer.activate_past_recording())
    pair.step(9)
    pair.step(4)
    for count in (-2, 0, -1):
        pair.both(lambda layer, count=count: layer.crop(count))
        pair.step(1)
    assert pair.elastic.elastic


@pytest.mark.parametrize(
    "twin", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["copy", "pickle"]
)
def test_a_copy_has_a_state_and_tokens_of_its_own(pair: Pair, twin: Callable[[Any], Any]) -> None:
    pair.step(9)
    copied = Pair()
    copied.stock, copied.elastic = copy.deepcopy(pair.stock), twin(pair.elastic)
    copied.compare()
    copied.step(2)
    pair.compare()
    pair.step(1)
    copied.compare()


def test_the_cache_takes_it_for_what_it_is() -> None:
    cache, config = KVCache(build("falcon_h1").config), build("falcon_h1").config
    stock = DynamicCache(config=config)
    assert {type(layer) for layer in cache.layers} == {ElasticHybridLayer}
    assert cache.is_linear == stock.is_linear
    assert cache.is_sliding == stock.is_sliding
    assert cache.is_compileable == stock.is_compileable
    assert cache.has_previous_state() == stock.has_previous_state()
    layer = cache.layers[0]
    keys = torch.randn(1, 2, 4, 8)
    cache.update(keys, keys, 0)
    layer.update_recurrent_state(torch.ones(1, 3))
    again = pickle.loads(pickle.dumps(cache))
    assert {type(layer) for layer in again.layers} == {ElasticHybridLayer}
    assert torch.equal(again.layers[0].keys, keys)
    assert torch.equal(again.layers[0].recurrent_states[0], torch.ones(1, 3))
