"""A managed model beside the same one unmanaged, on one device and one pool."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ballonet import testing
from ballonet.testing import chaos_of

from .. import models
from ..tuned import tuning
from .scene import Place

TOKENS = 12
LAYERS = 6  # of tiny models
small_layers = partial(tuning, weights={"large": 2**11})  # within it the layers of tiny models may stream


def tiny(name: str, place: Place, layers: int = LAYERS) -> Any:
    return models.build(name, num_hidden_layers=layers).to(place.kind)


def questions(name: str, kind: str) -> dict[str, Any]:
    return {key: value.to(kind) for key, value in models.questions(name, 3, 16, padded=True).items()}


def differences(actual: models.Output, expected: models.Output) -> str:
    """Nothing where the tokens are the same."""
    if torch.equal(actual.tokens, expected.tokens):
        return ""
    first = (actual.tokens != expected.tokens).any(0).nonzero()[0].item()
    apart = (
        (actual.logits - expected.logits).abs().max().item() if actual.logits.shape == expected.logits.shape else "?"
    )
    return f"from token {first} on; logits up to {apart} apart"


def compared(name: str, place: Place, dtype: torch.dtype, modes: Mapping[str, Any], **changes: Any) -> list[str]:
    """What differs from stock for one architecture, without and with chaos. Stock runs on the same pool."""
    implementation = changes.pop("attn_implementation", None)
    model = models.build(name, **changes).to(place.kind, dtype)
    if implementation is not None:
        model.set_attn_implementation(implementation)
    inputs = questions(name, place.kind)
    expected = {mode: models.generate(model, mode, inputs, TOKENS) for mode in modes}
    wrong = []
    for chaos in (None, 5):
        with testing.manage(model, chaos=chaos) as managed:
            for mode in modes:
                actual = models.generate(model, mode, inputs, TOKENS)
                if said := differences(actual, expected[mode]):
                    wrong.append(f"{name}, {dtype}, {mode}, chaos {chaos}: {said}")
            if chaos_of(managed) is not None:
                assert chaos_of(managed).moved["weights"] > 0
    return wrong


def few_tokens(place: Place, tokens: int) -> None:
    """A tiny managed model under chaos gives the tokens that it gave before."""
    model = models.build("llama").to(place.kind)
    inputs = {key: value.to(place.kind) for key, value in models.prompts(2, 9).items()}
    expected = models.generate(model, "greedy", inputs, tokens)
    with testing.manage(model, chaos=4):
        actual = models.generate(model, "greedy", inputs, tokens)
    assert not differences(actual, expected)
