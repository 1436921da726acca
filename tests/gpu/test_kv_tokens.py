"""Managed models give stock's tokens on the device: architectures, ways to choose tokens, kernels of attention, several
threads at once, with and without chaos."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ballonet import testing

from .. import models
from .scene import Place, play, scene
from .stock import TOKENS, compared, differences

# full attention; with every token's keys in one head; sliding and full; keys and values of different width; experts
NAMES = ("llama", "qwen3", "gpt2", "falcon", "mistral-window", "gemma3_text", "deepseek_v3", "mixtral", "granitemoe")
FEW = ("llama", "gemma3_text")  # all of them: tests/test_generate_equivalence.py
DTYPES = {"cuda": ("float32", "bfloat16"), "cpu": ("float32",)}  # a CPU rounds sums of strided bfloat16 views otherwise


@scene(pages=256)
def test_tokens_are_stocks(place: Place) -> None:
    wrong: list[str] = []
    for dtype in DTYPES[place.kind]:
        for name in NAMES if place.cuda else FEW:
            wrong += compared(name, place, getattr(torch, dtype), models.MODES)
            gc.collect()
    assert not wrong, "\n".join(wrong)


def attention_is_stocks(place: Place, implementation: str) -> None:
    """Sizes that every kernel takes: heads of 32."""
    modes = {"greedy": models.MODES["greedy"]}
    sizes = {"hidden_size": 128, "intermediate_size": 128}
    wrong = compared("llama", place, torch.bfloat16, modes, attn_implementation=implementation, **sizes)
    assert not wrong, "\n".join(wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["eager", "flex_attention", "flash_attention_2"])
def test_attention_is_stocks(implementation: str) -> None:
    """tests/test_attention.py has those that a CPU can compute."""
    from torch.utils._triton import has_triton
    from transformers.utils import is_flash_attn_2_available

    if implementation == "flash_attention_2" and not is_flash_attn_2_available():
        pytest.skip("flash_attn is not installed, or not for this device")
    if implementation == "flex_attention" and not has_triton():
        pytest.skip("flex attention is a Triton kernel, and Triton is not here or not for this device")
    play(attention_is_stocks, "cuda", pages=256, implementation=implementation)


@scene(pages=256)
def test_threads_generate_at_once(place: Place) -> None:
    """One managed model under chaos, several `generate()` at once, each on a stream of its own."""
    model = models.build("llama").to(place.kind)
    prompts = [
        {key: value.to(place.kind) for key, value in models.prompts(2, 8 + 3 * number).items()} for number in range(3)
    ]
    expected = [models.generate(model, "greedy", prompt, TOKENS) for prompt in prompts]
    place.synchronize()

    def generate(number: int) -> None:
        lane = place.lane()
        lane.follow()
        for _ in range(4 if place.cuda else 1):
            with lane():
                actual = models.generate(model, "greedy", prompts[number], TOKENS)
                assert not differences(actual, expected[number]), f"thread {number}"
        lane.lead()

    with testing.manage(model, chaos=3), ThreadPoolExecutor(3) as threads:
        list(threads.map(generate, range(3)))
        place.synchronize()
