"""The replicas on this machine: their processes, started, replaced where one is lost, and ended with the supervisor.

Note [Forks]
    torch and transformers take seconds to import. So replicas are forks of one process that has only imported them
    (Python's forkserver): a replacement starts at once, and all share the memory of imported modules. CUDA does not
    survive a fork, and is initialized by any code that looks for devices: with GPUs each replica is spawned and imports
    for itself, which takes less time there than loading a model.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess, parent_process
from typing import Any, Final, Protocol

from ...allocator.config import change_environment, environment
from ...offload.policy.replicas.chunk_cost import ChunkCost
from ...offload.policy.replicas.replacements import Replacements
from ...offload.policy.tuning import Replicas


class Processes(Protocol):
    """The processes of replicas on this machine, one of each rank."""

    def start(self, rank: int, cost: ChunkCost | None) -> None:
        """Starts the replica of a rank. `cost`: of chunks; None: the replica measures it. OSError."""

    def ended(self) -> list[tuple[int, str]]:
        """Returns the ranks of the processes that have ended since the last call, and how each did."""

    def end(self, rank: int) -> None:
        """Kills the process of a rank, if there is one."""


class Ranks:
    """Starts and replaces replicas. Used by one thread. `replaced`: number of replacements so far."""

    def __init__(
        self,
        count: int,
        processes: Processes,
        cost: ChunkCost | None,
        clock: Callable[[], float],
        say: Callable[[str], object],
        tuning: Replicas,
    ) -> None:
        """`count`: of ranks; `cost`: of chunks; None: the first replicas measure it. `say`: prints a line."""
        self.replaced = 0
        self._ranks = range(count)
        self._processes = processes
        self._cost = cost
        self._clock = clock
        self._say = say
        self._replacements = Replacements(count, tuning)
        self._members: dict[int, int] = {}  # by rank

    @property
    def expected(self) -> bool:
        """Whether a replica is starting, or will be started."""
        return self._replacements.expected

    def start(self) -> None:
        """Starts the replicas of all ranks. OSError where a process cannot be started."""
        for rank in self._ranks:
            self._processes.start(rank, self._cost)

    def joined(self, rank: int, member: int, cost: ChunkCost) -> bool:
        """Notes that the replica of a rank has joined as a member, with its cost of chunks. False where that cannot be:
        no process of the rank runs, or its replica has joined already."""
        if not self._replacements.joined(rank, self._clock()):
            return False
        self._cost = self._cost or cost
        self._members[rank] = member
        return True

    def lost(self) -> Iterator[tuple[int | None, str]]:
        """Yields the members whose processes have ended, and how; None: the replica had not joined. Starts the
        replacements that are due."""
        for rank, how in self._processes.ended():
            yield self._gone(rank, how)
        for rank in self._replacements.due(self._clock()):
            self.replaced += 1
            try:
                self._processes.start(rank, self._cost)
            except OSError as error:
                yield self._gone(rank, f"it could not be started: {error}")

    def end(self, member: int) -> bool:
        """Kills the process of a member. False where this machine runs none."""
        ranks = [rank for rank, each in self._members.items() if each == member]
        for rank in ranks:
            self._processes.end(rank)
        return bool(ranks)

    def end_starting(self) -> None:
        """Kills the processes of replicas that have not joined, and so cannot be sent a message."""
        for rank in self._ranks:
            if rank not in self._members:
                self._processes.end(rank)

    def _gone(self, rank: int, how: str) -> tuple[int | None, str]:
        member = self._members.pop(rank, None)
        who = "a replica that had not joined yet" if member is None else f"replica {member}"
        wait = self._replacements.ended(rank, self._clock())
        then = "" if wait is None else "; another one is started" + (f" in {wait:.1f} s" if wait else "")
        self._say(f"{who} has ended: {how}{then}")
        return member, how


SECRET: Final = "BALLONET_REPLICA_SECRET"  # the environment variable with the supervisor's secret
STARTED: Final = "BALLONET_REPLICA_STARTED"  # that with the messages.Started of a started replica
_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
_IMPORTED: Final = ("ballonet.hooks.replicas.process", "ballonet.allocator.install")

# (rank, cost of chunks) -> (arguments of `python -m ballonet serve`, environment) of the replica of this rank
Recipe = Callable[[int, ChunkCost | None], tuple[Sequence[str], Mapping[str, str]]]


class ChildProcesses:
    """Child processes, a ranks.Processes. Used by one thread at a time. To be closed."""

    def __init__(self, recipe: Recipe, forks: bool = True) -> None:
        """`recipe`: makes arguments and environment of a process; `forks`: see Note [Forks]."""
        self._recipe = recipe
        self._running: dict[int, BaseProcess] = {}  # by rank
        # Any: BaseContext lacks the attributes in which contexts differ, such as Process
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
        """Ids of the running processes."""
        return tuple(each.pid for each in self._running.values() if each.pid is not None)

    def ended(self) -> list[tuple[int, str]]:
        """Returns the ranks of the processes that have ended since the last call, and how each did."""
        gone = {rank: each.exitcode for rank, each in self._running.items() if each.exitcode is not None}
        self._running = {rank: each for rank, each in self._running.items() if rank not in gone}
        return [(rank, _how(code)) for rank, code in gone.items()]

    def end(self, rank: int) -> None:
        """Kills the process of a rank, if there is one."""
        if rank in self._running:
            self._running[rank].kill()

    def close(self, patience: float) -> None:
        """Waits for the processes to end, at most `patience` seconds each, and kills those that have not."""
        for each in self._running.values():
            each.join(patience)
            if each.exitcode is None:
                each.kill()
                each.join()
        self._running.clear()


def placed(number: int, devices: int) -> dict[str, str]:
    """Returns the environment of replica `number` of a machine with so many GPUs, which are dealt in turns."""
    environ = dict(environment())
    if devices:
        names = [name for name in environ.get(_DEVICES, "").split(",") if name] or [str(gpu) for gpu in range(devices)]
        environ[_DEVICES] = names[number % len(names)]
    return environ


def _serve(arguments: list[str], environ: Mapping[str, str]) -> None:
    """Runs `ballonet serve` as the process of a replica."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    os.setsid()  # Ctrl-C is for the supervisor, which ends replicas when requests have ended
    tqdm.set_lock(threading.RLock())  # tqdm's own has a named semaphore, which a killed process leaves behind
    change_environment({**dict.fromkeys(environment()), **environ})
    sys.argv = ["ballonet", "serve", *arguments]
    try:
        runpy.run_module("ballonet", run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # multiprocessing skips them


def end_with_parent(say: Callable[[str], object]) -> Callable[[], object]:
    """Has this process exit at once when the supervisor that started it ends. Returns a function that stops this, for a
    replica that has joined: it notices the end by its connection, and unwinds."""
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
