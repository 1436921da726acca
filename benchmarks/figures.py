"""Puts what was measured, the files of benchmarks/results, into the README and docs/measuring.md.

Each document has a section between two marks; what stands between them is made here and nowhere else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import ROOT, Figure
from picture import draw
from rich.console import Console
from rich.markup import escape
from rich.table import Table

RESULTS = ROOT / "benchmarks" / "results"
SHOWN = {
    ROOT / "README.md": ("prefix", "oom", "context", "streaming", "decode"),
    ROOT / "docs" / "measuring.md": (
        *("slo", "knee", "driver-time", "shrink", "recover", "fragmentation", "page-size", "kv-stream", "lending"),
        *("tenants", "serve", "serve-plain"),
        *("hit-rate", "cold-load", "reactivate", "kv-growth", "prefill", "allocate", "exchange", "peak", "traces"),
    ),
}
PICTURES = ROOT / "docs"  # where pictures go, and from where documents lead to them
NO_GPU = "No GPU has run `make gpu` yet: every figure here is of a CPU, on the host stand-in.\n"


def main() -> None:
    results = load()
    if not results:
        raise SystemExit(f"nothing was measured yet: {RESULTS} is empty. make bench")
    for result in results:
        for figure in result["figures"]:
            if figure["benchmark"] == "streaming":
                draw(figure, where(result), picture(result))
    for document, names in SHOWN.items():
        before, opening, rest = document.read_text().partition("<!-- figures -->\n")
        _, closing, after = rest.partition("<!-- end of figures -->")
        document.write_text(before + opening + "\n".join(section(results, names, document.parent)) + closing + after)


def load(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """What was kept, machines with a GPU first."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    results = [each for each in found if "figures" in each]  # a preflight has none
    return sorted(results, key=lambda result: "gpu" not in result["machine"])


def section(results: list[dict[str, Any]], names: tuple[str, ...], folder: Path = ROOT) -> Iterator[str]:
    """The tables of these benchmarks, and what was tested where, for a document in `folder`."""
    if not any("gpu" in result["machine"] and result["figures"] for result in results):
        yield NO_GPU
    for name in names:
        for result in results:
            for figure in result["figures"]:
                if figure["benchmark"] == name:
                    yield markdown(result, figure)
                    if name == "streaming":
                        yield f"![Time per token]({picture(result).relative_to(folder)})\n"
    for result in results:
        if result["tests"] or ("gpu" in result["machine"] and result["failed"]):
            yield tested(result)


def picture(result: dict[str, Any]) -> Path:
    """Where the picture of streaming on this machine is."""
    return PICTURES / f"streaming-{slug(result['machine'])}.svg"


def slug(machine: dict[str, Any]) -> str:
    """A short name of the machine, for a file's."""
    name = machine.get("gpu") or f"{machine['cpu']} {machine['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def where(result: dict[str, Any]) -> str:
    """The machine and the versions in a line."""
    machine, versions = result["machine"], result["versions"]
    host = f"{machine['cpu']}, {machine['cores']} cores"
    place = f"{machine['gpu']}, driver {machine['driver']}, {host}" if "gpu" in machine else f"{host}, no GPU"
    return f"{place}, torch {versions['torch']}, transformers {versions['transformers']}"


def markdown(result: dict[str, Any], figure: dict[str, Any]) -> str:
    """One benchmark: what, where and by which command, then the rows."""
    program = f"benchmarks/bench_{figure['benchmark'].replace('-', '_')}.py"
    lines = [
        f"**{figure['title'][0].upper()}{figure['title'][1:]}**  ",
        f"{where(result)}; `python {program}`",
        "",
        "| " + " | ".join(figure["columns"]) + " |",
        "|" + "---|" * len(figure["columns"]),
        *("| " + " | ".join(cell(value) for value in row) + " |" for row in figure["rows"]),
        "",
    ]
    return "\n".join(lines)


def tested(result: dict[str, Any]) -> str:
    """What the tests of a part gave, and what was not run."""
    counts = ", ".join(f"{count} {what}" for what, count in sorted(result["tests"].items()))
    lines = [f"**`make gpu PART={result['part']}`**: {counts or 'no test'} ({where(result)})."]
    lines += [f"- failed: {what}" for what in result["failed"]] + [f"- not run: {what}" for what in result["skipped"]]
    return "\n".join([*lines, ""])


def cell(value: Any) -> str:
    """A figure with its spread and limit, or a plain value."""
    if isinstance(value, dict):
        return str(Figure(**value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def print_result(result: dict[str, Any]) -> None:
    """The tables of a part on the terminal, then what failed, what was missed and what was skipped."""
    terminal = Console()
    console = Console(width=None if terminal.is_terminal else 160)
    for figure in result["figures"]:
        table = Table(*figure["columns"], title=escape(figure["title"]), title_justify="left")
        for row in figure["rows"]:
            table.add_row(*(escape(cell(value)) for value in row))
        console.print(table)
    figures = [(figure, value) for figure in result["figures"] for row in figure["rows"] for value in row]
    limits = [(figure, value) for figure, value in figures if isinstance(value, dict) and value.get("limit")]
    lines = [f"{count} tests {what}" for what, count in sorted(result["tests"].items())]
    lines += [f"{sum(value['met'] for _, value in limits)} of {len(limits)} limits met"]
    lines += [f"limit missed: {figure['benchmark']}: {cell(value)}" for figure, value in limits if not value["met"]]
    lines += [f"failed: {what}" for what in result["failed"]] + [f"not run: {what}" for what in result["skipped"]]
    for line in lines:
        console.print(line, markup=False, highlight=False)


if __name__ == "__main__":
    main()
