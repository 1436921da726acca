"""Programs that tests run in a process of their own: what would end the process, or changes it for good.

That process is a fork of one which has imported torch and transformers (gpu/forked.py), which takes seconds otherwise.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from .gpu.forked import Fork
from .gpu.scene import FORKS, ROOT, environment

SECONDS = 900  # that a program may take: only one that hangs takes them
# As Python itself begins with `-m`, with `-c` and with a file
BEGIN = """
import os, runpy, sys
command, folder, out, err, told = {}
__spec__ = runpy.__spec__  # as what Python begins programs with, whose frames are in no traceback of theirs
if told:
    os.dup2(os.open(told, os.O_RDONLY), 0)
for descriptor, path in ((1, out), (2, err)) if out else ():
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
os.chdir(folder)
if command[0] == "-m":
    sys.argv[1:], sys.path[0] = command[2:], os.getcwd()
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


def gone() -> int:
    """The pid of a process that has ended."""
    done = subprocess.Popen([sys.executable, "-S", "-c", ""])
    done.wait()
    return done.pid


def begun(command: Sequence[str], variables: Mapping[str, str], log: Path) -> Fork:
    """`python COMMAND`, which writes all that it says to the end of `log`."""
    told = [*command], str(ROOT), "", "", ""
    return FORKS.start(BEGIN.format(repr(told)), variables, log)


class Program:
    """`python COMMAND` that runs beside the tests."""

    def __init__(self, command: Sequence[str], said: Path, folder: Path, variables: Mapping[str, str] | None) -> None:
        """`said`: a folder for what it prints."""
        self.command = command
        self._out, self._err, self._log = said / "out", said / "err", said / "log"
        self._log.touch()
        program = BEGIN.format(repr(([*command], str(folder), str(self._out), str(self._err), self._told(said))))
        self.process = FORKS.start(program, environment() if variables is None else variables, self._log)

    def _told(self, said: Path) -> str:
        """A file that it reads as its input; none where that is empty."""
        return ""

    @property
    def out(self) -> str:
        """What it has printed so far."""
        return read(self._out)

    @property
    def err(self) -> str:
        """What it has written to its standard error so far."""
        return read(self._log) + read(self._err)

    def ended(self, seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
        """Waits for its end, which must come."""
        status = self.process.wait(seconds)
        assert status is not None, f"no end within {seconds} s"
        return subprocess.CompletedProcess(self.command, status, self.out, self.err)


class Asked(Program):
    """As a program of Popen whose input and output are pipes."""

    def __init__(self, command: Sequence[str], said: Path, folder: Path, variables: Mapping[str, str] | None) -> None:
        super().__init__(command, said, folder, variables)
        self.stdin, self.stdout = (said / "told").open("w"), self._out.open()

    def _told(self, said: Path) -> str:
        for pipe in (said / "told", self._out):
            os.mkfifo(pipe)
        return str(said / "told")

    def wait(self, seconds: float = SECONDS) -> int | None:
        """Returns the exit status; None where there is none within so many seconds, and it was killed."""
        return self.process.wait(seconds)

    def kill(self) -> None:
        """Ends it, unless it has ended."""
        self.process.kill()


def read(path: Path) -> str:
    """The text of a file, if it is there."""
    return path.read_text(errors="replace") if path.exists() else ""


def python(
    *command: str, folder: Path = ROOT, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What `python COMMAND` gives in that folder. `variables`: those of its environment, without which it has those of
    the tests, but for settings of ballonet."""
    with tempfile.TemporaryDirectory() as said:
        return Program(command, Path(said), folder, variables).ended()


def run(code: str, *arguments: object, folder: Path = ROOT) -> str:
    """Runs the code and returns what it prints. It must end well. In it `tests` is this folder."""
    done = python("-c", textwrap.dedent(code), *map(str, arguments), folder=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
