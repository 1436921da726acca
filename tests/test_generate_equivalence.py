"""`generate()` of a managed model: the tokens of stock on every architecture, plain and while pages move."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

import ballonet
from ballonet import testing
from ballonet.allocator import devices, install
from ballonet.hooks.kv.cache import CachePlan, plan
from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.hooks.weights.model_parts import decoder_layers
from ballonet.testing import chaos_of

from .architectures import ARCHITECTURES, LAYERS, PLAIN
from .models import Output, ask, before_each_forward, build, generate, layers_of, questions
from .pool import bytes_that_exist, in_pool, take_out

BUDGET = 2**25
PAGES = (4096, 65536)  # with small pages layers have ranges of their own; with large ones they share one
NAMES = list(ARCHITECTURES)
# Those of which no layer keeps a token for good
NOT_ELASTIC = {
    *("mistral-window", "recurrent_gemma", "mamba", "falcon_mamba", "mamba2"),
    *("glm_moe_dsa", "deepseek_v4", "minimax", "rwkv"),
}


# Models that do everything that is asked of a cache: one of each set of kinds of layers, and of each way to be called
WHOLE = {
    *("llama", "gpt2", "falcon", "gemma2", "mistral-window", "gemma3n_text", "gemma4_text", "llama4_text", "gpt_oss"),
    *("mixtral", "deepseek_v2", "longcat_flash", "mimo_v2_flash", "falcon_h1", "zamba2", "jamba", "qwen3_next", "lfm2"),
    *("recurrent_gemma", "mamba", "mamba2", "glm_moe_dsa", "deepseek_v4", "minimax", "rwkv", "t5", "t5gemma", "bart"),
    *("led", "whisper", "vision-encoder-decoder", "llava", "qwen2_vl", "mllama", "blip-2"),
}


@pytest.fixture
def installed(name: str) -> Iterator[None]:
    ballonet.install(BUDGET, page_size=PAGES[NAMES.index(name) % 2], device="cpu")
    yield
    model_of.cache_clear()  # some keep a tensor of their last forward
    gc.collect()
    devices.require().check()
    assert bytes_that_exist() <= BUDGET
    take_out()
    gc.freeze()  # the modules of this architecture


@functools.lru_cache(1)
def model_of(name: str) -> PreTrainedModel:
    with install.stock():
        return build(name)


@functools.cache
def stock(name: str, way: str) -> Output:
    """What the model says on its own, in torch's memory."""
    with install.stock():
        return ask(model_of(name), name, way)


def agrees(model: PreTrainedModel, name: str, way: str) -> bool:
    """Does the model say now what it says on its own? Nothing in the pool is left when a test has failed."""
    return ask(model, name, way).agrees(stock(name, way))


def ways(name: str, chaos: int | None) -> list[str]:
    """Returns the ways that differ in what they do to the cache: nothing of it depends on pads, so "padded" is for who
    refuses others. Architectures that are alike share them out. Without chaos one is enough, which shows what the
    cache is made of."""
    chosen = [way for way in ("beam", "assisted", "continued") if way not in ARCHITECTURES[name].refuses]
    chosen += ["padded"] if len(chosen) < 3 else []
    if name not in WHOLE:
        chosen = [way for way in chosen if way != "assisted"]  # in which little moves
        chosen = [chosen[NAMES.index(name) % len(chosen)]]
    return chosen[:1] if chaos is None else chosen


class Watch:
    """Looks before each forward whether the cache is what was planned, and counts forwards with a filled one."""

    def __init__(self, planned: CachePlan, *, may_move: bool, may_be_stock: bool) -> None:
        self._layers = (*planned.layers, *planned.cross)
        self._made = not planned.reason
        self._may_move = may_move
        self._may_be_stock = may_be_stock
        self.seen = 0

    def __call__(self, step: int, cache: Any) -> None:
        layers = layers_of(cache)
        if not self._made:
            assert not any(isinstance(layer, ElasticLayer) for layer in layers)
            return
        assert type(cache) in (DynamicCache, EncoderDecoderCache)
        names = [type(layer).__name__ for layer in layers]
        if not self._may_be_stock or names != [layer.stock for layer in self._layers]:
            assert names == [layer.layer for layer in self._layers]
            self._look_closer(
                [layer for layer, as_planned in zip(layers, self._layers, strict=True) if as_planned.elastic]
            )
        self.seen += bool(step)

    def _look_closer(self, layers: list[Any]) -> None:
        used = [layer for layer in layers if layer.is_initialized]  # some wait for an image
        assert all(layer.elastic for layer in used)
        if self.seen == 1 and not self._may_move:  # chaos may have moved it to the host
            assert all(in_pool(layer.values) for layer in used)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_equal_stock(installed: None, name: str) -> None:
    model = model_of(name)
    planned = plan(type(model), model.config)
    assert bool(planned.elastic) == (name not in NOT_ELASTIC)
    if name in PLAIN:
        layers = decoder_layers(model)
        assert len(layers) == LAYERS
        assert {type(layer).__name__ for layer in layers} <= set(model._no_split_modules or ())
        assert decoder_layers(torch.nn.Sequential(model, torch.nn.Linear(1, 1))) == layers
    for way in ways(name, len(name)):
        stock(name, way)
    wrong = []
    for chaos in (None, len(name)):
        with testing.manage(model, chaos=chaos) as handle:
            for way in ways(name, chaos):
                given = way == "continued" and ARCHITECTURES[name].returns_another_cache
                watch = Watch(planned, may_move=chaos is not None, may_be_stock=given)
                with before_each_forward(model, watch):
                    if not agrees(model, name, way):
                        wrong.append(f"{name}, {way}, {'plain' if chaos is None else 'chaos'}")
                assert planned.reason or watch.seen >= 3
            if chaos_of(handle) is not None:
                moved = chaos_of(handle).moved
                assert moved["weights"] > 5
                both = moved["kv_device"], moved["kv_host"]
                assert (min(both) > 3 if name in WHOLE else sum(both) > 3) or not planned.elastic
    assert wrong == []


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v2", "falcon_h1", "rwkv", "t5", "llava"])
def test_one_wrong_row_is_noticed(installed: None, name: str) -> None:
    model = model_of(name)
    planned = plan(type(model), model.config)
    targets = [-1 if planned.reason else max(range(len(planned.layers)), key=lambda index: stored(planned, index))]
    if planned.cross:
        targets.append(len(planned.layers))
    for target in targets:

        def act(step: int, cache: Any, target: int = target) -> None:
            if step == 3:
                plant(layers_of(cache)[target] if layers_of(cache) else cache)

        with ballonet.manage(model), before_each_forward(model, act):
            assert not agrees(model, name, "padded"), f"{name}, layer {target}"


def stored(planned: CachePlan, index: int) -> tuple[bool, bool, int]:
    """What makes a layer one to plant something in: that it is elastic, that it stores anything, that it is late."""
    layer = planned.layers[index]
    return layer.elastic, layer.stock != "DummyLayer", index


def plant(layer: Any) -> None:
    """One token of one sequence becomes another; in a layer without tokens the state is changed."""
    if isinstance(layer, list):  # RWKV's own
        layer[1][0] += 1
    elif getattr(layer, "keys", None) is not None:
        token = layer.keys.shape[-2] - 2
        wrong = -layer.keys[0, :, token], -layer.values[0, :, token]  # which may be the same memory
        layer.keys[0, :, token], layer.values[0, :, token] = wrong
    else:
        layer.recurrent_states[0][0] += 1


@pytest.mark.parametrize("name", [name for name, architecture in ARCHITECTURES.items() if architecture.refuses])
def test_way_that_is_left_out_is_refused_by_stock(name: str) -> None:
    model = build(name)
    for way, says in ARCHITECTURES[name].refuses.items():
        with pytest.raises(Exception, match=says):
            ask(model, name, way)


@pytest.mark.parametrize("name", [name for name, architecture in ARCHITECTURES.items() if architecture.extra])
def test_inputs_beside_the_tokens_change_the_answer(name: str) -> None:
    model, inputs = build(name), questions(name, 2)
    others = {key: -value if value.is_floating_point() else value for key, value in inputs.items()}
    assert not generate(model, "greedy", inputs, 2).agrees(generate(model, "greedy", others, 2))


def test_at_least_sixty_architectures_have_elastic_layers() -> None:
    assert ARCHITECTURES.keys() > NOT_ELASTIC
    assert ARCHITECTURES.keys() > WHOLE
    assert len(ARCHITECTURES) - len(NOT_ELASTIC) >= 60
