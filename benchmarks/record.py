"""What a part of the proof has found so far: kept in its JSON after every step, and told on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import print_result, slug
from harness import ROOT, machine, versions

TAIL = 3000  # characters of the output of a step that failed


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a process ended: "passed", "exit status 1", "died of SIGSEGV", "no end within 240 s"."""

    status: str
    seconds: float
    output: str


class Record:
    """What a part has found so far, as it is written."""

    def __init__(self, part: str, results: Path) -> None:
        self.begin = time.monotonic()
        self.failed: list[str] = []
        self._machine = machine()
        self._results = results
        self._counts: Counter[str] = Counter()
        self._result: dict[str, Any] = {
            "part": part,
            "machine": self._machine,
            "versions": versions(),
            "commit": commit(),
            "complete": False,
            "tests": {},
            "skipped": [],
            "failed": self.failed,
            "steps": [],
            "figures": [],
        }
        self.path = results / f"{slug(self._machine)}-{part}.json"
        print(f"part {part}: {slug(self._machine)}, results in {self.path}", flush=True)
        self.write()

    def step(self, name: str, outcome: Outcome, note: str = "", failures: Mapping[str, str] | None = None) -> None:
        """A step has ended. `failures`: of its tests, each with the end of what it said."""
        result: dict[str, Any] = {"name": name, "status": outcome.status, "seconds": round(outcome.seconds, 1)}
        if outcome.status != "passed":
            result["output"] = nowhere(outcome.output)[-TAIL:]
            result |= {"failures": {test: nowhere(text) for test, text in failures.items()}} if failures else {}
            self.failed.append(f"{name}: {outcome.status}")
        self._result["steps"].append(result)
        elapsed = time.monotonic() - self.begin
        print(f"[{elapsed:4.0f} s] {name}: {outcome.status} in {outcome.seconds:.0f} s {note}".rstrip(), flush=True)
        if outcome.status != "passed":
            print("    " + "\n    ".join(outcome.output[-TAIL:].splitlines()[-20:]), flush=True)
        self.write()

    def skip(self, what: str) -> None:
        """Something that is part of the proof was not run."""
        if what not in self._result["skipped"]:
            self._result["skipped"].append(what)
        self.write()

    def no_time(self, what: str) -> None:
        """A step was not begun."""
        self.failed.append(f"{what}: no time was left for it")
        self.skip(f"{what}: no time was left for it")

    def count(self, counts: Counter[str]) -> None:
        self._counts += counts
        self._result["tests"] = dict(self._counts)

    def figure(self, figure: dict[str, Any]) -> None:
        self._result["figures"].append(figure)

    def write(self) -> None:
        """At once or not at all."""
        self._results.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self._result, indent=1) + "\n")
        os.replace(unfinished, self.path)

    def finish(self) -> None:
        """Every step was met."""
        self._result["complete"] = True
        self.write()
        print_result(self._result)

    def cut_off(self) -> None:
        """The run ends before this part has, unless it has finished."""
        if not self._result["complete"]:
            self.failed.append("cut off before its end")
            self.write()
            print_result(self._result)


def nowhere(text: str) -> str:
    """The text without the folders of this machine in which the sources and Python's packages are."""
    for folder in (ROOT, Path(sys.prefix)):
        text = text.replace(f"{folder}/", "").replace(str(folder), ".")
    return text


def commit() -> str | None:
    """The commit of the sources, with + where they were changed since; None where that cannot be told."""
    try:
        head = git("rev-parse", "HEAD")
        return head + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
