"""`make mutants`: plants one bug at a time in a copy of the project, and runs the tests that should then fail.

    python tests/mutants/run.py                       those that were not judged as they are
    python tests/mutants/run.py fence-retire core ... these bugs or areas, whether they were or not
    python tests/mutants/run.py --host                those whose tests need no GPU, for which torch's CPU build does
    python tests/mutants/run.py --list                checks the patches, and plants nothing
    python tests/mutants/run.py --table               only writes tests/mutants/README.md from what was found

A test kills a bug that passes without it and fails with it. The bugs are `tests/mutants/AREA/NAME.patch` (patches.py
has the format). Those for the simulated GPU are judged where torch's CUDA build is, which `make test-cuda` fetches.
Exit status 1 where a bug lives that should not, dies that cannot, or where none of its tests passes without it.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

from patches import ROOT, Patch, read_all, wrong
from project import COPY, copy, planted
from verdicts import TABLE, Verdict, key_of, known, store, table

sys.path.insert(0, str(ROOT / "tests" / "simgpu"))
import environment

SECONDS = 300  # that a test may take, and with a bug ten times what it took without: one that hangs is killed
SAID = 150  # characters of what is quoted


class Judge:
    """Runs the tests of bugs with `python`, or with `cuda`, the interpreter whose torch finds the simulated GPU."""

    def __init__(self, python: Path, cuda: Path | None) -> None:
        self.python = python
        self.cuda = cuda
        self._limits: dict[tuple[str, ...], float] = {}

    def judge(self, patch: Patch) -> Verdict | None:
        """The verdict of the first of its tests that fails with it. One that fails without it kills nothing: None
        where all do."""
        limits = {test: limit for test in patch.tests if (limit := self.limit_of(patch, test))}
        if not limits:
            return None
        with planted(patch):
            verdicts = (self.fails(patch, test, limit) for test, limit in limits.items())
            return next(filter(None, verdicts), Verdict("", ""))

    def limit_of(self, patch: Patch, test: str) -> float:
        """Seconds that the test may take with the bug; 0 where it fails without. It is run once for all bugs."""
        key = test, *self.settings(patch).values()
        if key not in self._limits:
            began = time.monotonic()
            failure = self.fails(patch, test, SECONDS)
            self._limits[key] = 0 if failure else max(SECONDS, 10 * (time.monotonic() - began))
            if failure:
                print(f"  {test} fails without any bug: {failure.said}", flush=True)
        return self._limits[key]

    def settings(self, patch: Patch) -> dict[str, str]:
        """Variables of the simulated device."""
        if not patch.simulated:
            return {}
        return {"SIMGPU_DELAY": patch.header.get("Delay", "0"), "SIMGPU_SEED": patch.header.get("Seed", "0")}

    def fails(self, patch: Patch, test: str, limit: float) -> Verdict | None:
        """How the test fails, also by not ending within so many seconds; None where it passes."""
        python = self.cuda if patch.simulated else self.python
        command = [str(python), "-m", "pytest", test, "-x", "-q", "-p", "no:cacheprovider"]
        command += ["-m", "gpu"] if patch.simulated else ["--hypothesis-profile", "planted"]
        home = {"SIMGPU_HOME": str(environment.build.BUILD)} if patch.simulated else {}
        with subprocess.Popen(
            command,
            cwd=COPY,
            env={**home, **os.environ, **self.settings(patch), "PYTHONPATH": str(COPY / "src")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return Verdict(test, "it does not end")
        (COPY / "build" / "mutant.log").write_text(said)
        if process.returncode == 0 and re.search(r"\b\d+ passed", said) is None:
            return Verdict(test, "it was skipped")
        return None if process.returncode == 0 else Verdict(test, reason(said))


def reason(said: str) -> str:
    """The line that tells why: the device's report, else the error that a test ended with."""
    lines = [re.sub(r"0x[0-9a-f]+", "0x...", line.removeprefix("E").strip()) for line in said.splitlines()]
    lines = [line for line in lines if line.strip("^~ ")]  # marks under code
    for line in lines:
        if line.startswith("simgpu: VIOLATION: "):
            return line.removeprefix("simgpu: VIOLATION: ")[:SAID]
    for before, line in pairwise(lines):
        if re.match(r"[\w.]*(Error|Exception|Broken|Exhausted)\b(?!: exit status)", line):
            return (before if line == "AssertionError" else line)[:SAID]
    asserted = (line for line in lines if re.match(r"assert\b", line))
    return next(asserted, next((line for line in reversed(lines) if line), ""))[:SAID]


def cuda_python(named: Path | None) -> Path | None:
    """The interpreter of the simulated GPU; None where torch's CUDA build is not there."""
    if named is not None:
        return named
    present = environment.is_present(environment.TORCH)
    return environment.prepare(environment.folder(environment.TORCH)) if present else None


def check(patches: list[Patch]) -> int:
    for patch in patches:
        print(f"{patch.area + '/' + patch.name:32} {wrong(patch) or patch.bug}")
    return int(any(map(wrong, patches)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="bugs or areas; all without")
    parser.add_argument("--host", action="store_true", help="only bugs whose tests need no GPU, simulated or not")
    parser.add_argument("--list", action="store_true", help="checks the patches, and plants nothing")
    parser.add_argument("--table", action="store_true", help="writes tests/mutants/README.md, and plants nothing")
    parser.add_argument("--python", type=Path, help="of a CUDA environment that is ready, SIMGPU_HOME set: builds none")
    options = parser.parse_args()
    every = read_all()
    if unknown := set(options.names) - {name for patch in every for name in (patch.area, patch.name)}:
        parser.error(f"no such bugs: {', '.join(sorted(unknown))}; --list shows them")
    chosen = [patch for patch in every if not options.names or {patch.area, patch.name} & {*options.names}]
    chosen = [patch for patch in chosen if not (options.host and patch.simulated)]
    if options.list:
        return check(chosen)
    if options.table:
        TABLE.write_text(table(every), "utf-8")
        return 0
    if any(map(wrong, chosen)):
        return check([patch for patch in chosen if wrong(patch)])
    judge = Judge(Path(sys.executable), cuda_python(options.python) if any(p.simulated for p in chosen) else None)
    if judge.cuda is None and (left := sum(patch.simulated for patch in chosen)):
        print(f"{left} bugs need torch's CUDA build, which `make test-cuda` fetches: they are not judged here")
        chosen = [patch for patch in chosen if not patch.simulated]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as Ctrl-C: the bug is taken out again
    copy()
    keys = {patch.name: key_of(patch) for patch in chosen}  # of what was just copied
    verdicts, failures = {} if options.names else known(), 0
    for number, patch in enumerate(chosen, 1):
        began = time.monotonic()
        verdict = verdicts.get(keys[patch.name]) or judge.judge(patch)
        if verdict is not None:
            store(keys[patch.name], verdict)
        killed = verdict is not None and bool(verdict.by)
        failures += killed == bool(patch.survives)
        ended = (
            f"killed by {verdict.by}: {verdict.said}" if verdict and killed else "lives" if verdict else "not judged"
        )
        print(f"[{number}/{len(chosen)}] {time.monotonic() - began:4.0f} s  {patch.name:24} {ended}", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
