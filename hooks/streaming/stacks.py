"""What threads are doing, as far as their stacks tell: which calls have not returned, and for whom they wait.

Note [A stack at one moment]
    A thread goes on while another walks its stack: a generator at its top may yield, and then has no caller any more,
    as if the stack ended there. So the frames are collected by one call of C code, while no other thread runs.

Note [Nothing is collected meanwhile]
    Python 3.11 may collect garbage wherever it makes an object, and runs finalizers then, and lets other threads run.
    `sys._current_frames` makes frames, and holds a lock of the interpreter: who asks for it then, with the GIL, waits
    for a thread that waits for the GIL, and everything stands still ([cpython 106883]). So no collection begins while
    stacks are looked at. To forbid it, and to allow it again, are steps of the same call: no other thread finds it
    forbidden, and Ctrl-C does not come in between.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from concurrent.futures import Future
from itertools import accumulate, chain, compress, repeat, starmap, takewhile
from operator import methodcaller
from threading import Thread
from types import CodeType, FrameType
from typing import Any

Call = tuple[int, CodeType | None]


def identity(frame: FrameType | None) -> Call:
    """What tells the call with this frame from those on a stack, and does not keep what it refers to alive.

    The id alone would not do: the next frame is often where one was before.
    """
    return id(frame), frame and frame.f_code


def called_from(frame: FrameType | None, call: Call) -> bool:
    """Is the call that of this frame, of this thread, or of one of its callers? Asked at each look at a watched layer,
    so it is a plain loop."""
    key, code = call
    while frame is not None:
        if id(frame) == key and frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def on_stack(thread: int, call: Call) -> bool:
    """Is the call on the stack of that thread, another one?"""
    key, code = call
    return any(id(frame) == key and frame.f_code is code for frame in stack_of(thread))


def stack_of(thread: int) -> list[FrameType]:
    """The frames of a thread, the innermost first; none where it has ended. See Note [A stack at one moment]."""
    innermost = map(methodcaller("get", thread), starmap(sys._current_frames, [()]))
    return _at_once(takewhile(bool, accumulate(chain(innermost, repeat("f_back")), getattr)))


def threads() -> list[int]:
    """All that run Python now."""
    return _at_once(chain.from_iterable(starmap(sys._current_frames, [()])))


def awaited(thread: int) -> set[int]:
    """The threads that it waits for, for as long as they run: those that it joins, and those that run the `Future`
    whose result it asks for. Other ways of waiting do not tell for whom."""
    found: set[int] = set()
    for frame in stack_of(thread):
        if frame.f_code in (Thread.join.__code__, Future.result.__code__):
            its = frame.f_locals
            if its.get("timeout") is None and (other := _running(its.get("self"))) is not None:
                found.add(other)
    return found


def _running(work: object) -> int | None:
    """The thread that is, or runs, this."""
    if isinstance(work, Thread):
        return work.ident
    if isinstance(work, Future):
        for thread in threads():
            pools = (each for each in stack_of(thread) if each.f_globals.get("__name__") == "concurrent.futures.thread")
            if any(getattr(each.f_locals.get("self"), "future", None) is work for each in pools):
                return thread
    return None


def _at_once(steps: Iterable[Any]) -> list[Any]:
    """What the steps give, where each of them is a call of C code. See Note [Nothing is collected meanwhile]."""
    allowed: list[bool] = []
    before = map(allowed.append, starmap(gc.isenabled, [()]))  # gives None, as the two others do
    after = starmap(gc.enable, compress([()], allowed))
    return list(filter(None, chain(before, starmap(gc.disable, [()]), steps, after)))
