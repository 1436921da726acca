"""Runs the parts of the proof and keeps what they found: tests, then benchmarks, then one JSON per part.

    python benchmarks/run.py            every GPU part (make gpu); of a part alone: run.py core
    python benchmarks/run.py --minutes 9 --only tests decode streaming      what a short loan of a machine is worth most
    python benchmarks/run.py --only test_kv_stream test_pace                test files by name
    python benchmarks/run.py cpu cpu-pressure cpu-serving    the benchmarks of a machine without a GPU (make bench)
    .venv-cuda/bin/python benchmarks/run.py simulated        counts on the simulated GPU of `make test-cuda`

Every test file and every benchmark is a step: a process of its own with a time limit. The tests of all parts come
first, several at a time, then the benchmarks, each alone. A step that fails, crashes or hangs is recorded with the end
of what it said, and the others go on. The JSON is written after every step, so that a run that is cut off leaves what
it had. The exit status says whether every step passed; a limit that was missed is shown, in the tables and in the
JSON, but is not a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from figures import RESULTS, command, program, slug
from harness import ROOT, machine
from record import TAIL, Outcome, Record

PART_SECONDS = 455  # of the 8 minutes, so that the file is written and the table printed
STEP_SECONDS = 240  # that a step of a GPU part may take
LEAST_SECONDS = 5  # a step that would have less is not begun
PREFLIGHT_SECONDS = 180  # its probes may take 150 together
TESTS_AT_ONCE = min(6, max(4, os.cpu_count() or 1))  # 16 processes on one H200 took 2 to 3 times as long each
ENDING_SECONDS = 10  # that pytest has to tell what failed, once its time is over


@dataclass(frozen=True, slots=True)
class Part:
    """What a part runs. `tests`: paths and patterns from the root; what is marked gpu in them runs, the files side by
    side. `alone`: the same of files that nothing runs beside, before the others. Then the benchmarks, each alone."""

    benchmarks: tuple[str, ...]
    tests: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    gpu: bool = True
    seconds: float = PART_SECONDS
    step_seconds: float = STEP_SECONDS
    test_seconds: float = 130  # that the tests may take together; the benchmarks get the rest


TENANTS = ("tenants", "tenants-parts", "tenants-rates")
TRACES = {  # the suffixes of what a benchmark can be given
    "hit-rate": (".jsonl",),
    "replicas": (".csv",),
    **dict.fromkeys(TENANTS, (".csv", ".jsonl")),
}
PARTS: Mapping[str, Part] = {
    "cpu": Part(
        benchmarks=("kv-growth", "decode", "calls", "prefill", "streaming", "slo", "host-memory", "peak"),
        gpu=False,
        seconds=3600,
        step_seconds=1200,
    ),
    "cpu-pressure": Part(
        benchmarks=("oom", "context", "shrink", "hit-rate", "prefix", "sleep", "wake", "sync", "images"),
        gpu=False,
        seconds=3600,
        step_seconds=1200,
    ),
    "cpu-serving": Part(
        benchmarks=("serve", "serve-plain", "batch-attention", "replicas", "papers"),
        gpu=False,
        seconds=3600,
        step_seconds=3000,
    ),
    "tenants": Part(benchmarks=TENANTS, gpu=False, seconds=5400, step_seconds=5400),  # cut off, it goes on where it was
    "simulated": Part(benchmarks=("calls",), gpu=False, seconds=1200, step_seconds=1200),  # counts, no times
    "core": Part(
        alone=("tests/contract/test_driver_contract.py", "tests/test_device_choice.py"),  # they look at what is free
        tests=(
            "tests/gpu/test_core_*.py",
            "tests/gpu/test_replay.py",
            "tests/gpu/test_compiled.py",
            "tests/test_mempool.py",
            "tests/test_pluggable.py",
        ),
        benchmarks=("peak",),
        test_seconds=320,
    ),
    "kv": Part(
        tests=("tests/gpu/test_kv_*.py", "tests/test_manage_devices.py"),
        benchmarks=("decode", "prefill", "kv-growth"),
        test_seconds=250,
    ),
    "weights": Part(
        tests=(
            "tests/gpu/test_weights_*.py",
            "tests/gpu/test_slots_*.py",
            "tests/gpu/test_manage_*.py",
            "tests/gpu/test_pace.py",
        ),
        benchmarks=("streaming", "images"),
    ),
    "remap": Part(
        tests=("tests/gpu/test_remap_*.py",),
        benchmarks=("slo", "sleep", "wake", "sync"),
    ),
    "balloon": Part(
        tests=("tests/gpu/test_balloon_*.py",),
        benchmarks=("oom", "context", "shrink"),
    ),
    "serve": Part(
        tests=("tests/gpu/test_serve_*.py",),
        benchmarks=("batch-attention", "serve", "serve-plain"),
    ),
    "replicas": Part(
        tests=("tests/gpu/test_replicas_*.py", "tests/replicas/test_staging.py", "tests/replicas/test_stage_times.py"),
        benchmarks=(),
        test_seconds=250,
    ),
    "pieces": Part(tests=("tests/gpu/test_pieces*.py",), benchmarks=(), test_seconds=300),
    "speed": Part(
        tests=("tests/gpu/test_speed.py",),
        benchmarks=("speed",),
        seconds=290,
        step_seconds=290,
        test_seconds=40,
    ),
    "prefix": Part(
        tests=("tests/gpu/test_prefix*.py",),
        benchmarks=("prefix", "hit-rate"),
        test_seconds=250,
    ),
}


_running: set[subprocess.Popen[bytes]] = set()


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that steps are ended and the file is written
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job, and its steps, would ignore it
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all that need a GPU")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="the benchmarks with tiny sizes: shows only that they run")
    parser.add_argument(
        "--traces", nargs="*", type=Path, default=[], help="recorded traces for those that take some: .csv, .jsonl"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="that everything may take; what had no time is told"
    )
    parser.add_argument("--repetitions", type=int, help="of each benchmark; fewer take less time")
    parser.add_argument("--cases", type=int, help="only the first so many, where a benchmark has several")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="preflight, tests, test files or benchmarks")
    given = parser.parse_args()
    chosen = {name: PARTS[name] for name in given.parts or PARTS if name in PARTS and (given.parts or PARTS[name].gpu)}
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    names = {"preflight", "tests", *(name for part in chosen.values() for name in part.benchmarks)}
    names |= {
        Path(path).stem
        for part in chosen.values()
        for pattern in (*part.alone, *part.tests)
        for path in matching(pattern)
    }
    if unknown := set(given.only or ()) - names:
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}: there are {', '.join(sorted(names))}")
    only = set(given.only or names)
    ends = time.monotonic() + 60 * given.minutes
    # What a preflight found holds for the tests, too, and what is compiled for torch is compiled once.
    os.environ.setdefault("BALLONET_CACHE_DIR", str(ROOT / "build" / "cache"))
    if "preflight" in only and any(part.gpu for part in chosen.values()) and not no_gpu():
        preflight(given.results)
    parts = {name: restricted(part, only) for name, part in chosen.items()}
    asked = ["--tiny"] if given.tiny else []
    for name in ("repetitions", "cases"):
        value = getattr(given, name)
        asked += [f"--{name}", str(value)] if value else []
    sys.exit(0 if run(parts, given.results, asked, given.traces, ends) else 1)


def matching(pattern: str) -> list[str]:
    """The files of a pattern, as paths from the root."""
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


def restricted(part: Part, only: set[str]) -> Part:
    """The same with nothing but what is named."""

    def named(patterns: Sequence[str]) -> tuple[str, ...]:
        if "tests" in only:
            return tuple(patterns)
        return tuple(path for pattern in patterns for path in matching(pattern) if Path(path).stem in only)

    benchmarks = tuple(name for name in part.benchmarks if name in only)
    return replace(part, benchmarks=benchmarks, tests=named(part.tests), alone=named(part.alone))


def preflight(results: Path) -> None:
    """What the driver does, before anything relies on it. The parts run whatever comes of it: they show the rest."""
    out = results / f"{slug(machine())}-preflight.json"
    print(f"preflight, to {out}", flush=True)
    command = [sys.executable, "-m", "ballonet", "preflight", "--out", str(out)]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, cwd=ROOT, check=False, timeout=PREFLIGHT_SECONDS)


def run(
    parts: Mapping[str, Part],
    results: Path,
    asked: Sequence[str] = (),
    traces: Sequence[Path] = (),
    ends: float = math.inf,
) -> bool:
    """Runs the parts and writes the JSON of each. Whether every step passed.

    `asked`: what every benchmark is told. `ends`: when everything has to be over, by time.monotonic()."""
    records = {name: Record(name, results) for name in parts}
    try:
        for name, part in parts.items():
            if part.gpu and (reason := no_gpu()):
                records[name].skip(f"everything: {reason}")
                records[name].failed.append(f"part {name}: {reason}")
        able = {name: part for name, part in parts.items() if not records[name].failed}
        run_tests({name: (records[name], part) for name, part in able.items()}, ends)
        for name, part in parts.items():
            if name in able:
                deadline = min(ends, time.monotonic() + part.seconds - part.test_seconds * bool(part.tests))
                for benchmark in part.benchmarks:
                    given = [str(trace) for trace in traces if trace.suffix in TRACES.get(benchmark, ())]
                    arguments = [*asked, *(["--traces", *given] if given else [])]
                    run_benchmark(benchmark, arguments, records[name], part.step_seconds, deadline)
            records[name].finish()
    except BaseException:
        for record in records.values():
            record.cut_off()
        raise
    return not any(record.failed for record in records.values())


def run_tests(parts: Mapping[str, tuple[Record, Part]], ends: float) -> None:
    """The tests of the parts: first those that nothing may run beside, then the others, several at a time. A pattern
    that matches none is a failure."""
    deadline = min(ends, time.monotonic() + sum(part.test_seconds for _, part in parts.values() if part.tests))
    alone: list[tuple[str, Record, Part]] = []
    others: list[tuple[str, Record, Part]] = []
    for record, part in parts.values():
        for files, patterns in ((alone, part.alone), (others, part.tests)):
            for pattern in patterns:
                paths = matching(pattern)
                files += [(path, record, part) for path in paths]
                if not paths:
                    record.failed.append(f"{pattern}: there is no such test file")
    for files, at_once in ((alone, 1), (others, TESTS_AT_ONCE)):
        with ThreadPoolExecutor(at_once) as pool, tempfile.TemporaryDirectory() as folder:
            reports = {path: Path(folder) / f"{number}.xml" for number, (path, _, _) in enumerate(files)}
            running = {
                pool.submit(run_test, path, reports[path], part.step_seconds, deadline): (path, record)
                for path, record, part in files
            }
            try:
                for done in as_completed(running):
                    path, record = running[done]
                    record_test(path, done.result(), reports[path], record)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(_running):
                    stop(process)
                raise


def run_test(path: str, report: Path, most: float, deadline: float) -> Outcome | None:
    command = ["-m", "pytest", "-m", "gpu", "-v", "--durations=5", "-p", "no:cacheprovider", "-p", "no:xdist"]
    return run_step([*command, f"--junitxml={report}", path], most, deadline)


def record_test(path: str, outcome: Outcome | None, report: Path, record: Record) -> None:
    """A test file's counts, and the reasons of what it skipped."""
    if outcome is None:
        record.no_time(path)
        return
    counts, reasons, failures = read_report(report)
    for reason in reasons:
        record.skip(f"{path}: {reason}")
    record.count(counts)
    if outcome.status == "passed" and not counts:
        outcome = Outcome("no tests", outcome.seconds, outcome.output)
    record.step(path, outcome, ", ".join(f"{count} {what}" for what, count in counts.items()), failures)


def read_report(path: Path) -> tuple[Counter[str], list[str], dict[str, str]]:
    """Counts of passed, failed and skipped tests, "test: reason" of the skipped, and what those that failed said, from
    pytest's JUnit file."""
    counts: Counter[str] = Counter()
    reasons, failures = [], {}
    try:
        report = ElementTree.parse(path)
        ended = sum(int(suite.get("tests", 0)) for suite in report.iter("testsuite"))
        cases = list(report.iter("testcase"))  # one more where a test was interrupted
    except (OSError, ElementTree.ParseError):
        return counts, ["a test file that did not end: its counts are missing"], {}
    for case in cases:
        skipped = case.find("skipped")
        wrong = [child for child in (case.find("failure"), case.find("error")) if child is not None]
        if skipped is not None:
            reasons.append(f"{case.get('name')}: {skipped.get('message')}")
            counts["skipped"] += 1
        elif wrong:
            failures[str(case.get("name"))] = "\n".join(child.text or "" for child in wrong)[-TAIL:]
            counts["failed"] += 1
    counts["passed"] = ended - counts["failed"] - counts["skipped"]
    return +counts, reasons, failures


def run_benchmark(name: str, arguments: list[str], record: Record, most: float, deadline: float) -> None:
    """A benchmark; its table goes into the record, also where it was cut off: the rows that it had written."""
    what = f"benchmarks/{command(name)}"
    out = record.path.with_name(f"{record.path.stem}-{name}.unfinished").resolve()
    out.unlink(missing_ok=True)
    try:
        outcome = run_step([f"benchmarks/{program(name)}", name, "--out", str(out), *arguments], most, deadline)
    finally:
        if out.exists():
            record.figure(json.loads(out.read_text()))
            out.unlink()
    if outcome is None:
        record.no_time(what)
        return
    for line in re.findall(r"^left out: .*", outcome.output, re.MULTILINE):
        record.skip(f"{what}: {line}")
    record.step(what, outcome)


def run_step(command: list[str], most: float, deadline: float) -> Outcome | None:
    """Runs Python with these arguments, for `most` seconds at most, in a process group of its own. None where no time
    is left."""
    limit = min(most, deadline - time.monotonic())
    if limit < LEAST_SECONDS:
        return None
    with tempfile.TemporaryFile(mode="w+", errors="replace") as output:
        begin = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | {"PYTHONFAULTHANDLER": "1"},  # a crash says where in Python it was
            start_new_session=True,
        )
        _running.add(process)
        try:
            code = process.wait(limit)
            status = "passed" if code == 0 else f"exit status {code}" if code > 0 else f"died of {signal_name(-code)}"
        except subprocess.TimeoutExpired:
            status = f"no end within {limit:.0f} s"
            process.send_signal(signal.SIGINT)  # pytest then says what failed so far, and writes its report
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_SECONDS)
        finally:
            stop(process)
            _running.discard(process)
        output.seek(0)
        return Outcome(status, time.monotonic() - begin, output.read())


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def no_gpu() -> str:
    """Why there is no NVIDIA device here; empty where there is one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"no NVIDIA driver: {error}"
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the NVIDIA driver finds no device"
    return ""


if __name__ == "__main__":
    main()
