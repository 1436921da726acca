"""Decoders of all architectures in two, three and four parts: the logits of the whole, to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ballonet.allocator.errors import SpliceError
from ballonet.hooks.splice.splice import Splice
from ballonet.hooks.weights.model_parts import decoder_layers
from ballonet.offload.policy.replicas.groups import Span

from .parts import NAMES, cuts, deeper, in_one, in_parts, steps

REFUSED = {  # what the proof says of them
    "recurrent_gemma": "neither in their calls nor in the cache",
    "rwkv": r"its own logits of a decode step of 2 rows have the shape \(2, 2, 199\)",
}
# Architectures whose own forward fails with several tokens behind others and the mask of all
WHOLE_PROMPTS = {"mamba", "falcon_mamba"}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_parts_are_the_whole(name: str) -> None:
    model = deeper(name)
    asked = steps(9 if name in WHOLE_PROMPTS else 4)
    expected = in_one(model, asked)
    assert not any(logits.isnan().any() for logits in expected)
    layers = len(decoder_layers(model))
    assert layers >= 4 or name == "nemotron_h"
    for parts in range(2, min(layers, 4) + 1):
        found = in_parts(model, cuts(layers, parts), asked)
        assert [index for index, pair in enumerate(zip(found, expected, strict=True)) if not torch.equal(*pair)] == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_in_parts_is_refused_with_the_reason(name: str) -> None:
    model = deeper(name)
    with Splice(model) as splice:
        for _ in range(2):
            with pytest.raises(SpliceError, match=f"cannot be split between replicas: .*{REFUSED[name]}"):
                splice.span = Span(0, 1)
        assert splice.span == splice.whole


def test_how_many_run_in_parts() -> None:
    assert len(NAMES) - len(REFUSED) >= 97


@pytest.fixture(autouse=True, scope="module")
def nothing_stays() -> Iterator[None]:
    yield
    deeper.cache_clear()
