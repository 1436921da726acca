"""Attention of a decode step of continuous batching: time per token and layer, for few and for many requests.

Lengths are mixed, so that every row has as many keys on average, and the cache is larger than what a CPU keeps near.
Stock is transformers' "sdpa" attention: the keys of all requests, copied together, under a mask, without the time to
build that. ballonet attends by request, to keys where they lie (hooks/batching/attention.py). On a GPU in half
precision its kernel gets all at once.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
from harness import Benchmark, Figure, Options, interleaved, main, report
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ballonet.hooks.batching.attention import Keys, attend_alone, attend_packed, takes_tables, where_they_lie

COUNTS = {"cuda": (12, 128), "cpu": (12, 128), "tiny": (2, 8)}  # requests
LENGTHS = {"cuda": (64, 1024), "cpu": (64, 1024), "tiny": (8, 40)}  # tokens of a request
BLOCK = {"cuda": 256, "cpu": 32, "tiny": 16}  # tokens
LAYERS = {"cuda": 8, "cpu": 4, "tiny": 2}
HEADS, SHARED, DIM = 8, 2, 64
LIMIT = 1.3  # of the time per token of the fewest requests


class Step:
    """A decode step of so many requests, each of whose blocks lie between those of others."""

    def __init__(self, chosen: Options, count: int) -> None:
        kind, self.device = chosen.kind, torch.device(chosen.device)
        self.dtype = torch.bfloat16 if chosen.cuda else torch.float32
        draw = torch.Generator().manual_seed(1)
        low, high = LENGTHS[kind]
        counts = torch.randint(low, high + 1, (count,), generator=draw).tolist()
        tokens, layers = BLOCK[kind], LAYERS[kind]
        blocks = torch.randperm(sum(-(-length // tokens) for length in counts), generator=draw).tolist()
        self.cache = torch.randn(len(blocks) * layers * 2 * tokens, SHARED, DIM, dtype=self.dtype, device=self.device)
        self.keys = Keys(SimpleNamespace(tokens_per_page=tokens, block_physical_stride=2 * layers * tokens))
        rows = list[int]()
        for length in counts:
            table = [blocks.pop() for _ in range(-(-length // tokens))]
            self.keys.add(length, table)
            starts = [block * 2 * layers * tokens for block in table]
            rows += [start + n for start in starts for n in range(tokens)][:length]
        self.index = torch.tensor(rows, device=self.device)
        self.query = torch.randn(1, count, HEADS, DIM, dtype=self.dtype, device=self.device).transpose(1, 2)
        self.mask = torch.full((1, 1, count, len(rows)), torch.finfo(self.dtype).min, device=self.device).to(self.dtype)
        end = 0
        for row, length in enumerate(counts):
            self.mask[..., row, end : end + length] = 0
            end += length
        self.views = [
            (self.cache[2 * layer * tokens :], self.cache[(2 * layer + 1) * tokens :]) for layer in range(layers)
        ]
        self.tokens, self.module = tokens, SimpleNamespace(num_key_value_groups=HEADS // SHARED, is_causal=True)

    def stock(self) -> None:
        """Attends in all layers as transformers does."""
        module: Any = self.module
        for views in self.views:
            key, value = (view.index_select(0, self.index).transpose(0, 1)[None] for view in views)
            sdpa_attention_forward(module, self.query, key, value, self.mask)

    def alone(self) -> None:
        """Attends in all layers by request."""
        rows = [1] * len(self.keys.counts)
        for views in self.views:
            attend_alone(self.query, where_they_lie(views, self.keys, self.index), rows, self.keys, None, 0.0)

    def packed(self) -> None:
        """Attends in all layers by one call each of the kernel for packed sequences."""
        first, used, table = self.keys.tensors(self.device)
        starts = torch.arange(len(self.keys.counts) + 1, dtype=torch.int32, device=self.device)
        shape = -1, self.tokens, SHARED, DIM
        for views in self.views:
            if takes_tables():
                pages = len(views[1]) // self.tokens
                states = tuple(view[: pages * self.tokens].view(shape) for view in views)
            else:  # all are copied together
                states = tuple(view.index_select(0, self.index) for view in views)
                ends = torch.tensor([0, *self.keys.counts]).cumsum(0).to(self.device, torch.int32)
                first, used, table = ends, None, None  # type: ignore[assignment]
            attend_packed(self.query, states, (starts, first), (1, self.keys.most), 0, None, 0.0, used, table)  # type: ignore[arg-type]

    def per_token(self, who: str) -> float:
        """us per token and layer."""
        act, synchronize = getattr(self, who), torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        synchronize()
        began = time.perf_counter()
        act()
        synchronize()
        return (time.perf_counter() - began) * 1e6 / len(self.keys.counts) / len(self.views)


def attention(chosen: Options) -> None:
    if not chosen.cuda:
        torch.set_num_threads(1)
    counts, ours = COUNTS[chosen.kind], "packed" if chosen.cuda else "alone"
    steps = {count: Step(chosen, count) for count in counts}
    with torch.no_grad():
        taken = interleaved(
            {
                f"{who} {count}": lambda who=who, step=step: step.per_token(who)  # type: ignore[misc]
                for count, step in steps.items()
                for who in ("stock", ours)
            },
            chosen.repetitions,
        )
    rows = []
    for count in counts:
        row: dict[str, Any] = {
            "requests": count,
            "stock": taken[f"stock {count}"],
            "ballonet": taken[f"{ours} {count}"],
        }
        stocks, grown = (Figure.ratio(taken[f"{who} {count}"], taken[f"{who} {counts[0]}"]) for who in ("stock", ours))
        limited = count > counts[0] and not chosen.tiny
        row |= {f"stock / its {counts[0]}": stocks}
        rows.append(row | {f"ballonet / its {counts[0]}": grown.at_most(LIMIT) if limited else grown})
    low, high = LENGTHS[chosen.kind]
    title = f"attention of a batch, {low} to {high} keys per request: us per token and layer"
    report(chosen, title, rows)


BENCHMARKS = {"batch-attention": Benchmark(attention)}

if __name__ == "__main__":
    main(__doc__, BENCHMARKS)
