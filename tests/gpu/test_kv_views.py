"""Attention over the elastic cache's views, whose indices grow as far as kernels can count."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.offload.policy.geometry import INT32, longest

from .scene import PAGES, Place, device_bytes, play

BATCH, HEADS, DIM = 8, 8, 128


def the_last_token_is_found(place: Place, tokens: int, dtype: str) -> None:
    """Attention over a view whose largest index is just below 2**31 reads the same as over contiguous tensors.

    The newest key alone answers the query, so the result is the newest value; an index that overflows reads elsewhere.
    """
    kind = getattr(torch, dtype)
    layer = ElasticLayer()
    shape = (BATCH, HEADS, tokens, DIM)
    keys, values = (torch.empty(shape, dtype=kind, device=place.kind) for _ in range(2))
    step = max(1, tokens // 16)
    query = torch.randn(BATCH, HEADS, 1, DIM, device=place.kind).to(kind)
    with torch.no_grad():
        for start in range(0, tokens, step):
            part = slice(start, min(start + step, tokens))
            for whole in (keys, values):
                whole[:, :, part].normal_(std=0.1)
            if part.stop == tokens:
                keys[:, :, -1:] = query
            seen, shown = layer.update(keys[:, :, part], values[:, :, part])
        assert layer.elastic
        mask = None
        if dtype == "float32":  # another kernel
            mask = torch.rand(BATCH, 1, 1, tokens, device=place.kind) < 0.9
            mask[..., -1] = True
        right = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=8.0)
        attended = F.scaled_dot_product_attention(query, seen, shown, attn_mask=mask, scale=8.0)
    assert seen.shape == shape
    if tokens == longest(BATCH, HEADS, DIM, DIM, kind.itemsize):
        assert INT32 - 2 * seen.stride(2) <= (tokens - 1) * seen.stride(2) < INT32
    assert torch.allclose(attended.float(), values[:, :, -1:].float(), atol=1e-2), "the newest token was not found"
    assert torch.allclose(attended.float(), right.float(), rtol=0, atol=1e-3 if kind == torch.float32 else 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_last_token_is_found(dtype: str) -> None:
    tokens = longest(BATCH, HEADS, DIM, DIM, getattr(torch, dtype).itemsize)
    pages = 30 * 512  # 30 GiB
    most = device_bytes() * 3 // 4 // PAGES["cuda"]
    if most < pages:  # no index gets as far there: as many tokens as the device holds
        tokens, pages = tokens * most // pages // 16, most // 16
    play(the_last_token_is_found, "cuda", pages=pages, tokens=tokens, dtype=dtype)
