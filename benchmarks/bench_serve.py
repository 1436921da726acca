"""Many requests at once at a fixed budget: transformers' continuous batching by its own sizing, and on the pool.

Stock sizes its cache by what the device has free: here it is told the budget, and that the weights are in it. With
`space on the host` it has as much host memory (`cpu_offload_space`) as ballonet may use, which it pins, so that it runs
only where there is CUDA. With `weights fixed` no layer leaves the device: what is gained then comes of the KV alone.
With `full batches` as many requests are in a batch as fit, else as many as make the most tokens per second.
All answer the same requests, greedily, and answers are compared token by token. Steps, preemptions and the largest
batch are counts; tokens per second are those of one run after a short one that is not measured.
"""

from __future__ import annotations

import time
from typing import Any

from common import GIB, MIB, Figure, Options, report
from peer import Functions, begin, peers

STOCK, SPACED, FIXED = "stock", "stock, space on the host", "ballonet, weights fixed"
FULL, OURS = "ballonet, full batches", "ballonet"
LAYERS = {"cuda": 32, "cpu": 12, "tiny": 4}
BUDGETS = {"cuda": (20 * GIB, 18 * GIB), "cpu": (288 * MIB, 240 * MIB), "tiny": (24 * MIB,)}
REQUESTS = {"cuda": 256, "cpu": 32, "tiny": 8}
NEW = {"cuda": 256, "cpu": 64, "tiny": 12}  # tokens of each answer
LONGEST = {"cuda": 2048, "cpu": 256, "tiny": 40}  # prompt
BLOCK = {"cuda": 256, "cpu": 32, "tiny": 16}  # tokens
STEPS = {288 * MIB: 0.75, 240 * MIB: 0.5}  # at most, of stock's
COLUMNS = [
    "budget, MiB",
    "peer",
    "steps",
    "steps / stock's",
    "preempted",
    "largest batch",
    "tokens per second",
    "times stock's",
    "answers that differ",
]


def main() -> None:
    chosen = begin("serve", __doc__, functions)
    rows = []
    for budget in BUDGETS[chosen.kind]:
        found: dict[str, dict[str, Any]] = {}
        for name in (
            STOCK,
            *((SPACED,) if chosen.cuda else ()),
            FIXED,
            FULL,
            OURS,
        ):
            with peers(__file__, chosen, (name,)) as one:
                found[name] = one[name].ask("serve", budget=budget)
        stock = found[STOCK]
        for name, said in found.items():
            steps = Figure.of([said["steps"] / stock["steps"]])
            speed = Figure.of([said["speed"] / stock["speed"]])
            if name == OURS and budget in STEPS:
                steps, speed = steps.at_most(STEPS[budget]), speed.at_least(1.0)
            differ = sum(one != other for one, other in zip(said["answers"], stock["answers"], strict=True))
            rows.append(
                [
                    round(budget / MIB),
                    name,
                    said["steps"],
                    steps,
                    said["preempted"],
                    said["largest"],
                    Figure.of([said["speed"]]),
                    speed,
                    Figure.of([float(differ)]).at_most(0),
                ]
            )
    title = f"{REQUESTS[chosen.kind]} requests of {NEW[chosen.kind]} tokens, {LAYERS[chosen.kind]} layers"
    report(chosen, "serve", title, [dict(zip(COLUMNS, row, strict=True)) for row in rows])


def functions(name: str, chosen: Options) -> Functions:
    return {"serve": lambda budget: serve(name, chosen, budget)}


def serve(name: str, chosen: Options, budget: int) -> dict[str, Any]:
    """Answers all requests twice, the second time measured."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    import ballonet

    torch.set_num_threads(1 if not chosen.cuda else torch.get_num_threads())
    ours = name in (FIXED, FULL, OURS)
    if ours:
        ballonet.install(
            budget, host_budget=budget, page_size=None if chosen.cuda else 256 * 1024, device=chosen.device
        )
    torch.manual_seed(0)
    wide = {"cuda": 4096, "cpu": 512, "tiny": 256}[chosen.kind]
    config = LlamaConfig(
        hidden_size=wide,
        intermediate_size=wide * 11 // 4,
        num_hidden_layers=LAYERS[chosen.kind],
        num_attention_heads=wide // 64,
        num_key_value_heads=max(1, wide // 64 // (4 if chosen.cuda else 1)),
        vocab_size=2048,
        max_position_embeddings=8192,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if chosen.cuda else torch.float32)
    model = model.to(chosen.device).eval()
    if ours:
        ballonet.manage(model, interval=None if name == FIXED else "auto", batches="full" if name == FULL else "fast")
    else:
        told(budget, sum(weight.nbytes for weight in model.parameters()))
    answered(name, chosen, model, budget, 2)
    return answered(name, chosen, model, budget, NEW[chosen.kind])


def told(budget: int, weights: int) -> None:
    """Stock is told that this is all the memory, and that the weights lie in it."""
    import torch
    from transformers.generation.continuous_batching import cache

    cache.get_device_and_memory_breakdown = lambda: (torch.device("cpu"), budget, weights, weights)


def answered(name: str, chosen: Options, model: Any, budget: int, tokens: int) -> dict[str, Any]:
    """Counts and answers of one run."""
    import torch
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig
    from transformers.generation.continuous_batching import continuous_api, requests

    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(16, LONGEST[chosen.kind] + 1, (REQUESTS[chosen.kind],), generator=draw).tolist()
    asked = [torch.randint(3, 2000, (length,), generator=draw).tolist() for length in lengths]
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
        max_batch_tokens=256,
        max_memory_percent=0.9,
        cpu_offload_space=budget / GIB if name == SPACED else 0.0,
    )
    began = time.perf_counter()
    try:
        found = model.generate_batch(
            asked,
            generation_config=GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=settings,
            progress_bar=False,
        )
    finally:
        processor._generation_step, state.create_equivalent_initial_request = step, again
    took = time.perf_counter() - began
    answers = [each.generated_tokens for _, each in sorted(found.items(), key=lambda item: int(item[0][4:]))]
    return {**counts, "speed": sum(map(len, answers)) / took, "answers": answers}


if __name__ == "__main__":
    main()
