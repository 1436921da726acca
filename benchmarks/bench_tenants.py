"""Two and three models on one device under recorded requests: time simulated, pages real (`ballonet whatif`).

    python benchmarks/bench_tenants.py [--traces TRACE.csv]

Models of the 8B Llama shape, on a device with little beside their weights. Requests are dealt out one by one
(`together`), or all of a few seconds to one model and then to the next (`turns`): of a trace made here, or of files
that are given (Azure's). `split` and `swap` are transformers' own cache and scheduler, each with an even part of the
budget, or one model at a time on the device. The other rows are ballonet, and ballonet with one part switched off.

What a step takes: 8.8 ms, 40 us for each new token, 36.6 ns for each that is read; the link has 55 GB/s. The first, the
third and the link were measured on an H200 (a decode step under a CUDA graph; attention over 65,536 tokens); the second
is what 16 GFLOP take at two fifths of its peak, and is assumed.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from harness import GIB, MIB, Benchmark, Figure, Options, main, report
from transformers import LlamaConfig

from ballonet.allocator.errors import BallonetError
from ballonet.hooks.plan.machine import Machine, Tenant, dealt
from ballonet.hooks.plan.run import run
from ballonet.hooks.server.arrivals import read
from ballonet.offload.policy.step_costs import Parts

OURS = "ballonet"
ABLATIONS = (
    *("lru", "uncapped", "one-slot", "two-slots", "no-restoring", "weights-fixed"),
    *("activations-apart", "no-buffer"),
)
POLICIES = {"split": "split", "swap": "swap", OURS: "fast", **{f"ballonet, {name}": name for name in ABLATIONS}}
ASKING = {f"{OURS}, SLOs asked": "fast", "ballonet, fixed-buffer, SLOs asked": "fixed-buffer"}
COSTS = (8.8e-3, 4e-5, 3.66e-8, 0.0)
SLOS = 5.0, 0.1  # seconds to the first token, and of a step that decodes, of the rows whose requests ask
LINK = 55e9  # bytes per second
SHRINK = 64
BURST, CALM = 6.0, 0.1  # requests per second of the trace that is made here
COLUMNS = [
    "tenants",
    "requests",
    "policy",
    "finished",
    "TTFT P99, s",
    "TBT P99, s",
    "tokens per second",
    "stalled, s",
    "moved, s",
]


@dataclass(frozen=True, slots=True)
class Scene:
    """`models` of them on a device of so many bytes, asked `scale` times as fast as recorded; `turn`: seconds, None
    where they are asked together."""

    models: int
    budget: int
    scale: float
    turn: float | None
    policies: tuple[str, ...]
    asking: bool = False  # are there rows whose requests ask for SLOs?


ONEIROS, ELLM = (
    tuple(f"ballonet, {name}" for name in ABLATIONS[:6]),
    tuple(f"ballonet, {name}" for name in ABLATIONS[6:]),
)
SCENES = (
    Scene(2, 34 * GIB, 3.0, None, ("split", "swap", OURS, ONEIROS[-1], *ELLM), asking=True),
    Scene(2, 34 * GIB, 3.0, 3.0, ("split", "swap", OURS, *ONEIROS)),
    Scene(3, 48 * GIB, 1.0, 4.0, ("split", "swap", OURS, ONEIROS[0], ONEIROS[-1])),
    Scene(2, 24 * GIB, 1.0, 3.0, ("split", "swap", OURS)),
)
TINY = (Scene(2, 80 * MIB, 4.0, 1.0, ("split", "swap", OURS, "ballonet, lru")),)
REQUESTS = {False: 120, True: 12}  # fewer of Azure's end before a calm, and before a third model has had its turn


def sharing(chosen: Options) -> None:
    rows = []
    with TemporaryDirectory() as folder:
        made = Path(folder) / "made.csv"
        write(made, REQUESTS[chosen.tiny], 200 if chosen.tiny else 6000)
        for trace in chosen.traces or [made]:
            for scene in TINY if chosen.tiny else SCENES:
                rows += list(measure(chosen, trace, scene))
    title = (
        f"{'tiny models' if chosen.tiny else '8B models'}, {REQUESTS[chosen.tiny]} requests of "
        f"{', '.join(each.name for each in chosen.traces) or 'a trace made here'}, time simulated, pages real"
    )
    report(chosen, title, [dict(zip(COLUMNS, row, strict=True)) for row in rows])


def measure(chosen: Options, trace: Path, scene: Scene) -> Iterator[list[Any]]:
    """A row for each policy."""
    shrink = 1 if chosen.tiny else SHRINK
    page = 256 * 1024 if chosen.tiny else 8 * MIB
    machine = Machine(scene.budget, scene.budget * 2, page, 200.0 * MIB if chosen.tiny else LINK, shrink)
    batching = {
        "page_size": 32 if chosen.tiny else 256,
        "max_batch_tokens": 256 if chosen.tiny else 2048,
        "allow_block_sharing": False,  # the trace does not say what prompts have in common
    }
    arrivals = read(trace, limit=REQUESTS[chosen.tiny], scale=scene.scale)
    asked = dealt(arrivals, scene.models, scene.turn)
    asking = ASKING if scene.asking else {}
    how = "together" if scene.turn is None else f"turns of {scene.turn:g} s"
    what = f"{scene.models} on {scene.budget / (MIB if chosen.tiny else GIB):g} {'MiB' if chosen.tiny else 'GiB'}"
    for label in (*scene.policies, *asking):
        tenants = [Tenant("abc"[n], config(chosen.tiny), Parts(*COSTS), each) for n, each in enumerate(asked)]
        policy = {**POLICIES, **ASKING}[label]
        try:
            found = run(tenants, machine, policy, batching, SLOS if label in asking else (None, None), label in asking)
        except BallonetError:
            yield [what, f"{how}, {scene.scale:g} times the speed", label, "does not fit", *[None] * 5]
            continue
        finished = found["requests"] - found["failed"]
        figures = [found[name] for name in ("ttft_p99", "tbt_p99", "tokens_per_second", "stalled", "moved")]
        figures = [None if figure is None else Figure.of([figure]) for figure in figures]
        yield [what, f"{how}, {scene.scale:g} times the speed", label, f"{finished} of {found['requests']}", *figures]


def config(tiny: bool) -> LlamaConfig:
    """The configuration of one model."""
    if tiny:
        return LlamaConfig(
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=256,
        )
    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        dtype=torch.bfloat16,
    )


def write(path: Path, requests: int, longest: int) -> None:
    """A trace as the first 120 requests of Azure's: prompts of up to so many tokens, short answers, and two bursts with
    a calm between them that is longer than the dwell of pages."""
    draw, at = Random(0), datetime(2026, 1, 1)
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
        for number in range(requests):
            rate = BURST if abs(2 * number - requests) > requests // 6 else CALM
            at += timedelta(seconds=draw.expovariate(rate))
            lines.writerow([f"{at:%Y-%m-%d %H:%M:%S.%f}", draw.randint(longest // 10, longest), draw.randint(4, 40)])


BENCHMARKS = {"tenants": Benchmark(sharing)}

if __name__ == "__main__":
    main(__doc__, BENCHMARKS)
