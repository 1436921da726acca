"""What the benchmarks share: options, peers in processes of their own, interleaved repetitions, figures, tables.

A program measures one thing or several, each with a name and a table:

    BENCHMARKS = {"decode": Benchmark(decoding, functions), "prefill": Benchmark(prefills, functions)}

    def decoding(chosen: Options) -> None:
        with peers(chosen, ("stock", "ballonet")) as started:
            report(chosen, "decoding", [started["stock"].ask("decode", tokens=1024), ...])

    def functions(peer: str, chosen: Options) -> Functions:
        return {"decode": lambda tokens: ...}

Torch's allocator can be chosen once per process, and each peer has another: so the program starts itself once per peer
with `--peer NAME`, and there `main()` answers requests, one line of JSON each, until its input ends. Every peer keeps
its model, and they are measured in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import selectors
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

import ballonet

ROOT = Path(__file__).resolve().parent.parent
MIB, GIB = 2**20, 2**30
REPETITIONS = 7
PACKAGES = ("torch", "transformers", "accelerate")
SECONDS = 300.0  # that an answer may take
TAIL = 2000  # characters of what a peer that failed had said
# torch's own allocator with expandable segments, by the environment of a peer
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
Functions = Mapping[str, Callable[..., Any]]  # what a peer answers, by name


@dataclass(frozen=True, slots=True)
class Options:
    """What every benchmark can be told. `cuda`: whether it runs on a GPU, else on the CPU and the host stand-in."""

    tiny: bool
    cuda: bool
    out: Path | None = None  # where the JSON goes; None: build/bench-NAME.json
    rounds: int | None = None  # repetitions that were asked for
    cases: int | None = None  # the first so many of a benchmark's cases; None: all
    traces: Sequence[Path] = ()
    program: Path = Path(sys.argv[0])  # that measures, and is the peers'
    benchmark: str = ""  # the name of what is measured

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


class Benchmark(NamedTuple):
    """What measures and reports, and what a peer of that name answers, where there are peers."""

    measure: Callable[[Options], None]
    functions: Callable[[str, Options], Functions] = lambda *_: {}


def main(description: str | None, benchmarks: Mapping[str, Benchmark]) -> None:
    """Measures what the command line names, or all that the program has. A process that is a peer answers with its
    functions until it is asked no more."""
    names = list(benchmarks)
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes and two repetitions: shows only that it runs")
    parser.add_argument("--out", type=Path, help="where the JSON goes (build/bench-NAME.json)")
    parser.add_argument("--repetitions", type=int, help=f"instead of {REPETITIONS} (or what takes long has)")
    parser.add_argument("--cases", type=int, help="only the first so many, where a benchmark has several")
    parser.add_argument(
        "--traces", nargs="+", type=Path, default=[], help="recorded ones, where a benchmark takes some"
    )
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := set(given.names) - set(names):
        parser.error(f"there is no {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    chosen = Options(given.tiny, _has_gpu(), given.out, given.repetitions, given.cases, given.traces, Path(sys.argv[0]))
    for name in given.names or names:
        one = replace(chosen, benchmark=name)
        if given.peer is None:
            benchmarks[name].measure(one)
        else:
            serve(benchmarks[name].functions(given.peer, one))


def _has_gpu() -> bool:
    """Whether `install()` would take a GPU here. Makes no CUDA context, and imports torch only where it could use one:
    who counts may be other processes."""
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


def report(chosen: Options, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the table and writes it. All rows have the same columns in the same order."""
    columns, lines = keep(chosen, title, rows)
    table = Table(*columns, title=title, title_justify="left")
    for line in lines:
        table.add_row(*(escape(str(value)) for value in line))
    console = Console()
    Console(width=None if console.is_terminal else 160).print(table)


def keep(chosen: Options, title: str, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Writes the table as JSON, with the spread of each figure and the limits; returns its columns and lines. A
    benchmark that may be cut off calls it after each row."""
    if not rows:
        raise SystemExit("there is nothing to report")
    columns, lines = list(rows[0]), [list(row.values()) for row in rows]
    plain = [[asdict(value) if isinstance(value, Figure) else value for value in line] for line in lines]
    out = chosen.out or ROOT / "build" / f"bench-{chosen.benchmark}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    written = out.with_suffix(".new")
    table = {"benchmark": chosen.benchmark, "title": title, "columns": columns, "rows": plain}
    written.write_text(json.dumps(table, indent=1))
    written.replace(out)
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
    numbers = {"python": platform.python_version(), "ballonet": ballonet.__version__}
    for package in PACKAGES:
        try:
            numbers[package] = version(package)
        except PackageNotFoundError:
            numbers[package] = "missing"
    torch = find_spec("torch")
    if torch is not None and torch.origin is not None:
        text = (Path(torch.origin).parent / "version.py").read_text()
        numbers |= dict(re.findall(r"^(cuda)\b.*= '([^']+)'", text, re.MULTILINE))
    return numbers


class PeerFailed(RuntimeError):
    """A peer raised, died or did not answer."""


class Peer:
    """One process that measures."""

    def __init__(self, chosen: Options, name: str, environment: Mapping[str, str]) -> None:
        self.name = name
        command = [sys.executable, str(chosen.program), chosen.benchmark, "--peer", name]
        command += ["--tiny"] if chosen.tiny else []
        self._said = tempfile.TemporaryFile(mode="w+", errors="replace")  # noqa: SIM115 (closed by close)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env={**os.environ, **environment},
        )

    def ask(self, what: str, **arguments: Any) -> Any:
        """What the peer's function of that name returns. PeerFailed."""
        assert self._process.stdin is not None
        with suppress(OSError):  # it is gone, and the answer will say so
            self._process.stdin.write(json.dumps([what, arguments]) + "\n")
            self._process.stdin.flush()
        answer = self._answer()
        if "error" in answer:
            raise PeerFailed(f"{self.name}: {what}{arguments} failed:\n{answer['error']}")
        return answer["result"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._process.stdout, selectors.EVENT_READ)
            ready = waiting.select(SECONDS)
        line = self._process.stdout.readline() if ready else ""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        why = f"ended with status {self._process.wait()}" if ready else f"did not answer in {SECONDS:.0f} s"
        self._said.seek(0)
        raise PeerFailed(f"{self.name} {why}:\n{self._said.read()[-TAIL:]}")

    def close(self) -> None:
        """Lets the process end, and ends it where it does not."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(30)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._said.close()


@contextmanager
def peers(
    chosen: Options, names: Sequence[str], environments: Mapping[str, Mapping[str, str]] | None = None
) -> Iterator[dict[str, Peer]]:
    """Starts a peer of each name; all start at once. `environments`: variables that some of them get."""
    with ExitStack() as stack:
        started = {name: Peer(chosen, name, (environments or {}).get(name, {})) for name in names}
        for peer in started.values():
            stack.callback(peer.close)
        yield started


def in_turns(asked: Mapping[str, Peer], repetitions: int, what: str, **arguments: Any) -> dict[str, Figure]:
    """Asks every peer the same, in turn; see `interleaved`."""
    return interleaved({name: partial(peer.ask, what, **arguments) for name, peer in asked.items()}, repetitions)


def answering(started: Mapping[str, Peer], needed: Sequence[str], what: str, **arguments: Any) -> dict[str, Peer]:
    """Returns the peers that answer this. Of the others, one that is not needed is left out, with a word why.
    PeerFailed."""
    able = {}
    for name, peer in started.items():
        try:
            peer.ask(what, **arguments)
            able[name] = peer
        except PeerFailed as error:
            if name in needed:
                raise
            print(f"left out: {error}", flush=True)
    return able


def serve(functions: Functions) -> None:
    """Answers requests until the input ends. What the functions print goes to the errors' side."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        what, arguments = json.loads(line)
        try:
            answer = {"result": functions[what](**arguments)}
        except Exception:
            answer = {"error": traceback.format_exc()[-TAIL:]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
