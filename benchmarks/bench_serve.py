"""Many requests at once: transformers' continuous batching by its own sizing, and on the pool.

serve: at a fixed budget. Stock sizes its cache by what the device has free: here it is told the budget, and that the
weights are in it. With `space on the host` it has as much host memory (`cpu_offload_space`) as ballonet may use, which
it pins, so that it runs only where there is CUDA. With `weights fixed` no layer leaves the device: what is gained then
comes of the KV alone. With `full batches` as many requests are in a batch as fit, else as many as make the most tokens
per second. All answer the same requests, greedily, and answers are compared token by token. Steps, preemptions and the
largest batch are counts; tokens per second are those of one run after a short one that is not measured, in a process of
its own. All peers run in turn, some times.

serve-plain: the same requests with room for all of them: what elasticity costs when there is no need of it. CPU seconds
are those of the process, whose torch has one thread on a CPU. Calls of the driver that change what lies behind an
address are counted per decoded token, once more when the same requests come again and find their pages mapped, and so
are pages that weights, caches or others gave: nothing is lent while pages are free.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from harness import GIB, MIB, Benchmark, Figure, Functions, Options, main, peers, report
from models import OURS, PAGE_CALLS, STOCK
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import cache, continuous_api, requests

import ballonet

SPACED, FIXED, FULL = "stock, space on the host", "ballonet, weights fixed", "ballonet, full batches"
LAYERS = {"cuda": 32, "cpu": 12, "tiny": 4}
REQUESTS = {"cuda": 128, "cpu": 32, "tiny": 8}
NEW = {"cuda": 64, "cpu": 64, "tiny": 12}  # tokens of each answer
LONGEST = {"cuda": 1024, "cpu": 256, "tiny": 40}  # prompt
BLOCK = {"cuda": 256, "cpu": 32, "tiny": 16}  # tokens
BATCH = {"cuda": 2048, "cpu": 256, "tiny": 256}  # tokens that are computed at once
BUDGETS = {"cuda": (16 * GIB, 18 * GIB), "cpu": (288 * MIB, 240 * MIB), "tiny": (24 * MIB,)}
STEPS = {288 * MIB: 0.75, 240 * MIB: 0.5}  # at most, of stock's
FASTER, LATER = 1.3, 1.5  # times stock's tokens per second, at least, and P99 of later tokens, at most
ROUNDS = 3  # of all peers, a process each; fewer where fewer repetitions are asked for
PLENTY = {"cuda": 60 * GIB, "cpu": 1 * GIB, "tiny": 96 * MIB}  # bytes, of serve-plain
COUNTED = {  # columns, by what a run says
    "steps": "steps",
    "preempted": "preempted",
    "largest": "largest batch",
    "speed": "tokens per second",
    "first": "first token, P99 s",
    "later": "later tokens, P99 s",
}


def at_a_budget(chosen: Options) -> None:
    names = (STOCK, *((SPACED,) if chosen.cuda else ()), FIXED, FULL, OURS)
    rows = [row for budget in BUDGETS[chosen.kind][: chosen.cases] for row in compared(chosen, budget, names)]
    report(chosen, title(chosen), rows)


def compared(chosen: Options, budget: int, names: Sequence[str]) -> list[dict[str, object]]:
    """A row for each peer at this budget."""
    runs = in_rounds(chosen, names, budget, min(ROUNDS, chosen.repetitions))
    stock, rows = runs[STOCK], list[dict[str, object]]()
    for name, said in runs.items():
        counts = {column: figure(said, what) for what, column in COUNTED.items()}
        fewer, faster, later = (ratio(said, stock, what) for what in ("steps", "speed", "later"))
        if name == OURS and budget in STEPS:
            fewer, faster = fewer.at_most(STEPS[budget]), faster.at_least(FASTER)
            later = later.at_most(LATER)
            counts["preempted"] = counts["preempted"].at_most(figure(stock, "preempted").median / 4)
        row = {"budget, MiB": round(budget / MIB), "peer": name, **counts, "steps / stock's": fewer}
        row |= {"speed / stock's": faster, "later / stock's": later, "answers that differ": differing(said, stock)}
        rows.append(row)
    return rows


def with_memory_for_all(chosen: Options) -> None:
    runs = in_rounds(chosen, (STOCK, OURS), PLENTY[chosen.kind], chosen.repetitions, again=True)
    rows = []
    for name, said in runs.items():
        cpu, given = figure(said, "cpu"), figure(said, "given")
        more, faster = ratio(said, runs[STOCK], "cpu"), ratio(said, runs[STOCK], "speed")
        if name == OURS:
            more, given, faster = more.at_most(1.03), given.at_most(0), faster.at_least(1)
        row = {"peer": name, "steps": figure(said, "steps"), "CPU seconds": cpu, "CPU / stock's": more}
        row |= {"tokens per second": figure(said, "speed"), "page calls per token": figure(said, "page_calls")}
        row |= {"speed / stock's": faster}
        row |= {"the same, again": figure(said, "page_calls_again").at_most(0.01)}
        rows.append({**row, "pages given": given, "answers that differ": differing(said, runs[STOCK])})
    report(chosen, f"{title(chosen)}, memory for all", rows)


def title(chosen: Options) -> str:
    kind = chosen.kind
    return f"{REQUESTS[kind]} requests of {NEW[kind]} tokens, {LAYERS[kind]} layers"


def in_rounds(
    chosen: Options, names: Sequence[str], budget: int, rounds: int, **more: Any
) -> dict[str, list[dict[str, Any]]]:
    """What each peer says of its runs at this budget, by name. A process each: what one run leaves is not the next
    one's. `more`: see `serve`."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, said in runs.items():
            with peers(chosen, (name,)) as one:
                said.append(one[name].ask("serve", budget=budget, **more))
    return runs


def figure(said: Sequence[dict[str, Any]], what: str) -> Figure:
    return Figure.of([float(reply[what]) for reply in said])


def ratio(said: Sequence[dict[str, Any]], stock: Sequence[dict[str, Any]], what: str) -> Figure:
    return Figure.ratio(figure(said, what), figure(stock, what))


def differing(said: Sequence[dict[str, Any]], stock: Sequence[dict[str, Any]]) -> Figure:
    """Answers of all runs that are not stock's: there are to be none."""
    expected = stock[0]["answers"]
    wrong = sum(one != other for reply in said for one, other in zip(reply["answers"], expected, strict=True))
    return Figure.of([float(wrong)]).at_most(0)


def functions(name: str, chosen: Options) -> Functions:
    return {"serve": partial(serve, name, chosen)}


def serve(name: str, chosen: Options, budget: int, again: bool = False) -> dict[str, Any]:
    """Answers all requests twice, first with two tokens each; returns what is known of the second time. `again`: once
    more, of which `page_calls_again` are returned. See `answered`."""
    torch.set_num_threads(1 if not chosen.cuda else torch.get_num_threads())
    ours = name in (FIXED, FULL, OURS)
    if ours:
        ballonet.install(
            budget, host_budget=budget, page_size=None if chosen.cuda else 256 * 1024, device=chosen.device
        )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if chosen.cuda else torch.float32
    with torch.device(chosen.device):
        model = AutoModelForCausalLM.from_config(shape(chosen), dtype=dtype).eval()
    if ours:
        ballonet.manage(model, interval=None if name == FIXED else "auto", batches="full" if name == FULL else "fast")
    else:
        told(chosen.device, budget, sum(weight.nbytes for weight in model.parameters()))
    answered(name, chosen, model, budget, 2)
    found = answered(name, chosen, model, budget, NEW[chosen.kind])
    if again:
        found["page_calls_again"] = answered(name, chosen, model, budget, NEW[chosen.kind])["page_calls"]
    return found


def shape(chosen: Options) -> LlamaConfig:
    wide = {"cuda": 4096, "cpu": 512, "tiny": 256}[chosen.kind]
    return LlamaConfig(
        hidden_size=wide,
        intermediate_size=wide * 11 // 4,
        num_hidden_layers=LAYERS[chosen.kind],
        num_attention_heads=wide // 64,
        num_key_value_heads=max(1, wide // 64 // (4 if chosen.cuda else 1)),
        vocab_size=2048,
        max_position_embeddings=8192,
    )


def prompts(chosen: Options) -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(16, LONGEST[chosen.kind] + 1, (REQUESTS[chosen.kind],), generator=draw).tolist()
    return [torch.randint(3, 2000, (length,), generator=draw).tolist() for length in lengths]


def tails(first: Sequence[float], later: Sequence[float]) -> dict[str, float]:
    """P99 over requests: seconds to the first token, and seconds per later token of a request."""
    return {"first": float(np.percentile(first, 99)), "later": float(np.percentile(later, 99))}


def told(device: str, budget: int, weights: int) -> None:
    """Stock is told that this is all the memory, and that the weights lie in it."""
    cache.get_device_and_memory_breakdown = lambda: (torch.device(device), budget, weights, weights)


def answered(name: str, chosen: Options, model: Any, budget: int, tokens: int) -> dict[str, Any]:
    """Counts and answers of one run: steps, preemptions, the largest batch; tokens per second, CPU seconds, calls of
    the driver that change pages per token, pages given; `tails`, of the tokens that a request has not computed again.
    """
    counts = {"steps": 0, "largest": 0, "preempted": 0}
    processor, state = continuous_api.ContinuousBatchProcessor, requests.RequestState
    step, again = processor._generation_step, state.create_equivalent_initial_request

    def counted(self: Any, *arguments: Any) -> Any:
        counts["steps"] += 1
        counts["largest"] = max(counts["largest"], len(self.inputs_and_outputs.requests_in_batch))
        return step(self, *arguments)

    def preempted(self: Any) -> Any:
        counts["preempted"] += 1
        return again(self)

    processor._generation_step, state.create_equivalent_initial_request = counted, preempted
    settings = ContinuousBatchingConfig(
        page_size=BLOCK[chosen.kind],
        max_batch_tokens=BATCH[chosen.kind],
        max_memory_percent=0.9,
        cpu_offload_space=budget / GIB if name == SPACED else 0.0,
    )
    before = managed_counts(name)
    began, cpu = time.perf_counter(), time.process_time()
    try:
        outputs = model.generate_batch(
            prompts(chosen),
            generation_config=GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=settings,
            progress_bar=False,
            record_timestamps=True,
        )
    finally:
        processor._generation_step, state.create_equivalent_initial_request = step, again
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    times = [(output.created_time, output.timestamps or [time.perf_counter()]) for output in outputs.values()]
    answers = [output.generated_tokens for _, output in sorted(outputs.items(), key=lambda item: int(item[0][4:]))]
    said = sum(map(len, answers))
    page_calls, given = (after - first for first, after in zip(before, managed_counts(name), strict=True))
    return {
        **counts,
        "speed": said / took,
        "cpu": cpu,
        "page_calls": page_calls / said,
        "given": given,
        "answers": answers,
        **tails(
            [noted[0] - created for created, noted in times],
            [(noted[-1] - noted[0]) / max(1, len(noted) - 1) for _, noted in times],
        ),
    }


def managed_counts(name: str) -> tuple[int, int]:
    """Calls of the driver that change what lies behind an address, and pages that someone gave for others."""
    if name not in (FIXED, FULL, OURS):
        return 0, 0
    stats = ballonet.stats()
    given = [verbs[verb].pages for verbs in stats.events.values() for verb in ("reclaim", "yield") if verb in verbs]
    return sum(stats.driver_calls[each] for each in PAGE_CALLS), sum(given)


BENCHMARKS = {"serve": Benchmark(at_a_budget, functions), "serve-plain": Benchmark(with_memory_for_all, functions)}

if __name__ == "__main__":
    main(__doc__, BENCHMARKS)
