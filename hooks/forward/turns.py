"""The queue for a model's slots: one forward at a time reads them.

Note [Turns]
    A forward of a model whose layers stream asks for the slots, and waits for the forward that has them, in the order
    of asking. It need not get them: without slots it reads the layers on the host, right and more slowly. So it waits
    for a limited time, and there is no deadlock: not of two threads that run two models inside of each other, nor of a
    forward that waits for a thread which runs the same model. A turn that was waited for in vain is not waited for
    again.
    Each change of the queue is one operation of a list, so that Ctrl-C leaves nothing locked. An interrupted forward
    keeps its turn until its thread next runs the model, or ends: the queue refers to turns weakly.
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
    """A forward's place in the queue for the slots."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.asked = False  # for the slots
        self.given_up = False  # has another forward waited for it in vain?
        self._running = threading.Lock()  # released once the turn has ended
        self._running.acquire()

    def mark_ended(self) -> None:
        """Wakes the forwards that wait for the end. Idempotent."""
        try:
            self._running.release()
        except RuntimeError:
            return  # released already

    def wait_ended(self, seconds: float) -> None:
        """Returns when the turn has ended, or after so long."""
        if self._running.acquire(timeout=seconds):
            self.mark_ended()


class Turns:
    """The queue for the slots of one model."""

    def __init__(
        self, group: Group, waiting: Waiting = DEFAULT.waiting, clock: Callable[[], float] = monotonic
    ) -> None:
        """`group`: of the model's weights. `waiting`: how long a forward waits for the slots, in seconds of `clock`."""
        self._waiting = waiting
        self._clock = clock
        self.sections: dict[object, int] = {}  # open sections -> the thread of each; no slot is read meanwhile
        self._group = group
        self._queue: list[weakref.ref[Turn]] = []

    def take(self, turn: Turn) -> bool:
        """Waits for the slots, for a while. Returns whether this forward has them, until `end`."""
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
            first.wait_ended(min(left, self._waiting.slots_look))
        return True

    def has(self, turn: Turn | None) -> bool:
        """Does this forward have the slots, and does the calling thread run it?"""
        if turn is None or turn.thread != threading.get_ident():
            return False
        first = self._queue[:1]  # usually still alive
        return bool(first and first[0]() is turn) or self._first() is turn

    def end(self, turn: Turn) -> None:
        """Gives the slots to the next forward. Idempotent."""
        for reference in self._queue[:]:
            if reference() is turn:
                try:
                    self._queue.remove(reference)
                except ValueError:
                    continue  # another thread has removed it
        turn.mark_ended()

    def section(self) -> Guarded[None]:
        """A `with` block in which no slot is read, and no other thread moves the layers."""
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
        """The turn that has the slots."""
        while first := self._queue[:1]:
            turn = first[0]()
            if turn is not None:
                return turn
            with suppress(ValueError):
                self._queue.remove(first[0])
        return None
