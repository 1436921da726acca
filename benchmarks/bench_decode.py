"""Time per decoded token of `generate()`, stock and managed: the same random weights, a cache that is already long.

Each peer is a process with its own allocator and its own copy of the model. The cache is filled directly. What is timed
are the steps of one `generate()` from its third token on, the device synchronised at each. Between them the managed
peer counts the calls of the driver that change what lies behind an address: in steady state there are none.

On a GPU the host may be what takes the time. So a `generate()` more is profiled: how long kernels run per token, how
much faster than stock's, and which takes the longest.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from common import PAGE_CALLS, Figure, Options, describe, interleaved, report, short
from peer import Functions, begin, peers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# (sequences, tokens held, how much faster than stock it is to be)
CASES = {
    "cuda": ((8, 16384, 1.8), (1, 65536, 2.2), (1, 1024, 0.97)),
    "cpu": ((1, 1024, 0.9), (1, 4096, 0.9), (1, 8192, 1.0), (1, 16384, 1.0)),
    "tiny": ((2, 32, 0.0),),
}
STEPS = 10  # tokens of each generate(); the first two are not timed
WARM = 2
NAME = 80  # characters of a kernel's name, which can have thousands


def main() -> None:
    chosen = begin("decode", __doc__, functions)
    rows = []
    with peers(__file__, chosen, ("stock", "ballonet")) as found:
        for batch, tokens, limit in CASES[chosen.kind][: chosen.cases]:
            calls: list[float] = []
            turns = {name: partial(noted, name, peer, batch, tokens, calls) for name, peer in found.items()}
            taken = interleaved(turns, chosen.repetitions)
            faster = Figure.ratio(taken["stock"], taken["ballonet"]).at_least(limit)
            row = {"sequences": batch, "tokens held": tokens, **taken, "times faster": faster}
            row["page calls per token"] = Figure.of(calls).at_most(0)
            rows.append({**row, **(kernels(found, batch, tokens) if chosen.cuda else {})})
    report(chosen, "decode", f"decoding: ms per token, {describe(chosen)}", rows)


def kernels(found: Mapping[str, Any], batch: int, tokens: int) -> dict[str, Any]:
    """For each peer the ms that kernels run per token, and of these the one that takes most."""
    told = {name: peer.ask("kernels", batch=batch, tokens=tokens) for name, peer in found.items()}
    row: dict[str, Any] = {}
    for name, each in told.items():
        row[f"kernels of {name}"] = Figure.of([each["ms"]])
        row[f"longest of {name}"] = f"{short(each['longest'])} ms {each['name']}"
    row["kernels, times faster"] = Figure.ratio(row["kernels of stock"], row["kernels of ballonet"])
    return row


def noted(name: str, peer: Any, batch: int, tokens: int, calls: list[float]) -> float:
    answer = peer.ask("decode", batch=batch, tokens=tokens)
    if name == "ballonet":
        calls.append(answer["calls"])
    ms: float = answer["ms"]
    return ms


def functions(name: str, chosen: Options) -> Functions:
    from llama import prepare

    model = prepare(name, chosen)
    return {
        "decode": lambda batch, tokens: decode(name, model, batch, tokens, chosen.device),
        "kernels": lambda batch, tokens: profile(name, model, batch, tokens, chosen.device),
    }


def decode(peer: str, model: PreTrainedModel, batch: int, tokens: int, device: str) -> dict[str, float]:
    """ms, and calls of the driver, per token."""
    from generating import Clock, timed
    from llama import filled

    import ballonet

    def calls() -> int:
        return sum(ballonet.stats().driver_calls[name] for name in PAGE_CALLS) if peer == "ballonet" else 0

    clock = Clock(device, calls)
    timed(model, filled(peer, model.config, batch, tokens, device), (batch, tokens), device, STEPS, clock)
    each = STEPS - WARM
    ms = (clock.times[-1] - clock.times[WARM - 1]) / each * 1e3
    return {"ms": ms, "calls": (clock.counts[-1] - clock.counts[WARM - 1]) / each}


def profile(peer: str, model: PreTrainedModel, batch: int, tokens: int, device: str) -> dict[str, Any]:
    """ms per token of all kernels, and of the one that takes most, with its name."""
    import torch
    from generating import Clock, timed
    from llama import filled

    cache = filled(peer, model.config, batch, tokens, device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        timed(model, cache, (batch, tokens), device, WARM, Clock(device))
    took = {each.key: each.self_device_time_total / WARM / 1e3 for each in profiler.key_averages()}
    longest = max(took, key=lambda name: took[name], default="none")
    return {"ms": sum(took.values()), "longest": took.get(longest, 0.0), "name": longest[:NAME]}


if __name__ == "__main__":
    main()
