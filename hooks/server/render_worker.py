"""The processes of a RenderPool (render_pool.py): one that has imported and loaded what jobs need, and forks; its
forks, which compute jobs until their pool ends them. Without torch: they take 80 MiB together, and start in 5 s.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from msgspec import msgpack

from .engine import Denial

LENGTH: Final = struct.Struct(">Q")  # is before each message
DONE, DENIED, FAILED = b"=", b"!", b"?"  # after the length of an answer: what it is,
STAYS, LEAVES = b"+", b"-"  # and whether the worker takes another job
_PDEATHSIG: Final = 1  # of prctl
_TOO_LARGE: Final = "the request is too large to be prepared"

Job = tuple[str, tuple[Any, ...]]  # MODULE:FUNCTION, and its arguments, which are pickled


def fork_workers(descriptor: int, prepared: tuple[Job, ...], memory: int, kept: int) -> None:
    """Does some jobs, says so, and then forks a worker for each socket that comes from the pool, and ends those whose
    pid comes, until the pool is gone. `memory`: bytes that a worker may take; `kept`: one that has taken more ends
    after its job."""
    pool = socket.socket(fileno=descriptor)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # it is the pool that ends them
        signal.signal(ignored, signal.SIG_IGN)
    for job in prepared:
        _call(job)
    gc.freeze()
    forker, workers = os.getpid(), dict[int, socket.socket]()
    ended, ends = socket.socketpair()  # something is to be read once a worker has ended
    ends.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ends.fileno(), warn_on_full_buffer=False)
    pool.send(LENGTH.pack(forker))
    while True:
        ready, *_ = select.select([pool, ended], [], [])
        if ended in ready:
            ended.recv(2**12)
            _reap(workers)
        if pool not in ready:
            continue
        try:
            message, descriptors, *_ = socket.recv_fds(pool, LENGTH.size, 1)
        except OSError:  # it is gone, and has not read all
            return
        if descriptors:
            link = socket.socket(fileno=descriptors[0])
            worker = os.fork()
            if not worker:
                ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)  # one that hangs ends with the pool, too
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (pool, ended, ends, *workers.values()):
                    other.close()
                if os.getppid() == forker:
                    _work(link, memory, kept)
                os._exit(0)
            workers[worker] = link
        elif message:
            (worker,) = LENGTH.unpack(message)
            if worker in workers:
                os.kill(worker, signal.SIGKILL)
        else:
            return


def _reap(workers: dict[int, socket.socket]) -> None:
    """Closes the sockets of workers that have ended, whose copies in this process kept them open. One that gave up is
    answered for: so do libraries that get no memory, Rust's by `abort`."""
    while workers:
        worker, status = os.waitpid(-1, os.WNOHANG)
        if not worker:
            return
        with workers.pop(worker) as link, suppress(OSError):
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGABRT:
                link.setblocking(False)
                _say(link, DENIED, LEAVES, msgpack.encode((400, f"{_TOO_LARGE}: its tokenizer gave up")))


def _work(pool: socket.socket, memory: int, kept: int) -> None:
    """Says its pid, and computes jobs until the pool is gone."""
    data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (data + memory,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most, stays = _peak() + kept, True
    with suppress(OSError, MemoryError), pool.makefile("rb") as jobs:  # a pool that is gone, a job that is too large
        pool.sendall(LENGTH.pack(os.getpid()))
        while stays and (length := jobs.read(LENGTH.size)):
            kind, result = _answer(jobs.read(*LENGTH.unpack(length)))
            stays = _peak() <= most
            _say(pool, kind, STAYS if stays else LEAVES, result)


def _say(pool: socket.socket, kind: bytes, then: bytes, result: bytes) -> None:
    """Sends an answer. OSError."""
    pool.sendall(LENGTH.pack(len(result)) + kind + then + result)


def _answer(job: bytes) -> tuple[bytes, bytes]:
    """Computes a job, and encodes what it gives, or why it gives nothing."""
    try:
        return DONE, msgpack.encode(_call(pickle.loads(job)))
    except Denial as denial:
        return DENIED, msgpack.encode(denial.args)
    except (MemoryError, RecursionError) as error:
        return DENIED, msgpack.encode((400, f"{_TOO_LARGE}: {type(error).__name__}"))
    except Exception:  # any error: of templates and tokenizers, and of our own
        return FAILED, msgpack.encode(traceback.format_exc())


def _call(job: Job) -> Any:
    (module, _, name), arguments = job[0].partition(":"), job[1]
    return getattr(importlib.import_module(module), name)(*arguments)


def _peak() -> int:
    """Bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def program(*arguments: object) -> str:
    """Returns the Python that calls `fork_workers` with these arguments. transformers finds no torch in it."""
    begin = f"import pickle, sys; sys.path[:] = {sys.path!r}; sys.modules['torch'] = None"
    return f"{begin}; from {__name__} import fork_workers; fork_workers(*pickle.loads({pickle.dumps(arguments)!r}))"
