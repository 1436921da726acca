"""A managed model under torch.compile: the graphs and the tokens of stock, and caches that are elastic again after."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch._dynamo.utils import counters
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ballonet import testing
from ballonet.hooks.kv.cache import KVCache
from ballonet.hooks.kv.layer import ElasticLayer

from .caches import installed
from .models import build, generate, prompts

pytestmark = pytest.mark.chaos


INPUTS = prompts(batch=2, longest=10)
Call = Callable[..., Any]


@pytest.fixture(scope="module", autouse=True)
def page() -> Iterator[int]:
    with installed(4096) as size:
        yield size


def forget_graphs() -> None:
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    forget_graphs()


def graphs() -> int:
    """Graphs made so far, without one break or frame given up."""
    assert not counters["graph_break"]
    assert not counters["unimplemented"]
    assert counters["frames"]["total"] == counters["frames"]["ok"]
    return counters["stats"]["unique_graphs"]


def step(call: Call, ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
    """The next token of each sequence, and the cache."""
    past = 0 if cache is None else cache.get_seq_length()
    mask = torch.cat([INPUTS["attention_mask"], torch.ones(2, past + ids.shape[1], dtype=torch.int64)], dim=1)
    with torch.no_grad():
        out = call(input_ids=ids, attention_mask=mask[:, : past + ids.shape[1]], past_key_values=cache, use_cache=True)
    return out.logits[:, -1:].argmax(-1), out.past_key_values


def decode(call: Callable[[int], Call], cache: Any, count: int, act: Callable[[int, Any], None]) -> torch.Tensor:
    """`count` tokens, the i-th by call(i). `act` is called before each forward but the first."""
    ids, cache = step(call(0), INPUTS["input_ids"], cache)
    tokens = [ids]
    for index in range(1, count):
        act(index, cache)
        ids, cache = step(call(index), ids, cache)
        tokens.append(ids)
    return torch.cat(tokens, dim=1)


def nothing(index: int, cache: Any) -> None:
    pass


def compiled(model: Any) -> Call:
    call: Call = torch.compile(model, fullgraph=True, backend="eager")
    return call


def dynamic_cache(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config)


def kv_cache(model: Any) -> KVCache:
    return KVCache(model.config)


def test_whole_graphs_and_as_many_as_stock() -> None:
    stock = build("llama", num_hidden_layers=1)
    call = compiled(stock)
    expected = decode(lambda _: call, dynamic_cache(stock), 8, nothing)
    count = graphs()
    forget_graphs()
    model = build("llama", num_hidden_layers=1)
    answer = generate(model, "greedy", INPUTS)
    with testing.manage(model, chaos=1):
        call = compiled(model)
        assert torch.equal(decode(lambda _: call, kv_cache(model), 8, nothing), expected)
        assert graphs() == count
        assert generate(model, "greedy", INPUTS).agrees(answer)


def disturb(index: int, cache: Any) -> None:
    """What leaves a range without the views that it had."""
    if index % 5 == 4:
        cache.crop(-5)
    if index % 7 == 6:
        cache.reorder_cache(torch.tensor([1, 0]))


def test_compiled_and_eager_steps_take_turns_on_one_cache() -> None:
    model = build("llama", num_hidden_layers=1)
    expected = decode(lambda _: model, dynamic_cache(model), 40, disturb)
    elastic: list[bool] = []
    made: list[int] = []

    def look(index: int, cache: Any) -> None:
        elastic.append(all(layer.elastic for layer in cache.layers))
        assert elastic[-1] or not any(layer.elastic for layer in cache.layers)
        made.append(graphs())
        disturb(index, cache)

    handle = testing.manage(model, chaos=2)
    call = compiled(model)
    cache = kv_cache(model)
    assert torch.equal(decode(lambda i: call if i % 4 > 1 else model, cache, 40, look), expected)
    assert elastic == [i % 4 <= 1 for i in range(39)]
    assert made[-1] == made[30] <= 6  # elastic and stock, once without and once or twice with symbols
    step(model, INPUTS["input_ids"][:, :1], cache)
    assert all(layer.elastic for layer in cache.layers)
    handle.release()


CHANGES: dict[str, Callable[[Any], None]] = {
    "crop": lambda layer: layer.crop(-4),
    "reorder": lambda layer: layer.reorder_cache(torch.tensor([1, 1])),
    "repeat": lambda layer: layer.batch_repeat_interleave(2),
    "select": lambda layer: layer.batch_select_indices(torch.tensor([1])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_change_of_a_layer_inside_a_graph_leaves_its_range(change: str) -> None:
    ours, stock = ElasticLayer(), DynamicLayer()
    tokens = torch.randn(2, 3, 40, 8)
    for layer in (ours, stock):
        layer.update(tokens, tokens)
    before = ours.keys
    kept = before.clone()
    for layer in (ours, stock):
        layer.crop(-20)  # pages leave, and with them the views that the range had
    call = torch.compile(CHANGES[change], fullgraph=True, backend="eager")
    for layer in (ours, stock):
        call(layer)
    assert torch.equal(ours.keys, stock.keys)
    assert torch.equal(ours.values, stock.values)
    for layer in (ours, stock):
        layer.update(*[tokens[:1, :, :1].expand(layer.keys.shape[0], -1, -1, -1)] * 2)
    assert ours.elastic
    assert torch.equal(ours.keys, stock.keys)
    assert torch.equal(before, kept)


@torch._dynamo.config.patch(recompile_limit=64)  # each layer is a graph of its own, in stock too
def test_single_layers_compiled() -> None:
    counts = []
    tokens = []
    for managed in (False, True):
        forget_graphs()
        model = build("llama", num_hidden_layers=2)
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend="eager")
        handle = testing.manage(model, chaos=3) if managed else None
        tokens.append(decode(lambda _, model=model: model, None, 8, nothing))
        counts.append(graphs())
        if handle is not None:
            handle.release()
    assert torch.equal(*tokens)
    assert counts[1] <= counts[0] + 2  # a layer of the first forward had no cache yet


def test_generate_with_a_compiled_forward() -> None:
    """Hooks run outside of the graph, and hold a lease."""
    model = build("llama", num_hidden_layers=1)
    expected = generate(model, "greedy", INPUTS, 6)
    leases: list[int] = []
    model.register_forward_hook(lambda *_: leases.append(handle._weights.group.leases))
    with testing.manage(model, chaos=4) as handle:
        model.forward = torch.compile(model.forward, fullgraph=True, backend="eager")
        for _ in range(2):
            assert generate(model, "greedy", INPUTS, 6).agrees(expected)
            assert graphs() <= 3
        assert {*leases} == {1}
        assert handle._weights.group.leases == 0


def test_training_step_compiled() -> None:
    def gradients(model: Any) -> list[torch.Tensor]:
        call = torch.compile(model, fullgraph=True, backend="aot_eager")
        call(**INPUTS, labels=INPUTS["input_ids"], use_cache=False).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients(build("llama", num_hidden_layers=1))
    forget_graphs()
    model = build("llama", num_hidden_layers=1)
    with testing.manage(model, chaos=5):
        assert all(torch.equal(*pair) for pair in zip(gradients(model), expected, strict=True))


@torch._inductor.config.patch(compile_threads=1, cpp_cache_precompile_headers=False)  # what pays for many kernels
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_on_a_cache_that_was_elastic() -> None:
    """A step of attention alone: each kernel of a model would be a run of the C++ compiler."""

    def attend(states: list[torch.Tensor], cache: DynamicCache) -> torch.Tensor:
        query, keys, values = states
        return torch.nn.functional.scaled_dot_product_attention(query, *cache.update(keys, values, 0))

    compiled = torch.compile(attend, fullgraph=True)
    model = build("llama", num_hidden_layers=1)
    ours, stock = kv_cache(model), dynamic_cache(model)
    for index in range(6):
        states = [torch.randn(2, 3, 20 if index == 0 else 1, 8) for _ in range(3)]
        output = (compiled if index == 2 else attend)(states, ours)
        assert torch.allclose(output, attend(states, stock), atol=1e-6)
        assert ours.layers[0].elastic == (index != 2)
    assert torch.equal(ours.layers[0].keys, stock.layers[0].keys)
    assert torch.equal(ours.layers[0].values, stock.layers[0].values)


def test_a_managed_model_can_be_exported() -> None:
    model = build("llama", num_hidden_layers=1)
    arguments = dict(INPUTS, use_cache=False)
    with torch.no_grad():
        expected = model(**arguments).logits
        with testing.manage(model, chaos=6):
            exported = torch.export.export(model, (), arguments, strict=False)
            assert torch.equal(exported.module()(**arguments).logits, expected)
