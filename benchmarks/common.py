"""What the benchmarks share: options, interleaved repetitions, medians with spread and limit, a table and its JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

import ballonet

ROOT = Path(__file__).resolve().parent.parent
MIB, GIB = 2**20, 2**30
PAGE_CALLS = ("cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuMemcpyAsync")
REPETITIONS = 7
Row = Mapping[str, Any] | Sequence[tuple[str, Any]]  # of a table: cells by column; pairs where two have one name
PACKAGES = ("torch", "transformers", "accelerate")


@dataclass(frozen=True, slots=True)
class Options:
    """What every benchmark can be told. `cuda`: whether it runs on a GPU, else on the CPU and the host stand-in."""

    tiny: bool
    out: Path
    cuda: bool
    peer: str | None
    files: list[Path]
    keep: Path = ROOT / "build"  # where a trace goes that explains a figure
    rounds: int | None = None  # repetitions that were asked for
    cases: int | None = None  # the first so many of a benchmark's cases; None: all

    @property
    def device(self) -> str:
        """torch's name of the device."""
        return "cuda" if self.cuda else "cpu"

    @property
    def kind(self) -> str:
        """Whose sizes count: "cuda", "cpu" or "tiny"."""
        return "tiny" if self.tiny else self.device

    @property
    def repetitions(self) -> int:
        return self.rounds or (2 if self.tiny else REPETITIONS)


def options(name: str, description: str | None) -> Options:
    """From the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes and two repetitions: shows only that it runs")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / f"bench-{name}.json", help="where the JSON goes")
    parser.add_argument("--keep", type=Path, default=ROOT / "build", help="where a trace goes that explains a figure")
    parser.add_argument("--repetitions", type=int, help=f"instead of {REPETITIONS} (or what takes long has)")
    parser.add_argument("--cases", type=int, help="only the first so many, where a benchmark has several")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("files", nargs="*", type=Path, help="recorded traces, for the benchmark that takes some")
    given = parser.parse_args()
    shortened = given.repetitions, given.cases
    return Options(given.tiny, given.out, _has_gpu(), given.peer, given.files, given.keep, *shortened)


def describe(chosen: Options) -> str:
    """The model of llama.py that is measured, in words, for a title."""
    return "tiny Llama" if chosen.tiny else "8B Llama shape, bfloat16" if chosen.cuda else "135M Llama shape, float32"


def describe_few(chosen: Options, layers: int) -> str:
    """The same of what `llama.few` gives."""
    shape = "8B Llama shape, bfloat16" if chosen.cuda and not chosen.tiny else "smallest shape that streams, float32"
    return f"{layers} layers of the {shape}"


def _has_gpu() -> bool:
    """Whether `install()` would take a GPU here. Makes no CUDA context, and imports torch only where it could use one:
    what measures are other processes (peer.py), and to import it takes longer than many a benchmark."""
    if "cuda" not in versions():
        return False
    import torch

    from ballonet.allocator import device_choice
    from ballonet.allocator.config import Config

    usable = torch.version.cuda is not None and torch.cuda.is_available()
    return device_choice.choose(Config.from_env(), usable).kind == "cuda"


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value: the median of the repetitions, the smallest and largest of them, and its limit if it has one.

    `limit` reads `"<= 1.1"` or `">= 0.9"`; `met` says whether the median keeps it.
    """

    median: float
    least: float
    most: float
    limit: str | None = None
    met: bool | None = None

    @classmethod
    def of(cls, values: list[float]) -> Figure:
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def ratio(cls, above: Figure, below: Figure) -> Figure:
        """The ratio of the medians."""
        return cls.of([above.median / below.median])

    def at_most(self, limit: float) -> Figure:
        return replace(self, limit=f"<= {limit:g}", met=self.median <= limit)

    def at_least(self, limit: float) -> Figure:
        return replace(self, limit=f">= {limit:g}", met=self.median >= limit)

    def __str__(self) -> str:
        text = short(self.median)
        if self.least < self.most:
            text += f" ({short(self.least)} to {short(self.most)})"
        if self.limit is None:
            return text
        sign = self.limit.replace("<=", "≤").replace(">=", "≥")
        return f"{text} [{sign}: {'met' if self.met else 'NOT MET'}]"


def short(value: float) -> str:
    """Three digits or a little more, and never an exponent: `'43.2'`, `'1.004'`, `'6,832'`."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}" if 0.9 < abs(value) < 2 else f"{value:.3g}"


def interleaved(peers: Mapping[str, Callable[[], float]], repetitions: int = REPETITIONS) -> dict[str, Figure]:
    """Each peer once per round, so that a drift of the machine's speed meets all alike. The first does not count."""
    values: dict[str, list[float]] = {name: [] for name in peers}
    console = Console(stderr=True)
    rounds = track(
        range(repetitions + 1), "measuring", console=console, transient=True, disable=not console.is_terminal
    )
    for repetition in rounds:
        for name, measure in peers.items():
            value = measure()
            if repetition:
                values[name].append(value)
    return {name: Figure.of(taken) for name, taken in values.items()}


def report(chosen: Options, name: str, title: str, rows: list[Row]) -> None:
    """Prints the table and writes it. All rows have the same columns in the same order."""
    columns, lines = keep(chosen, name, title, rows)
    table = Table(*columns, title=title, title_justify="left")
    for line in lines:
        table.add_row(*(escape(str(value)) for value in line))
    console = Console()
    Console(width=None if console.is_terminal else 160).print(table)


def keep(chosen: Options, name: str, title: str, rows: list[Row]) -> tuple[list[str], list[list[Any]]]:
    """Writes the table as JSON, with the spread of each figure and the limits; returns its columns and lines. A
    benchmark that may be cut off calls it after each row."""
    if not rows:
        raise SystemExit("there is nothing to report")
    cells = [list(row.items()) if isinstance(row, Mapping) else row for row in rows]
    columns, lines = [column for column, _ in cells[0]], [[value for _, value in row] for row in cells]
    plain = [[asdict(value) if isinstance(value, Figure) else value for value in line] for line in lines]
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    written = chosen.out.with_suffix(".new")
    written.write_text(json.dumps({"benchmark": name, "title": title, "columns": columns, "rows": plain}, indent=1))
    written.replace(chosen.out)
    return columns, lines


def machine() -> dict[str, Any]:
    """What the figures were measured on; gpu, gpu_gib and driver where there is an NVIDIA device."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        **_gpu(),
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "ram_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "kernel": platform.release(),
    }


def _gpu() -> dict[str, Any]:
    """The device as its driver names it, with the driver's own version where `nvidia-smi` tells it, else its CUDA's."""
    try:
        from ballonet.allocator import _native

        facts = _native.probe("libcuda.so.1", 0)
    except Exception:  # whatever is wrong with it will be said by the steps
        return {}
    number = facts["driver_version"]
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        said = ""
    driver = said.partition("\n")[0] or f"for CUDA {number // 1000}.{number % 1000 // 10}"
    return {"gpu": facts["name"], "gpu_gib": round(facts["total_memory"] / 2**30), "driver": driver}


def versions() -> dict[str, str]:
    """Returns the versions of Python, ballonet, the packages underneath, and the CUDA that torch is built for. Imports
    none of them."""
    found = {"python": platform.python_version(), "ballonet": ballonet.__version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    torch = find_spec("torch")
    if torch is not None and torch.origin is not None:
        text = (Path(torch.origin).parent / "version.py").read_text()
        found |= dict(re.findall(r"^(cuda)\b.*= '([^']+)'", text, re.MULTILINE))
    return found
