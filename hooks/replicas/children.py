"""Processes of replicas on this machine: started as `ballonet serve --join`, and ended with the supervisor."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from ...allocator.config import environment
from .placement import as_replica

SECRET = "BALLONET_REPLICA_SECRET"  # the variable that replicas read the supervisor's secret from


class Children:
    """Used by one thread at a time. To be closed."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        """Starts a process of `python -m ballonet serve` with these arguments. OSError."""
        command = [sys.executable, "-m", "ballonet", "serve", *arguments]
        # a group of its own: Ctrl-C is for the supervisor, which tells replicas when requests have ended
        self._running.append(
            subprocess.Popen(command, env=dict(environ), stdin=subprocess.DEVNULL, start_new_session=True)
        )

    @property
    def processes(self) -> tuple[int, ...]:
        """Ids of those that run."""
        return tuple(each.pid for each in self._running)

    def ended(self) -> list[tuple[int, str]]:
        """See supervisor.Processes."""
        gone = [each for each in self._running if each.poll() is not None]
        self._running = [each for each in self._running if each not in gone]
        return [(each.pid, _how(each.returncode)) for each in gone]

    def end(self, process: int) -> None:
        """See supervisor.Processes."""
        for each in self._running:
            if each.pid == process:
                each.kill()

    def close(self, patience: float) -> None:
        """Waits for all to end, so many seconds, and then ends them."""
        for each in self._running:
            try:
                each.wait(patience)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()
        self._running = []


def placed(number: int, devices: int) -> dict[str, str]:
    """The environment of replica `number` of a machine with so many GPUs; see placement.as_replica."""
    environ = environment()
    changes = as_replica(environ, number, devices)
    kept = {name: value for name, value in environ.items() if name not in changes}
    return kept | {name: value for name, value in changes.items() if value is not None}


def _how(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
