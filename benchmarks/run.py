"""Runs the parts of the proof and keeps what they found: tests, then benchmarks, then one JSON per part.

    python benchmarks/run.py            every GPU part (make gpu); of a part alone: run.py core
    python benchmarks/run.py cpu cpu-pressure cpu-serving    the benchmarks of a machine without a GPU (make bench)

Every test file and every benchmark is a step: a process of its own with a time limit. A step that fails, crashes or
hangs is recorded with the end of what it said, and the others go on. The JSON is written after every step, so that a
run that is cut off leaves what it had. The exit status says whether every step passed; a limit that was missed is
shown, in the tables and in the JSON, but is not a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, machine
from figures import RESULTS, slug
from record import Outcome, Record

PART_SECONDS = 455  # of the 8 minutes, so that the file is written and the table printed
STEP_SECONDS = 240  # that a step of a GPU part may take
LEAST_SECONDS = 5  # a step that would have less is not begun
PREFLIGHT_SECONDS = 300  # its probes may take 240 together
TESTS_AT_ONCE = 4  # most of their time goes into starting Python and loading kernels


@dataclass(frozen=True, slots=True)
class Part:
    """What a part runs. `tests`: rounds of paths and patterns from the root; what is marked gpu in them runs, one round
    after another, the files of a round side by side. Then the benchmarks, each alone."""

    benchmarks: tuple[str, ...]
    tests: tuple[tuple[str, ...], ...] = ()
    gpu: bool = True
    seconds: float = PART_SECONDS
    step_seconds: float = STEP_SECONDS
    test_seconds: float = PART_SECONDS  # that the tests may take together, so that the benchmarks get the rest


# the suffix of what a benchmark can be given
TRACES = {"traces": ".csv", "hit_rate": ".jsonl", "tenants": ".csv", "replicas": ".csv"}
BALLOON = ("oom", "context", "driver_time", "shrink", "recover", "fragmentation")
PARTS: Mapping[str, Part] = {
    "cpu": Part(
        benchmarks=(
            *("kv_growth", "decode", "calls", "prefill", "streaming", "knee", "reactivate", "slo", "cold_load"),
            *("allocate", "exchange", "traces", "peak", "page_size", "plan"),
        ),
        gpu=False,
        seconds=3600,
        step_seconds=1200,
    ),
    "cpu-pressure": Part(
        benchmarks=(*BALLOON, "kv_stream", "lending", "hit_rate", "prefix"),
        gpu=False,
        seconds=3600,
        step_seconds=1200,
    ),
    "cpu-serving": Part(
        benchmarks=("serve", "serve_plain", "tenants", "replicas", "links"), gpu=False, seconds=3600, step_seconds=3000
    ),
    "core": Part(
        tests=(
            ("tests/contract/test_driver_contract.py",),
            ("tests/test_runtime.py",),  # compares what is free before and after
            (
                "tests/gpu/test_core_*.py",
                "tests/gpu/test_compiled.py",
                "tests/gpu/test_scene.py",
                "tests/test_mempool.py",
                "tests/test_pluggable.py",
            ),
        ),
        benchmarks=("allocate", "exchange", "page_size", "traces", "peak"),
        test_seconds=320,
    ),
    "kv": Part(
        tests=(("tests/gpu/test_kv_*.py", "tests/test_manage_devices.py"),),
        benchmarks=("decode", "prefill", "kv_growth", "kv_stream"),
        test_seconds=250,
    ),
    "weights": Part(
        tests=(
            (
                "tests/gpu/test_weights_*.py",
                "tests/gpu/test_slots_*.py",
                "tests/gpu/test_manage_*.py",
                "tests/gpu/test_pace.py",
            ),
        ),
        benchmarks=("streaming", "cold_load"),
        test_seconds=130,
    ),
    "remap": Part(
        tests=(("tests/gpu/test_remap_*.py",),),
        benchmarks=("knee", "slo", "reactivate"),
        test_seconds=130,
    ),
    "balloon": Part(
        tests=(("tests/gpu/test_balloon_*.py",),),
        benchmarks=BALLOON,
        test_seconds=130,
    ),
    "serve": Part(
        tests=(("tests/gpu/test_serve_*.py",),),
        benchmarks=("serve", "serve_plain"),
        test_seconds=130,
    ),
    "replicas": Part(
        tests=(
            ("tests/gpu/test_replicas_*.py", "tests/replicas/test_staging.py", "tests/replicas/test_stage_times.py"),
        ),
        benchmarks=("links", "replicas"),
        test_seconds=250,
    ),
    "prefix": Part(
        tests=(("tests/gpu/test_prefix*.py",),),
        benchmarks=("prefix", "lending", "hit_rate"),
        test_seconds=250,
    ),
}


_running: set[subprocess.Popen[bytes]] = set()


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that steps are ended and the file is written
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all that need a GPU")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="the benchmarks with tiny sizes: shows only that they run")
    parser.add_argument(
        "--traces", nargs="*", type=Path, default=[], help="recorded traces for those that take some: .csv, .jsonl"
    )
    given = parser.parse_args()
    parts = given.parts or [name for name, part in PARTS.items() if part.gpu]
    if unknown := [name for name in parts if name not in PARTS]:
        parser.error(f"there is no part {', '.join(unknown)}: there are {', '.join(PARTS)}")
    if any(PARTS[name].gpu for name in parts) and not no_gpu():
        preflight(given.results)
    passed = [run(name, PARTS[name], given.results, given.tiny, given.traces) for name in parts]
    sys.exit(0 if all(passed) else 1)


def preflight(results: Path) -> None:
    """What the driver does, before anything relies on it. The parts run whatever comes of it: they show the rest."""
    out = results / f"{slug(machine())}-preflight.json"
    print(f"preflight, to {out}", flush=True)
    command = [sys.executable, "-m", "ballonet", "preflight", "--out", str(out)]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, cwd=ROOT, check=False, timeout=PREFLIGHT_SECONDS)


def run(name: str, part: Part, results: Path, tiny: bool = False, traces: list[Path] | None = None) -> bool:
    """Runs one part and writes its JSON. Whether every step passed."""
    record = Record(name, results)
    try:
        reason = no_gpu() if part.gpu else ""
        if reason:
            record.skip(f"everything: {reason}")
            record.failed.append(f"part {name}: {reason}")
        else:
            deadline = time.monotonic() + part.seconds
            for patterns in part.tests:
                run_tests(patterns, record, part.step_seconds, min(deadline, record.begin + part.test_seconds))
            for benchmark in part.benchmarks:
                files = [each for each in traces or () if each.suffix == TRACES.get(benchmark)]
                arguments = ["--keep", str(results), *(["--tiny"] if tiny else []), *map(str, files)]
                run_benchmark(benchmark, arguments, record, part.step_seconds, deadline)
        record.complete()
    except BaseException:
        record.failed.append("cut off before its end")
        raise
    finally:
        record.finish()
    return not record.failed


def run_tests(patterns: tuple[str, ...], record: Record, most: float, deadline: float) -> None:
    """The test files of a round; a pattern that matches none is a failure."""
    files: list[str] = []
    for pattern in patterns:
        matching = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))
        files += matching
        if not matching:
            record.failed.append(f"{pattern}: there is no such test file")
    with ThreadPoolExecutor(TESTS_AT_ONCE) as pool, tempfile.TemporaryDirectory() as folder:
        reports = {path: Path(folder) / f"{number}.xml" for number, path in enumerate(files)}
        running = {pool.submit(run_test, path, report, most, deadline): path for path, report in reports.items()}
        try:
            for done in as_completed(running):
                record_test(running[done], done.result(), reports[running[done]], record)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                stop(process)
            raise


def run_test(path: str, report: Path, most: float, deadline: float) -> Outcome | None:
    command = ["-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider", "-p", "no:xdist"]
    return run_step([*command, f"--junitxml={report}", path], most, deadline)


def record_test(path: str, outcome: Outcome | None, report: Path, record: Record) -> None:
    """A test file's counts, and the reasons of what it skipped."""
    if outcome is None:
        record.no_time(path)
        return
    counts, reasons = read_report(report)
    for reason in reasons:
        record.skip(f"{path}: {reason}")
    record.count(counts)
    if outcome.status == "passed" and not counts:
        outcome = Outcome("no tests", outcome.seconds, outcome.output)
    record.step(path, outcome, ", ".join(f"{count} {what}" for what, count in counts.items()))


def read_report(path: Path) -> tuple[Counter[str], list[str]]:
    """Counts of passed, failed and skipped tests, and "test: reason" of the skipped, from pytest's JUnit file."""
    counts: Counter[str] = Counter()
    reasons = []
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return counts, ["a test file that did not end: its counts are missing"]
    for case in cases:
        skipped = case.find("skipped")
        if skipped is not None:
            reasons.append(f"{case.get('name')}: {skipped.get('message')}")
            counts["skipped"] += 1
        else:
            counts["passed" if case.find("failure") is None and case.find("error") is None else "failed"] += 1
    return counts, reasons


def run_benchmark(name: str, arguments: list[str], record: Record, most: float, deadline: float) -> None:
    """A benchmark; its table goes into the record."""
    program = f"benchmarks/bench_{name}.py"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figure.json"
        outcome = run_step([program, *arguments, "--out", str(out)], most, deadline)
        if outcome is None:
            record.no_time(program)
            return
        if outcome.status == "passed":
            record.figure(json.loads(out.read_text()))
            for line in re.findall(r"^left out: .*", outcome.output, re.MULTILINE):
                record.skip(f"{program}: {line}")
        record.step(program, outcome)


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
