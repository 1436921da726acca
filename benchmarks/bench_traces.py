"""How much memory the allocator needs for a trace beyond what is live: a trace made here, and any given as files.

python benchmarks/bench_traces.py [TRACE.csv ...]
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import Figure, options, report

PAGE_SIZES = ("2MiB", "8MiB")


def main() -> None:
    chosen = options("traces", __doc__)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "prefills (made here).csv"
        make_trace(made, layers=2 if chosen.tiny else 16)
        rows = [measure(trace, page) for trace in [made, *chosen.files] for page in PAGE_SIZES]
    report(chosen, "traces", "peak physical memory against peak live (limit: 1.02 x peak live + 4 pages)", rows)


def measure(trace: Path, page: str) -> dict[str, object]:
    command = [sys.executable, "-m", "ballonet", "replay", str(trace), "--page-size", page]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    live, physical = result["peak_live"], result["peak_physical"]
    limit = 1.02 + 4 * int(page.removesuffix("MiB")) * 2**20 / live
    return {
        "trace": trace.name,
        "pages of": page,
        "peak live MiB": live >> 20,
        "peak physical MiB": physical >> 20,
        "physical / live": Figure.of([physical / live]).at_most(round(limit, 4)),
        "operations": result["ops"],
        "driver calls": result["driver_calls"],
    }


def make_trace(path: Path, layers: int) -> None:
    """Prefills of varied length: norm, projections, scores and MLP, freed as a transformer does."""
    rows: list[tuple[int, str, int, int, int]] = []
    live: dict[str, int] = {}

    def alloc(name: str, size: int) -> None:
        live[name] = len(rows)
        rows.append((len(rows), "alloc", live[name], size, 0))

    def free(*names: str) -> None:
        for name in names:
            rows.append((len(rows), "free", live.pop(name), 0, 0))

    hidden, heads, itemsize = 2048, 16, 2
    for tokens in (512, 1337, 700, 2048, 96, 1800, 1024, 333, 1999):
        row = tokens * hidden * itemsize
        alloc("x", row)
        for _ in range(layers):
            alloc("normed", row)
            for name in ("q", "k", "v"):
                alloc(name, row)
            free("normed")
            alloc("scores", tokens * tokens * heads * itemsize)
            alloc("probabilities", tokens * tokens * heads * itemsize)
            free("scores")
            alloc("context", row)
            free("probabilities", "q", "k", "v")
            alloc("y", row)
            free("context", "x")
            alloc("gate", 4 * row)
            alloc("up", 4 * row)
            alloc("product", 4 * row)
            free("gate", "up")
            alloc("x", row)
            free("product", "y")
        free("x")
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("time_us", "op", "id", "size", "stream"))
        writer.writerows(rows)


if __name__ == "__main__":
    main()
