"""What chunks take on this machine, measured on the model as it is loaded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from ...offload.policy.replicas.fit_cost import Fit, Sample, fit
from ...offload.policy.tuning import DEFAULT, Replicas


def measured(model: Any, most: int, tuning: Replicas = DEFAULT.replicas) -> Fit:
    """Times prompts of up to `most` tokens, each in two chunks, and a token behind them, and fits a cost to the least
    that each took: what disturbs a chunk makes it longer. ValueError where that says nothing."""
    least: dict[tuple[int, int], float] = {}
    for chunk, seconds in _timed(model, most, tuning.rounds_measured):
        least[chunk] = min(seconds, least.get(chunk, seconds))
    return fit([Sample((chunk,), seconds) for chunk, seconds in least.items()], tuning)


@torch.no_grad()
def _timed(model: Any, most: int, rounds: int) -> Iterator[tuple[tuple[int, int], float]]:
    """((tokens before, new tokens), seconds) of chunks; the first round, which loads kernels, is left out."""
    lengths = sorted({max(2, most * part // 12) for part in range(1, 13)})
    for number in range(1 + rounds):
        for length in lengths:
            for found in _prompt(model, length):
                if number:
                    yield found


def _prompt(model: Any, length: int) -> Iterator[tuple[tuple[int, int], float]]:
    ids = torch.zeros(1, length, dtype=torch.long, device=model.device)
    cache: Any = None
    before = 0
    for new in (length // 2, length - length // 2, 1):
        began = time.perf_counter()
        output = model(input_ids=ids[:, :new], past_key_values=cache, use_cache=True)
        _ = output.logits[0, -1, 0].item()  # waits for the device
        yield (before, new), time.perf_counter() - began
        cache, before = output.past_key_values, before + new
