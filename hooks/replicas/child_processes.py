"""Replicas as processes of this machine, each at the end of a pipe: without Ray, and what tests use.

Note [Forks]
    torch and transformers take seconds to import. So replicas are forks of one process that has only imported them
    (Python's forkserver): a replacement starts at once, and all share the memory of imported modules. CUDA does not
    survive a fork, and is initialized by any code that looks for devices: with GPUs each replica is spawned and imports
    for itself, which takes less time there than loading a model.

Note [Pipes]
    A pipe has two ends that only these two processes have, so nobody else comes in. It keeps the order of messages, and
    ends with either process, which the other one notices at once. A message is a msgspec struct and never a pickled
    object. A stopped process reads nothing, so the supervisor has a thread and a queue for each replica, and never
    waits for one; a replica sends at once, as the supervisor has a thread that reads.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any, Final

from ...allocator.config import change_environment, environment
from ...allocator.errors import BallonetError, PoolExhausted
from .channel import Members, ToSupervisor, Wakeup
from .errors import SupervisorLost
from .messages import Message, decoded, encoded
from .process import ReplicaOptions, installed, run

_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
_IMPORTED: Final = ("ballonet.hooks.replicas.process", "ballonet.allocator.install")


class PipeToSupervisor(ToSupervisor):
    """A replica's end of its pipe. See Note [Pipes]. Until `serving` is set, the process exits at once when the
    supervisor ends, whatever it waits for; later it notices by its messages, and unwinds."""

    def __init__(self, pipe: Connection, wakeup: Wakeup, timeout: float, say: Callable[[str], object]) -> None:
        """`pipe`: is taken over. `timeout`: see ToSupervisor; `say`: prints a line."""
        super().__init__(wakeup, timeout)
        self._pipe = pipe
        self._say = say
        self._sending = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="ballonet supervisor in", daemon=True)
        self._reader.start()

    def post(self, *messages: Message) -> None:
        """Sends messages to the supervisor. SupervisorLost."""
        try:
            with self._sending:
                self._pipe.send_bytes(encoded(*messages))
        except OSError as error:
            raise SupervisorLost("the supervisor has ended. Its replicas end with it") from error

    def close(self) -> None:
        """Does nothing: the pipe ends with this process, and the supervisor has what was written to it."""

    def _read(self) -> None:
        with suppress(OSError, EOFError, ValueError):
            while True:
                self.arrive(decoded(self._pipe.recv_bytes()))
        if not self.serving.is_set():
            self._say("a replica ends before it serves: its supervisor has gone")
            os._exit(1)
        self.lose()


class ReplicaPipes(Members["ReplicaPipe"]):
    """The supervisor's ends of all pipes. One thread opens."""

    def __init__(self, host: str, links: int, wakeup: Wakeup) -> None:
        """The arguments are those of Members. `wakeup`: is also notified when a pipe ends."""
        super().__init__(host, links, wakeup)
        self._open: list[ReplicaPipe] = []

    def open(self, context: Any = multiprocessing) -> Connection:
        """Makes a pipe, and returns the end for a replica. `context`: of multiprocessing."""
        mine, its = context.Pipe()
        pipe = ReplicaPipe(mine)
        self._open = [*(other for other in self._open if not other.ended.is_set()), pipe]
        threading.Thread(target=self._read, args=(pipe,), name="ballonet replica in", daemon=True).start()
        end: Connection = its
        return end

    def send(self, sender: ReplicaPipe, message: Message) -> None:
        """Sends a message over a pipe, without waiting."""
        sender.outgoing.put(message)

    def close(self, patience: float) -> None:
        """Waits until all messages of replicas that have ended are there, at most so many seconds each."""
        for pipe in self._open:
            pipe.ended.wait(patience)

    def _read(self, pipe: ReplicaPipe) -> None:
        """Takes in the messages of a replica until it ends."""
        with suppress(OSError, EOFError, ValueError):
            while True:
                self.hear(pipe, decoded(pipe.connection.recv_bytes()))
        pipe.outgoing.put(None)
        pipe.ended.set()
        self.leave(pipe)


class ReplicaPipe:
    """The supervisor's end of a pipe. `outgoing`: messages to the replica, None: the end."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.outgoing: SimpleQueue[Message | None] = SimpleQueue()
        self.ended = threading.Event()  # of what the replica says
        threading.Thread(target=self._send, name="ballonet replica out", daemon=True).start()

    def _send(self) -> None:
        with suppress(OSError):
            while (message := self.outgoing.get()) is not None:
                self.connection.send_bytes(encoded(message))
        self.ended.wait()
        self.connection.close()


class ChildProcesses:
    """Processes of this machine, a channel.Processes. Used by one thread. To be closed."""

    def __init__(self, options: ReplicaOptions, devices: int, pipes: ReplicaPipes) -> None:
        """`devices`: GPUs of this machine."""
        self._options = options
        self._devices = devices
        self._pipes = pipes
        self._running: dict[int, BaseProcess] = {}  # by rank
        # Any: BaseContext lacks the attributes in which contexts differ, such as Process
        self._context: Any = multiprocessing.get_context("spawn" if devices else "forkserver")
        if not devices:
            self._context.set_forkserver_preload([*_IMPORTED])

    @property
    def processes(self) -> tuple[int, ...]:
        """Ids of the running processes."""
        return tuple(process.pid for process in self._running.values() if process.pid is not None)

    def start(self, rank: int) -> None:
        """Starts the replica of a rank. OSError."""
        pipe, environ = self._pipes.open(self._context), placed(rank, self._devices)
        # a daemon: if this process ends without `close`, its end does not wait for replicas
        process = self._context.Process(target=_serve, args=(pipe, self._options, rank, environ), daemon=True)
        try:
            process.start()
        finally:
            pipe.close()  # else it would not end with that process
        self._running[rank] = process

    def ended(self) -> list[tuple[int, str]]:
        """Returns the ranks of the processes that have ended since the last call, and how each did."""
        codes = {rank: process.exitcode for rank, process in self._running.items()}
        gone = {rank: code for rank, code in codes.items() if code is not None}
        self._running = {rank: process for rank, process in self._running.items() if rank not in gone}
        return [(rank, _how(code)) for rank, code in gone.items()]

    def end(self, rank: int, for_good: bool = False) -> None:
        """Kills the process of a rank, if there is one."""
        if rank in self._running:
            self._running[rank].kill()

    def close(self, patience: float) -> None:
        """Waits for the processes to end, at most `patience` seconds each, and kills those that have not."""
        for process in self._running.values():
            process.join(patience)
            if process.exitcode is None:
                process.kill()
                process.join()
        self._running.clear()
        self._pipes.close(patience)


def placed(number: int, devices: int) -> dict[str, str]:
    """Returns the environment of replica `number` of a machine with so many GPUs, which are dealt in turns."""
    environ = dict(environment())
    if devices:
        names = [name for name in environ.get(_DEVICES, "").split(",") if name] or [str(gpu) for gpu in range(devices)]
        environ[_DEVICES] = names[number % len(names)]
    return environ


def _serve(pipe: Connection, options: ReplicaOptions, rank: int, environ: Mapping[str, str]) -> None:
    """The process of a replica."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    os.setsid()  # Ctrl-C is for the supervisor, which ends replicas when requests have ended
    tqdm.set_lock(threading.RLock())  # tqdm's own has a named semaphore, which a killed process leaves behind
    change_environment({**dict.fromkeys(environment()), **environ})
    channel = PipeToSupervisor(pipe, Wakeup(), options.tuning.joining, options.say)
    try:
        run(options, installed(options), rank, channel)
    except (BallonetError, PoolExhausted) as error:
        options.say(str(error))
        raise SystemExit(2) from None
    finally:
        atexit._run_exitfuncs()  # multiprocessing skips them


def _how(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
