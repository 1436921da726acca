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
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ALONE = {
    "OMP_NUM_THREADS": "1",  # no other thread is begun by an import
    "OPENBLAS_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",  # which is read at an import
}
SECONDS = 900  # that what was killed may take to end
SERVER = """
import contextlib, gc, json, os, pathlib, signal, sys
import pytest, tests.models

import ballonet.allocator.config

with contextlib.suppress(ImportError):  # a machine that serves nothing lacks what it takes
    import ballonet.hooks.server.server
assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asks ends this process, by the end of its input
gc.freeze()
while line := sys.stdin.readline():
    order, *told = json.loads(line)
    if order != "start":
        child, status = os.waitpid(told[0], 0 if order == "wait" else os.WNOHANG)
        print(os.waitstatus_to_exitcode(status) if child else "", flush=True)
        continue
    program, environment, log = told
    if not (child := os.fork()):
        break
    print(child, flush=True)
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
if runtime := environment.get("XDG_RUNTIME_DIR"):  # as in the process of the tests, see conftest.py
    ballonet.allocator.config.LEDGERS = pathlib.Path(runtime)
exec(compile(program, "<scene>", "exec"), {"__name__": "__main__"})
"""


class Fork:
    """A program that runs, or has ended."""

    def __init__(self, forks: Forks, pid: int) -> None:
        self.pid = pid
        self._forks = forks
        self._status: int | None = None

    def poll(self) -> int | None:
        """Returns the exit status, of a signal the negative number; None while it runs."""
        if self._status is None and (answer := self._forks.ask("poll", self.pid)):
            self._status = int(answer)
        return self._status

    def wait(self, seconds: float = SECONDS) -> int | None:
        """Returns the exit status. None where it did not end within so many seconds and was killed."""
        if self._status is None:
            answer = self._forks.ask("wait", self.pid, seconds=seconds)
            if answer is None:
                self.send_signal(signal.SIGKILL)
            self._status = int(answer or self._forks.answer() or 0)
            return self._status if answer else None
        return self._status

    def send_signal(self, number: int) -> None:
        """Does nothing to a program whose status is known: its number may be another's by now."""
        if self._status is None:
            os.kill(self.pid, number)  # it is at least a zombie, as nobody has asked for its status

    def terminate(self) -> None:
        """Asks it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it, unless it has ended."""
        self.send_signal(signal.SIGKILL)
        self.wait(SECONDS)


class Forks:
    """The process that forks, from the first program on."""

    def __init__(self, prelude: str, cwd: Path) -> None:
        """`prelude`: what is to be executed before anything is imported."""
        self._prelude = prelude
        self._cwd = cwd
        self._server: subprocess.Popen[bytes] | None = None

    def start(self, program: str, environment: Mapping[str, str], log: Path) -> Fork:
        """Begins a program, which writes what it says to `log`."""
        return Fork(self, int(self.ask("start", program, dict(environment), str(log)) or 0))

    def run(self, program: str, environment: Mapping[str, str], seconds: float) -> tuple[int | None, str]:
        """Returns the exit status of the program, as `Fork.wait` does, and all that it said."""
        with TemporaryDirectory() as folder:
            log = Path(folder) / "said"
            log.touch()
            status = self.start(program, environment, log).wait(seconds)
            return status, log.read_text(errors="replace")

    def ask(self, order: str, *told: Any, seconds: float | None = None) -> str | None:
        """Returns the answer to an order; None where there is none within so many seconds, though it comes later."""
        sink = self._started().stdin
        assert sink is not None
        sink.write(json.dumps([order, *told]).encode() + b"\n")
        return self.answer(seconds)

    def answer(self, seconds: float | None = None) -> str | None:
        """Returns the next answer; None where there is none within so many seconds."""
        source = self._started().stdout
        assert source is not None
        if not select.select([source], [], [], seconds)[0]:
            return None
        line = source.readline()
        assert line, f"the process that forks has ended, with {self._started().wait()}"
        return line.decode().strip()

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
