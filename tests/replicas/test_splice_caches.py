"""Layers of a cache that are elsewhere: they hold nothing, and lengths are as if they did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from ballonet.allocator import devices
from ballonet.allocator.errors import SpliceError
from ballonet.hooks.compat import DynamicLayer
from ballonet.hooks.kv.cache import KVCache
from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.hooks.splice import elsewhere
from ballonet.hooks.splice.elsewhere import Elsewhere
from ballonet.hooks.splice.splice import Splice, SpliceStage
from ballonet.offload.policy.replicas.groups import Span

from ..caches import installed, kv_pages
from ..models import build
from .parts import Step, cuts, deeper, in_one, inputs_of, steps

# with layers of attention, with windows, with states, with both in one, with an index
NAMES = ["llama", "gemma2", "qwen3_next", "falcon_h1", "glm_moe_dsa", "minimax", "gemma3n_text", "mamba", "gpt2"]


def bytes_of(layer: Any) -> int:
    """Bytes of the tensors that a layer of a cache has."""
    found = [each for each in vars(layer).values() if isinstance(each, torch.Tensor)]
    for each in vars(layer).values():
        found += [one for one in each.values() if isinstance(one, torch.Tensor)] if isinstance(each, dict) else []
    return sum(each.nbytes for each in found if each.dim())  # the size of a window is a tensor, too


@pytest.mark.parametrize("name", NAMES)
def test_each_holds_its_own_layers_and_answers_for_all(name: str) -> None:
    model = deeper(name)
    with Splice(model) as splice:
        count = len(splice.layers)
        asked = [each for each in steps(9) if each.request == "first"]
        whole: Any = None
        for step in asked:
            whole = SpliceStage(splice).run(inputs_of(model, step, splice.cache_name, whole and whole.cache))
        for span in (Span(0, 1), Span(1, count), Span(count - 1, count)):
            given: list[Any] = []
            if span.begin:
                splice.span = Span(0, span.begin)
                before: Any = None
                for step in asked:
                    before = SpliceStage(splice).run(inputs_of(model, step, splice.cache_name, before and before.cache))
                    given.append(before)
            splice.span = span
            cache: Any = None
            for index, step in enumerate(asked):
                found = SpliceStage(splice).run(
                    inputs_of(model, step, splice.cache_name, cache), given[index] if given else None
                )
                cache = found.cache
            if name not in ("mamba", "minimax"):
                assert [type(each).__name__.removesuffix("Elsewhere") for each in cache.layers] == [
                    type(each).__name__ for each in whole.cache.layers
                ]
            for mine, its in zip(cache.layers, whole.cache.layers, strict=False):
                if hasattr(its, "get_seq_length"):
                    assert mine.get_seq_length() == its.get_seq_length()
                    assert mine.get_mask_sizes(3) == its.get_mask_sizes(3)
                if hasattr(its, "has_previous_state"):
                    assert mine.has_previous_state == its.has_previous_state
                if isinstance(mine, Elsewhere):
                    assert not bytes_of(mine)
                    with pytest.raises(SpliceError, match="are on another replica"):
                        mine.update(torch.zeros(1), torch.zeros(1))


def one_part(model: Any, splice: Splice) -> Any:
    """The cache of the first half after a prompt."""
    splice.span = Span(0, 2)
    return SpliceStage(splice).run(inputs_of(model, steps(9)[0], "past_key_values", None)).cache


def test_what_is_done_to_a_cache_is_done_to_lengths() -> None:
    model = build("llama", num_hidden_layers=4)
    with Splice(model) as splice:
        cache = one_part(model, splice)
        kinds = [isinstance(layer, Elsewhere) for layer in cache.layers]
        assert kinds == [False, False, True, True]
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 2]))
        assert [layer.get_seq_length() for layer in cache.layers] == [9] * 4
        cache.crop(-2)
        assert [layer.get_seq_length() for layer in cache.layers] == [7] * 4
        cache.reset()
        assert [layer.get_seq_length() for layer in cache.layers] == [0] * 4


def test_layers_are_handed_over() -> None:
    """What a replica does whose span grows, and one whose span shrinks: the tokens of the whole."""
    model, asked = build("llama", num_hidden_layers=4), [each for each in steps(9) if each.request == "first"]
    expected = in_one(model, asked)
    with Splice(model) as splice:
        caches: list[Any] = [None, None]
        for number, step in enumerate(asked):
            if number == 2:  # layer 1 goes from the first to the second
                layer = caches[0].layers[1]
                keys, values = layer.keys.clone(), layer.values.clone()
                elsewhere.leave(caches[0], 1)
                assert layer.keys is None
                elsewhere.leave(caches[0], 1)
                held = elsewhere.hold(caches[1], 1)
                assert isinstance(held, DynamicLayer)
                assert held.get_seq_length() == 0
                held.update(keys, values)
                assert elsewhere.hold(caches[1], 1) is held
            given: Any = None
            border = 2 if number < 2 else 1
            for part, span in enumerate((Span(0, border), Span(border, 4))):
                splice.span = span
                given = SpliceStage(splice).run(inputs_of(model, step, "past_key_values", caches[part]), given)
                caches[part] = given.cache
            assert torch.equal(given.logits, expected[number])


@pytest.mark.parametrize("page", [4096, 65536], ids=["alone", "in one range"])
@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
def test_elastic_layers(name: str, page: int) -> None:
    """With large pages the layers that run here have their places in a range that is laid out for all."""
    model, asked = deeper(name), steps(4)
    expected = in_one(model, asked)
    with installed(page), Splice(model) as splice:
        count = len(splice.layers)
        caches: dict[tuple[str, int], Any] = {}
        for step, logits in zip(asked, expected, strict=True):
            given: Any = None
            for part, span in enumerate(cuts(count, 2)):
                splice.span = span
                cache = caches.setdefault((step.request, part), KVCache(model.config))
                given = SpliceStage(splice).run(inputs_of(model, step, "past_key_values", cache), given)
                kinds = [type(layer) for layer in cache.layers]
                assert [issubclass(kind, ElasticLayer) for kind in kinds] == [each in span for each in range(count)]
                assert {layer.get_seq_length() for layer in cache.layers} == {cache.get_seq_length()}
            assert torch.equal(given.logits, logits)
        assert kv_pages(devices.require()) > 0
        layer = cache.layers[0]
        assert isinstance(layer, Elsewhere)
        assert isinstance(elsewhere.hold(cache, 0), ElasticLayer)
        elsewhere.leave(cache, count - 1)
        assert isinstance(cache.layers[count - 1], Elsewhere)
        del cache, caches, given, layer


def test_a_cache_whose_tokens_were_not_handed_over_is_refused() -> None:
    model, step = build("llama", num_hidden_layers=4), steps(9)[0]
    after = Step("first", torch.cat([step.ids, step.ids[:, :1]], dim=1), 1)
    with Splice(model) as splice:
        whole = SpliceStage(splice).run(inputs_of(model, step, "past_key_values", None)).cache
        splice.span = Span(0, 2)
        with pytest.raises(SpliceError, match="layer 2 of this cache holds tokens, but does not run here"):
            SpliceStage(splice).run(inputs_of(model, after, "past_key_values", whole))
        part = SpliceStage(splice).run(inputs_of(model, step, "past_key_values", None)).cache
        splice.span = Span(0, 3)
        with pytest.raises(SpliceError, match="its tokens are on another replica"):
            SpliceStage(splice).run(inputs_of(model, after, "past_key_values", part))
        static = StaticCache(config=model.config, max_cache_len=32)
        with pytest.raises(SpliceError, match="fixed size"):
            SpliceStage(splice).run(inputs_of(model, step, "past_key_values", static))


def test_transformers_tables_are_as_before() -> None:
    """No class of what is elsewhere takes the place of its stock class."""
    from transformers import cache_utils

    deeper("deepseek_v4")
    before = dict(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING)
    with Splice(deeper("deepseek_v4")) as splice:
        splice.span = Span(0, 2)
        cache = SpliceStage(splice).run(inputs_of(splice.model, steps(9)[0], "past_key_values", None)).cache
        assert sum(isinstance(layer, Elsewhere) for layer in cache.layers) == 2
    assert before == cache_utils.DYNAMIC_LAYER_TYPE_MAPPING
    assert not any(issubclass(type(layer), Elsewhere) for layer in DynamicCache(config=splice.model.config).layers)
