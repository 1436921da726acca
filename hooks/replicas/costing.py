"""What chunks take on this machine, measured on the model as it is loaded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from ...offload.policy.replicas.fit_cost import Fit, Sample, fit
from ...offload.policy.tuning import DEFAULT, Replicas


def measured(model: Any, most: int, tuning: Replicas = DEFAULT.replicas) -> Fit:
    """Times prompts of up to `most` tokens, and tokens behind them, and fits a cost to that. Each prompt is computed in
    two chunks, the second behind the first."""
    return fit([*_samples(model, most)], tuning)


@torch.no_grad()
def _samples(model: Any, most: int) -> Iterator[Sample]:
    lengths = sorted({max(2, most * part // 8) for part in range(1, 9)})
    for _ in range(2):  # the first round loads kernels
        found = [each for length in lengths for each in _prompt(model, length)]
    yield from found


def _prompt(model: Any, length: int) -> Iterator[Sample]:
    ids = torch.zeros(1, length, dtype=torch.long, device=model.device)
    cache: Any = None
    before = 0
    for new in (length // 2, length - length // 2, 1):
        chunk = ids[:, :new]
        began = time.perf_counter()
        output = model(input_ids=chunk, past_key_values=cache, use_cache=True)
        _ = output.logits[0, -1, 0].item()  # waits for the device
        yield Sample(((before, new),), time.perf_counter() - began)
        cache, before = output.past_key_values, before + new
