"""Caches when something goes wrong, or on at the same time: errors, Ctrl-C, no memory inside a layer; threads."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import ballonet
from ballonet import testing
from ballonet.allocator import devices, install
from ballonet.hooks.kv import layer as kv
from ballonet.hooks.kv import range as kv_range
from ballonet.hooks.kv.cache import KVCache
from ballonet.hooks.kv.grouping import CacheRanges
from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.testing import chaos_of

from .caches import BUDGET, forget, fresh, full_host, kv_pages
from .lines import interrupted
from .models import Output, build, generate, prompts

pytestmark = pytest.mark.usefixtures("small_pages")
INPUTS = prompts(batch=3, longest=12)


def step(model: Any, cache: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Feeds the tokens behind those that the cache has; returns the next one of each sequence."""
    mask = torch.cat([INPUTS["attention_mask"], torch.ones(3, 200, dtype=torch.int64)], dim=1)[: tokens.shape[0]]
    with torch.no_grad():
        length = cache.get_seq_length() + tokens.shape[1]
        logits = model(tokens, attention_mask=mask[:, :length], past_key_values=cache).logits
    found: torch.Tensor = logits[:, -1:].argmax(-1)
    return found


def decode(model: Any, cache: Any, ids: torch.Tensor, count: int) -> torch.Tensor:
    """`count` more tokens behind `ids`, of which the cache may have some."""
    for _ in range(count):
        ids = torch.cat([ids, step(model, cache, ids[:, cache.get_seq_length() :])], dim=1)
    return ids


def to_common_length(cache: Any) -> None:
    lengths = [layer.get_seq_length() for layer in cache.layers]
    for layer, length in zip(cache.layers, lengths, strict=True):
        layer.crop(min(lengths) - length)


@pytest.mark.parametrize(
    ("error", "where", "chaos"),
    [(ValueError, "attention", None), (ValueError, "mlp", 5), (KeyboardInterrupt, "attention", 5),
     (KeyboardInterrupt, "mlp", None), (SystemExit, "attention", None), (SystemExit, "mlp", 5)],
)  # fmt: skip
def test_what_ends_a_forward_inside_a_layer(error: type[BaseException], where: str, chaos: int | None) -> None:
    with install.stock():
        model = build("llama")
        expected = decode(model, DynamicCache(config=model.config), INPUTS["input_ids"], 20)
    handle = testing.manage(model, chaos=chaos)
    cache = KVCache(model.config)
    group = handle._weights.group
    ids = decode(model, cache, INPUTS["input_ids"], 3)
    part = model.model.layers[1].self_attn.o_proj if where == "attention" else model.model.layers[1].mlp

    def fail(*_: Any) -> None:
        raise error("in the middle")

    for _ in range(3):
        with part.register_forward_pre_hook(fail), pytest.raises(error, match="in the middle"):
            step(model, cache, ids[:, -1:])
        assert len({layer.get_seq_length() for layer in cache.layers}) == 2
        to_common_length(cache)
        ids = decode(model, cache, ids, 4)
        assert group.leases == 0
    ids = decode(model, cache, ids, 20 - 15)
    assert torch.equal(ids, expected)
    assert all(layer.elastic for layer in cache.layers)
    handle.release()


def test_out_of_memory_inside_a_layer_and_on_with_a_smaller_batch(small_pages: int) -> None:
    with install.stock():
        model = build("llama")
        expected = decode(model, DynamicCache(config=model.config), INPUTS["input_ids"], 150)
    device = devices.require()
    with full_host(device), ballonet.manage(model):
        cache = KVCache(model.config)
        ids = decode(model, cache, INPUTS["input_ids"], 3)
        gc.collect()
        device.trim()
        used = device.snapshot()
        ballonet.set_budget((used["created"] + 2) * small_pages)
        failed = 0
        try:
            while ids.shape[1] < 160 and not failed:
                try:
                    ids = decode(model, cache, ids, 1)
                except torch.OutOfMemoryError:
                    failed = ids.shape[1]
        finally:
            ballonet.set_budget(BUDGET)
        assert failed
        to_common_length(cache)
        cache.batch_select_indices(torch.tensor([0, 1]))
        ids = decode(model, cache, ids[:2], 162 - ids.shape[1])
        assert torch.equal(ids, expected[:2])
        assert all(layer.elastic for layer in cache.layers)
    device.check()


INTERRUPTED: dict[str, Callable[[Any], Any]] = {
    "first update": lambda layer: (forget(layer), layer.update(*fresh(3, 5))),
    "update": lambda layer: layer.update(*fresh(1, 5)),
    "update with pages": lambda layer: layer.update(*fresh(90, 5)),
    "update after crop": lambda layer: (layer.crop(-3), layer.update(*fresh(3, 5))),
    "update in a larger place": lambda layer: layer.update(*fresh(9000, 5)),
    "crop": lambda layer: layer.crop(-30),
    "crop everything": lambda layer: layer.crop(-40),
    "repeat": lambda layer: layer.batch_repeat_interleave(2),
    "select": lambda layer: layer.batch_select_indices(torch.tensor([1])),
}


@pytest.mark.parametrize("act", INTERRUPTED)
def test_ctrl_c_between_any_two_lines(act: str) -> None:
    """Two layers of a range: one is interrupted, and is then as before or as after; the other is as it was."""
    device = devices.require()
    for nth in itertools.count(1, 3 if act == "update in a larger place" else 1):
        ranges = CacheRanges(layers=2, expected=2)
        layers, stock = [ElasticLayer(ranges) for _ in range(2)], [DynamicLayer() for _ in range(2)]
        for index, layer in enumerate((*layers, *stock)):
            layer.update(*fresh(40, index % 2))
        before = [(layer.keys.clone(), layer.values.clone()) for layer in layers]
        came = interrupted(lambda: INTERRUPTED[act](layers[0]), nth, kv, kv_range)  # noqa: B023
        INTERRUPTED[act](stock[0])
        keys, values = layers[0].keys, layers[0].values
        assert torch.equal(layers[1].keys, before[1][0])
        assert torch.equal(layers[1].values, before[1][1])
        held = [before[0], (stock[0].keys, stock[0].values)]
        if "after" in act:
            held.append((before[0][0][:, :, :-3], before[0][1][:, :, :-3]))
        if act == "first update" and layers[0].get_seq_length() == 0:
            held, keys, values = [], None, None
        assert not held or any(
            keys.shape == k.shape and torch.equal(keys, k) and torch.equal(values, v) for k, v in held
        ), nth
        stock[0].keys, stock[0].values = (None, None) if keys is None else (keys.clone(), values.clone())
        stock[0].is_initialized = keys is not None
        del keys, values
        for layer in (layers[0], stock[0]):
            layer.update(*fresh(70, 7, 2 if stock[0].keys is None else stock[0].keys.shape[0]))
        assert torch.equal(layers[0].keys, stock[0].keys)
        assert torch.equal(layers[0].values, stock[0].values)
        assert layers[0].elastic
        assert ranges.group(device).leases == 1  # of the thread that uses it by hand
        layers[1].update(*fresh(1, 9))
        assert torch.equal(layers[1].keys, torch.cat([before[1][0], fresh(1, 9)[0]], dim=2))
        for layer in layers:
            layer.reset()
        assert kv_pages(device) == 0
        device.check()
        if not came:
            break
    assert nth > 5


def test_several_generations_at_once(small_pages: int) -> None:
    """One model on three threads, another managed one, and one that is not managed but has an elastic cache."""
    with install.stock():
        shared, other, free = build("llama"), build("qwen2"), build("gpt2")
        expected = {id(model): generate(model, "greedy", INPUTS) for model in (shared, other, free)}
    found: list[tuple[int, Output]] = []
    errors: list[BaseException] = []

    def run(model: Any, make: Callable[[], Any]) -> None:
        try:
            for _ in range(3):
                found.append((id(model), generate(model, "greedy", INPUTS, past_key_values=make())))
        except BaseException as error:
            errors.append(error)
            raise

    works = [
        *[(shared, lambda: None)] * 2,
        (shared, lambda: KVCache(shared.config)),
        (other, lambda: None),
        (free, lambda: KVCache(free.config)),
        (free, lambda: None),
    ]
    with testing.manage(shared, chaos=1) as first, testing.manage(other, chaos=2) as second:
        threads = [threading.Thread(target=run, args=work) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert len(found) == 3 * len(works)
        assert all(output.tokens.equal(expected[model].tokens) for model, output in found)
        assert all(output.agrees(expected[model]) for model, output in found)
        for handle in (first, second):
            assert handle._weights.group.leases == 0
            assert chaos_of(handle) is not None
            assert sum(chaos_of(handle).moved.values()) > 0


def test_the_thread_of_an_unmanaged_model_keeps_a_lease_on_its_cache() -> None:
    """Attention reads what an append has shown, and no hook says when it is done."""
    model = build("llama")
    cache = KVCache(model.config)
    group = cache._ranges.group(devices.require())
    seen: list[int] = []
    update = kv_range.KVRange._note

    def note(*args: Any) -> None:
        seen.append(group.leases)
        update(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_range.KVRange, "_note", note)
        with model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: seen.append(group.leases)):
            step(model, cache, INPUTS["input_ids"])
    assert seen == [2, 2, 1, 2]
