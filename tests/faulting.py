"""What goes wrong in the middle of an operation: a driver call fails, or an exception comes before a line of Python.

    for scene, done in at_each_call(begin, act):  # or at_each_line(begin, act, *modules)
        ...  # what must hold afterwards

Each run has a scene of its own, `with begin() as scene`, in which `act(scene)` meets one of them. First there are three
runs without any, in which is counted what can be met: what is called the first time only is no part of the pattern, nor
what only one of the other two calls, as other threads were late.
`done`: nothing came of it. An act that fails must raise an error about a driver call, or about memory. What was not
met is disarmed before anything else runs, and one half as far on is tried. Of many places `most` are taken, evenly, the
first and the last among them; with BALLONET_SOAK all. There have to be `least` places, and most of those taken have to
be met. What is printed says which one it was.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from operator import itemgetter
from types import FrameType, ModuleType
from typing import Any, Literal, TypeVar

import pytest
import torch

from ballonet.allocator.errors import (
    BallonetError,
    BudgetError,
    DriverError,
    DriverUnavailable,
    InvariantBroken,
    PoolExhausted,
)

from .core import PAGE, Core, all_calls, any_device, calls, driver, make, opened, physical

T = TypeVar("T")
Place = TypeVar("Place")
Begin = Callable[[], AbstractContextManager[T]]
Each = Literal["line", "opcode"]
ERRORS = (BallonetError, PoolExhausted, torch.OutOfMemoryError)  # what an operation may raise where a call fails
SAY_WHY = (DriverError, DriverUnavailable, BudgetError, MemoryError, torch.OutOfMemoryError)
# Around every other call, always in the same way: a few of them are as good as all.
AROUND = ("cuCtxSetCurrent", "cuCtxGetCurrent", "cuStreamIsCapturing", "cuThreadExchangeStreamCaptureMode")


# -- Driver calls


def arm(function: str, ahead: int = 1) -> None:
    """The `ahead`th call of the function from now on fails; "cuMemMap=700" with that error."""
    name = function.partition("=")[0]
    nth = calls()[name] + ahead
    _armed.append((name, nth))
    _disarmed.discard((name, nth))  # it strikes again
    _tell(function, nth)


def pending(function: str) -> bool:
    """A fault of the function is armed and has not struck."""
    return any(name == function and calls()[name] < nth for name, nth in _armed)


def disarm() -> None:
    """What was armed and has not struck does no harm any more."""
    for name, nth in _armed:
        if calls()[name] < nth:
            _tell(f"{name}=0", nth)  # the call succeeds, and is counted as a fault
            _disarmed.add((name, nth))
    _armed.clear()


def faults_fired() -> int:
    """How many have struck in this process."""
    fired: int = any_device().snapshot()["faults"]
    return fired - sum(calls()[name] >= nth for name, nth in _disarmed)


_armed: list[tuple[str, int]] = []
_disarmed: set[tuple[str, int]] = set()


def _tell(function: str, nth: int) -> None:
    # Faults are armed before the library is looked for, and stay armed.
    with pytest.raises(DriverUnavailable):
        make(page=PAGE, budget=0, path="/nonexistent", faults=[(function, nth)])


def at_each_call(
    begin: Begin[T],
    act: Callable[[T], object],
    *,
    most: int | None = None,
    times: int = 1,
    least: int = 5,
) -> Iterator[tuple[T, bool]]:
    """`times`: so many calls of the function fail, one after the other. An act that returns False is not done."""

    def places(work: Callable[[], object]) -> tuple[int, list[tuple[str, int]]]:
        made = all_calls(work)
        return sum(made.values()), [(name, nth) for name, count in made.items() for nth in faulted(name, count, most)]

    def meet(work: Callable[[], object], place: tuple[str, int]) -> tuple[bool, bool]:
        function, nth = place
        before = faults_fired()
        for more in range(times):
            arm(function, nth + more)
        try:
            done = work() is not False
        except ERRORS as error:
            if faults_fired() == before or not _says_why(error):
                raise
            done = False
        finally:
            struck = faults_fired() > before
            disarm()
            driver().ok("cuCtxSetCurrent", None)  # a call that failed to restore it left the device's current
        assert done or struck, "it may fail only where a call did"
        return done, struck

    return _runs(begin, act, places, meet, least, lambda place: (place[0], place[1] // 2) if place[1] > 1 else None)


def faults_at_every_call(
    prepare: Callable[[Core], T], work: Callable[[T], object], times: int = 1, **options: Any
) -> Iterator[tuple[T, bool]]:
    """`at_each_call` in scenes that are made of a device each."""

    @contextmanager
    def begin() -> Iterator[tuple[Core, T]]:
        with opened(**options) as core:
            yield core, prepare(core)

    for (core, scene), done in at_each_call(begin, lambda both: work(both[1]), times=times):
        core.device.check()
        assert physical() == core.created() * core.page
        yield scene, done


def faulted(function: str, count: int, most: int | None = None) -> list[int]:
    """Which of so many calls of the function to let fail."""
    few = -(-count // 5) if function in AROUND else count
    return spread(count, min(few, most or few))


def spread(count: int, most: int | None) -> list[int]:
    """The numbers 1 to `count`, or `most` of them: evenly, with the first and the last; the middle where it is one."""
    if most is None or count <= most or "BALLONET_SOAK" in os.environ:
        return [*range(1, count + 1)]
    return [1 + count // 2] if most == 1 else [1 + (count - 1) * part // (most - 1) for part in range(most)]


def _says_why(error: BaseException | None) -> bool:
    """Is the error, or one that it came of, about a driver call or about memory?"""
    while error is not None and not isinstance(error, InvariantBroken):
        if isinstance(error, SAY_WHY) or "driver" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


# -- Lines


def before_line(
    act: Callable[[], object], at: int, then: Callable[[], object], *modules: ModuleType, each: Each = "line"
) -> int:
    """Runs `act`, and `then` before the `at`th of those lines (or opcodes) that this thread runs in the modules,
    finalizers included. Returns how many there were, `at` at most if that is not 0. Lines that enter a block are left
    out: there Python looks for signals neither before nor after."""
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
    return seen


def _enters_block(frame: FrameType) -> bool:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith(("with ", "try:"))


def at_each_line(
    begin: Begin[T],
    act: Callable[[T], object],
    *modules: ModuleType,
    most: int | None = None,
    least: int = 5,
    each: Each = "line",
    error: type[BaseException] = KeyboardInterrupt,
) -> Iterator[tuple[T, bool]]:
    """Ctrl-C, which is to leave nothing half done, or another `error`. See `before_line`."""

    def places(work: Callable[[], object]) -> tuple[int, list[int]]:
        count = before_line(work, 0, lambda: None, *modules, each=each)
        return count, spread(count, most)

    def meet(work: Callable[[], object], at: int) -> tuple[bool, bool]:
        came = False

        def interrupt() -> None:
            nonlocal came
            came = True  # also where a finalizer swallows it
            raise error

        with suppress(error):
            before_line(work, at, interrupt, *modules, each=each)
        return not came, came

    return _runs(begin, act, places, meet, least, lambda at: at // 2 or None)


def _runs(
    begin: Begin[T],
    act: Callable[[T], object],
    places: Callable[[Callable[[], object]], tuple[int, Sequence[Place]]],
    meet: Callable[[Callable[[], object], Place], tuple[bool, bool]],
    least: int,
    sooner: Callable[[Place], Place | None],
) -> Iterator[tuple[T, bool]]:
    """`places`: how many there are, and which are taken. `meet`: whether the act was done, and the place was met.
    `sooner`: the place to try where it was not, as other threads had made fewer calls; None: there is none."""
    counted = []
    for _ in range(3):
        with begin() as scene:
            counted.append(places(partial(act, scene)))
            yield scene, True
    count, functions = min(counted[1:], key=itemgetter(0))
    assert count >= least, "the act is not what it was"
    met = 0
    for first in functions:
        place: Place | None = first
        struck = False
        while place is not None and not struck:
            print(place, flush=True)
            with begin() as scene:
                done, struck = meet(partial(act, scene), place)
                yield scene, done
            place = sooner(place)
        met += struck
    print(f"{met} of {len(functions)} met; there are {count}")
    assert met >= 0.6 * len(functions), "which functions are called may depend on other threads, but not by so much"
