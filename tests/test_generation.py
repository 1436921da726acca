"""How caches of attached models become elastic: only theirs, on their thread, and nothing stays behind."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.generation.utils import GenerationMixin

from ballonet.allocator._native import Device
from ballonet.allocator.errors import AlreadyManaged
from ballonet.hooks import compat
from ballonet.hooks.kv import generation
from ballonet.hooks.kv.cache import KVCache
from ballonet.hooks.kv.layer import ElasticLayer

from .kv.pressure import started
from .models import Output, before_each_forward, build, generate, prompts, questions
from .threads import elsewhere

INPUTS = prompts(batch=3, longest=12)
Act = Callable[[int, Any], None]


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with started(budget=2**24, page_size=4096) as opened:
        yield opened


@contextmanager
def attached(model: torch.nn.Module) -> Iterator[None]:
    detach = generation.attach(model)
    try:
        yield
    finally:
        detach()


@functools.cache
def model_of(name: str) -> PreTrainedModel:
    return build(name)


@functools.cache
def stock(name: str, mode: str) -> Output:
    return generate(model_of(name), mode, INPUTS)


def kinds(cache: Any) -> set[type]:
    return {type(layer) for layer in cache.layers}


def test_only_this_thread_and_this_model_get_elastic_layers(device: Device) -> None:
    managed, other = model_of("llama"), build("llama")
    copied = copy.deepcopy(managed)
    caches: dict[str, set[type]] = {}
    leases: list[Any] = []

    def look(name: str) -> Act:
        return lambda step, cache: caches.setdefault(name, kinds(cache)) and None

    def others() -> None:
        caches["constructed"] = kinds(DynamicCache(config=managed.config))
        generate(other, "greedy", INPUTS)

    def in_the_middle(step: int, cache: Any) -> None:
        look("managed")(step, cache)
        if step == 2:
            elsewhere(others)
            generate(copied, "greedy", INPUTS)  # on this thread, inside the forward of the managed one

    with (
        attached(managed),
        managed.register_forward_pre_hook(lambda *_: leases.append(generation.ModelLease(weakref.ref(managed)).open())),
        managed.register_forward_hook(lambda *_: leases.pop().close(), always_call=True),
        before_each_forward(managed, in_the_middle),
        before_each_forward(other, look("other")),
        before_each_forward(copied, look("copied")),
    ):
        output = generate(managed, "greedy", INPUTS)
    assert caches["managed"] == {ElasticLayer}
    assert caches["other"] == caches["copied"] == caches["constructed"] == {DynamicLayer}
    assert output.agrees(stock("llama", "greedy"))
    assert not leases


def test_detached_models_leave_transformers_as_it_was() -> None:
    before = GenerationMixin._prepare_cache_for_generation
    signature = inspect.signature(before)
    models = [build("llama"), build("gpt2")]
    attributes = [set(vars(model)) for model in models]
    detach = [generation.attach(model) for model in models]
    assert compat.layer_types()["full_attention"] is not DynamicLayer
    assert inspect.signature(GenerationMixin._prepare_cache_for_generation) == signature
    assert [set(vars(model)) for model in models] == attributes
    assert generate(pickle.loads(pickle.dumps(models[0])), "greedy", INPUTS).agrees(stock("llama", "greedy"))
    with pytest.raises(AlreadyManaged):
        generation.attach(models[0])
    detach[0]()
    detach[0]()
    assert compat.layer_types()["full_attention"] is not DynamicLayer
    del models[1]  # collected without being detached
    gc.collect()
    assert compat.layer_types()["full_attention"] is DynamicLayer
    assert GenerationMixin._prepare_cache_for_generation is before


def test_wrapper_around_ours_stays(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    detach = generation.attach(model)
    ours = compat.layer_types()["full_attention"]
    made: list[Any] = []

    def theirs(**kwargs: Any) -> Any:
        made.append(ours(**kwargs))
        return made[-1]

    monkeypatch.setitem(compat.layer_types(), "full_attention", theirs)
    detach()
    assert compat.layer_types()["full_attention"] is theirs
    assert generate(model, "greedy", INPUTS).agrees(stock("llama", "greedy"))
    assert {type(layer) for layer in made} == {DynamicLayer}
    detach = generation.attach(model)
    assert generate(model, "greedy", INPUTS).agrees(stock("llama", "greedy"))
    detach()
    assert compat.layer_types()["full_attention"] is theirs
    monkeypatch.undo()
    compat.layer_types()["full_attention"] = DynamicLayer


def test_a_cache_that_a_forward_makes_for_itself_is_elastic(device: Device) -> None:
    model = model_of("llama")
    with attached(model):
        lease = generation.ModelLease(weakref.ref(model)).open()
        with torch.no_grad():
            cache = model(**INPUTS, use_cache=True).past_key_values
        assert cache.layers[0]._range.group.leases == 1
        lease.close()
        lease.close()
        assert cache.layers[0]._range.group.leases == 0
        assert kinds(cache) == {ElasticLayer}
        assert kinds(DynamicCache(config=model.config)) == {DynamicLayer}


def test_the_explicit_cache(device: Device) -> None:
    model = model_of("qwen2")
    cache = KVCache(model.config, max_length=40)
    assert generate(model, "beam", INPUTS, past_key_values=cache).agrees(stock("qwen2", "beam"))
    assert all(layer.elastic for layer in cache.layers)
    assert cache.get_seq_length() == 12 + 14 - 1


@pytest.mark.parametrize("implementation", ["static", "offloaded", "offloaded_static", "quantized"])
def test_other_kinds_of_cache_stay_what_they_are(
    device: Device, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama")
    made: list[ElasticLayer] = []
    layer = generation.Building.layer

    def outcome() -> Any:
        try:
            return generate(model, "greedy", INPUTS, cache_implementation=implementation).tokens.tolist()
        except Exception as error:  # some need a GPU or a package that is not here
            return type(error), str(error)

    expected = outcome()
    monkeypatch.setattr(
        generation.Building, "layer", lambda *args, **kwargs: made.append(layer(*args, **kwargs)) or made[-1]
    )
    with attached(model):
        assert outcome() == expected
        assert not made
        generate(model, "greedy", INPUTS, cache_implementation="dynamic")
        assert made


def test_module_without_a_dynamic_cache_is_left_alone() -> None:
    bert = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}
    modules = (transformers.BertModel(transformers.BertConfig(**bert)), build("minimax"), build("rwkv"))
    for module in (*modules, torch.nn.Linear(2, 2)):
        with attached(module):
            assert compat.layer_types()["full_attention"] is DynamicLayer
            generation.ModelLease(weakref.ref(module)).open().close()


@pytest.mark.parametrize("name", ["t5", "t5gemma"])
def test_both_halves_of_an_encoder_decoder_s_cache_have_ranges_of_their_own(device: Device, name: str) -> None:
    """T5Gemma makes the half for the encoder's output by itself, after transformers has prepared the cache."""
    model = build(name)
    with attached(model):
        prepared = model.generate(**questions(name, 2), max_new_tokens=3, return_dict_in_generate=True).past_key_values
        lease = generation.ModelLease(weakref.ref(model)).open()
        forwarded = model(**questions(name, 2), decoder_input_ids=torch.tensor([[2], [2]])).past_key_values
        lease.close()
    assert type(prepared) is type(forwarded) is EncoderDecoderCache
    assert {type(layer) for layer in prepared.cross_attention_cache.layers} == {ElasticLayer}
    assert ElasticLayer in {type(layer) for layer in prepared.self_attention_cache.layers}
    for cache in (prepared, forwarded):
        halves = [
            {id(layer.ranges) for layer in half.layers if isinstance(layer, ElasticLayer)}
            for half in (cache.self_attention_cache, cache.cross_attention_cache)
        ]
        assert len(halves[0]) == 1
        assert halves[0].isdisjoint(halves[1])


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_decoder_that_is_given_what_an_encoder_said(device: Device, name: str) -> None:
    """The decoder's forward makes both halves of the cache."""
    model = build(name, add_cross_attention=True)
    said = {"encoder_hidden_states": torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(2))}

    def steps() -> tuple[Any, torch.Tensor]:
        lease = generation.ModelLease(weakref.ref(model)).open()
        with torch.no_grad():
            cache = model(INPUTS["input_ids"], **said, use_cache=True).past_key_values
            logits = model(INPUTS["input_ids"][:, :2], **said, past_key_values=cache, use_cache=True).logits
        lease.close()
        return cache, logits

    stock, expected = steps()
    with attached(model):
        elastic, output = steps()
    assert torch.allclose(output, expected, rtol=1e-4, atol=1e-4)
    assert type(stock) is type(elastic) is EncoderDecoderCache
    assert kinds(elastic.self_attention_cache) == kinds(elastic.cross_attention_cache) == {ElasticLayer}
    assert elastic.cross_attention_cache.layers[0].keys.shape[2] == 5


def test_the_classes_with_their_own_preparation_get_it_back() -> None:
    model = build("t5gemma")
    owner = type(model)
    before = vars(owner)["_prepare_cache_for_generation"]
    with attached(model), attached(build("llama")):
        assert vars(owner)["_prepare_cache_for_generation"] is not before
    assert vars(owner)["_prepare_cache_for_generation"] is before
