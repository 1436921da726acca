"""What a token costs the host in Python: calls of one decode step of `generate()`, stock and managed, and its time.

Each peer is a process with its own copy of the same model. Calls are those of Python functions, whoever's they are, and
those of ballonet alone; they do not depend on load. The times are those of the fastest of other steps, in which nothing
is counted. Layers are small: what is over stock's is nearly all of it the host's.

On a GPU, and on the simulated one, "pieces" is the managed model as it is, "resident" with `pieces=None`; padded, there
are two sequences of different length. There calls of C functions are counted as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from harness import Benchmark, Figure, Functions, Options, in_turns, main, peers, report
from models import OURS, Clock, build, describe_few, few, filled, interval_of, layer_page_size, timed
from transformers import PreTrainedModel

import ballonet

LAYERS = {"cuda": 32, "cpu": 16, "tiny": 4}
PEERS = {
    "cuda": ("stock", "resident", "pieces", "stock, padded", "resident, padded", "pieces, padded"),
    "cpu": ("stock", "resident", "interval 4", "interval 1"),
}
PADDED = ", padded"
LIMITS = {"interval 4": 1.25, "interval 1": 2.0, "pieces": 0.2, "pieces, padded": 0.3}  # times stock's calls
HELD = 256  # tokens
TOKENS = {"cuda": 24, "cpu": 48, "tiny": 8}  # of each generate()
WARM = 4


def counting(chosen: Options) -> None:
    rows = on_a_device(chosen) if chosen.cuda else on_the_host(chosen)
    report(chosen, f"Python per decoded token, {describe_few(small(chosen), LAYERS[chosen.kind])}", rows)


def on_a_device(chosen: Options) -> list[dict[str, Any]]:
    """Calls alone, as a simulated device has no times."""
    with peers(chosen, PEERS["cuda"]) as started:
        counted = {name: started[name].ask("calls") for name in started}
    rows = []
    for name, (calls, ours, c_calls) in counted.items():
        stock, _, stocks_c = counted["stock" + PADDED * name.endswith(PADDED)]
        both = of_stock(name, calls + c_calls, stock + stocks_c)
        row = {"peer": name, "calls": calls, "ballonet's": ours, "times stock's": of_stock(name, calls, stock)}
        rows.append({**row, "of C functions": c_calls, "both, times stock's": both})
    return rows


def on_the_host(chosen: Options) -> list[dict[str, Any]]:
    """Calls and times on the stand-in."""
    with peers(chosen, PEERS["cpu"]) as started:
        counted = {name: started[name].ask("calls") for name in started}
        taken = in_turns(started, chosen.repetitions, "ms")
    rows = []
    for name, (calls, ours, _) in counted.items():
        times = of_stock(name, calls, counted["stock"][0])
        over = (taken[name].median - taken["stock"].median) / LAYERS[chosen.kind] * 1e3
        row = {"peer": name, "calls": calls, "ballonet's": ours, "times stock's": times, "ms": taken[name]}
        rows.append({**row, "us per layer over stock": Figure.of([over])})
    return rows


def of_stock(name: str, calls: int, stock: int) -> Figure:
    """How many times stock's calls these are, with the peer's limit."""
    times = Figure.of([calls / stock])
    return times.at_most(LIMITS[name]) if name in LIMITS else times


def small(chosen: Options) -> Options:
    """The same with layers that are small on every device: their number decides, and not their size."""
    return replace(chosen, tiny=True)


def functions(name: str, chosen: Options) -> Functions:
    torch.set_num_threads(1)
    managed = not name.startswith("stock")
    if managed:
        ballonet.install("4GiB", page_size=layer_page_size(chosen))
    model = build(few(small(chosen), LAYERS[chosen.kind]), chosen.device)
    if managed:
        pieces: Any = "auto" if name.startswith("pieces") else None
        ballonet.manage(model, interval=interval_of(name), pieces=pieces)
    return {"calls": partial(calls, name, model, chosen), "ms": partial(ms, name, model, chosen)}


def calls(peer: str, model: PreTrainedModel, chosen: Options) -> tuple[int, int, int]:
    """Python's calls of a step, all and ballonet's, and those of C functions: the median by the first."""
    counts = {"call": 0, "c_call": 0, "ours": 0}

    def count(frame: Any, event: str, _: Any) -> None:
        if event in counts:
            counts[event] += 1
            if event == "call":
                counts["ours"] += frame.f_globals.get("__name__", "").startswith("ballonet.")

    marks: list[tuple[int, int, int]] = []

    def note() -> int:
        marks.append((counts["call"], counts["ours"], counts["c_call"]))
        return 0

    sys.setprofile(count)
    try:
        generated(peer, model, chosen, note)
    finally:
        sys.setprofile(None)
    steps = [tuple(after - before for before, after in zip(*pair, strict=True)) for pair in pairwise(marks[WARM:])]
    all_of_them, ours, c_calls = sorted(steps)[len(steps) // 2]
    return all_of_them, ours, c_calls


def ms(peer: str, model: PreTrainedModel, chosen: Options) -> float:
    """Milliseconds of the fastest step."""
    times = generated(peer, model, chosen, int)
    return min(after - before for before, after in pairwise(times[WARM:])) * 1e3


def generated(peer: str, model: PreTrainedModel, chosen: Options, note: Callable[[], int]) -> list[float]:
    """When each token of a generate() was there; `note` is called after each."""
    padded = peer.endswith(PADDED)
    size = 1 + padded, HELD
    cache = filled("stock" if peer.startswith("stock") else OURS, model.config, *size, chosen.device)
    clock = Clock(chosen.device, note)
    return timed(model, cache, size, chosen.device, TOKENS[chosen.kind], clock, HELD // 8 * padded).times


BENCHMARKS = {"calls": Benchmark(counting, functions)}

if __name__ == "__main__":
    main(__doc__, BENCHMARKS)
