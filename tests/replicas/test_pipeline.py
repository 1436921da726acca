"""A group of stages in one process answers as stock continuous batching does."""

from __future__ import annotations

from typing import Any

import pytest

from ..models import build
from ..serving.batches import answers, prompts
from .grouped import BLOCK, CHUNK, answered, install, requests

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def said(model: Any, asked: list[list[int]], new: int = 12) -> list[list[int]]:
    """Stock's answers, in batches of as many tokens."""
    found = answers(model, asked, new, num_blocks=400, page_size=BLOCK, max_batch_tokens=CHUNK)
    return [each.tokens for each in found]


def four_layers(name: str) -> Any:
    if name != "gemma2":
        return build(name, num_hidden_layers=4)
    kinds = ["sliding_attention", "full_attention"] * 2
    model = build(name, num_hidden_layers=4, layer_types=kinds)
    model.set_attn_implementation("eager")
    return model


# By how many stages. What depends on these llama shows; what depends on the model, any number.
MODELS = {
    "llama": (1, 2, 3, 4),
    "gemma2": (2, 3, 4),
    "mistral-window": (2, 4),
    "qwen2": (3,),
    "qwen3": (4,),
    "phi": (2,),
    "gpt2": (3,),
}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_stocks(name: str) -> None:
    """Prompts are longer than an iteration, and than a window."""
    model, asked = four_layers(name), prompts(4, 2 * CHUNK)
    expected = said(model, asked, 6)
    install()
    for stages in MODELS[name]:
        assert answered(model, requests(asked, 6), stages) == expected, stages
