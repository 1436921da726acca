"""Listeners for CUDA graphs: torch's methods that begin, end, replay and reset them, wrapped once for all.

Note [Two listeners]
    Two parts of ballonet have to know of captures, and neither knows of the other: what a thread allocates from
    (pluggable.py), and what graphs read of managed models. They come and go in any order. So the methods are wrapped
    with the first listener and put back with the last; each of two wrappers of one method would put back the other's.

Note [Not seen]
    Calls that do not go through `torch.cuda.CUDAGraph` are not seen here: `torch.accelerator.Graph`, captures that a
    program begins with the driver, and launches of what `raw_cuda_graph_exec()` returns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Final

import torch

from .patches import Patches, SharedPatch, Undo


class CaptureListener:
    """Base of listeners, called for each `torch.cuda.CUDAGraph` on the thread that uses it. Does nothing."""

    def begins(self, graph: Any, pool: object) -> None:
        """Called before a capture begins on this thread's current stream. `pool`: whose memory the graph is to share,
        None for one of its own. An exception keeps it from beginning."""

    def ended(self, graph: Any, *, captured: bool) -> None:
        """Called after a capture has ended. Where not `captured` it could not begin, or failed. May be called without
        `begins` before."""

    def replaying(self, graph: Any) -> AbstractContextManager[object]:
        """Returns a context for each replay. An exception on entry keeps it from being launched."""
        return nullcontext()

    def reset(self, graph: Any) -> None:
        """Called when a graph holds no capture any more."""

    def aside(self, owner: object) -> AbstractContextManager[object]:
        """Returns a context for captures of ballonet's own, of which listeners are told nothing else."""
        return nullcontext()


def aside(owner: object) -> AbstractContextManager[object]:
    """A `with` block in which this thread captures for ballonet itself: who decides where it allocates steps aside."""
    around = ExitStack()
    for user in _listeners.users:
        around.enter_context(user.aside(owner))
    return around


def listen(listener: CaptureListener) -> None:
    """Adds a listener. Idempotent. AttributeError where torch has no CUDA graphs."""
    _listeners.add(id(listener), listener)


def leave(listener: CaptureListener) -> None:
    """Removes a listener. Idempotent."""
    _listeners.remove(id(listener))


def _wrap() -> Iterator[Undo]:
    graph, patches = torch.cuda.CUDAGraph, Patches()
    yield patches.restore
    wrappers = {"capture_begin": _begin, "capture_end": _end, "replay": _replay, "reset": _reset}
    for name, around in wrappers.items():
        if hasattr(graph, name):
            patches.replace(graph, name, around(getattr(graph, name)))


_listeners: Final = SharedPatch[CaptureListener](_wrap)


def _begin(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
        told: list[CaptureListener] = []
        try:
            for user in _listeners.users:
                told.append(user)
                user.begins(graph, args[0] if args else kwargs.get("pool"))
            stock(graph, *args, **kwargs)
        except BaseException:
            for listener in reversed(told):
                listener.ended(graph, captured=False)
            raise

    return capture_begin


def _end(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def capture_end(graph: Any) -> None:
        captured = False
        try:
            stock(graph)
            captured = True
        finally:
            for user in reversed(_listeners.users):
                user.ended(graph, captured=captured)

    return capture_end


def _replay(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def replay(graph: Any) -> None:
        with ExitStack() as around:
            for user in _listeners.users:
                around.enter_context(user.replaying(graph))
            stock(graph)

    return replay


def _reset(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def reset(graph: Any) -> None:
        stock(graph)
        for user in _listeners.users:
            user.reset(graph)

    return reset
