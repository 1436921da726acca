"""Programs in forks of a process that has imported torch and transformers.

To import them takes six seconds of a CPU, which is more than most scenes take. Only for the simulated device: a real
driver must not be forked once it was asked for anything, and an import may ask.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

ALONE = {
    "OMP_NUM_THREADS": "1",  # no other thread is begun by an import
    "OPENBLAS_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",  # which is read at an import
}
SERVER = """
import gc, json, os, signal, sys
import pytest, tests.models

assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asks ends this process, by the end of its input
gc.freeze()
while line := sys.stdin.readline():
    program, environment, log = json.loads(line)
    if not (child := os.fork()):
        break
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
signal.signal(signal.SIGINT, signal.default_int_handler)
for path, flags, places in ((os.devnull, os.O_RDONLY, (0,)), (log, os.O_WRONLY | os.O_APPEND, (1, 2))):
    opened = os.open(path, flags)
    for place in places:
        os.dup2(opened, place)
    os.close(opened)
os.environ.clear()
os.environ.update(environment)
exec(compile(program, "<scene>", "exec"), {"__name__": "__main__"})
"""


class Forks:
    """The process, from the first program on. Runs one program at a time."""

    def __init__(self, prelude: str, cwd: Path) -> None:
        """`prelude`: what is to be executed before anything is imported."""
        self._prelude = prelude
        self._cwd = cwd
        self._server: subprocess.Popen[bytes] | None = None

    def run(self, program: str, environment: Mapping[str, str], seconds: float) -> tuple[int | None, str]:
        """Returns the exit status of the program, of a signal the negative number, and all that it said. None where it
        did not end within so many seconds and was killed."""
        with TemporaryDirectory() as folder:
            log = Path(folder) / "said"
            log.touch()
            child = self._tell(json.dumps([program, dict(environment), str(log)]))
            output = self._started().stdout
            ended = bool(select.select([output], [], [], seconds)[0])
            if not ended:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            status = self._number()
            return status if ended else None, log.read_text(errors="replace")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, "-c", self._prelude + SERVER],
                cwd=self._cwd,
                env=os.environ | ALONE,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # what has come is seen by select()
            )
        return self._server

    def _tell(self, line: str) -> int:
        """Asks for a program; returns the process that runs it."""
        sink = self._started().stdin
        assert sink is not None
        sink.write(line.encode() + b"\n")
        return self._number()

    def _number(self) -> int:
        source = self._started().stdout
        assert source is not None
        line = source.readline()
        assert line, f"the process that forks has ended, with {self._started().wait()}"
        return int(line)
