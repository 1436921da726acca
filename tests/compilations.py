"""Compiles a library twice at once, as two processes that start together do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = (
    "import sys, pathlib; from ballonet.allocator import companion; "
    "print(companion.build(pathlib.Path(sys.argv[1]), getattr(companion, sys.argv[2])))"
)


def compile_it_at_once(name: str, folder: Path) -> None:
    """`name`: a library of ``companion``. Both processes find the one file that is left in `folder`."""
    command = [sys.executable, "-c", SCRIPT, str(folder), name]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate()[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert paths == {str(path) for path in folder.iterdir()}
    assert len(paths) == 1
