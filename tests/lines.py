"""Acts before one line of the library while it runs: Ctrl-C, which is to leave nothing half done, or another thread."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, ModuleType
from typing import Any, Literal


def before_line(
    act: Callable[[], object],
    at: int,
    then: Callable[[], object],
    *modules: ModuleType,
    each: Literal["line", "opcode"] = "line",
) -> bool:
    """Runs `act`, and `then` before the `at`th of those lines (or opcodes) that this thread runs in the modules,
    finalizers included. Returns whether there was one. Lines that enter a block are left out: there Python looks for
    signals neither before nor after."""
    files, seen = {module.__file__ for module in modules}, 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal seen
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = each == "opcode"
        if event == each and (each == "opcode" or not _enters_block(frame)):
            seen += 1
            if seen == at:
                sys.settrace(None)
                then()
        return trace

    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(None)
    return seen >= at


def interrupted(
    act: Callable[[], object], at: int, *modules: ModuleType, each: Literal["line", "opcode"] = "line"
) -> bool:
    """Runs `act` with Ctrl-C there (`before_line`). Returns whether it came, also where a finalizer swallowed it."""
    came = False

    def interrupt() -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        before_line(act, at, interrupt, *modules, each=each)
    return came


def _enters_block(frame: FrameType) -> bool:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith(("with ", "try:"))
