"""Plants one bug at a time in a copy of the project, and runs the tests that should then fail on the simulated device.

    python tests/simgpu/mutants.py                    those of mutants_list.py that were not judged as they are
    python tests/simgpu/mutants.py fence-retire ...   these, whether they were or not
    python tests/simgpu/mutants.py --list             are the texts that they replace in the sources?
    python tests/simgpu/mutants.py --table            only writes docs/mutants.md from build/mutants.json

A mutant removes one fence, wait, `record_stream` or lease: what a GPU needs and a CPU, whose operators are complete
when they return, does not miss. A test kills it that passes without it and fails with it. The copy is in build/mutants;
what each run found is added to build/mutants.json, under a hash of the mutant and its tests. Exit status 1 where a
mutant lives that should not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import environment
from mutants_list import MUTANTS, Mutant

ROOT = environment.ROOT
COPY = ROOT / "build" / "mutants"
VERDICTS = ROOT / "build" / "mutants.json"
TABLE = ROOT / "docs" / "mutants.md"
SCENES = ("tests/gpu/scene.py", "tests/gpu/hold.py")  # which all tests are made of
SECONDS = 300  # that a test may take, and with a bug ten times what it took without: one that hangs is killed
SAID = 150  # characters of what is quoted
HEADER = """\
# Planted bugs

Each removes one thing that a GPU needs: a fence, a wait, a `record_stream`, a lease, a rule of captures. It is planted
in a copy of the project, and a test that passes without it has to fail with it, on the simulated device
([tests/simgpu](../tests/simgpu/README.md)). `make mutants` does so; `tests/simgpu/mutants_list.py` has the edits. This
table is written by `python tests/simgpu/mutants.py --table`.

| mutant | what it removes | killed by | how it shows |
|---|---|---|---|
"""


class Verdict(NamedTuple):
    by: str  # the test that failed; empty where none did
    said: str  # one line of its message


def copy_project() -> None:
    """Brings the copy up to date: the sources, and at first what was built. A file that was otherwise is new, and so
    compiled again, as an earlier run may have been ended with a bug planted."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, COPY / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.unlink(missing_ok=True)
            target.symlink_to(os.readlink(source))
        elif source.exists() and not (target.exists() and target.read_bytes() == source.read_bytes()):
            (shutil.copy if target.exists() else shutil.copy2)(source, target)
    if not (COPY / "build").exists():
        omitted = shutil.ignore_patterns("mutants*", "simgpu", "mypy")
        shutil.copytree(ROOT / "build", COPY / "build", symlinks=True, ignore=omitted)
        for library in (ROOT / "allocator").glob("*.so"):
            shutil.copy2(library, COPY / "allocator")


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Within it the bug is in the copy. ValueError where a text that it replaces is not there exactly once."""
    if wrong := misplaced(mutant):
        raise ValueError(f"{mutant.name}: {wrong}")
    before = {path: (COPY / path).read_text(encoding="utf-8") for path, _, _ in mutant.edits}
    try:
        for path, old, new in mutant.edits:
            file = COPY / path
            file.write_text(file.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
        yield
    finally:
        for path, text in before.items():
            (COPY / path).write_text(text, encoding="utf-8")


def misplaced(mutant: Mutant) -> str:
    """What is wrong with the texts that it replaces; empty where nothing is."""
    there = {path: (ROOT / path).read_text(encoding="utf-8") for path, _, _ in mutant.edits}
    counts = {(path, old): there[path].count(old) for path, old, _ in mutant.edits}
    return "; ".join(f"{path} has {count} times: {old!r}" for (path, old), count in counts.items() if count != 1)


def build() -> None:
    """Compiles what changed of the native core."""
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=COPY, check=True)


def fails(python: Path, mutant: Mutant, test: str, limit: float = SECONDS) -> Verdict | None:
    """How the test fails, also by not ending within so many seconds; None where it passes."""
    command = [str(python), "-m", "pytest", test, "-x", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    settings = {"SIMGPU_DELAY": str(mutant.delay), "SIMGPU_SEED": str(mutant.seed), "PYTHONPATH": str(COPY / "src")}
    with subprocess.Popen(
        command,
        cwd=COPY,
        env={"SIMGPU_HOME": str(environment.build.BUILD), **os.environ, **settings},
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
    return None if process.returncode == 0 else Verdict(test, reason(said))


def reason(said: str) -> str:
    """The line that tells why: the device's report, else the error that a scene ended with."""
    lines = [line.removeprefix("E").strip() for line in said.splitlines()]
    lines = [line for line in lines if line.strip("^~ ")]  # marks under code
    for line in lines:
        if line.startswith("simgpu: VIOLATION: "):
            return re.sub(r"0x[0-9a-f]+", "0x...", line.removeprefix("simgpu: VIOLATION: "))[:SAID]
    for before, line in pairwise(lines):
        if re.match(r"[\w.]*(Error|Exception|Broken|Exhausted)\b(?!: exit status)", line):
            return (before if line == "AssertionError" else line)[:SAID]
    return next((line for line in reversed(lines) if line), "")[:SAID]


def judge(python: Path, mutant: Mutant) -> Verdict | None:
    """The verdict of the first of its tests that fails with it. One that fails without it kills nothing: None where
    all do."""
    build()
    limits = {test: limit for test in mutant.tests if (limit := limit_of(python, mutant, test))}
    if not limits:
        return None
    with planted(mutant):
        build()
        found = (fails(python, mutant, test, limit) for test, limit in limits.items())
        return next(filter(None, found), Verdict("", ""))


_limits: dict[tuple[str, int, int], float] = {}


def limit_of(python: Path, mutant: Mutant, test: str) -> float:
    """Seconds that the test may take with the bug; 0 where it fails without. It is run once for all mutants."""
    key = test, mutant.delay, mutant.seed
    if key not in _limits:
        began = time.monotonic()
        found = fails(python, mutant, test)
        _limits[key] = 0 if found else max(SECONDS, 10 * (time.monotonic() - began))
        if found:
            print(f"  {test} fails without any bug: {found.said}", flush=True)
    return _limits[key]


def key_of(mutant: Mutant) -> str:
    """What its verdict depends on: the bug, and its tests as they are."""
    files = sorted({*SCENES, *(test.partition("::")[0] for test in mutant.tests)})
    parts = [
        repr((mutant.edits, mutant.tests, mutant.delay, mutant.seed)),
        *((ROOT / file).read_text() for file in files),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def known() -> dict[str, Verdict]:
    """What earlier runs found, by key."""
    found = json.loads(VERDICTS.read_text()) if VERDICTS.exists() else {}
    return {key: Verdict(*each) for key, each in found.items()}


def table() -> str:
    rows, verdicts = [], known()
    for mutant in MUTANTS:
        by, said = verdicts.get(key_of(mutant), Verdict("", "not judged yet"))
        killed = f"`{by.removeprefix('tests/gpu/')}`" if by else "-"
        shown = said or mutant.survives or "**it lives**"
        rows.append(f"| {mutant.name} | {mutant.what} | {killed} | {shown.replace('|', '/').replace('<', '&lt;')} |\n")
    return HEADER + "".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to plant; all without")
    parser.add_argument("--list", action="store_true", help="checks that the texts are there, and plants nothing")
    parser.add_argument("--table", action="store_true", help="writes docs/mutants.md, and plants nothing")
    parser.add_argument("--python", type=Path, help="of an environment that is ready, SIMGPU_HOME set: builds none")
    options = parser.parse_args()
    if unknown := set(options.names) - {mutant.name for mutant in MUTANTS}:
        parser.error(f"no such mutants: {', '.join(sorted(unknown))}; --list shows them")
    chosen = [mutant for mutant in MUTANTS if not options.names or mutant.name in options.names]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name:24} {misplaced(mutant) or mutant.what}")
        return any(map(misplaced, chosen))
    if options.table:
        TABLE.write_text(table())
        return 0
    python = options.python or environment.prepare(environment.fetch(environment.TORCH))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as Ctrl-C: the bug is taken out again
    copy_project()
    keys = {mutant.name: key_of(mutant) for mutant in chosen}  # of what was just copied
    verdicts, wrong = {} if options.names else known(), 0
    for number, mutant in enumerate(chosen, 1):
        began = time.monotonic()
        found = verdicts.get(keys[mutant.name]) or judge(python, mutant)
        if found is not None:
            VERDICTS.write_text(json.dumps({**known(), keys[mutant.name]: found}, indent=1))
        killed = found is not None and bool(found.by)
        wrong += killed == bool(mutant.survives)
        ended = f"killed by {found.by}: {found.said}" if found and killed else "lives" if found else "not judged"
        print(f"[{number}/{len(chosen)}] {time.monotonic() - began:4.0f} s  {mutant.name:24} {ended}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
