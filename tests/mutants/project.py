"""The copy of the project in build/mutants, in which bugs are planted one at a time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from patches import ROOT, Patch, edited

COPY = ROOT / "build" / "mutants"


def copy() -> None:
    """Brings the copy up to date: the sources, and at first what was built.

    A file that was otherwise is new, and so compiled again, as an earlier run may have been ended with a bug planted.
    """
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
        omitted = shutil.ignore_patterns("mutants*", "simgpu", "mypy", "torch-headers")
        shutil.copytree(ROOT / "build", COPY / "build", symlinks=True, ignore=omitted)
        for library in (ROOT / "allocator").glob("*.so"):
            shutil.copy2(library, COPY / "allocator")
    build()


def build() -> None:
    """Compiles what changed of the native core."""
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=COPY, check=True)


@contextmanager
def planted(patch: Patch) -> Iterator[None]:
    """Within it the bug is in the copy, compiled. ValueError where it has no place in the sources."""
    after = edited(patch, COPY)
    before = {path: (COPY / path).read_text("utf-8") for path in after}
    try:
        write(after, patch)
        yield
    finally:
        write(before, patch)


def write(texts: dict[str, str], patch: Patch) -> None:
    for path, text in texts.items():
        (COPY / path).write_text(text, "utf-8")
    if patch.native:
        build()
