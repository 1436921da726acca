"""What one decoded token costs a layer's KV cache: stock concatenates, the elastic layer appends in place.

One layer, batch 1, 8 heads of 128, bfloat16.
"""

from __future__ import annotations

import time

import torch
from common import interleaved, report
from transformers.cache_utils import DynamicLayer

import ballonet
from ballonet.allocator.install import stock
from ballonet.hooks.kv import ElasticLayer

LENGTHS = (1024, 4096, 8192, 16384, 32768)
HEADS, DIM = 8, 128
STEPS = 16


def main() -> None:
    ballonet.install("2GiB")
    rows = []
    for length in LENGTHS:
        taken = interleaved(
            {
                "stock": lambda n=length: under_stock(n),  # type: ignore[misc]
                "ballonet": lambda n=length: time_steps(ElasticLayer(), n),  # type: ignore[misc]
            }
        )
        theirs, ours = taken["stock"], taken["ballonet"]
        rows.append([length, theirs, ours, round(theirs.median / ours.median, 1)])
    report(
        "kv-growth",
        "one more token in a KV cache: µs per layer (limit: 25 µs, flat in length)",
        ["tokens held", "stock DynamicLayer", "ballonet", "times faster"],
        rows,
    )


def under_stock(length: int) -> float:
    """With torch's own allocator too, not with the pool's."""
    with stock():
        return time_steps(DynamicLayer(), length)


def time_steps(layer: DynamicLayer, length: int) -> float:
    """µs per one-token update of a layer that holds `length` tokens."""
    prompt = torch.zeros(1, HEADS, length, DIM, dtype=torch.bfloat16)
    token = torch.zeros(1, HEADS, 1, DIM, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.update(prompt, prompt)
        layer.update(token, token)
        begin = time.perf_counter_ns()
        for _ in range(STEPS):
            layer.update(token, token)
        return (time.perf_counter_ns() - begin) / STEPS / 1e3


if __name__ == "__main__":
    main()
