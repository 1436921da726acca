"""The elastic cache's views under attention kernels and graphs, and what a decoded token asks of the driver."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import StoppingCriteria

import ballonet
from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.offload.policy.geometry import INT32, longest

from .. import models
from .scene import PAGES, Captured, Place, device_bytes, everywhere, play

HEADS, DIM = 8, 128
PAGE_CALLS = ("cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuMemcpyAsync")


def the_last_token_is_found(place: Place, batch: int, tokens: int, dtype: str, masked: bool) -> None:
    """Attention over a view whose largest index is just below 2**31 reads the same as over contiguous tensors.

    The newest key alone answers the query, so the result is the newest value; an index that overflows reads elsewhere.
    """
    kind = getattr(torch, dtype)
    layer = ElasticLayer()
    shape = (batch, HEADS, tokens, DIM)
    keys, values = (torch.empty(shape, dtype=kind, device=place.kind) for _ in range(2))
    step = max(1, tokens // 16)
    query = torch.randn(batch, HEADS, 1, DIM, device=place.kind).to(kind)
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
        if masked:
            mask = torch.rand(batch, 1, 1, tokens, device=place.kind) < 0.9
            mask[..., -1] = True
        right = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=8.0)
        found = F.scaled_dot_product_attention(query, seen, shown, attn_mask=mask, scale=8.0)
    assert seen.shape == shape
    reach = (tokens - 1) * seen.stride(2)
    if tokens == longest(batch, HEADS, DIM, DIM, kind.itemsize):
        assert INT32 - 2 * seen.stride(2) < reach < INT32
    assert torch.allclose(found.float(), values[:, :, -1:].float(), atol=1e-2), "the newest token was not found"
    assert torch.allclose(found.float(), right.float(), rtol=0, atol=1e-3 if kind == torch.float32 else 1e-2)
    layer.reset()
    del seen, shown, layer
    place.device.reap(wait=True)


@everywhere
@pytest.mark.parametrize(("dtype", "masked"), [("float32", True), ("float32", False), ("bfloat16", False)])
def test_the_last_token_is_found(kind: str, dtype: str, masked: bool) -> None:
    batch = 8
    tokens, pages = 100, 512
    if kind == "cuda":
        tokens = longest(batch, HEADS, DIM, DIM, getattr(torch, dtype).itemsize)
        pages = 30 * 512  # 30 GiB
        most = device_bytes() * 3 // 4 // PAGES[kind]
        if most < pages:  # no index gets as far there: as many tokens as the device holds
            tokens, pages = tokens * most // pages // 16, most // 16
    play(the_last_token_is_found, kind, pages=pages, batch=batch, tokens=tokens, dtype=dtype, masked=masked)


def a_graph_reads_the_cache(place: Place, tokens: int) -> None:
    """Decoding captured over a view of the cache gives the same bits wherever its pages are at the replay."""
    torch.manual_seed(0)
    layer = ElasticLayer()
    with torch.no_grad():
        states = torch.randn(2, HEADS, tokens, DIM, device=place.kind).to(torch.bfloat16)
        keys, values = layer.update(states, states)
    query = torch.randn(2, HEADS, 1, DIM, device=place.kind).to(torch.bfloat16)

    def attend(keys: torch.Tensor = keys, values: torch.Tensor = values) -> tuple[torch.Tensor, ...]:
        return (F.scaled_dot_product_attention(query, keys, values),)

    graph = Captured(place, attend)
    (right,) = graph.replay()
    home: Any = layer._home
    backed = [piece for piece in range(home.range.pieces) if home.range.backing(piece) == "device"]
    assert len(backed) >= 4
    for where in (*reversed(place.places), "device"):
        for piece in backed:
            assert home.range.move(piece, where)
        assert torch.equal(graph.replay()[0], right), where
    values.zero_()
    assert not torch.equal(graph.replay()[0], right), "the graph does not read the cache"
    del graph, attend, keys, values
    layer.reset()
    del layer, home
    place.device.reap(wait=True)


@everywhere
def test_a_graph_reads_the_cache(kind: str) -> None:
    play(a_graph_reads_the_cache, kind, pages=256, tokens=2048 if kind == "cuda" else 64)


class Counter(StoppingCriteria):
    """Never stops anything; after each token notes the driver's calls so far and the pages of the cache."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.calls: list[int] = []
        self.kv: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        stats = ballonet.stats()
        self.calls.append(sum(stats.driver_calls[name] for name in PAGE_CALLS))
        self.kv.append(stats.pages.kv)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def a_token_asks_nothing(place: Place, tokens: int) -> None:
    """Decoding, the driver is asked for the pages that the cache grows by, and between them for nothing."""
    model = models.build("llama", hidden_size=256, max_position_embeddings=4096).to(place.kind)
    inputs = {key: value.to(place.kind) for key, value in models.prompts(4, 40).items()}
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens}
    with ballonet.manage(model):
        model.generate(**inputs, **settings)  # afterwards the heap has what it needs
        gc.collect()
        counter = Counter(place)
        model.generate(**inputs, **settings, stopping_criteria=[counter])
    steps = list(zip(counter.calls, counter.calls[1:], counter.kv, counter.kv[1:], strict=False))
    grown = [after - before for before, after, _, _ in steps]
    quiet = [calls for calls, (_, _, before, after) in zip(grown, steps, strict=True) if before == after]
    assert len(quiet) > tokens // 2
    assert sum(quiet) == 0, f"calls while the cache did not grow: {quiet}"
    assert sum(grown) <= 3 * (counter.kv[-1] - counter.kv[0]), "more calls than create, map and access of each page"


@everywhere
def test_a_token_asks_nothing(kind: str) -> None:
    play(a_token_asks_nothing, kind, pages=256, tokens=400 if kind == "cuda" else 80)
