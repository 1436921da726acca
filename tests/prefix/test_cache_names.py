"""A model's cache by all of its names: what transformers calls it, and what callers still do."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from ballonet.hooks.cache_argument import CACHE_NAMES, given_cache
from ballonet.hooks.compat import cache_name, computes_whole_prompt, prepared_caches
from ballonet.hooks.splice.forms import Call, cache_of

from ..models import build
from .conversations import sides, words


@pytest.mark.parametrize("name", ["llama", "mamba2", "t5"])
def test_cache_name_is_an_argument_that_the_forward_and_generate_take(name: str) -> None:
    model = build(name)
    assert cache_name(model) in inspect.signature(model.forward).parameters
    given: dict[str, Any] = {}
    model._prepare_cache_for_generation(model.generation_config, given, "greedy_search", 1, 9)
    assert list(given) == [cache_name(model)]


def test_cache_name_is_that_of_generate_where_the_forward_takes_anything() -> None:
    class Wrapped(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> None: ...

    assert cache_name(Wrapped()) == cache_name(build("llama"))


def test_cache_is_found_by_every_name_and_beside_empty_ones() -> None:
    cache = DynamicCache()
    for name in CACHE_NAMES:
        assert given_cache({"use_cache": True, name: cache}) is cache
        assert given_cache(dict.fromkeys(CACHE_NAMES) | {name: cache}) is cache
        assert cache_of(Call((), {"hidden_states": None, name: "of states"})) == "of states"
    assert given_cache({"use_cache": True}) is None


@pytest.mark.parametrize(
    ("name", "whole"), [("llama", False), ("mamba2", True), ("falcon_h1", False), ("gemma2", False)]
)
def test_whole_prompt_is_computed_with_states_alone(name: str, whole: bool) -> None:
    (cache,) = prepared_caches(build(name))
    assert computes_whole_prompt(cache) is whole


@pytest.mark.parametrize("older", [False, True])
def test_a_users_cache_is_left_alone_by_both_names(older: bool) -> None:
    """The hook before `generate()` sees what the caller wrote."""
    generator = torch.Generator().manual_seed(1)
    with sides() as both:
        ids, name = words(generator, 20), "past_key_values" if older else cache_name(both.stock)
        got, want = (
            model.generate(ids, max_new_tokens=3, **{name: DynamicCache(config=model.config)})
            for model in (both.model, both.stock)
        )
        assert torch.equal(got, want)
        assert both.store.counts.why_not == {"a cache was given": 1}
