"""Runs PyTorch's own test_cuda.py under torch's allocator and under ballonet's, and compares.

    python tests/simgpu/torch_suite.py path/to/test_cuda.py [-k EXPRESSION]

The file is PyTorch's and no part of this project. Exit status 1 where a test passes with torch's allocator and not with
ballonet's, 0 where none does, 77 where there is no file.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Final

SELECTED: Final = (
    "(memory or graph or pool or Pool or stream or alloc or oom or Block or pinned or snapshot or fraction or plots) "
    "and not Optims and not fuzz and not make_graphed"
)
SKIPPED: Final = 77
LIMIT_SECONDS: Final = 3600


def passed(tests: Path, command: list[str], expression: str, folder: Path) -> set[str]:
    """The names of the tests that pass. The file is copied: the conftest beside it may be for another pytest."""
    copy = folder / "test_cuda.py"
    shutil.copy(tests, copy)
    report = folder / "report.xml"
    options = ["-q", "-p", "no:cacheprovider", "--tb=line", f"--junitxml={report}", "-k", expression]
    environment = os.environ | {"BALLONET_SPILL": "0"}  # what does not fit is to be refused, as torch's allocator does
    subprocess.run([*command, str(copy), *options], cwd=folder, env=environment, check=False, timeout=LIMIT_SECONDS)
    if not report.is_file():
        raise SystemExit(f"{' '.join(command)} ended without a report: narrow it down with -k")
    cases = ElementTree.parse(report).getroot().iter("testcase")
    bad = {"failure", "error", "skipped"}
    return {f"{c.get('classname')}::{c.get('name')}" for c in cases if not bad & {child.tag for child in c}}


def main() -> int:
    parser = argparse.ArgumentParser(description="PyTorch's own tests under two allocators")
    parser.add_argument("file", type=Path)
    parser.add_argument("-k", default=SELECTED, dest="expression")
    arguments = parser.parse_args()
    if not arguments.file.is_file():
        print(f"{arguments.file} is not there: nothing was run")
        return SKIPPED
    ways = {
        "torch's": [sys.executable, "-m", "pytest"],
        "ballonet's": [sys.executable, "-m", "ballonet", "run", "-m", "pytest"],
    }
    results: dict[str, set[str]] = {}
    for name, command in ways.items():
        with tempfile.TemporaryDirectory() as folder:
            results[name] = passed(arguments.file, command, arguments.expression, Path(folder))
        print(f"{len(results[name])} pass with {name} allocator")
    lost = sorted(results["torch's"] - results["ballonet's"])
    for test in lost:
        print(f"passes with torch's allocator only: {test}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
