"""Whose turn it is with a model's slots: one forward at a time reads them.

Note [Turns]
    A forward of a model whose layers stream asks for the slots, and waits for whoever has them, in the order of asking.
    It need not get them: without slots it reads the layers on the host, right and more slowly. So it waits no longer
    than its patience, and nobody waits forever: not two threads that run two models inside of each other, nor a forward
    that waits for a thread which runs the same model. Whoever was given up on is not waited for again.
    All that is done to the queue is one operation of a list, so that Ctrl-C leaves nothing locked. A forward that was
    interrupted keeps its turn until its thread comes by again, or ends: the queue refers to turns weakly.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from ...allocator._native import Group, Lease
from ...allocator.interrupts import Guarded, guarded
from ...offload.policy.tuning import DEFAULT, Waiting


class Turn:
    """One forward's: held by whoever runs it."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.asked = False  # for the slots
        self.given_up = False  # has someone waited for it in vain?
        self._bell = threading.Lock()  # open once the turn has ended
        self._bell.acquire()

    def ring(self) -> None:
        try:
            self._bell.release()
        except RuntimeError:
            return  # it rings already

    def listen(self, seconds: float) -> None:
        """Returns when the turn has ended, or after so long."""
        if self._bell.acquire(timeout=seconds):
            self.ring()


class Turns:
    """The turns with the slots of one model."""

    def __init__(
        self, group: Group, waiting: Waiting = DEFAULT.waiting, clock: Callable[[], float] = monotonic
    ) -> None:
        """`group`: of the model's weights; `waiting`: how long a forward waits for the slots, in seconds of `clock`."""
        self._waiting = waiting
        self._clock = clock
        self.sections: dict[object, int] = {}  # that are open, by the thread each was opened on: no slot is read
        self._group = group
        self._queue: list[weakref.ref[Turn]] = []

    def take(self, turn: Turn) -> bool:
        """Has this forward the slots? Waits for them, for a while. They are its own until `end`."""
        turn.asked = True
        mine = weakref.ref(turn)
        self._queue.append(mine)
        end = self._clock() + self._waiting.slots
        while (first := self._first()) is not turn:
            left = end - self._clock()
            if first is None:
                continue
            if first.given_up or left <= 0 or first.thread == turn.thread:
                first.given_up = True
                self.end(turn)
                return False
            first.listen(min(left, self._waiting.slots_look))
        return True

    def has(self, turn: Turn | None) -> bool:
        """Are the slots this forward's, and is the thread that asks its own?"""
        if turn is None or turn.thread != threading.get_ident():
            return False
        first = self._queue[:1]  # as a rule it is there still
        return bool(first and first[0]() is turn) or self._first() is turn

    def end(self, turn: Turn) -> None:
        """The next one, please. Idempotent."""
        for each in self._queue[:]:
            if each() is turn:
                try:
                    self._queue.remove(each)
                except ValueError:
                    continue  # someone else has done it meanwhile
        turn.ring()

    def section(self) -> Guarded[None]:
        """Within it no slot is read, and no other thread moves the layers."""
        key, lease = object(), Lease()

        def begin() -> None:
            self.sections[key] = threading.get_ident()
            lease.enter(self._group)

        def end(failed: bool) -> None:
            self.sections.pop(key, None)
            lease.close()

        return guarded(begin, end)

    @property
    def leases(self) -> int:
        """Leases on the model that sections of this thread hold."""
        me = threading.get_ident()
        return sum(thread == me for thread in list(self.sections.values()))

    def _first(self) -> Turn | None:
        """Whose the slots are."""
        while first := self._queue[:1]:
            turn = first[0]()
            if turn is not None:
                return turn
            with suppress(ValueError):
                self._queue.remove(first[0])
        return None
