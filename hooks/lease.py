"""Leases: what one forward of one model uses, from its entry to its exit, on the thread that runs it.

What a lease names is in use even before its kernels are launched: pages of a group that another thread leases are
neither moved nor taken. The module hooks of a managed model open one around every forward; KV layers add the group of
their cache at their first update in it. A cache that is used outside of any lease holds its group for each call, and
its thread keeps one on what it appends to (`Kept`).

Note [Held, and known to be]
    Ctrl-C comes between any two calls, also between the one that enters a group and the one that notes it. So both are
    one call of C code, and so are leaving a group and striking it off the list.
"""

from __future__ import annotations

import threading
from itertools import filterfalse
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ..allocator._native import Group

if TYPE_CHECKING:
    from .kv.pages import KVPages


class _Current(threading.local):
    lease: ForwardLease | None = None


_current = _Current()


class ForwardLease:
    """The groups that a forward has entered, and the KV ranges that it has written. Leases nest.

    To be opened once somebody holds it who closes it. `close()` may be called on any thread. One that was not closed,
    because something ended the forward that runs no hooks, is closed when its thread ends.
    """

    _closed = True

    def __init__(self) -> None:
        self._groups: list[Group] = []
        self._ranges: dict[int, KVPages] = {}
        self._outer: ForwardLease | None = None
        self._thread = threading.get_ident()

    def open(self) -> Self:
        """It is the innermost one of this thread from now on."""
        self._outer = current()
        self._closed = False
        _current.lease = self
        return self

    def enter_group(self, group: Group) -> None:
        """Leases the group until `close()`; once, however often it is asked for."""
        if not any(each is group for each in self._groups):
            _enter(group, self._groups)

    def touched(self, kv: KVPages) -> None:
        """Notes that this forward has appended to the range."""
        self._ranges[id(kv)] = kv

    @property
    def ranges(self) -> tuple[KVPages, ...]:
        """The KV ranges that this forward has appended to so far."""
        return tuple(self._ranges.values())

    def close(self) -> None:
        """Gives every group back, whether those inside it are closed or not. Closing again does nothing."""
        self._closed = True
        _current.lease = current()
        self._ranges.clear()
        while self._groups:
            _leave_last(self._groups, self._thread)

    def __del__(self) -> None:
        if not self._closed:
            self.close()


def current() -> ForwardLease | None:
    """The innermost lease of this thread that is open."""
    lease = _current.lease
    while lease is not None and lease._closed:  # by another thread
        lease = lease._outer
    return lease


def _enter(group: Group, entered: list[Group]) -> None:
    """See Note [Held, and known to be]."""
    entered.extend(filterfalse(Group.enter, (group,)))  # keeps it, because entering returns None


def _leave_last(entered: list[Group], thread: int) -> None:
    next(map(Group.leave, map(list.pop, (entered,)), (thread,)))


class Kept:
    """The lease of the thread that uses a group outside of forwards, between its calls too: it reads what a call has
    shown after that call, and a page must not leave its address while another thread launches kernels."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._entered: list[Group] = []
        self._thread = 0

    def renew(self) -> bool:
        """The calling thread uses the group from now on. False, and none is kept, within a forward, which has its own
        lease."""
        thread = 0 if current() is not None else threading.get_ident()
        if thread != self._thread or bool(thread) != bool(self._entered):
            self._end()
            self._thread = thread
            if thread:
                _enter(self._group, self._entered)
        return thread != 0

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        if self._entered:
            _leave_last(self._entered, self._thread)


class Holding:
    """`with Holding(group):` leases it until this thread's lease ends, or without one until the block does."""

    _alone: list[Group] | None = None

    def __init__(self, group: Group) -> None:
        self._group = group
        self._thread = threading.get_ident()

    def __enter__(self) -> Self:
        lease = current()
        if lease is None:
            self._alone = []
            _enter(self._group, self._alone)
        else:
            lease.enter_group(self._group)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def __del__(self) -> None:
        self._end()  # where Ctrl-C came between the block and its end

    def _end(self) -> None:
        if self._alone:
            _leave_last(self._alone, self._thread)
