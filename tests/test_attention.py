"""Every attention that transformers has for this machine, over elastic views: the logits of stock to the bit."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ballonet import testing
from ballonet.allocator import install
from ballonet.hooks.kv import ranges as kv_module
from ballonet.hooks.kv.cache import KVCache
from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.hooks.kv.ranges import CacheRanges
from ballonet.offload.policy import geometry

from .models import build, generate, prompts
from .pool import in_pool

pytestmark = pytest.mark.usefixtures("small_pages")
INPUTS = prompts(batch=3, longest=12)


def not_compiled(implementation: str) -> AbstractContextManager[Any]:
    """Compiled for a CPU flex attention takes minutes, or fails, in stock too; its arithmetic without is the same."""
    compiles = implementation == "flex_attention"
    return torch.compiler.set_stance("force_eager") if compiles else nullcontext()


def test_no_attention_of_transformers_is_forgotten() -> None:
    """flash_*: tests/gpu/test_kv_tokens.py. paged: of continuous batching, which has a cache of its own."""
    known = {"eager", "sdpa", "flex_attention"}
    others = {name for name in ALL_ATTENTION_FUNCTIONS if not name.startswith(("flash_", "paged|"))}
    assert others | {"eager"} == known


CASES = [
    ("eager", 4, torch.bfloat16),
    ("eager", 2, torch.float32),
    ("sdpa", 4, torch.float32),
    ("sdpa", 2, torch.float16),
    ("sdpa", 1, torch.bfloat16),
    ("flex_attention", 2, torch.float32),
]


@pytest.mark.parametrize(("implementation", "heads", "dtype"), CASES, ids=str)
@pytest.mark.filterwarnings("ignore:_compile flag", "ignore:flex_attention called without")
def test_generate(implementation: str, heads: int, dtype: torch.dtype) -> None:
    """Prefill, left padding, decoding; then a question behind the first, which is a masked prefill on a cache."""

    def run(model: Any, cache: Any) -> list[torch.Tensor]:
        with not_compiled(implementation):
            first = generate(model, "greedy", INPUTS, past_key_values=cache)
            if cache is None:
                return [first.tokens, first.logits]
            more = torch.cat([first.tokens, INPUTS["input_ids"][:, :5]], dim=1)
            mask = torch.cat([INPUTS["attention_mask"], torch.ones(3, 19, dtype=torch.int64)], dim=1)
            with torch.no_grad():
                length = cache.get_seq_length()
                out = model(more[:, length:], attention_mask=mask, past_key_values=cache)
        return [first.tokens, first.logits, out.logits]

    with install.stock():
        model = build("llama", num_key_value_heads=heads, head_dim=16).to(dtype)
        model.set_attn_implementation(implementation)
        expected = run(model, DynamicCache(config=model.config))
    for chaos in (None, 3):
        with testing.manage(model, chaos=chaos):
            for cache in (None, KVCache(model.config)):
                outputs = run(model, cache)
                assert all(torch.equal(*pair) for pair in zip(outputs, expected, strict=False)), chaos
            assert all(layer.elastic for layer in cache.layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 4, 2, 8), (3, 6, 1, 6), (1, 8, 8, 64)], ids=str)
@pytest.mark.parametrize("layers", [1, 3])
def test_views_and_contiguous_tensors_give_the_same_bits(
    layers: int, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """Bits of `scaled_dot_product_attention` itself, with every kind of mask, at lengths around the ends of pages."""
    batch, heads, kv_heads, dim = shape
    ranges = CacheRanges(layers=layers, expected=1)
    layer = [ElasticLayer(ranges) for _ in range(layers)][-1]
    torch.manual_seed(0)
    for new in (1, 6, 1, 57, 1, 200, 1):
        keys, values = layer.update(*torch.randn(2, batch, kv_heads, new, dim, dtype=dtype))
        assert in_pool(keys)
        assert not keys.is_contiguous() or keys.shape[2] == 1 or batch * kv_heads == 1
        query = torch.randn(batch, heads, new, dim, dtype=dtype)
        length = keys.shape[2]
        causal = torch.ones(new, length, dtype=torch.bool).tril(length - new)
        padded = causal[None, None].repeat(batch, 1, 1, 1)
        padded[0, :, :, : length // 3] = False
        masks = [None, causal, padded, torch.zeros(batch, 1, new, length, dtype=dtype).masked_fill(~padded, -1e4)]
        for mask in masks:
            ours, expected = (
                scaled_dot_product_attention(query, k, v, attn_mask=mask, enable_gqa=heads != kv_heads)
                for k, v in ((keys, values), (keys.contiguous(), values.contiguous()))
            )
            if dim % 8:  # rows that do not start at a multiple of 16 bytes are added up in another order
                assert torch.allclose(ours, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
            else:
                assert torch.equal(ours.nan_to_num(), expected.nan_to_num())


def attended(layer: Any, new: int, seed: int) -> torch.Tensor:
    """What masked attention makes of the layer after `new` more tokens."""
    generator = torch.Generator().manual_seed(seed)
    fresh = torch.randn(2, 2, 2, new, 8, generator=generator)
    keys, values = layer.update(fresh[0], fresh[1])
    mask = torch.ones(2, 1, new, keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - new)
    return scaled_dot_product_attention(fresh[0], keys, values, attn_mask=mask)


@pytest.mark.parametrize("first", [50, 62, 63, 64])
def test_at_the_int32_bound_the_stock_layer_takes_over(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bound at 2**12 elements: a token here has 2 * 2 * (8 + 8) = 64, so 63 of them stay below it."""
    monkeypatch.setattr(geometry, "INT32", 2**12)
    assert geometry.longest(2, 2, 8, 8, 4) == 63
    ours, stock = ElasticLayer(), DynamicLayer()
    for step, new in enumerate((first, 1, 1, 11, 1)):
        assert torch.equal(attended(ours, new, step), attended(stock, new, step))
        assert ours.elastic == (stock.get_seq_length() <= 63)
        if ours.elastic:
            assert ours._range.geometry.tokens * ours.keys.stride(2) < 2**12
    for layer in (ours, stock):
        layer.crop(-20)
    assert torch.equal(attended(ours, 1, 9), attended(stock, 1, 9))
    assert ours.elastic == (stock.get_seq_length() <= 63)


def test_so_many_layers_share_a_range_as_stay_below_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "INT32", 2**12)
    ranges = CacheRanges(layers=6, longest=20, expected=1)
    layers = [ElasticLayer(ranges) for _ in range(6)]
    for layer in layers:
        layer.update(*torch.randn(2, 2, 2, 1, 8))
    kv_ranges = {id(layer._range): layer._range for layer in layers}
    for kv_range in kv_ranges.values():
        assert kv_range.geometry.tokens * kv_range.geometry.token_stride < 2**12
        assert kv_range.geometry.layers == 1


def test_a_layer_beyond_the_bound_is_refused_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody has asked `longest`, the geometry itself refuses: there is no elastic layer beyond the bound."""
    monkeypatch.setattr(geometry, "INT32", 2**12)
    monkeypatch.setattr(kv_module, "longest", lambda *sizes: 10**6)
    with pytest.raises(ValueError, match=r"reach 2\*\*31"):
        ElasticLayer().update(*torch.randn(2, 2, 2, 64, 8))
