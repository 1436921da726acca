"""Cleanup that is completed although Ctrl-C, or an exception of another signal's handler, comes between any two lines.

Python ignores an exception in a finalizer, and the rest of the finalizer is lost. And a context manager written in
Python may be interrupted on entry and exit, and then keeps what it holds for as long as the traceback lives. Here the
core calls both, which is never interrupted, and calls them again where they were: so each step may be done twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from ._native import Guarded as Guarded
from ._native import finish
from ._native import if_free as if_free

T = TypeVar("T")


class _Section(NamedTuple):
    begin: Callable[[], Any]
    end: Callable[[bool], object]


def guarded(begin: Callable[[], T], end: Callable[[bool], object]) -> Guarded[T]:
    """Returns a context manager: `begin()`, and however that and the block end, `end(failed)`."""
    return Guarded(_Section(begin, end))


_watched: Final[dict[int, weakref.ref[Any]]] = {}  # by id of the steps


class Finalizer:
    """Steps that run once, when an object is collected or this is called: all of them, in order, whatever one raises.
    Not while Python itself ends."""

    def __init__(self, of: object, *steps: Callable[[], object]) -> None:
        """`steps` do not refer to `of`."""
        self._steps: list[Callable[[], object]] = [*steps]
        self._key = id(self._steps)  # no reference to this object is needed: the watched one keeps the steps
        self._steps.append(partial(_watched.pop, self._key, None))
        _watched[self._key] = weakref.ref(of, partial(finish, self._steps))

    @property
    def alive(self) -> bool:
        """Are steps still to be done?"""
        return bool(self._steps)

    def __call__(self) -> None:
        """Runs the steps that are left. Idempotent."""
        finish(self._steps)

    def detach(self) -> None:
        """Cancels the steps."""
        self._steps.clear()
        _watched.pop(self._key, None)
