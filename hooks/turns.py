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
from types import FrameType
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
        self._frame = id(frame)

    def abandoned(self) -> bool:
        """Is the call no longer on its thread's stack?"""
        frame = sys._current_frames().get(self.thread)
        while frame is not None:
            if id(frame) == self._frame:
                return False
            frame = frame.f_back
        return True


class Turns:
    """The turns of one model."""

    def __init__(self) -> None:
        self.passes: Passes | None = None  # None while nothing streams
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

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Within it nobody else has the turn, and all layers are at rest to begin with. ManageError, DriverError."""
        if self.mine():
            self._rest()
            yield
            return
        turn = Turn(sys._getframe())
        self._take(turn)
        try:
            self._rest()
            yield
        finally:
            self.end(turn)

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
