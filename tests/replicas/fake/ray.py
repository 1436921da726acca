"""The part of Ray for examples/serve_on_ray.py: each actor is a process of its own, started by multiprocessing."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as ready
from types import SimpleNamespace
from typing import Any

_forked: Any = multiprocessing.get_context("forkserver")  # each spawned by itself would import torch anew
_forked.set_forkserver_preload(["ballonet.hooks.replicas.process"])
_begun = False


def init(address: str | None = None) -> None:
    """Has to be called before all others."""
    global _begun
    assert address is None, f"there is no cluster at {address}"
    _begun = True


def shutdown() -> None:
    global _begun
    _begun = False


util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")


class Ref:
    """The future result of an actor's call."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.value: list[Any] = []

    def get(self) -> Any:
        if not self.value:
            self.value.append(self.connection.recv())
        if isinstance(self.value[0], BaseException):
            raise self.value[0]
        return self.value[0]


class Method:
    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._name = name

    def remote(self, *arguments: Any) -> Ref:
        """Begins the call in the actor's process."""
        self._connection.send((self._name, arguments))
        return Ref(self._connection)


class Actor:
    """The handle of an actor."""

    def __init__(self, kind: type, arguments: tuple[Any, ...]) -> None:
        self._connection, other = _forked.Pipe()
        _forked.Process(target=_run, args=(kind, arguments, other), daemon=True).start()
        other.close()

    def __getattr__(self, name: str) -> Method:
        return Method(self._connection, name)


def remote(*, num_gpus: float) -> Callable[[type], Any]:
    """There are no GPUs here. Returns what makes an actor class of a class."""
    assert _begun, "ray.init() was not called"
    assert num_gpus == 0, f"no machine has {num_gpus} GPUs"
    return lambda kind: SimpleNamespace(remote=lambda *arguments: Actor(kind, arguments))


def wait(refs: Sequence[Ref], *, num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
    """The futures that have returned, and the others, once `num_returns` have, or after so many seconds."""
    end = time.monotonic() + timeout
    while True:
        waiting = [each.connection for each in refs if not each.value]
        there = ready(waiting, max(0.0, end - time.monotonic())) if waiting else []
        done = [each for each in refs if each.value or each.connection in there]
        if len(done) >= num_returns or time.monotonic() >= end:
            return done, [each for each in refs if each not in done]
        time.sleep(0.05)


def get(refs: Sequence[Ref]) -> list[Any]:
    """Returns the results of calls."""
    return [each.get() for each in refs]


def _run(kind: type, arguments: tuple[Any, ...], connection: Connection) -> None:
    """An actor's process: calls come one after the other."""
    actor = kind(*arguments)
    while True:
        try:
            name, given = connection.recv()
        except EOFError:
            return
        try:
            connection.send(getattr(actor, name)(*given))
        except BaseException as error:
            connection.send(error)
