"""Whose turn it is: passes over a model with streamed layers are made one at a time.

Note [Turns]
    Slots belong to one pass, so forwards of a model whose layers stream take turns, and so does whoever needs its
    layers at rest. Models of which nothing streams know no turns. Turns are a queue: whoever is first in it has the
    turn. All that is done to it is one operation of a list, so that no lock can be left locked by Ctrl-C, and a
    finalizer that runs anywhere may take a turn, too.
    Ctrl-C may leave a turn open, or waiting (forwards.py, Note [Leases and interrupts]): whoever is behind it looks now
    and then whether its call is still on its thread's stack, and if not ends it, and the lease that came with it.

Note [Turns in a circle]
    One thread runs A, which calls B; another runs B, which calls A: each waits for the turn of the other. But a forward
    that waits does not compute, and layers at rest are valid for everyone. So the thread that runs A brings the layers
    of A to rest and lends its turn, and goes on with them at rest.
    A forward that waits for a thread (`join`, the result of a future) which waits for its turn cannot be asked for
    anything: that thread gets a ManageError instead. Where nothing tells what a forward waits for, whoever waits for it
    warns after `LONG` seconds, and waits on.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from types import FrameType
from typing import Final, Protocol

from ...allocator.errors import BallonetError, ManageError
from ...allocator.interrupts import Guarded, guarded
from .stacks import Call, awaited, called_from, identity, on_stack

LOOK_AGAIN: Final = 0.05  # seconds between looks at whoever has the turn
LONG: Final = 60.0  # seconds after which whoever waits says so


class Passes(Protocol):
    """What happens around the passes over a model."""

    def fly(self) -> None: ...
    def land(self) -> None: ...
    def rest(self) -> None: ...


class Turn:
    """That of the call whose frame this is. `abandon` ends what the call holds besides."""

    def __init__(self, frame: FrameType | None, *, lends: bool) -> None:
        """`lends`: may others use the model, with its layers at rest, while the call waits for another turn?"""
        self.thread = threading.get_ident()
        self.lends = lends
        self.abandon: Callable[[], None] | None = None
        self.borrowed = False  # from the one that is first
        self.asked: deque[tuple[Turns, Turn]] = deque()  # while it waits: who would borrow other turns of its thread
        self.refused: BallonetError | None = None  # why it did not get what it asked for
        self.stuck: Turn | None = None  # behind which it seemed to wait forever when it looked last
        self._call = identity(frame)
        self._bell = threading.Lock()  # rings when it is released
        self._bell.acquire()

    def abandoned(self) -> bool:
        """Is the call no longer on its thread's stack?"""
        return not self.runs(self._call)

    def runs(self, call: Call) -> bool:
        """Is that call on the stack of the turn's thread?"""
        if self.thread == threading.get_ident():
            return called_from(sys._getframe(), call)
        return on_stack(self.thread, call)

    def ring(self) -> None:
        with suppress(RuntimeError):  # it rings already
            self._bell.release()

    def listen(self) -> None:
        """Returns when it rings, or a little later."""
        self._bell.acquire(timeout=LOOK_AGAIN)


_waiting: dict[int, tuple[Turns, Turn]] = {}  # by thread: what it waits for, and with which turn


class Turns:
    """The turns of one model."""

    def __init__(self, name: str = "a model") -> None:
        self.passes: Passes | None = None  # None while nothing streams
        self.sections: set[object] = set()  # that are open: no layer may fly
        self._name = name
        self._queue: list[Turn] = []

    def begin(self, frame: FrameType | None) -> Turn:
        """A forward begins, whose call has this frame. It waits for its turn, where there are turns. ManageError where
        it would wait forever."""
        turn = Turn(frame, lends=True)
        if self.passes is not None:
            self._take(turn)
        return turn

    def fly(self, turn: Turn) -> None:
        """The forward is about to run layers. ManageError, DriverError."""
        if (passes := self.passes) is not None:  # which another thread may end at any moment
            self._take(turn)  # where layers have begun to stream in this forward
            if not turn.borrowed:
                passes.fly()

    def land(self, turn: Turn) -> None:
        """It has run them, as far as it did. DriverError."""
        if (passes := self.passes) is not None and self._turn is turn:
            passes.land()

    def end(self, turn: Turn) -> None:
        """The next one, please. Again: does nothing."""
        if turn in self._queue:
            with suppress(ValueError):  # someone else has done it meanwhile
                self._queue.remove(turn)
        following = self._turn
        if following is not None:
            following.ring()

    def mine(self) -> bool:
        """Has this thread the turn?"""
        turn = self._turn
        return turn is not None and turn.thread == threading.get_ident()

    def running(self) -> bool:
        """The same, and the call that took it has not been interrupted."""
        turn = self._turn
        return turn is not None and turn.thread == threading.get_ident() and not turn.abandoned()

    def inside(self, call: Call) -> Turn | None:
        """The turn of the thread that has not returned from this call."""
        turn = self._turn
        return turn if turn is not None and turn.runs(call) else None

    def at_rest(self, *, or_flying: bool = False) -> Guarded[None]:
        """Within it nobody else has the turn, and all layers are at rest to begin with, or `or_flying` as
        they were. ManageError, DriverError."""
        return Guarded(_AtRest(self, or_flying))

    def resident(self, then: Callable[[], None] = lambda: None) -> Guarded[None]:
        """Within it no layer flies: weights can be read, and written. `then` is called first in it. ManageError,
        DriverError."""
        section = object()

        def begin() -> None:
            with self.at_rest():
                self.sections.add(section)
            then()

        return guarded(begin, lambda failed: self.sections.discard(section))

    @property
    def _turn(self) -> Turn | None:
        """Whose it is."""
        first = self._queue[:1]
        return first[0] if first else None

    def _rest(self, or_flying: bool = False) -> None:
        if (passes := self.passes) is not None and not or_flying:
            passes.rest()

    def _take(self, turn: Turn) -> None:
        """Returns when the turn has come, or is lent. It stays in the queue until `end`."""
        if turn not in self._queue:
            self._queue.append(turn)
        if self._turn is turn or turn.borrowed:
            return
        outer = _waiting.get(turn.thread)  # of a finalizer that runs while its thread waits
        try:
            _waiting[turn.thread] = self, turn
            self._wait(turn)
        except BaseException:
            self.end(turn)
            raise
        finally:
            if outer is None:
                _waiting.pop(turn.thread, None)
            else:
                _waiting[turn.thread] = outer

    def _wait(self, turn: Turn) -> None:
        began: float | None = monotonic()
        while (first := self._turn) is not turn and not turn.borrowed:
            if first is None:
                self._queue.append(turn)
                continue
            if first.thread == turn.thread or first.abandoned():
                if first.abandon is not None:
                    first.abandon()
                self.end(first)
                continue
            self._borrow(turn, first)
            turn.listen()
            while turn.asked:
                _lend(*turn.asked.popleft())
            if turn.refused is not None:
                raise turn.refused
            if began is not None and monotonic() - began > LONG:
                began = None
                warnings.warn(_SLOW.format(self._name, LONG, first.thread), RuntimeWarning, stacklevel=2)

    def _borrow(self, turn: Turn, first: Turn) -> None:
        """Asks for it, where `first` cannot end before `turn` has ended. ManageError where nobody can be asked."""
        before, turn.stuck = turn.stuck, None
        if not _waits(first.thread, turn.thread) or self._turn is not first:
            return
        _, busy = _waiting.get(first.thread, (None, None))
        if busy is None or not first.lends:
            turn.stuck = first
            if before is first:  # others go on while one looks: what holds holds twice
                raise ManageError(_STUCK.format(self._name))
            return
        if not busy.abandoned() and all(borrower is not turn for _, borrower in busy.asked):
            busy.asked.append((self, turn))
            busy.ring()


class _AtRest:
    """See Turns.at_rest."""

    def __init__(self, turns: Turns, or_flying: bool) -> None:
        self._turns = turns
        self._or_flying = or_flying
        self._turn: Turn | None = None

    def begin(self) -> None:
        if not self._turns.running():
            self._turn = turn = Turn(sys._getframe(1), lends=False)  # of the call whose `with` this is
            self._turns._take(turn)
            if turn.borrowed:
                return
        self._turns._rest(self._or_flying)

    def end(self, failed: bool) -> None:
        if self._turn is not None:
            self._turns.end(self._turn)


def _lend(turns: Turns, borrower: Turn) -> None:
    """This thread has the turn, if it has not ended meanwhile, and waits elsewhere, for what `borrower` has."""
    if not turns.mine():
        return
    try:
        turns._rest()
    except BallonetError as error:
        borrower.refused = error
    else:
        with suppress(ValueError):
            turns._queue.remove(borrower)
            turns._queue.insert(1, borrower)
            borrower.borrowed = True
    borrower.ring()


def _waits(one: int, other: int) -> bool:
    """Does the one thread wait for the other, perhaps by way of more?"""
    seen: set[int] = set()
    now = {one}
    while now and other not in now:
        seen |= now
        now = {each for thread in now for each in _waits_for(thread)} - seen
    return other in now


def _waits_for(thread: int) -> set[int]:
    found = awaited(thread)
    turns, turn = _waiting.get(thread, (None, None))
    if turns is not None and turn is not None and not turn.abandoned():
        first = turns._turn
        if first is not None:
            found.add(first.thread)
    return found


_STUCK: Final = (
    "{0} is run by a thread that waits for this one, and its layers stream, so that only one thread can run it at a "
    "time: run it on the thread that runs it already, or give a budget in which nothing streams (interval=None)"
)
_SLOW: Final = (
    "{0} has layers that stream, so that threads take turns with it; this one has waited for {1:.0f} s, and thread {2} "
    "is still running it. Should that thread be waiting for this one, it waits forever: see docs/limits.md"
)
