"""A group of stages in one process says what stock continuous batching says."""

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


MODELS = ["llama", "qwen2", "qwen3", "mistral-window", "gemma2", "phi", "gpt2"]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_stocks(name: str, stages: int) -> None:
    model = four_layers(name)
    asked = prompts(7, 3 * CHUNK)
    expected = said(model, asked)
    install()
    assert answered(model, requests(asked), stages) == expected
