"""Layers that stream while kernels run: the tokens of stock, and no weight that goes back to the host.

Slots hold a layer's weights only while it runs. On a GPU copies, kernels and graphs are on streams of their own, and a
wait that is missing shows as other tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import _native

from .. import models
from ..tuned import tuning
from .scene import Place, everywhere, play
from .stock import TOKENS, differences, questions

LAYERS = 6
KINDS = ("llama", "gemma3_text", "mixtral")


def streams_here(kind: str) -> None:
    if kind == "cuda" and not _native.probe("libcuda.so.1", 0)["host_pages"]:
        pytest.skip("this device cannot map host pages")


small_layers = partial(tuning, weights={"large": 2**11})  # within it the layers of tiny models may stream


def to_host() -> int:
    return ballonet.stats().copied.weights_d2h


def tiny(name: str, place: Place, dtype: torch.dtype = torch.float32, layers: int = LAYERS) -> Any:
    changes: dict[str, Any] = {"num_hidden_layers": layers}
    if name == "gemma3_text":
        changes["layer_types"] = ["sliding_attention", "full_attention"] * (layers // 2)
    return models.build(name, **changes).to(place.kind, dtype)


def tokens_at_every_interval(place: Place, name: str, dtype: str) -> None:
    """Greedy, sampled and by beams: a prefill and decode steps each."""
    model = tiny(name, place, getattr(torch, dtype))
    inputs = questions(name, place.kind)
    expected = {mode: models.generate(model, mode, inputs, TOKENS) for mode in models.MODES}
    wrong = []
    with small_layers():
        with ballonet.manage(model, interval=None) as managed:
            resident = managed.report().pages
        for interval in range(1, LAYERS + 1) if place.cuda else (1, 2):
            with ballonet.manage(model, interval=interval) as managed:
                streamed = LAYERS // interval
                assert len(managed.report().streamed) == streamed
                layer = managed.report().host_pages // streamed
                pages = resident - (streamed - min(2, streamed)) * layer
                assert managed.report().pages == pages, "two slots, and no more"
                before = to_host()
                for mode, right in expected.items():
                    found = models.generate(model, mode, inputs, TOKENS)
                    if said := differences(found, right):
                        wrong.append(f"{name}, {dtype}, interval {interval}, {mode}: {said}")
                assert to_host() == before, "a weight went back to the host"
                assert managed.report().link_bytes > 0
    assert not wrong, "\n".join(wrong)


@everywhere
@pytest.mark.parametrize("name", KINDS)
def test_tokens_at_every_interval(kind: str, name: str) -> None:
    streams_here(kind)
    if kind == "cpu" and name != KINDS[0]:
        pytest.skip("tests/streaming has more of this for a CPU")
    for dtype in ("float32", "bfloat16") if kind == "cuda" else ("float32",):
        play(tokens_at_every_interval, kind, pages=256, host_pages=128, name=name, dtype=dtype)
