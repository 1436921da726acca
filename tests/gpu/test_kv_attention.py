"""Attention kernels that transformers offers, over the elastic cache; and several threads that generate at once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import ballonet

from .. import models
from .scene import Place, everywhere, play
from .stock import TOKENS, compared


def attention_is_stocks(place: Place, implementation: str, dtype: str) -> None:
    """Sizes that every kernel takes: heads of 32."""
    modes = {"greedy": models.MODES["greedy"]}
    sizes = {"hidden_size": 128, "intermediate_size": 128}
    wrong = compared("llama", place, getattr(torch, dtype), modes, attn_implementation=implementation, **sizes)
    assert not wrong, "\n".join(wrong)


@everywhere
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention", "flash_attention_2"])
def test_attention_is_stocks(kind: str, implementation: str) -> None:
    from torch.utils._triton import has_triton
    from transformers.utils import is_flash_attn_2_available

    if implementation == "flash_attention_2" and not is_flash_attn_2_available():
        pytest.skip("flash_attn is not installed, or not for this device")
    if implementation == "flex_attention" and kind == "cpu":
        pytest.skip("compiling flex attention for a CPU takes minutes")
    if implementation == "flex_attention" and not has_triton():
        pytest.skip("flex attention is a Triton kernel, and Triton is not here or not for this device")
    dtype = "float32" if implementation in ("eager", "sdpa") and kind == "cpu" else "bfloat16"
    play(attention_is_stocks, kind, pages=256, implementation=implementation, dtype=dtype)


def threads_generate_at_once(place: Place, threads: int, rounds: int) -> None:
    """One managed model under chaos, several `generate()` at once, each on a stream of its own."""
    model = models.build("llama").to(place.kind)
    prompts = [
        {key: value.to(place.kind) for key, value in models.prompts(2, 8 + 3 * number).items()}
        for number in range(threads)
    ]
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
    expected = [model.generate(**prompt, **settings) for prompt in prompts]
    place.synchronize()
    errors: list[BaseException] = []

    def generate(number: int) -> None:
        try:
            lane = place.lane()
            lane.follow()
            for _ in range(rounds):
                with lane():
                    found = model.generate(**prompts[number], **settings)
                    assert torch.equal(found, expected[number]), f"thread {number}"
            lane.lead()
        except BaseException as error:
            errors.append(error)

    with ballonet.manage(model, chaos=3):
        running = [threading.Thread(target=generate, args=(number,)) for number in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        place.synchronize()
    assert not errors, errors


@everywhere
def test_threads_generate_at_once(kind: str) -> None:
    play(threads_generate_at_once, kind, pages=256, threads=3, rounds=4 if kind == "cuda" else 1)
