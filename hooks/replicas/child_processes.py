"""Processes of replicas on this machine: started as `ballonet serve --join`, and ended with the supervisor.

Note [Where they come from]
    torch and transformers take seconds to import. So replicas are forks of one process that has done this and nothing
    else (Python's forkserver): a replica that replaces a lost one is there at once, and all share the memory of what
    was imported. CUDA does not survive a fork, and whoever looks for devices initializes it: with GPUs each is a
    process of its own that imports for itself, which takes less there than loading a model.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess, parent_process
from typing import Any, Final

from ...allocator.config import change_environment, environment
from ...offload.policy.replicas.chunk_cost import ChunkCost
from .placement import as_replica

SECRET: Final = "BALLONET_REPLICA_SECRET"  # the variable that replicas read the supervisor's secret from
STARTED: Final = "BALLONET_REPLICA_STARTED"  # and this one what it tells those that it starts (messages.Started)
_IMPORTED: Final = ("ballonet.hooks.replicas.process", "ballonet.allocator.install")

# (arguments of `python -m ballonet serve`, environment) of the replica of a rank, which takes chunks to cost that
Recipe = Callable[[int, ChunkCost | None], tuple[Sequence[str], Mapping[str, str]]]


class ChildProcesses:
    """See ranks.Processes. Used by one thread at a time. To be closed."""

    def __init__(self, recipe: Recipe, forks: bool = True) -> None:
        """`forks`: see Note [Where they come from]."""
        self._recipe = recipe
        self._running: dict[int, BaseProcess] = {}  # by rank
        # Any: BaseContext has neither Process nor what else differs
        self._context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
        if forks:
            self._context.set_forkserver_preload([*_IMPORTED])

    def start(self, rank: int, cost: ChunkCost | None) -> None:
        """Starts the replica of a rank. OSError."""
        arguments, environ = self._recipe(rank, cost)
        # a daemon: if this process ends without `close`, its end does not wait for replicas
        process = self._context.Process(target=_serve, args=(list(arguments), dict(environ)), daemon=True)
        process.start()
        self._running[rank] = process

    @property
    def processes(self) -> tuple[int, ...]:
        """Ids of those that run."""
        return tuple(each.pid for each in self._running.values() if each.pid is not None)

    def ended(self) -> list[tuple[int, str]]:
        """See ranks.Processes."""
        gone = {rank: each.exitcode for rank, each in self._running.items() if each.exitcode is not None}
        self._running = {rank: each for rank, each in self._running.items() if rank not in gone}
        return [(rank, _how(code)) for rank, code in gone.items()]

    def end(self, rank: int) -> None:
        """See ranks.Processes."""
        if rank in self._running:
            self._running[rank].kill()

    def close(self, patience: float) -> None:
        """Waits for all to end, so many seconds each, and then ends them."""
        for each in self._running.values():
            each.join(patience)
            if each.exitcode is None:
                each.kill()
                each.join()
        self._running.clear()


def placed(number: int, devices: int) -> dict[str, str]:
    """The environment of replica `number` of a machine with so many GPUs; see placement.as_replica."""
    environ = environment()
    changes = as_replica(environ, number, devices)
    kept = {name: value for name, value in environ.items() if name not in changes}
    return kept | {name: value for name, value in changes.items() if value is not None}


def _serve(arguments: list[str], environ: Mapping[str, str]) -> None:
    """The process of a replica."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    os.setsid()  # Ctrl-C is for the supervisor, which tells replicas when requests have ended
    tqdm.set_lock(threading.RLock())  # its own has a semaphore with a name, which who is killed leaves behind
    change_environment({**dict.fromkeys(environment()), **environ})
    sys.argv = ["ballonet", "serve", *arguments]
    try:
        runpy.run_module("ballonet", run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out


def end_with_parent(say: Callable[[str], object]) -> Callable[[], object]:
    """Ends this process at once when the supervisor that started it does, whatever this waits for, until what it
    returns is called: by one that has joined, which hears of that from the store, and unwinds."""
    parent, joined = parent_process(), threading.Event()

    def watch() -> None:
        assert parent is not None
        parent.join()
        if not joined.is_set():
            say("a replica ends before it serves: its supervisor has gone")
            os._exit(1)

    if parent is not None:
        threading.Thread(target=watch, name="ballonet parent", daemon=True).start()
    return joined.set


def _how(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
