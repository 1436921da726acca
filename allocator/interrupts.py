"""What is done to its end although Ctrl-C, or what another signal's handler raises, comes between any two lines.

Python ignores what is raised in a finalizer, and what that had left to do is lost. And a context manager that is
written in Python may be interrupted on its way in and out, so that what it holds is held for as long as someone keeps
the traceback. Both are called from the core here, which is never interrupted, and again where they were: so whatever
they do may be done twice.
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
    """A context manager: `begin()`, and however that and the block end, `end(failed)`."""
    return Guarded(_Section(begin, end))


_watched: Final[dict[int, weakref.ref[Any]]] = {}  # by id of the steps


class Finalizer:
    """What is done, once, when an object is collected, or when this is called before: all of the steps, in this order,
    whatever one of them raises. Not while Python itself ends."""

    def __init__(self, of: object, *steps: Callable[[], object]) -> None:
        """`steps` do not refer to `of`."""
        self._steps: list[Callable[[], object]] = [*steps]
        self._key = id(self._steps)  # nobody need keep this object: what is watched keeps the steps
        self._steps.append(partial(_watched.pop, self._key, None))
        _watched[self._key] = weakref.ref(of, partial(finish, self._steps))

    @property
    def alive(self) -> bool:
        """Is it still to be done?"""
        return bool(self._steps)

    def __call__(self) -> None:
        """Does what is left to do. Idempotent."""
        finish(self._steps)

    def detach(self) -> None:
        """Cancels it."""
        self._steps.clear()
        _watched.pop(self._key, None)
