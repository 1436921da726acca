"""A `generate()` of random tokens from a cache that is already long, timed token by token."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from peer import synchronize
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria

from ballonet.hooks.compat import cache_name


class Clock(StoppingCriteria):
    """Never stops anything; notes the time, and a count, after each token: `times` when the device has computed it,
    `submitted` when the host was through with it."""

    def __init__(self, device: str, count: Callable[[], int] = int, wait: Callable[[str], None] = synchronize) -> None:
        """`wait`: until what was submitted to the device is done."""
        self.times: list[float] = []
        self.submitted: list[float] = []
        self.counts: list[int] = []
        self._device = device
        self._wait = wait
        self._count = count

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.note()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def note(self) -> None:
        self.submitted.append(time.perf_counter())
        self._wait(self._device)
        self.times.append(time.perf_counter())
        self.counts.append(self._count())

    def gaps(self, warm: int = 0) -> list[float]:
        """ms between tokens, without the first ones."""
        return [(b - a) * 1e3 for a, b in pairwise(self.times[warm:])]

    def ms(self, warm: int = 0) -> float:
        """ms per token: the median."""
        return median(self.gaps(warm))

    def host_ms(self, warm: int = 0) -> float:
        """ms until the host was through with a token, from when the one before was computed: the median."""
        pairs = zip(self.times[warm:], self.submitted[warm + 1 :], strict=False)
        return median((submitted - before) * 1e3 for before, submitted in pairs)


def words(model: PreTrainedModel, shape: tuple[int, int], seed: int) -> torch.Tensor:
    """Random tokens, int64[sequences, tokens], on the CPU."""
    return torch.randint(1, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def said(
    model: PreTrainedModel, prompt: torch.Tensor, tokens: int, device: str, **more: Any
) -> tuple[Clock, list[int]]:
    """What follows a prompt of one sequence, and a clock whose first time is that of the beginning."""
    ids, clock = prompt.to(device), Clock(device)
    clock.note()
    found = answer(model, ids, tokens, clock, **more)
    return clock, found[0, prompt.shape[1] :].tolist()


def timed(
    model: PreTrainedModel,
    cache: DynamicCache,
    size: tuple[int, int],
    device: str,
    tokens: int,
    clock: Clock,
    padding: int = 0,
) -> Clock:
    """Generates so many tokens. `size`: sequences, and tokens of each in the cache; `device`: where they are computed,
    wherever weights are meanwhile; `padding`: tokens of the first sequence that do not count."""
    batch, held = size
    prompt = torch.randint(0, model.config.vocab_size, (batch, held + 1), device=device)
    mask = torch.ones_like(prompt)
    mask[0, :padding] = 0
    answer(model, prompt, tokens, clock, attention_mask=mask, **{cache_name(model): cache})
    if len(clock.times) != tokens:
        raise RuntimeError(f"generate() stopped after {len(clock.times)} of {tokens} tokens")
    return clock


def answer(model: PreTrainedModel, prompt: torch.Tensor, tokens: int, clock: Clock | None = None, **more: Any) -> Any:
    """What a greedy `generate()` returns for a prompt, which has no padding unless `more` has a mask."""
    return model.generate(
        prompt,
        max_new_tokens=tokens,
        do_sample=False,
        **({} if clock is None else {"stopping_criteria": [clock]}),
        **{"attention_mask": torch.ones_like(prompt), **more},
    )
