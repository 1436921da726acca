"""A bounded pool of processes, in which everything runs whose time or memory a client decides: templates, tokenizers,
compilers of schemas and grammars.

Note [Why processes]
    A template can loop for hours, and a tokenizer takes gigabytes. A thread cannot be ended, holds the interpreter's
    lock meanwhile, and leaves its memory behind; a process can be ended at a limit of time, and has a limit of memory.
    They are forks of one process (render_worker.py), so that another is there within milliseconds after one was ended.
    Jobs go to them as pickles; what comes back is plain data, as a client's template ran beside it.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from msgspec import msgpack

from ...allocator.config import API_KEY, environment
from ...allocator.errors import ManageError
from .connections import CLIENTS, ClientLimits
from .engine import Denial
from .render_worker import DENIED, DONE, LENGTH, STAYS, Job, program

Result = TypeVar("Result")
_QUIET = {  # one thread, as a fork has no others; no line about a torch that is missing
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


@dataclass(frozen=True, slots=True, eq=False)
class _Worker:
    """A process, and the streams to it."""

    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class RenderPool:
    """Computes jobs in processes, on an event loop. They end with this process, however it ends."""

    def __init__(self, prepared: tuple[Job, ...] = (), tuning: ClientLimits = CLIENTS) -> None:
        """Begins to start. `prepared`: jobs that the process does of which all others are forks."""
        self._prepared = prepared
        self._tuning = tuning
        self._idle: list[_Worker] = []
        self._turns = asyncio.Semaphore(tuning.renderers)
        self._waiting = 0
        self._begin()

    def wait(self) -> None:
        """Waits until jobs are prepared, on any thread. ManageError."""
        if not self._forker.recv(LENGTH.size):
            raise ManageError("the processes that render prompts do not start: what they lack they have written above")

    async def run(self, function: str, *arguments: object, result: type[Result]) -> Result:
        """Calls MODULE:FUNCTION in a process. Returns what it returns, decoded from msgpack as a `result`. Denial: its
        own, 400 where it takes too long or too much memory, 429 where too many jobs wait, 503 where its process is
        lost. RuntimeError: any other error of it."""
        if self._waiting >= self._tuning.jobs:
            raise Denial(429, f"{self._waiting} requests wait to be prepared: try again later", retry_after=1.0)
        self._waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self._waiting -= 1
        try:
            kind, answer = await self._compute(pickle.dumps((function, arguments)))
        finally:
            self._turns.release()
        if kind == DONE:
            return msgpack.decode(answer, type=result)
        if kind == DENIED:
            raise Denial(*msgpack.decode(answer))
        raise RuntimeError(msgpack.decode(answer))

    def close(self) -> None:
        """Ends the processes."""
        self._forker.close()
        self._process.kill()
        self._process.wait()

    async def _compute(self, job: bytes) -> tuple[bytes, bytes]:
        """Returns the kind of an answer, and the answer. Denial. The process is ended unless it has answered."""
        worker, stays = None, False
        try:
            worker = await self._take()
            async with asyncio.timeout(self._tuning.render):
                worker.writer.write(LENGTH.pack(len(job)))
                for begin in range(0, len(job), self._tuning.piece):  # or asyncio would copy all of it
                    worker.writer.write(memoryview(job)[begin : begin + self._tuning.piece])
                    await worker.writer.drain()
                (length,) = LENGTH.unpack(await worker.reader.readexactly(LENGTH.size))
                kind, stays = await worker.reader.readexactly(1), await worker.reader.readexactly(1) == STAYS
                answer = await worker.reader.readexactly(length)
        except TimeoutError:
            raise Denial(400, f"the request takes longer than {self._tuning.render:g} s to be prepared") from None
        except (OSError, EOFError):
            why = "the process that prepared the request has ended: the request may have taken too much memory"
            raise Denial(503, why, retry_after=1.0) from None
        finally:
            if worker is not None and stays:
                self._idle.append(worker)
            elif worker is not None:
                self._end(worker)
        return kind, answer

    async def _take(self) -> _Worker:
        """Returns a process without a job. OSError, EOFError."""
        for _ in range(2):  # turns of the event loop, which then knows of processes that somebody has ended
            await asyncio.sleep(0)
        while self._idle:
            worker = self._idle.pop()
            if not worker.reader.at_eof():
                return worker
            self._end(worker)
        return await self._fork()

    async def _fork(self) -> _Worker:
        """Starts a process. OSError, EOFError."""
        if self._process.poll() is not None:  # somebody ended it, and so all others
            self._forker.close()
            self._begin()
        mine, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._forker, [LENGTH.pack(0)], [theirs.fileno()])
        reader, writer = await asyncio.open_connection(sock=mine)
        try:
            (pid,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        except BaseException:
            writer.close()
            raise
        return _Worker(pid, reader, writer)

    def _end(self, worker: _Worker) -> None:
        worker.writer.close()
        with suppress(OSError):  # the process is gone that forked it, and it so, too
            self._forker.send(LENGTH.pack(worker.pid))

    def _begin(self) -> None:
        """Starts the process that forks others."""
        self._forker, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            memory = self._tuning.render_memory, self._tuning.render_kept
            kept = {name: value for name, value in environment().items() if name != API_KEY}
            self._process = subprocess.Popen(
                [sys.executable, "-c", program(theirs.fileno(), self._prepared, *memory)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=kept | _QUIET,
            )
