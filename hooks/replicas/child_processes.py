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
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any, Final

from ...allocator.config import change_environment, environment
from ...allocator.errors import BallonetError, PoolExhausted
from ...offload.policy.replicas.chunk_cost import ChunkCost
from .channel import Admission, ToSupervisor, Wakeup
from .errors import SupervisorLost
from .messages import Join, Message, Welcome, decoded, encoded
from .process import ReplicaOptions, serve

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
        self.lose()
        if not self.serving.is_set():
            self._say("a replica ends before it serves: its supervisor has gone")
            os._exit(1)


class ChildProcesses:
    """Replicas of this machine, a channel.ReplicaChannel and Processes. One thread takes, starts and ends; any may
    post. To be closed."""

    def __init__(self, options: ReplicaOptions, devices: int, admission: Admission, wakeup: Wakeup) -> None:
        """`devices`: GPUs of this machine; `wakeup`: notified when a message comes, or a process ends."""
        self._options = options
        self._devices = devices
        self._admission = admission
        self._wakeup = wakeup
        self._lock = threading.Lock()  # of the members
        self._members: dict[int, _Child] = {}
        self._running: dict[int, _Child] = {}  # by rank
        self._received: deque[tuple[int, Message]] = deque()
        # Any: BaseContext lacks the attributes in which contexts differ, such as Process
        self._context: Any = multiprocessing.get_context("spawn" if devices else "forkserver")
        if not devices:
            self._context.set_forkserver_preload([*_IMPORTED])

    @property
    def processes(self) -> tuple[int, ...]:
        """Ids of the running processes."""
        return tuple(child.process.pid for child in self._running.values() if child.process.pid is not None)

    def start(self, rank: int, cost: ChunkCost | None) -> None:
        """Starts the replica of a rank. OSError."""
        mine, its = self._context.Pipe()
        environ = dict(self._options.environment) | placed(rank, self._devices)
        # a daemon: if this process ends without `close`, its end does not wait for replicas
        process = self._context.Process(target=_serve, args=(its, self._options, rank, cost, environ), daemon=True)
        process.start()
        its.close()  # else the pipe would not end with that process
        child = self._running[rank] = _Child(process, mine)
        threading.Thread(target=self._read, args=(child,), name="ballonet replica in", daemon=True).start()

    def ended(self) -> list[tuple[int, str]]:
        """Returns the ranks of the processes that have ended since the last call, and how each did."""
        codes = {rank: child.process.exitcode for rank, child in self._running.items()}
        gone = {rank: code for rank, code in codes.items() if code is not None}
        self._running = {rank: child for rank, child in self._running.items() if rank not in gone}
        return [(rank, _how(code)) for rank, code in gone.items()]

    def end(self, rank: int) -> None:
        """Kills the process of a rank, if there is one."""
        if rank in self._running:
            self._running[rank].process.kill()

    def abandon(self, rank: int) -> None:
        """Does nothing: a process that has ended starts no other."""

    def take(self) -> tuple[int, Message] | None:
        """Removes and returns the next message, (member, message); None where none has come."""
        return self._received.popleft() if self._received else None

    def has(self) -> bool:
        """Returns whether a message has come."""
        return bool(self._received)

    def post(self, member: int, message: Message) -> None:
        """Sends a message to one replica, without waiting. Nothing where its process has ended."""
        with self._lock:
            child = self._members.get(member)
        if child is not None:
            child.outgoing.put(message)

    def close(self, patience: float) -> None:
        """Waits for the processes to end, at most `patience` seconds each, and kills those that have not."""
        for child in self._running.values():
            child.process.join(patience)
            if child.process.exitcode is None:
                child.process.kill()
                child.process.join()
            child.reader_ended.wait(patience)
        self._running.clear()

    def _read(self, child: _Child) -> None:
        """Admits a replica, and takes in its messages until it ends."""
        with suppress(OSError, EOFError, ValueError):
            while True:
                for message in decoded(child.pipe.recv_bytes()):
                    if isinstance(message, Join):
                        self._admit(child, message)
                    elif child.member is not None:
                        self._received.append((child.member, message))
                self._wakeup.notify()
        with self._lock:
            self._members = {member: other for member, other in self._members.items() if other is not child}
        child.outgoing.put(None)
        child.reader_ended.set()
        self._wakeup.notify()

    def _admit(self, child: _Child, join: Join) -> None:
        with self._lock:
            answer = self._admission.answer(join.fingerprint)
            self._members.pop(-1 if child.member is None else child.member, None)
            if isinstance(answer, Welcome):
                child.member = answer.member
                self._members[answer.member] = child
        child.outgoing.put(answer)


class _Child:
    """A process and its pipe. `member`: its latest number, None before it is admitted; `outgoing`: messages to it,
    None: the end."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self.process = process
        self.pipe = pipe
        self.member: int | None = None
        self.outgoing: SimpleQueue[Message | None] = SimpleQueue()
        self.reader_ended = threading.Event()
        threading.Thread(target=self._send, name="ballonet replica out", daemon=True).start()

    def _send(self) -> None:
        with suppress(OSError):
            while (message := self.outgoing.get()) is not None:
                self.pipe.send_bytes(encoded(message))
        self.reader_ended.wait()
        self.pipe.close()


def placed(number: int, devices: int) -> dict[str, str]:
    """Returns the environment of replica `number` of a machine with so many GPUs, which are dealt in turns."""
    environ = dict(environment())
    if devices:
        names = [name for name in environ.get(_DEVICES, "").split(",") if name] or [str(gpu) for gpu in range(devices)]
        environ[_DEVICES] = names[number % len(names)]
    return environ


def _serve(
    pipe: Connection, options: ReplicaOptions, rank: int, cost: ChunkCost | None, environ: Mapping[str, str]
) -> None:
    """The process of a replica."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    os.setsid()  # Ctrl-C is for the supervisor, which ends replicas when requests have ended
    tqdm.set_lock(threading.RLock())  # tqdm's own has a named semaphore, which a killed process leaves behind
    change_environment({**dict.fromkeys(environment()), **environ})
    channel = PipeToSupervisor(pipe, Wakeup(), options.tuning.joining, options.say)
    try:
        serve(options, rank, cost, channel)
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
