"""Whose turn it is: passes over a model with streamed layers are made one at a time.

Note [Turns]
    Slots belong to one pass, so forwards of a model whose layers stream take turns, and so does whoever needs its
    layers at rest. Models of which nothing streams know no turns. Ctrl-C may leave a turn open (forwards.py, Note
    [Leases and interrupts]): whoever waits for it looks whether the call that has it is still on its thread's stack,
    and if not ends it, and the lease that came with it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Final, Protocol

_LOOK_AGAIN: Final = 0.05  # seconds between looks at whoever has the turn


class Passes(Protocol):
    """What happens around the passes over a model."""

    def fly(self) -> None: ...
    def land(self) -> None: ...
    def rest(self) -> None: ...


class Turn:
    """That of the call whose frame this is. `abandon` ends what the call holds besides."""

    def __init__(self, frame: FrameType | None) -> None:
        self.thread = threading.get_ident()
        self.abandon: Callable[[], None] | None = None
        self._call = identity(frame)

    def abandoned(self) -> bool:
        """Is the call no longer on its thread's stack?"""
        return not on_stack(self._call, sys._current_frames().get(self.thread))


Call = tuple[int, CodeType | None]


def identity(frame: FrameType | None) -> Call:
    """What tells the call with this frame from those on a stack, and does not keep what it refers to alive.

    The id alone would not do: the next frame is often where one was before.
    """
    return id(frame), frame and frame.f_code


def on_stack(call: Call, frame: FrameType | None) -> bool:
    """Is it that of `frame`, or of one of its callers?"""
    while frame is not None:
        if identity(frame) == call:
            return True
        frame = frame.f_back
    return False


class Turns:
    """The turns of one model."""

    def __init__(self) -> None:
        self.passes: Passes | None = None  # None while nothing streams
        self.sections = 0  # that are open: no layer may fly
        self._turn: Turn | None = None
        self._lock = threading.Lock()

    def begin(self, frame: FrameType | None) -> Turn:
        """A forward begins, whose call has this frame. It waits for its turn, where there are turns."""
        turn = Turn(frame)
        if self.passes is not None:
            self._take(turn)
        return turn

    def fly(self, turn: Turn) -> None:
        """The forward is about to run layers. ManageError, DriverError."""
        if self.passes is not None:
            self._take(turn)  # where layers have begun to stream in this forward
            self.passes.fly()

    def land(self, turn: Turn) -> None:
        """It has run them, as far as it did. DriverError."""
        if self.passes is not None and self._turn is turn:
            self.passes.land()

    def end(self, turn: Turn) -> None:
        """The next one, please. Again: does nothing."""
        with self._lock:
            if self._turn is turn:
                self._turn = None

    def mine(self) -> bool:
        """Has this thread the turn?"""
        turn = self._turn
        return turn is not None and turn.thread == threading.get_ident()

    def running(self) -> bool:
        """The same, and the call that took it has not been interrupted."""
        turn = self._turn
        return turn is not None and turn.thread == threading.get_ident() and not turn.abandoned()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Within it nobody else has the turn, and all layers are at rest to begin with. ManageError, DriverError."""
        if self.mine():
            self._rest()
            yield
            return
        turn = Turn(sys._getframe(2))  # whose `with` this is: the frame of a generator is on no stack while it waits
        self._take(turn)
        try:
            self._rest()
            yield
        finally:
            self.end(turn)

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Within it no layer flies: weights can be read, and written. ManageError, DriverError."""
        with self.at_rest(), self._lock:
            self.sections += 1
        try:
            yield
        finally:
            with self._lock:
                self.sections -= 1

    def _rest(self) -> None:
        if self.passes is not None:
            self.passes.rest()

    def _take(self, turn: Turn) -> None:
        while True:
            with self._lock:
                before = self._turn
                if before is None or before is turn:
                    self._turn = turn
                    return
            if before.thread == turn.thread or before.abandoned():
                if before.abandon is not None:
                    before.abandon()
                self.end(before)
            else:
                threading.Event().wait(_LOOK_AGAIN)
