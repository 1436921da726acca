"""Managed models give stock's tokens on the device: architectures, ways to choose tokens, with and without chaos."""

from __future__ import annotations

import gc

import pytest
import torch

from .. import models
from .scene import Place, everywhere, play
from .stock import compared

# full attention; with every token's keys in one head; sliding and full; keys and values of different width; experts
NAMES = ("llama", "qwen3", "gpt2", "falcon", "mistral-window", "gemma3_text", "deepseek_v3", "mixtral", "granitemoe")
FEW = ("llama", "gemma3_text", "deepseek_v3", "mixtral")


def tokens_are_stocks(place: Place, names: tuple[str, ...], dtype: str) -> None:
    wrong: list[str] = []
    for name in names:
        wrong += compared(name, place, getattr(torch, dtype), models.MODES)
        gc.collect()
    assert not wrong, "\n".join(wrong)


@everywhere
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_are_stocks(kind: str, dtype: str) -> None:
    if kind == "cpu" and dtype == "bfloat16":
        pytest.skip("on a CPU the sums of a strided bfloat16 view are rounded in another order")
    play(tokens_are_stocks, kind, pages=256, names=NAMES if kind == "cuda" else FEW, dtype=dtype)
