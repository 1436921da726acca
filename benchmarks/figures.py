"""Puts what was measured, the files of benchmarks/results, into docs/measuring.md, and draws streaming for the README.

The document has two sections, each between two marks; what stands between them is made here and nowhere else.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import ROOT, Figure
from rich.console import Console
from rich.markup import escape
from rich.table import Table

RESULTS = ROOT / "benchmarks" / "results"
PROGRAMS = {  # benchmarks/bench_NAME.py, and what it measures
    "budget": ("oom", "context", "shrink"),
    "prefix": ("prefix", "hit-rate"),
    "streaming": ("streaming",),
    "speed": ("speed",),
    "calls": ("calls",),
    "decode": ("decode", "prefill", "kv-growth"),
    "serve": ("serve", "serve-plain"),
    "batch_attention": ("batch-attention",),
    "images": ("images",),
    "peak": ("peak",),
    "sleep": ("sleep", "wake", "sync"),
    "slo": ("slo",),
    "tenants": ("tenants", "tenants-parts", "tenants-rates"),
    "replicas": ("replicas",),
    "papers": ("papers", "host-memory"),
}
ORDER = (  # of the tables of a machine
    *("streaming", "speed", "decode", "prefill", "kv-growth", "calls", "oom", "context", "shrink", "peak", "prefix"),
    *("hit-rate", "serve", "serve-plain", "batch-attention", "slo", "tenants", "tenants-parts", "tenants-rates"),
    *("replicas", "papers", "host-memory", "sleep", "wake", "sync", "images"),
)
OMITTED = {  # columns that only the stored results have
    "context": ("what gave pages",),
    "decode": ("longest of stock", "longest of ballonet"),
    "prefix": ("MiB on the host", "tokens reused"),
    "streaming": ("MiB per token",),
}
STEP = re.compile(r"(?:[\w/]*/)?([^/:]+): (?:(test_.*?): )?(.*)", re.DOTALL)  # file, tests, reason
PICTURES = ROOT / "docs"  # where pictures go, and from where documents lead to them
WIDTH = 0.38  # of a bar, where 1 is the distance of what streams
NO_GPU = "No GPU has run `make gpu` yet: every figure here is of a CPU, on the host stand-in.\n"


def main() -> None:
    results = load()
    if not results:
        raise SystemExit(f"nothing was measured yet: {RESULTS} is empty. make bench")
    for result in results:
        for figure in result["figures"]:
            if figure["benchmark"] == "streaming":
                draw(figure, where(result), picture(result))
    for document, mark, text in sections(results):
        before, opening, rest = document.read_text().partition(f"<!-- {mark} -->\n")
        _, closing, after = rest.partition(f"<!-- end of {mark} -->")
        document.write_text(before + opening + text + closing + after)


def load(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """What was kept, machines with a GPU first, then the simulated one."""
    read = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    results = [result for result in read if "figures" in result]  # a preflight has none
    gpus = [result["machine"].get("gpu", "") for result in results]
    order = sorted(range(len(results)), key=lambda place: (not gpus[place], "simulated" in gpus[place]))
    return [results[place] for place in order]


def sections(results: list[dict[str, Any]]) -> Iterator[tuple[Path, str, str]]:
    """What is made of the results: a document, the mark it stands behind, and the text."""
    measuring = ROOT / "docs" / "measuring.md"
    parts = [(result, figure) for name in ORDER for result in results for figure in merged(result, name)]
    yield measuring, "figures", "\n".join(section(results, parts, measuring.parent))
    yield measuring, "gpu", "\n".join(tested(results))


def merged(result: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The figures of a benchmark on one machine. Runs whose titles go on where the first one's ends are one figure with
    it, whose first column is what they add."""
    figures = [figure for figure in result["figures"] if figure["benchmark"] == name]
    title = figures[0]["title"] if figures else ""
    alike = all(figure["title"].startswith(title) and figure["columns"] == figures[0]["columns"] for figure in figures)
    if len(figures) < 2 or not alike:
        return figures
    added = [figure["title"].removeprefix(title).strip(", ") or "as it is" for figure in figures]
    rows = [[add, *row] for add, figure in zip(added, figures, strict=True) for row in figure["rows"]]
    return [figures[0] | {"columns": ["run", *figures[0]["columns"]], "rows": rows}]


def section(
    results: list[dict[str, Any]], parts: list[tuple[dict[str, Any], dict[str, Any]]], folder: Path
) -> Iterator[str]:
    """The tables of these parts, (result, figure), machine by machine, for a document in `folder`."""
    if not any("gpu" in result["machine"] and result["figures"] for result in results):
        yield NO_GPU
    for machine in dict.fromkeys(map(where, results)):
        there = [(result, figure) for result, figure in parts if where(result) == machine]
        if there:
            yield f"On {machine}:\n"
        for result, figure in there:
            yield markdown(figure)
            if figure["benchmark"] == "streaming":
                yield f"![Time per token]({picture(result).relative_to(folder)})\n"


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


def program(benchmark: str) -> str:
    """The file that measures this."""
    (name,) = (name for name, measured in PROGRAMS.items() if benchmark in measured)
    return f"bench_{name}.py"


def command(benchmark: str) -> str:
    """The same with what it is told where it measures more: `bench_decode.py prefill`."""
    file = program(benchmark)
    return file if file == f"bench_{benchmark.replace('-', '_')}.py" else f"{file} {benchmark}"


def markdown(figure: dict[str, Any]) -> str:
    """One benchmark: what was measured and by which program, then the rows."""
    title = f"**{heading(figure)}** (`{command(figure['benchmark'])}`)\n"
    omitted = OMITTED.get(figure["benchmark"], ())
    kept = [at for at, column in enumerate(figure["columns"]) if column not in omitted]
    rows = [[cell(row[at]) for at in kept] for row in figure["rows"]]
    return "\n".join([title, *table([figure["columns"][at] for at in kept], rows)])


def heading(figure: Mapping[str, Any]) -> str:
    """What was measured, as a sentence begins."""
    return str(figure["title"][0].upper() + figure["title"][1:])


def table(columns: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a table of Markdown, and an empty one behind it."""
    lines = ["| " + " | ".join(row) + " |" for row in (columns, *rows)]
    return [lines[0], "|" + "---|" * len(columns), *lines[1:], ""]


def draw(figure: Mapping[str, Any], title: str, path: Path) -> None:
    """Bars for what streams, accelerate's beside the interval at which as many layers lie on the host. `figure`: of
    bench_streaming.py, as its JSON has it; a panel for each case, all to one scale. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = by_case(figure)
    size = (max(7.5, 5 * len(cases)), 3.9)
    with matplotlib.rc_context({"svg.hashsalt": "ballonet", "font.size": 9}):
        drawn, panels = pyplot.subplots(1, len(cases), figsize=size, sharey=True, squeeze=False)
        for panel, ((sequences, held), rows) in zip(panels[0], cases.items(), strict=True):
            draw_case(panel, rows)
            panel.set_title(f"{sequences} x {held:,} tokens held", fontsize=9)
        panels[0][0].set_ylabel("ms per token (lower is better)")
        panels[0][0].legend(loc="upper left", frameon=False, fontsize=8)
        drawn.suptitle(f"{heading(figure)}\n{title}", fontsize=9)
        drawn.tight_layout()
        drawn.savefig(path, metadata={"Date": None})
        pyplot.close(drawn)


def draw_case(panel: Any, rows: Sequence[Streamed]) -> None:
    """The bars of one case in a panel of matplotlib."""
    colours = {"ballonet": "tab:blue", "accelerate": "tab:orange"}
    labels = {
        "ballonet": "ballonet",
        "accelerate": "accelerate, the same layers on the host",
        "": "limit of computing and link",
    }
    for place, row in enumerate(rows):
        first = place - WIDTH * (len(row.ms) - 1) / 2
        for number, (peer, ms) in enumerate(row.ms.items()):
            drawn = panel.bar(first + number * WIDTH, ms, WIDTH, color=colours[peer], label=labels.pop(peer, None))
            panel.bar_label(drawn, fmt="%.3g", fontsize=8, padding=2)
        ends = (first - WIDTH / 2, first + WIDTH / 2)
        panel.hlines(row.bound, *ends, color="black", linewidth=2, label=labels.pop("", None))
    panel.set_xticks(range(len(rows)), [row.what for row in rows])
    panel.set_xlabel("layers on the host")
    panel.margins(y=0.12)


@dataclass(frozen=True, slots=True)
class Streamed:
    """What streams, in words; ms per token by peer; and those of the longer of computing and copying."""

    what: str
    ms: Mapping[str, float]
    bound: float


def by_case(figure: Mapping[str, Any]) -> dict[tuple[int, int], list[Streamed]]:
    """What was measured of each case (sequences, tokens of each), by what streams."""
    rows = [dict(zip(figure["columns"], row, strict=True)) for row in figure["rows"]]
    of_case = {case_of(row): row["ms per token"]["median"] for row in rows if row["bound, ms"] == ""}  # accelerate's
    cases: dict[tuple[int, int], list[Streamed]] = {}
    for row in rows:
        if row["bound, ms"] != "":
            ms = {"ballonet": row["ms per token"]["median"]}
            if row["accelerate / it"] != "":
                ms["accelerate"] = of_case[case_of(row)]
            cases.setdefault(case_of(row), []).append(Streamed(spelled(row["what streams"]), ms, row["bound, ms"]))
    return cases


def case_of(row: Mapping[str, Any]) -> tuple[int, int]:
    """Sequences, and tokens of each."""
    return row["sequences"], row["tokens held"]


def spelled(streams: str) -> str:
    """The layers on the host: `interval 4` is a quarter of them."""
    interval = streams.removeprefix("interval ")
    return {"resident": "none", "1": "all"}.get(interval, f"1/{interval}")


def tested(results: list[dict[str, Any]]) -> Iterator[str]:
    """What the tests of the parts of `make gpu` gave on each machine, what failed and what was not run."""
    on_gpu = [result for result in results if result["tests"] or ("gpu" in result["machine"] and result["failed"])]
    for machine, group in itertools.groupby(on_gpu, where):
        yield f"`make gpu` on {machine}:\n"
        yield from table(["part", "tests passed", "failed", "not run"], [outcome(result) for result in group])


def outcome(result: dict[str, Any]) -> list[str]:
    """The row of a part: its name, how many tests passed, what failed, and what was not run."""
    tests = result["tests"]
    failures = ([f"tests: {tests['failed']}"] if tests.get("failed") else []) + short(result["failed"])
    return [result["part"], str(tests.get("passed", 0)), "; ".join(failures), "; ".join(short(result["skipped"]))]


def short(steps: list[str]) -> list[str]:
    """The steps, `file: tests: reason`, with those of one file and reason as one."""
    found: dict[tuple[str, str], list[str]] = {}
    for step in steps:
        match = STEP.fullmatch(step)
        file, tests, reason = match.groups() if match else (step, None, "")
        found.setdefault((file, reason.strip(" :").replace("|", "/")), []).extend(tests.split(", ") if tests else [])
    return [f"`{file}`{counted(tests)}: {reason}" for (file, reason), tests in found.items()]


def counted(tests: list[str]) -> str:
    """The name of one test, the number of several."""
    return f", {len(tests)} tests" if len(tests) > 1 else "".join(f", {test}" for test in tests)


def cell(value: Any) -> str:
    """A figure with its spread and limit, or a plain value."""
    if isinstance(value, dict):
        return str(Figure(**value))
    return f"{value:,}" if isinstance(value, int) else "-" if value is None else str(value)


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
