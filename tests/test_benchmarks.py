"""Every benchmark runs, the runner survives whatever they do, and the documents show what was kept."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.generation.continuous_batching import cache

from . import programs
from .pool import take_out

ROOT = Path(__file__).parent.parent
# Without those whose scenes tests/gpu plays on the stand-in, and that take longest to begin: `make bench` runs them.
# "serve-plain" is what "serve" does, in more memory.
PLAYED = ("prefix", "serve-plain")
# In this process, one peer after the other: each process of its own would load transformers anew.
INSIDE = (
    *("oom", "context", "shrink", "decode", "kv-growth", "prefill", "peak"),
    *("calls", "streaming", "slo", "serve", "sleep", "wake", "sync", "images"),
)
FORKED = ("speed",)  # in this process, with a fork for each peer
ALONE = (  # without peers
    *("batch-attention", "hit-rate", "replicas", "tenants", "tenants-parts", "tenants-rates", "papers", "host-memory"),
)
COUNTED = ("slo", "host-memory")  # no clock is read: every limit is met, anywhere


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/run.py, which finds its neighbours in its own folder."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import run

    return run


@pytest.fixture
def figures(run: ModuleType) -> ModuleType:
    import figures

    return figures


@pytest.fixture
def measured(figures: ModuleType) -> Callable[[str], ModuleType]:
    """The program that measures what is named."""
    return lambda name: importlib.import_module(figures.program(name).removesuffix(".py"))


@pytest.mark.parametrize("name", ALONE)
def test_a_benchmark_runs(name: str, figures: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "figure.json"
    program = str(ROOT / "benchmarks" / figures.program(name))
    done = programs.python(program, name, "--tiny", "--out", str(out), variables=os.environ)
    assert done.returncode == 0, done.stderr
    check_figure(out, name)


def check_figure(out: Path, name: str) -> None:
    result = json.loads(out.read_text())
    assert result["benchmark"] == name
    assert result["rows"]
    assert all(len(row) == len(result["columns"]) for row in result["rows"])
    measured = [value for row in result["rows"] for value in row if isinstance(value, dict)]
    assert measured
    assert all(value["least"] <= value["median"] <= value["most"] for value in measured)
    assert all((value["limit"] is None) == (value["met"] is None) for value in measured)
    if name in COUNTED:
        assert [value for value in measured if value["met"] is False] == []
        assert any(value["met"] for value in measured)


class Inside:
    """A peer that is this very process: stock's model lies in the pool, too."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self._functions = functions

    def ask(self, what: str, **arguments: Any) -> Any:
        return json.loads(json.dumps(self._functions[what](**arguments)))

    def forget(self) -> None:
        self._functions = {}


@pytest.mark.parametrize("name", INSIDE)
def test_a_benchmark_runs_in_one_process(
    name: str, measured: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = measured(name)

    @contextmanager
    def peers(chosen: Any, names: Sequence[str], environments: Any = None) -> Iterator[dict[str, Inside]]:
        for variable, value in {**(environments or {})}.get(names[0], {}).items():
            monkeypatch.setenv(variable, value)
        inside = {peer: Inside(module.BENCHMARKS[name].functions(peer, chosen)) for peer in names}
        try:
            yield inside
        finally:
            for peer in inside.values():
                peer.forget()
            take_out()

    monkeypatch.setenv("BALLONET_DEVICE", "cpu")
    memory = "get_device_and_memory_breakdown"  # which a peer replaces in a process of its own
    monkeypatch.setattr(cache, memory, getattr(cache, memory))
    monkeypatch.setattr(module, "peers", peers)
    run_here(module, name, tmp_path, monkeypatch)


def run_here(module: ModuleType, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the benchmark in this process."""
    import harness

    out = folder / "figure.json"
    monkeypatch.setattr(sys, "argv", [str(module.__file__), name, "--tiny", "--out", str(out)])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        harness.main(module.__doc__, module.BENCHMARKS)
    finally:
        torch.set_num_threads(threads)
    check_figure(out, name)


@pytest.mark.parametrize("name", FORKED)
def test_a_benchmark_runs_with_forked_peers(
    name: str, measured: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import harness

    numbers = count()

    def forked(command: Sequence[str], *, env: Mapping[str, str], **_: Any) -> programs.Asked:
        (said := tmp_path / f"peer {next(numbers)}").mkdir()
        return programs.Asked(command[1:], said, ROOT, env)

    kept = {"PIPE": subprocess.PIPE, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(harness, "subprocess", SimpleNamespace(Popen=forked, **kept))
    run_here(measured(name), name, tmp_path, monkeypatch)


# Rounds until each kind of work was seen to hold, then one in which the first model is said to give other answers.
SOAK = """
import os, sys, threading

os.environ["BALLONET_DEVICE"] = "cpu"
sys.path.insert(0, "benchmarks")
import torch

torch.set_num_threads(1)
import soak
from harness import Options

working = soak.Soak(Options(tiny=True, cuda=False), seed=0)
counts = working.counts
while not (counts.done["requests"] and counts.done["children"] and counts.done["budgets set"]):
    working.round(0.3, threading.Event())
    assert counts.failures == []
speaker = working._speakers[0]
speaker.expected = {task: answer + 1 for task, answer in speaker.expected.items()}
working.round(0.3, threading.Event())
assert counts.failures
assert all("other tokens than unmanaged" in failure for failure in counts.failures), counts.failures
assert soak.growth([2**30] * 12) == ""
assert "grew" in soak.growth([2**30 + round * 2**26 for round in range(12)])
"""


def test_a_soak_holds_and_notices_what_does_not() -> None:
    programs.run(SOAK)


def test_every_benchmark_belongs_to_a_part_and_a_program(
    run: ModuleType, figures: ModuleType, measured: Callable[[str], ModuleType]
) -> None:
    """Each program measures what `make figures` says, and everything is run by a part, and by a test here."""
    programs = {path.name for path in (ROOT / "benchmarks").glob("bench_*.py")}
    assert programs == {f"bench_{name}.py" for name in figures.PROGRAMS}
    for names in figures.PROGRAMS.values():
        assert set(measured(names[0]).BENCHMARKS) == {*names}
    named = {name for part in run.PARTS.values() for name in part.benchmarks}
    assert named == {*figures.ORDER} == {*PLAYED, *INSIDE, *FORKED, *ALONE}


def test_every_gpu_test_belongs_to_one_part(run: ModuleType) -> None:
    marked = re.compile(r"mark\.gpu\b|^@(everywhere|scene)\b", re.MULTILINE)
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if marked.search(path.read_text())]
    files += [ROOT / "tests" / "contract" / "test_driver_contract.py"]  # marked in its conftest
    files.remove(ROOT / "tests" / "gpu" / "test_scene.py")  # of the helper itself, on a CPU
    patterns = [pattern for part in run.PARTS.values() for pattern in (*part.alone, *part.tests)]
    chosen = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    assert chosen == sorted(path for path in files if path != Path(__file__))


def tenants_run(kept: int, ttft: float | None, gap: float | None, failed: int = 0) -> dict[str, Any]:
    """The figures of a run of 100 requests."""
    return {
        "requests": 100,
        "failed": failed,
        "kept": kept,
        "ttft_p99": ttft,
        "tbt_p99": gap,
        "tokens_per_second": 10.0,
    }


def test_ballonet_is_held_against_the_best_of_the_peers_that_answer(measured: Callable[[str], ModuleType]) -> None:
    """`split` is the quickest, but refuses two requests; `pie` is better in both latencies; with one seed of two the
    goodput is a peer's."""
    judged = measured("tenants").judged
    good = {
        "unlimited": tenants_run(100, 1.0, 0.1),
        "split": tenants_run(98, 1.0, 0.1, failed=2),
        "swap": tenants_run(90, 3.0, 0.3),
        "pie": tenants_run(80, 2.0, 0.15),
        "fast": tenants_run(90, 2.2, 0.19),
    }
    limits = judged([good, good | {"fast": tenants_run(89, 2.0, 0.16)}], 55)
    assert (limits["kept / best"].least, limits["kept / best"].met) == (pytest.approx(89 / 90), False)
    assert (limits["behind a peer"].most, limits["behind a peer"].met) == (pytest.approx(1.1), False)
    assert limits["tokens / best"].met
    assert limits["gap P99, s"].met
    assert not judged([good | {"fast": tenants_run(90, 2.0, 0.21)}], 55)["gap P99, s"].met
    assert not judged([good | {"fast": tenants_run(0, None, None, failed=9)}], 55)["behind a peer"].met


def test_the_fastest_link_is_held_against_the_floor_and_an_even_split(
    measured: Callable[[str], ModuleType],
) -> None:
    runs = {"unlimited": tenants_run(100, 1.0, 0.1), "split": tenants_run(80, 3.0, 0.1)}
    near, far = (
        measured("tenants").judged([runs | {"fast": tenants_run(100, ttft, gap)}], 450)
        for ttft, gap in ((1.2, 0.105), (1.21, 0.106))
    )
    names = ("over the floor / split's", "gap / floor's")
    assert [near[name].met for name in names] == [True, True]
    assert [far[name].met for name in names] == [False, False]
    assert names[0] not in measured("tenants").judged([runs | {"fast": runs["split"]}], 55)


def test_tenants_that_were_cut_off_go_on_where_they_were(
    measured: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three runs are kept; those of ballonet are measured again where its code has changed, a peer's are not."""
    tenants = measured("tenants")
    asked: list[Any] = []
    monkeypatch.setattr(tenants, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    monkeypatch.setattr(tenants, "measure", lambda one, traces: asked.append(one) or {"kept": len(asked)})
    runs = [tenants.Run(tenants.TINY[0], 1, policy, 12) for policy in ("split", "fast", "swap")]
    before, after = {True: "stock", False: "before"}, {True: "stock", False: "after"}
    for code, given, new in ((before, runs[:2], runs[:2]), (before, runs, runs[2:]), (after, runs, runs[1:2])):
        asked.clear()
        monkeypatch.setattr(tenants, "digests", lambda code=code: code)
        *_, rows = tenants.measured(given, (), tmp_path / "build" / "rows.jsonl")
        assert asked == new
        assert rows.keys() == {*given}


def test_the_settings_of_tenants_are_those_that_were_written_down(measured: Callable[[str], ModuleType]) -> None:
    tenants, page = measured("tenants"), (ROOT / "docs" / "measuring.md").read_text()
    settings = tenants.SETTINGS
    assert len(settings) >= 12
    assert [str(setting) for setting in settings if f"- {setting}\n" not in page] == []
    assert {setting.gib for setting in settings} == {24, 34, 48}
    assert {setting.link for setting in settings} == {25, 55, 450}
    assert {setting.how for setting in settings} == {"together", "turns", "bursts"}


BENCHMARKS = {
    "good": """
import json, sys
from pathlib import Path
Path(sys.argv[sys.argv.index("--out") + 1]).write_text(json.dumps({"benchmark": "good", "title": "it", "columns": ["x"],
    "rows": [[{"median": 3.0, "least": 2.0, "most": 4.0, "limit": "<= 1", "met": False}], [17]]}))
""",
    "raises": "raise ValueError('so it is')",
    "broken": """
import json, sys
from pathlib import Path
Path(sys.argv[sys.argv.index("--out") + 1]).write_text(json.dumps({"benchmark": "broken", "title": "it",
    "columns": ["x"], "rows": [[1]]}))
raise ValueError("after a row")
""",
    "crashes": "import os, signal; print('last words', flush=True); os.kill(os.getpid(), signal.SIGSEGV)",
    "hangs": """
import subprocess, time
from pathlib import Path
child = subprocess.Popen(["sleep", "1000"])
Path("written").write_text(str(child.pid))
Path("written").rename("pid")  # it is there as a whole, or not
time.sleep(1000)
""",
}
TESTS = """
import pytest

@pytest.mark.gpu
def test_good(): pass

@pytest.mark.gpu
def test_bad(): assert 1 == 2

@pytest.mark.gpu
def test_absent(): pytest.skip("no such tool here")

def test_unmarked(): assert False
"""


@pytest.fixture
def house(run: ModuleType, figures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with benchmarks and tests that do all they should not."""
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "no_gpu", lambda: "")
    (tmp_path / "benchmarks").mkdir()
    for name, text in BENCHMARKS.items():
        monkeypatch.setitem(figures.PROGRAMS, name, (name,))
        (tmp_path / "benchmarks" / f"bench_{name}.py").write_text(text)
    (tmp_path / "test_it.py").write_text(TESTS)
    return tmp_path


def only_result(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*.json")
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_failing_steps_are_recorded_and_the_rest_goes_on(
    run: ModuleType, house: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = run.Part(benchmarks=("raises", "crashes", "good"), tests=("test_it.py", "none_*.py"))
    assert not run.run({"core": part}, house / "results")
    result = only_result(house / "results")
    steps = {step["name"]: step for step in result["steps"]}
    assert result["complete"]
    assert result["tests"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert steps["test_it.py"]["status"] == "exit status 1"
    assert "assert 1 == 2" in steps["test_it.py"]["output"]
    assert "assert 1 == 2" in steps["test_it.py"]["failures"].pop("test_bad")
    assert steps["test_it.py"]["failures"] == {}
    assert any("no such tool here" in reason for reason in result["skipped"])
    assert "so it is" in steps["benchmarks/bench_raises.py"]["output"]
    assert steps["benchmarks/bench_crashes.py"]["status"] == "died of SIGSEGV"
    assert "last words" in steps["benchmarks/bench_crashes.py"]["output"]
    assert steps["benchmarks/bench_good.py"].keys() == {"name", "status", "seconds"}
    assert [figure["benchmark"] for figure in result["figures"]] == ["good"]
    assert len(result["failed"]) == 4, result["failed"]
    assert any("none_*.py" in what for what in result["failed"])
    said = capsys.readouterr().out
    assert "3 (2 to 4) [≤ 1: NOT MET]" in said
    assert "limit missed: good" in said


def test_a_benchmark_that_is_cut_off_keeps_the_rows_that_it_had(run: ModuleType, house: Path) -> None:
    assert not run.run({"core": run.Part(benchmarks=("broken",))}, house / "results")
    result = only_result(house / "results")
    assert [figure["rows"] for figure in result["figures"]] == [[[1]]]
    assert result["failed"] == ["benchmarks/bench_broken.py: exit status 1"]
    assert [path.suffix for path in (house / "results").iterdir()] == [".json"]


def test_hanging_step_is_ended_with_all_that_it_started(run: ModuleType, house: Path) -> None:
    seconds = run.LEAST_SECONDS
    while not (house / "pid").exists():  # on a machine that gives it no time to begin, it has more
        (results := house / f"{seconds} s").mkdir()
        assert not run.run({"core": run.Part(benchmarks=("hangs",), step_seconds=seconds)}, results)
        (step,) = only_result(results)["steps"]
        assert step["status"] == f"no end within {seconds} s"
        seconds *= 4
    child, ends = Path("/proc", (house / "pid").read_text(), "stat"), time.monotonic() + 60
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":  # a kill needs a moment
        assert time.monotonic() < ends, "what a step started lives on"
        time.sleep(0.05)


def test_steps_without_time_are_said_to_be_skipped(run: ModuleType, house: Path) -> None:
    part = run.Part(benchmarks=("good",), tests=("test_it.py",), seconds=0, test_seconds=0)
    assert not run.run({"core": part}, house / "results")
    result = only_result(house / "results")
    assert result["skipped"] == [
        "test_it.py: no time was left for it",
        "benchmarks/bench_good.py: no time was left for it",
    ]
    assert result["steps"] == result["figures"] == []


def test_a_name_that_there_is_not_is_refused(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, said in ((["core", "--only", "decode"], "there is no decode"), (["nothing"], "no part nothing")):
        monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
        with pytest.raises(SystemExit, match="2"):
            run.main()
        assert said in capsys.readouterr().err


def test_a_run_that_is_cut_off_leaves_what_it_had(
    run: ModuleType, house: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[dict[str, Any]] = []

    def interrupted(*_: object) -> None:
        kept.append(only_result(house / "results"))
        raise KeyboardInterrupt

    measure = run.run_benchmark
    monkeypatch.setattr(
        run, "run_benchmark", lambda name, *more: (measure if name == "good" else interrupted)(name, *more)
    )
    with pytest.raises(KeyboardInterrupt):
        run.run({"core": run.Part(benchmarks=("good", "raises"))}, house / "results")
    result = only_result(house / "results")
    assert [figure["benchmark"] for figure in kept[0]["figures"]] == ["good"], "it is written after every step"
    assert not result["complete"]
    assert result["failed"] == ["cut off before its end"]
    assert [figure["benchmark"] for figure in result["figures"]] == ["good"]


def test_without_a_gpu_nothing_is_claimed(run: ModuleType, house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "no_gpu", lambda: "no NVIDIA driver: none")
    assert not run.run({"core": run.PARTS["core"]}, house / "results")
    result = only_result(house / "results")
    assert result["skipped"] == ["everything: no NVIDIA driver: none"]
    assert result["tests"] == {}
    assert result["figures"] == []


PEER = """
import os, sys
sys.path.insert(0, {benchmarks!r})
from harness import serve
name = sys.argv[sys.argv.index("--peer") + 1]
def value(of):
    print("noise that is no answer")
    if name == "raises":
        raise ValueError("so it is")
    if name == "dies":
        print("last words", flush=True)
        os._exit(3)
    return [name, of, os.environ.get("VARIABLE")]
serve({{"value": value}})
"""


def test_peers_answer_or_say_why_not(run: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import harness

    program = tmp_path / "program.py"
    program.write_text(PEER.format(benchmarks=str(ROOT / "benchmarks")))
    chosen = harness.Options(tiny=True, cuda=False, program=program, benchmark="it")
    with harness.peers(chosen, ("good", "raises", "dies"), {"good": {"VARIABLE": "set"}}) as peers:
        assert peers["good"].ask("value", of=3) == ["good", 3, "set"]
        with pytest.raises(harness.PeerFailed, match="so it is"):
            peers["raises"].ask("value", of=3)
        assert list(harness.answering(peers, ("good",), "value", of=4)) == ["good"]
        said = capsys.readouterr().out
        assert "left out: raises" in said
        assert "left out: dies" in said
        assert "ended with status 3" in said
        assert "last words" in said
        with pytest.raises(harness.PeerFailed):
            harness.answering(peers, ("good", "raises"), "value", of=4)
        assert peers["good"].ask("value", of=5) == ["good", 5, "set"]


def test_the_documents_show_what_was_kept(figures: ModuleType) -> None:
    for document, mark, expected in figures.sections(figures.load()):
        shown = document.read_text().partition(f"<!-- {mark} -->\n")[2].partition(f"<!-- end of {mark} -->")[0]
        assert shown == expected, f"make figures: {document.name}"
        for picture in re.findall(r"!\[[^]]*\]\((\S+)\)", shown):
            assert (document.parent / picture).exists(), f"make figures: {picture}"


def test_the_figures_of_the_readme_and_the_tour_are_measured_ones() -> None:
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if re.match(r"\| (?:H200|CPU)\b", line)]
    assert 1 <= len(rows) <= 5
    number = re.compile(r"\d+(?:[.,]\d+)*")
    measured = set(number.findall((ROOT / "docs" / "measuring.md").read_text()))
    tour = (ROOT / "docs" / "tour.md").read_text()
    rows += [
        part.replace("8B", "") for part in re.findall(r"^\*\*On a GPU:\*\* (.*?)\n\n", tour, re.MULTILINE | re.DOTALL)
    ]
    assert len(rows) >= 4
    assert {figure for row in rows for figure in number.findall(row.replace("H200", ""))} <= measured


def test_the_picture_has_accelerate_beside_as_many_layers_on_the_host(figures: ModuleType) -> None:
    columns = ["sequences", "tokens held", "what streams", "ms per token", "bound, ms", "accelerate / it"]
    streams = {"resident": (20, 20, ""), "interval 4": (60, 61, ""), "interval 2": (120, 121, {"median": 7.5})}
    rows = [[1, 16, name, {"median": ms}, bound, ratio] for name, (ms, bound, ratio) in streams.items()]
    rows.append([1, 16, "accelerate", {"median": 900}, "", ""])
    drawn = figures.by_case({"columns": columns, "rows": rows})[1, 16]
    assert [(row.what, row.bound) for row in drawn] == [("none", 20), ("1/4", 61), ("1/2", 121)]
    assert [row.ms.get("accelerate") for row in drawn] == [None, None, 900]


def test_make_gpu_says_what_the_machine_s_python_lacks() -> None:
    bare = f"PYTHON={sys.executable} -I -S"  # no site-packages
    done = subprocess.run(["make", "-s", "gpu", bare], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "pip install setuptools pybind11" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_on_a_gpu_begins_with_a_preflight(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(run, "no_gpu", lambda: "")
    monkeypatch.setattr(run, "run", lambda parts, *_: begun.extend(parts) or True)
    monkeypatch.setattr(
        run.subprocess, "run", lambda command, **_: begun.append(" ".join(command)) or SimpleNamespace(stdout="")
    )
    for parts, expected in ((["kv"], ["preflight", "kv"]), (["cpu"], ["cpu"])):
        begun.clear()
        monkeypatch.setattr(sys, "argv", ["run.py", *parts, "--results", str(tmp_path)])
        with pytest.raises(SystemExit, match=r"^0$"):
            run.main()
        asked = [line for line in begun if "nvidia-smi" not in line and "git" not in line]
        assert [line.split(" --out ")[0].removeprefix(f"{sys.executable} -m ballonet ") for line in asked] == expected
        if "preflight" in expected:
            assert asked[0].endswith("-preflight.json")
            assert str(tmp_path) in asked[0]
