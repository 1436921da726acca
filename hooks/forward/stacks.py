"""The stacks of threads: which calls have not returned.

Note [A stack at one moment]
    A thread goes on while another walks its stack: a generator at its top may yield, and then has no caller any more,
    as if the stack ended there. So the frames are collected by one call of C code, while no other thread runs.

Note [Nothing is collected meanwhile]
    Python 3.11 may collect garbage wherever it makes an object, and runs finalizers then, and lets other threads run.
    `sys._current_frames` makes frames, and holds a lock of the interpreter: a thread that asks for that lock then, with
    the GIL, waits for a thread that waits for the GIL, a deadlock ([cpython 106883]). So collection is disabled while
    stacks are looked at. Disabling and enabling it are steps of the same call: no other thread finds it disabled, and
    Ctrl-C does not come in between.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from itertools import accumulate, chain, compress, repeat, starmap, takewhile
from operator import methodcaller
from types import FrameType
from typing import Any


def stack_of(thread: int) -> list[FrameType]:
    """The frames of a thread, the innermost first; empty where it has ended. See Note [A stack at one moment]."""
    innermost = map(methodcaller("get", thread), starmap(sys._current_frames, [()]))
    return _at_once(takewhile(bool, accumulate(chain(innermost, repeat("f_back")), getattr)))


def threads() -> list[int]:
    """The ids of all threads that run Python now."""
    return _at_once(chain.from_iterable(starmap(sys._current_frames, [()])))


def _at_once(steps: Iterable[Any]) -> list[Any]:
    """Runs the steps, each a call of C code, as one call. See Note [Nothing is collected meanwhile]."""
    allowed: list[bool] = []
    before = map(allowed.append, starmap(gc.isenabled, [()]))  # gives None, as the two steps below do
    after = starmap(gc.enable, compress([()], allowed))
    return list(filter(None, chain(before, starmap(gc.disable, [()]), steps, after)))
