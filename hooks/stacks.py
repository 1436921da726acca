"""What threads are doing, as far as their stacks tell: which calls have not returned, and for whom they wait.

Note [A stack at one moment]
    A thread goes on while another walks its stack: a generator at its top may yield, and then has no caller any more,
    as if the stack ended there. So the frames are collected by one call of C code, while no other thread runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from itertools import accumulate, chain, repeat, starmap
from operator import itemgetter
from threading import Thread
from types import CodeType, FrameType
from typing import Any

Call = tuple[int, CodeType | None]


def identity(frame: FrameType | None) -> Call:
    """What tells the call with this frame from those on a stack, and does not keep what it refers to alive.

    The id alone would not do: the next frame is often where one was before.
    """
    return id(frame), frame and frame.f_code


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame of this thread, and those of its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def on_stack(call: Call, frames: Iterable[FrameType]) -> bool:
    """Is it that of one of the frames?"""
    key, code = call
    return any(id(frame) == key and frame.f_code is code for frame in frames)


def stack_of(thread: int) -> list[FrameType]:
    """The frames of a thread, the innermost first; none where it has ended. See Note [A stack at one moment]."""
    frames: list[Any] = []
    innermost = map(itemgetter(thread), starmap(sys._current_frames, [()]))
    with suppress(KeyError, AttributeError):  # there is no such thread; there is nothing beyond the outermost frame
        frames.extend(accumulate(chain(innermost, repeat("f_back")), getattr))
    return frames[:-1]


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
        for thread in sys._current_frames():
            pools = (each for each in stack_of(thread) if each.f_globals.get("__name__") == "concurrent.futures.thread")
            if any(getattr(each.f_locals.get("self"), "future", None) is work for each in pools):
                return thread
    return None
