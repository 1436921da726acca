"""Caches when something goes wrong, or on at the same time: errors, Ctrl-C, no memory inside a layer; threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.models.llama import modeling_llama

from ballonet import testing
from ballonet.allocator import install
from ballonet.hooks.kv.cache import KVCache
from ballonet.testing import chaos_of

from .faulting import at_each_line
from .models import Output, build, generate, prompts

pytestmark = pytest.mark.usefixtures("small_pages")
INPUTS = prompts(batch=3, longest=12)


def step(model: Any, cache: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Feeds the tokens behind those that the cache has; returns the next one of each sequence."""
    mask = torch.cat([INPUTS["attention_mask"], torch.ones(3, 200, dtype=torch.int64)], dim=1)[: tokens.shape[0]]
    with torch.no_grad():
        length = cache.get_seq_length() + tokens.shape[1]
        logits = model(tokens, attention_mask=mask[:, :length], past_key_values=cache).logits
    ids: torch.Tensor = logits[:, -1:].argmax(-1)
    return ids


def decode(model: Any, cache: Any, ids: torch.Tensor, count: int) -> torch.Tensor:
    """`count` more tokens behind `ids`, of which the cache may have some."""
    for _ in range(count):
        ids = torch.cat([ids, step(model, cache, ids[:, cache.get_seq_length() :])], dim=1)
    return ids


def to_common_length(cache: Any, ids: torch.Tensor) -> None:
    """At most to that before the last token, which is to be fed."""
    lengths = [layer.get_seq_length() for layer in cache.layers]
    for layer, length in zip(cache.layers, lengths, strict=True):
        layer.crop(min(*lengths, ids.shape[1] - 1) - length)


@pytest.mark.parametrize(
    ("error", "chaos"), [(torch.OutOfMemoryError, None), (ValueError, None), (KeyboardInterrupt, 5), (SystemExit, 5)]
)
def test_forward_interrupted_anywhere_leaves_a_cache_that_works(error: type[BaseException], chaos: int | None) -> None:
    """Before lines of the model's own. What each layer has then is right, and the next forward leases no more."""
    with install.stock():
        model = build("llama")
        expected = decode(model, DynamicCache(config=model.config), INPUTS["input_ids"], 8)
    handle = testing.manage(model, chaos=chaos)
    halves = 0

    def begin() -> AbstractContextManager[tuple[Any, torch.Tensor]]:
        cache = KVCache(model.config)
        return nullcontext((cache, decode(model, cache, INPUTS["input_ids"], 3)))

    runs = at_each_line(begin, lambda it: step(model, it[0], it[1][:, -1:]), modeling_llama, most=12, error=error)
    for (cache, ids), _ in runs:
        halves += len({layer.get_seq_length() for layer in cache.layers}) == 2
        to_common_length(cache, ids)
        assert torch.equal(decode(model, cache, ids, 8 - 3), expected)
        assert handle._weights.group.leases == 0
        assert all(layer.elastic for layer in cache.layers)
    assert halves > 3
    handle.release()


def test_several_generations_at_once(small_pages: int) -> None:
    """One model on three threads, another managed one, and one that is not managed but has an elastic cache."""
    with install.stock():
        shared, other, free = build("llama"), build("qwen2"), build("gpt2")
        expected = {id(model): generate(model, "greedy", INPUTS) for model in (shared, other, free)}
    outputs: list[tuple[int, Output]] = []
    errors: list[BaseException] = []

    def run(model: Any, make: Callable[[], Any]) -> None:
        try:
            for _ in range(3):
                outputs.append((id(model), generate(model, "greedy", INPUTS, past_key_values=make())))
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
        assert len(outputs) == 3 * len(works)
        assert all(output.tokens.equal(expected[model].tokens) for model, output in outputs)
        assert all(output.agrees(expected[model]) for model, output in outputs)
        for handle in (first, second):
            assert handle._weights.group.leases == 0
            assert chaos_of(handle) is not None
            assert sum(chaos_of(handle).moved.values()) > 0
