"""Runs PyTorch's own test_cuda.py under torch's allocator and under ballonet's, and compares.

    python tests/simgpu/torch_suite.py path/to/test_cuda.py [-k EXPRESSION] [--report FILE]

The file is PyTorch's and no part of this project. Exit status 1 where a test passes with torch's allocator and not with
ballonet's, 0 where none does, 77 where there is no file.

Many tests share a process, as importing torch takes longer than most of them. One that ends its process, breaks its
device, or takes longer than --limit, ends with that as its result, and the tests after it go on in a new process. What
failed beside others is tried again in a process of its own, and that result counts. As a plugin of pytest (the hooks
below) this file writes the outcome of each test as soon as it is known.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

SKIPPED: Final = 77
LOG: Final = "TORCH_SUITE_LOG"  # the variable that names the plugin's file
START_SECONDS: Final = 300  # until the first test of a process begins
WAYS: Final = {
    "torch": [sys.executable, "-m", "pytest"],
    "ballonet": [sys.executable, "-m", "ballonet", "run", "-m", "pytest"],
}
Results = dict[str, tuple[str, str]]  # test -> (passed, failed, skipped, crashed or hung; the last words)


def _write(**said: str) -> None:
    if log := os.environ.get(LOG):
        with open(log, "a") as file:
            file.write(json.dumps(said) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(began=nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        _write(ended=report.nodeid, outcome=report.outcome, words=_last_words(report))
    if report.outcome == "failed" and _is_device_broken():
        os._exit(1)


def _is_device_broken() -> bool:
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def pytest_collection_finish(session: Any) -> None:
    _write(selected="\n".join(item.nodeid for item in session.items))


def _last_words(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return "" if crash is None else " ".join(crash.message.split())[:300]


class Suite:
    """One file of tests in a folder of its own: the conftest beside the original may be for another pytest."""

    def __init__(self, file: Path, folder: Path, limit: float) -> None:
        self._folder, self._limit = folder, limit
        self._name = file.name
        for path in (file, Path(__file__)):  # the plugin alone: what lies beside it is for other interpreters
            shutil.copy(path, folder)

    def select(self, expression: str) -> list[str]:
        """The ids of the tests that the expression of pytest's -k names."""
        log = self._folder / "log"
        with self._start(WAYS["torch"], [self._name, "-k", expression, "--collect-only"], log) as process:
            process.wait()
        tests = [test for said in _read(log) for test in said.get("selected", "").split("\n") if test]
        if not tests:
            raise SystemExit(f"no test was found in {self._name}:\n{(self._folder / 'output').read_text()[-2000:]}")
        return tests

    def play(self, command: list[str], tests: list[str]) -> Results:
        """Each test's result, under one way of allocating."""
        together = self._play(command, tests)
        broken = [test for test in tests if together[test][0] in ("failed", "crashed")]
        for test in broken if len(tests) > 1 else ():
            together |= self._play(command, [test])
        return together

    def _play(self, command: list[str], tests: list[str]) -> Results:
        results: Results = {}
        while left := [test for test in tests if test not in results]:
            ended, running, ending = self._process(command, left)
            results |= ended
            results.setdefault(running or left[0], ending)
        return results

    def _process(self, command: list[str], tests: list[str]) -> tuple[Results, str | None, tuple[str, str]]:
        """(results, the test during which it ended, how it ended), of one process."""
        log = self._folder / "log"
        with self._start(command, tests, log) as process:
            began, running = time.monotonic() + START_SECONDS, None
            while process.poll() is None:
                time.sleep(0.2)
                now = _running(log)
                if now != running:
                    running, began = now, time.monotonic()
                if time.monotonic() - began > self._limit:
                    process.kill()
                    return _results(log), running, ("hung", f"not done within {self._limit:g} s")
        return _results(log), _running(log), ("crashed", f"the process ended: {process.returncode}")

    def _start(self, command: list[str], arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
        log.unlink(missing_ok=True)
        log.touch()
        options = ["-q", "-p", "no:cacheprovider", "-p", Path(__file__).stem, "--tb=short"]
        environment = os.environ | {
            LOG: str(log),
            "BALLONET_SPILL": "0",  # what does not fit is to be refused, as torch's allocator does
        }
        with (self._folder / "output").open("ab") as output:
            return subprocess.Popen(
                [*command, *options, *arguments], cwd=self._folder, env=environment, stdout=output, stderr=output
            )


def _read(log: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _results(log: Path) -> Results:
    return {said["ended"]: (said["outcome"], said["words"]) for said in _read(log) if "ended" in said}


def _running(log: Path) -> str | None:
    """The test that has begun and not ended."""
    running = None
    for said in _read(log):
        running = said.get("began", None if said.get("ended") == running else running)
    return running


def main() -> int:
    parser = argparse.ArgumentParser(description="PyTorch's own tests under two allocators")
    parser.add_argument("file", type=Path)
    parser.add_argument("-k", default="", dest="expression")
    parser.add_argument("--limit", type=float, default=600, help="seconds for a test")
    parser.add_argument("--report", type=Path, help="writes every result there, as JSON")
    chosen = parser.parse_args()
    if not chosen.file.is_file():
        print(f"{chosen.file} is not there: nothing was run")
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        suite = Suite(chosen.file, Path(folder), chosen.limit)
        tests = suite.select(chosen.expression)
        results: dict[str, Results] = {}
        for way, command in WAYS.items():
            results[way] = suite.play(command, tests)
            print(f"{len(_passed(results[way]))} of {len(tests)} pass with {way}'s allocator", flush=True)
            tests = [test for test in tests if test in _passed(results[way])]
    if chosen.report:
        chosen.report.write_text(json.dumps(results, indent=1))
    lost = sorted(_passed(results["torch"]) - _passed(results["ballonet"]))
    for test in lost:
        print(f"passes with torch's allocator only: {test}\n    {': '.join(results['ballonet'][test])}")
    return 1 if lost else 0


def _passed(results: Results) -> set[str]:
    return {test for test, (outcome, _) in results.items() if outcome == "passed"}


if __name__ == "__main__":
    sys.exit(main())
