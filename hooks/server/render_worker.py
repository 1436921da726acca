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
import signal
import socket
import struct
import sys
import traceback
from pathlib import Path
from typing import Any, Final

from msgspec import msgpack

from .engine import Denial

LENGTH: Final = struct.Struct(">Q")  # is before each message
DONE, DENIED, FAILED = b"=", b"!", b"?"  # after the length of an answer: what it is,
STAYS, LEAVES = b"+", b"-"  # and whether the worker takes another job
_PDEATHSIG: Final = 1  # of prctl

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
    forker, workers = os.getpid(), set[int]()
    pool.send(LENGTH.pack(forker))
    while True:
        message, descriptors, *_ = socket.recv_fds(pool, LENGTH.size, 1)
        while workers and (ended := os.waitpid(-1, os.WNOHANG)[0]):
            workers.remove(ended)
        if descriptors:
            worker = os.fork()
            if not worker:
                ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)  # one that hangs ends with the pool, too
                if os.getppid() == forker:
                    pool.close()
                    _work(socket.socket(fileno=descriptors[0]), memory, kept)
                os._exit(0)
            workers.add(worker)
            os.close(descriptors[0])
        elif message:
            (worker,) = LENGTH.unpack(message)
            if worker in workers:
                os.kill(worker, signal.SIGKILL)
        else:
            return


def _work(pool: socket.socket, memory: int, kept: int) -> None:
    """Says its pid, and computes jobs."""
    pool.sendall(LENGTH.pack(os.getpid()))
    data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (data + memory,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most, stays = _peak() + kept, True
    with pool.makefile("rb") as jobs:
        while stays and (length := jobs.read(LENGTH.size)):
            kind, result = _answer(pickle.loads(jobs.read(*LENGTH.unpack(length))))
            stays = _peak() <= most
            pool.sendall(LENGTH.pack(len(result)) + kind + (STAYS if stays else LEAVES) + result)


def _answer(job: Job) -> tuple[bytes, bytes]:
    """Computes a job, and encodes what it gives, or why it gives nothing."""
    try:
        return DONE, msgpack.encode(_call(job))
    except Denial as denial:
        return DENIED, msgpack.encode(denial.args)
    except (MemoryError, RecursionError) as error:
        return DENIED, msgpack.encode((400, f"the request is too large to be prepared: {type(error).__name__}"))
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
