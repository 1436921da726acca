"""What the benchmarks share: interleaved repetitions, medians with their spread, a table, and one JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

REPETITIONS = 7
PACKAGES = ("torch", "transformers", "ballonet")


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value: the median of the repetitions, and the smallest and largest of them."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: list[float]) -> Figure:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{short(self.median)} ({short(self.least)} to {short(self.most)})"


def short(value: float) -> str:
    """Three digits, and never an exponent: `'43.2'`, `'6,832'`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def interleaved(peers: Mapping[str, Callable[[], float]], repetitions: int = REPETITIONS) -> dict[str, Figure]:
    """Each peer once per round, so that a drift of the machine's speed meets all alike. The first does not count."""
    values: dict[str, list[float]] = {name: [] for name in peers}
    for repetition in track(range(repetitions + 1), "measuring", console=Console(stderr=True), transient=True):
        for name, measure in peers.items():
            value = measure()
            if repetition:
                values[name].append(value)
    return {name: Figure.of(taken) for name, taken in values.items()}


def report(name: str, title: str, columns: list[str], rows: list[list[Any]]) -> None:
    """Prints the table and writes build/bench-NAME.json, with machine and versions, and the spread of each figure."""
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, str) else str(cell) for cell in row))
    Console().print(table)
    build = Path("build")
    build.mkdir(exist_ok=True)
    plain = [[asdict(cell) if isinstance(cell, Figure) else cell for cell in row] for row in rows]
    result = {"benchmark": name, "title": title, "machine": machine(), "columns": columns, "rows": plain}
    (build / f"bench-{name}.json").write_text(json.dumps(result, indent=1))


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    versions = {package: version(package) for package in PACKAGES}
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        **versions,
    }
