"""A `generate()` of random tokens from a cache that is already long, timed token by token."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria


class Clock(StoppingCriteria):
    """Never stops anything; notes the time, and a count, after each token."""

    def __init__(self, wait: Callable[[], None], count: Callable[[], int]) -> None:
        """`wait`: until what was submitted is done."""
        self.times: list[float] = []
        self.counts: list[int] = []
        self._wait = wait
        self._count = count

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self._wait()
        self.times.append(time.perf_counter())
        self.counts.append(self._count())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def timed(
    model: PreTrainedModel, cache: DynamicCache, size: tuple[int, int], device: str, tokens: int, clock: Clock
) -> Clock:
    """Generates so many tokens. `size`: sequences, and tokens of each in the cache; `device`: where they are computed,
    wherever weights are meanwhile."""
    batch, held = size
    prompt = torch.randint(0, model.config.vocab_size, (batch, held + 1), device=device)
    answer(model, prompt, tokens, clock, past_key_values=cache)
    if len(clock.times) != tokens:
        raise RuntimeError(f"generate() stopped after {len(clock.times)} of {tokens} tokens")
    return clock


def answer(model: PreTrainedModel, prompt: torch.Tensor, tokens: int, clock: Clock | None = None, **more: Any) -> Any:
    """What a greedy `generate()` returns for a prompt without padding."""
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        do_sample=False,
        **({} if clock is None else {"stopping_criteria": [clock]}),
        **more,
    )
