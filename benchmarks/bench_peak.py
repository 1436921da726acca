"""Peak physical memory against peak live memory while prompts of varied length run through a model, one by one.

On a GPU torch's own allocator and its expandable segments are measured beside; on a CPU torch's keeps no count.
"""

from __future__ import annotations

from typing import Any

import torch
from harness import EXPANDABLE, MIB, Benchmark, Figure, Functions, Options, answering, main, peers, report
from models import TINY, build, layer_page_size, sized, synchronize

import ballonet
from ballonet.allocator import devices

# Few layers, so that activations count beside the weights; lengths that no size class fits twice.
SHAPES = {"cuda": (4096, 14336, 4, 32, 8, 32000, 32768), "cpu": (512, 1536, 4, 8, 2, 4000, 4096)}  # see models.sized
LENGTHS = {
    "cuda": (4096, 1024, 8192, 3072, 16384, 1337, 12288, 700, 9999, 2048, 15000, 96, 5555, 14336, 333, 11111),
    "cpu": (512, 128, 1024, 384, 2048, 167, 1536, 700, 96, 1999, 333),
    "tiny": (64, 16, 96, 33),
}


def peaks(chosen: Options) -> None:
    names = ("native", "expandable segments", "ballonet") if chosen.cuda else ("ballonet",)
    rows = []
    with peers(chosen, names, {"expandable segments": EXPANDABLE}) as started:
        able = answering(started, ("ballonet",), "ready")
        for name, peer in able.items():
            live, physical, page = peer.ask("peak")
            ratio = Figure.of([physical / live])
            if name == "ballonet":
                ratio = ratio.at_most(round(1.02 + 4 * page / live, 4))
            row = {"allocator": name, "peak live MiB": round(live / MIB), "peak physical MiB": round(physical / MIB)}
            rows.append({**row, "physical / live": ratio})
    title = "peak physical memory against peak live, prefills of varied length (limit: 1.02 x peak live + 4 pages)"
    report(chosen, title, rows)


def functions(name: str, chosen: Options) -> Functions:
    if name == "ballonet":
        ballonet.install("60GiB" if chosen.cuda else "2GiB", page_size=layer_page_size(chosen))
    return {"peak": lambda: peak(name, chosen), "ready": lambda: torch.empty(1, device=chosen.device).nelement()}


def peak(name: str, chosen: Options) -> tuple[int, int, int]:
    """Bytes: peak live, peak physical, and of a page (0 where there are none)."""
    config: Any = TINY if chosen.tiny else sized(*SHAPES[chosen.device])
    model = build(config, chosen.device)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for length in LENGTHS[chosen.kind]:
            prompt = torch.randint(0, config.vocab_size, (1, length), generator=generator).to(chosen.device)
            model(prompt, use_cache=True, logits_to_keep=1)
    synchronize(chosen.device)
    if name == "ballonet":
        snapshot = devices.require().snapshot()
        return snapshot["heap"]["live_peak"], snapshot["physical_peak"], snapshot["page_size"]
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), 0


BENCHMARKS = {"peak": Benchmark(peaks, functions)}

if __name__ == "__main__":
    main(__doc__, BENCHMARKS)
