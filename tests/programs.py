"""Programs that tests run in a process of their own: what would end the process, or changes it for good.

That process is a fork of one which has imported torch and transformers (gpu/forked.py), which takes seconds otherwise.
"""

from __future__ import annotations

import subprocess
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path

from .gpu.scene import FORKS, ROOT, environment

SECONDS = 300  # that a program may take: only one that hangs takes them
# As Python itself begins with `-m`, with `-c` and with a file
BEGIN = """
import os, runpy, sys
command, folder, out, err = {}
__spec__ = runpy.__spec__  # as what Python begins programs with, whose frames are in no traceback of theirs
for descriptor, path in ((1, out), (2, err)):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
os.chdir(folder)
if command[0] == "-m":
    sys.argv[1:] = command[2:]
    runpy._run_module_as_main(command[1])
elif command[0] == "-c":
    sys.argv = ["-c", *command[2:]]
    names = sys.modules["__main__"].__dict__
    names.update({{"__name__": "__main__"}})
    exec(compile(command[1], "<string>", "exec"), names)
else:
    sys.argv, sys.path[0] = command, os.path.dirname(os.path.abspath(command[0]))
    runpy.run_path(command[0], run_name="__main__")
"""


def python(
    *command: str, folder: Path = ROOT, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What `python COMMAND` gives in that folder. `variables`: those of its environment, without which it has those of
    the tests, but for settings of ballonet."""
    with tempfile.TemporaryDirectory() as kept:
        out, err = Path(kept, "out"), Path(kept, "err")
        program = BEGIN.format(repr(([*command], str(folder), str(out), str(err))))
        status, said = FORKS.run(program, environment() if variables is None else variables, SECONDS)
        assert status is not None, f"no end within {SECONDS} s"
        return subprocess.CompletedProcess(command, status, out.read_text(), said + err.read_text())


def run(code: str, *arguments: object, folder: Path = ROOT) -> str:
    """Runs the code and returns what it prints. It must end well. In it `tests` is this folder."""
    done = python("-c", textwrap.dedent(code), *map(str, arguments), folder=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
