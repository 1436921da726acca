"""Allocate and free: the core's own hit path, and `torch.empty` with ballonet under it and with others.

On a GPU the others are torch's own allocator, the same with expandable segments, and a pluggable allocator that does
nothing: what torch itself costs with any pluggable one. On a CPU it is torch's own.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Figure, Options, report
from peer import EXPANDABLE, Functions, answering, begin, in_turns, peers, synchronize

SIZES = {"cpu": (64, 4096, 65536, 1 << 20, 16 << 20), "cuda": (512, 4096, 65536, 1 << 20, 16 << 20, 64 << 20)}
BUDGET = "512MiB"
RATIO = 1.10  # of the stock allocator's time
CORE = 100  # ns
ROUNDS = 5  # times the repetitions: short ones, as a virtual machine is slow for whole seconds
EMPTY = """
#include <cstddef>
alignas(512) static char memory[64 * 512];
static unsigned next = 0;
extern "C" void* empty_alloc(std::ptrdiff_t, int, void*) { return memory + 512 * (next++ % 64); }
extern "C" void empty_free(void*, std::ptrdiff_t, int, void*) {}
"""


def main() -> None:
    chosen = begin("allocate", __doc__, functions)
    others = ("native", "expandable segments", "empty pluggable") if chosen.cuda else ("native",)
    rows = []
    with peers(__file__, chosen, (*others, "ballonet"), {"expandable segments": EXPANDABLE}) as started:
        found = answering(started, ("native", "ballonet"), "torch", size=SIZES[chosen.device][0])
        for size in SIZES[chosen.device]:
            core = Figure.of([found["ballonet"].ask("core", size=size) for _ in range(chosen.repetitions)])
            taken = in_turns(found, ROUNDS * chosen.repetitions, "torch", size=size)
            ratio = Figure.ratio(taken["ballonet"], taken["native"]).at_most(RATIO)
            rows.append({"bytes": size, "core alone": core.at_most(CORE), **taken, "ballonet / native": ratio})
    report(chosen, "allocate", "allocating: ns per allocation and free, by torch.empty and in the core alone", rows)


def functions(name: str, chosen: Options) -> Functions:
    import ballonet
    from ballonet.allocator import _native, devices

    rounds = 200 if chosen.tiny else 5_000
    found: dict[str, Any] = {"torch": lambda size: time_empty(size, chosen.device, rounds)}
    if name == "ballonet":
        ballonet.install(BUDGET)
        found["core"] = lambda size: _native.bench_hit_path(devices.require(), size, 40 * rounds)
    elif name == "empty pluggable":
        install_empty()
    return found


def time_empty(size: int, device: str, rounds: int) -> float:
    """ns per `torch.empty` and the free that follows."""
    import torch

    empty = torch.empty
    for _ in range(200):
        empty(size, dtype=torch.uint8, device=device)
    synchronize(device)
    begin = time.perf_counter_ns()
    for _ in range(rounds):
        empty(size, dtype=torch.uint8, device=device)
    return (time.perf_counter_ns() - begin) / rounds


def install_empty() -> None:
    """The cheapest pluggable allocator there can be. Its memory is not to be touched."""
    import torch

    from ballonet.allocator.companion import COMPILERS

    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "empty.cpp", Path(folder) / "empty.so"
        source.write_text(EMPTY)
        compiler = next(filter(None, map(shutil.which, COMPILERS)))
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        pluggable = torch.cuda.memory.CUDAPluggableAllocator(str(library), "empty_alloc", "empty_free")
    torch.cuda.memory.change_current_allocator(pluggable)


if __name__ == "__main__":
    main()
