"""Time per decoded token of a whole model, stock and managed, with the same weights and a cache of a given length.

The shape is that of SmolLM2-135M with random weights; the cache is filled directly, because a prefill of 16k tokens
would take minutes on a CPU and is not what is measured.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch
from common import interleaved, report
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import ballonet
from ballonet.allocator.install import stock

LENGTHS = (1024, 4096, 8192, 16384)
STEPS = 8
SHAPE = LlamaConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    max_position_embeddings=32768,
)


def main() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(SHAPE).eval()
    ours = copy.deepcopy(model)
    ballonet.install("4GiB")
    with ballonet.manage(ours):
        rows = []
        for length in LENGTHS:
            peers: dict[str, Callable[[], float]] = {
                "stock": lambda n=length: under_stock(model, n),  # type: ignore[misc]
                "ballonet": lambda n=length: time_token(ours, ballonet.KVCache(config=SHAPE), n),  # type: ignore[misc]
            }
            taken = interleaved(peers)
            rows.append(
                [length, taken["stock"], taken["ballonet"], round(taken["stock"].median / taken["ballonet"].median, 2)]
            )
    report(
        "decode",
        "decoding: ms per token, SmolLM2-135M shape, float32 (limits: 0.9 x as fast at 1k, faster from 8k)",
        ["tokens held", "stock", "ballonet", "times faster"],
        rows,
    )


def under_stock(model: PreTrainedModel, length: int) -> float:
    """With torch's own allocator too, not with the pool's."""
    with stock():
        return time_token(model, DynamicCache(config=SHAPE), length)


def time_token(model: PreTrainedModel, cache: DynamicCache, length: int) -> float:
    """ms per one-token forward with `length` tokens in the cache."""
    head = SHAPE.hidden_size // SHAPE.num_attention_heads
    states = torch.randn(1, SHAPE.num_key_value_heads, length, head)
    token = torch.tensor([[1]])
    with torch.no_grad():
        for layer in range(SHAPE.num_hidden_layers):
            cache.update(states, states, layer)
        model(token, past_key_values=cache, use_cache=True)
        begin = time.perf_counter_ns()
        for _ in range(STEPS):
            model(token, past_key_values=cache, use_cache=True)
        return (time.perf_counter_ns() - begin) / STEPS / 1e6


if __name__ == "__main__":
    main()
