"""What one forward of one model holds, from its entry to its exit, on the thread that runs it: leases on what it uses,
and its turn at the slots of its model, which one forward at a time reads.

Groups that a lease has entered are in use even before their kernels are launched: another thread neither moves nor
takes their pages. The module hooks of a managed model open a lease around every forward; KV layers enter the group of
their cache at their first update in it. A cache that is used outside of any lease leases its group for each call, and
its thread holds a lease on what it appends to (`ThreadLease`).

Note [Left in any case]
    Ctrl-C comes between any two lines, those of a finalizer too. So an object of the core (`Lease`) knows the groups
    that were entered, and leaves them when it is freed. A thread refers to its open leases weakly, so that a lease is
    freed with the forward that has it, however that ended.

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
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from time import monotonic
from types import TracebackType
from typing import Any, Final, Self

from ...allocator._native import Group, Lease
from ...allocator.interrupts import Guarded, guarded
from ...offload.policy.tuning import DEFAULT, Waiting


class _Opened(threading.local):
    """Leases that this thread has opened, the innermost last."""

    def __init__(self) -> None:
        self.leases: list[weakref.ref[ForwardLease]] = []


def _no_model() -> None:
    """The model of a lease that is no model's."""


on_this_thread = _Opened()
caches: Final = set[int]()  # ids of live caches that were given to a forward of a model that builds caches
_numbers = count(1)


class ForwardLease:
    """The groups that a forward has entered, and the KV ranges that it has written. Leases nest.

    Open it once something refers to it: an open lease that is not closed, as no hook runs after Ctrl-C, ends when
    nothing refers to it any more. `close()` may be called on any thread.
    """

    closed = True

    def __init__(self, model: Callable[[], Any] = _no_model) -> None:
        """`model`: returns the model whose forward it is, as a weak reference does."""
        self.model = model
        self.number = next(_numbers)  # unique
        self.entered = Lease()
        self.written_pages: dict[int, weakref.ref[Any]] = {}

    def open(self, group: Group | None = None) -> Self:
        """Makes it the innermost lease of this thread, and leases the group."""
        self.closed = False
        on_this_thread.leases.append(weakref.ref(self))
        if group is not None:
            self.entered.enter(group)
        return self

    def begin(self, cache: Any) -> None:
        """Called before the forward, under this lease, with a cache that the program gives it and that is not among
        `caches`."""

    def enter_group(self, group: Group) -> None:
        """Leases the group until `close()`. Idempotent."""
        self.entered.enter(group)

    def touched(self, pages: object) -> None:
        """Notes that this forward has appended to these KV pages."""
        self.written_pages[id(pages)] = weakref.ref(pages)

    @property
    def written(self) -> tuple[object, ...]:
        """The KV pages that this forward has appended to so far, and that still exist. For `ballonet.testing`."""
        return tuple(pages for reference in self.written_pages.values() if (pages := reference()) is not None)

    def close(self) -> None:
        """Gives every group back, whether leases inside it are closed or not. Idempotent."""
        self.closed = True
        leases = on_this_thread.leases
        if len(leases) == 1 and leases[0]() is self:
            leases.clear()
        else:
            current()  # forgets those that are closed by now
        self.written_pages.clear()
        self.entered.close()


def current() -> ForwardLease | None:
    """The innermost lease of this thread that is open."""
    leases = on_this_thread.leases
    while leases:
        lease = leases[-1]()
        if lease is not None and not lease.closed:  # another thread may have closed it
            return lease
        del lease
        leases.pop()
    return None


def opened() -> Iterator[ForwardLease]:
    """The leases of this thread that are open, the innermost first."""
    for reference in reversed(on_this_thread.leases):
        lease = reference()
        if lease is not None and not lease.closed:
            yield lease


class ThreadLease:
    """The lease of a thread that uses a group outside of forwards, also between its calls: it may read after a call
    what the call returned, and no page may be moved meanwhile by another thread."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._held: tuple[int, Lease] | None = None  # (thread, its lease)

    def renew(self, forward: ForwardLease | None) -> bool:
        """Leases the group to the calling thread. False, and no lease is held, within a `forward`, which has its
        own."""
        if forward is not None:
            self._held = None
            return False
        if self._held is None or self._held[0] != threading.get_ident():
            lease = Lease()
            self._held = None
            lease.enter(self._group)
            self._held = threading.get_ident(), lease
        return True


class GroupLease:
    """`with GroupLease(group):` leases it until the thread's innermost lease ends, or without one until the block
    does."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._alone = Lease()

    def __enter__(self) -> Self:
        lease = current()
        if lease is None:
            self._alone.enter(self._group)
        else:
            lease.enter_group(self._group)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._alone.close()


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
