"""What a token, a prompt and an append to the cache take, stock and managed: each peer has its own allocator and copy.

decode: time per token of `generate()`: the same random weights, a cache that is already long, filled directly. What is
timed are the steps of one `generate()` from its third token on, the device synchronised at each. Between them the
managed peer counts the calls of the driver that change what lies behind an address: in steady state there are none.

prefill: time of a prompt's first forward: what the hooks and the elastic cache add to it.

kv-growth: what one decoded token costs a layer's KV cache: stock concatenates, the elastic layer appends in place. One
layer, batch 1, 8 heads of 128, bfloat16.
"""

from __future__ import annotations

import time
from functools import partial

import torch
from harness import Benchmark, Figure, Functions, Options, Peer, in_turns, interleaved, main, peers, report
from models import OURS, PAGE_CALLS, STOCK, Clock, build, describe, filled, seconds, shape, synchronize, timed
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

import ballonet
from ballonet.hooks.compat import cache_name
from ballonet.hooks.kv.layer import ElasticLayer

# (sequences, tokens held, how much faster than stock it is to be)
CASES = {
    "cuda": ((8, 16384, 1.8), (1, 65536, 2.2), (1, 1024, 0.97)),
    "cpu": ((1, 1024, 0.9), (1, 4096, 0.9), (1, 8192, 1.0), (1, 16384, 1.0)),
    "tiny": ((2, 32, 0.0),),
}
STEPS = 10  # tokens of each generate(); the first two are not timed
WARM = 2
PROMPTS = {"cuda": (1024, 8192), "cpu": (256, 1024), "tiny": (24,)}  # tokens
PREFILL = 1.02  # of stock's time
LENGTHS = {"cuda": (1024, 4096, 8192, 16384, 32768), "cpu": (1024, 4096, 8192, 16384, 32768), "tiny": (16, 64)}
HEADS, DIM = 8, 128
UPDATES = 16
GROWTH = 25  # µs


def decoding(chosen: Options) -> None:
    rows = []
    with peers(chosen, (STOCK, OURS)) as started:
        for batch, tokens, limit in CASES[chosen.kind][: chosen.cases]:
            calls: list[float] = []
            turns = {name: partial(noted, name, peer, batch, tokens, calls) for name, peer in started.items()}
            taken = interleaved(turns, chosen.repetitions)
            faster = Figure.ratio(taken[STOCK], taken[OURS]).at_least(limit)
            row = {"sequences": batch, "tokens held": tokens, **taken, "times faster": faster}
            rows.append({**row, "page calls per token": Figure.of(calls).at_most(0)})
    report(chosen, f"decoding: ms per token, {describe(chosen)}", rows)


def noted(name: str, peer: Peer, batch: int, tokens: int, calls: list[float]) -> float:
    answer = peer.ask("decode", batch=batch, tokens=tokens)
    if name == OURS:
        calls.append(answer["calls"])
    ms: float = answer["ms"]
    return ms


def prefills(chosen: Options) -> None:
    rows = []
    with peers(chosen, (STOCK, OURS)) as started:
        for length in PROMPTS[chosen.kind]:
            taken = in_turns(started, chosen.repetitions, "prefill", tokens=length)
            ratio = Figure.ratio(taken[OURS], taken[STOCK]).at_most(PREFILL)
            rows.append({"tokens": length, **taken, "ballonet / stock": ratio})
    report(chosen, f"prefill: ms per prompt, {describe(chosen)}", rows)


def with_a_model(name: str, chosen: Options) -> Functions:
    if name == OURS:
        ballonet.install("60GiB" if chosen.cuda else "4GiB")
    model = build(shape(chosen), chosen.device)
    if name == OURS:
        ballonet.manage(model)
    return {
        "decode": lambda batch, tokens: decode(name, model, batch, tokens, chosen.device),
        "prefill": lambda tokens: prefill(name, model, tokens, chosen.device),
    }


def decode(peer: str, model: PreTrainedModel, batch: int, tokens: int, device: str) -> dict[str, float]:
    """ms, and calls of the driver, per token."""

    def calls() -> int:
        return sum(ballonet.stats().driver_calls[name] for name in PAGE_CALLS) if peer == OURS else 0

    clock = Clock(device, calls)
    timed(model, filled(peer, model.config, batch, tokens, device), (batch, tokens), device, STEPS, clock)
    steps = STEPS - WARM
    ms = (clock.times[-1] - clock.times[WARM - 1]) / steps * 1e3
    return {"ms": ms, "calls": (clock.counts[-1] - clock.counts[WARM - 1]) / steps}


def prefill(peer: str, model: PreTrainedModel, tokens: int, device: str) -> float:
    """ms"""
    config = model.config
    prompt = torch.randint(0, config.vocab_size, (1, tokens), device=device)
    cache = ballonet.KVCache(config=config) if peer == OURS else DynamicCache(config=config)
    given = {cache_name(model): cache, "use_cache": True, "logits_to_keep": 1}
    with torch.no_grad():
        return seconds(device, lambda: model(prompt, **given)) * 1e3


def growth(chosen: Options) -> None:
    rows = []
    with peers(chosen, (STOCK, OURS)) as started:
        for length in LENGTHS[chosen.kind]:
            taken = in_turns(started, chosen.repetitions, "steps", length=length)
            theirs, ours = taken[STOCK], taken[OURS]
            row = {"tokens held": length, "stock DynamicLayer": theirs, "ballonet": ours.at_most(GROWTH)}
            rows.append({**row, "times faster": Figure.ratio(theirs, ours)})
    report(chosen, "one more token in a KV cache: µs per layer", rows)


def with_a_layer(name: str, chosen: Options) -> Functions:
    kind: type[DynamicLayer] = DynamicLayer
    if name == OURS:
        ballonet.install("2GiB")
        kind = ElasticLayer
    return {"steps": lambda length: time_updates(kind(), length, chosen.device)}


def time_updates(layer: DynamicLayer, length: int, device: str) -> float:
    """µs per one-token update of a layer that holds `length` tokens."""
    prompt = torch.zeros(1, HEADS, length, DIM, dtype=torch.bfloat16, device=device)
    token = torch.zeros(1, HEADS, 1, DIM, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        layer.update(prompt, prompt)
        layer.update(token, token)
        synchronize(device)
        begin = time.perf_counter_ns()
        for _ in range(UPDATES):
            layer.update(token, token)
        synchronize(device)
        return (time.perf_counter_ns() - begin) / UPDATES / 1e3


BENCHMARKS = {
    "decode": Benchmark(decoding, with_a_model),
    "prefill": Benchmark(prefills, with_a_model),
    "kv-growth": Benchmark(growth, with_a_layer),
}

if __name__ == "__main__":
    main(__doc__, BENCHMARKS)
