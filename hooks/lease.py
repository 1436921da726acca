"""Leases: what one forward of one model uses, from its entry to its exit, on the thread that runs it.

What a lease names is in use even before its kernels are launched: pages of a group that another thread leases are
neither moved nor taken. The module hooks of a managed model open one around every forward; KV layers add the group of
their cache at their first update in it. A cache that is used outside of any lease holds its group for each call alone.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from ..allocator._native import Group, Range


class _Current(threading.local):
    lease: ForwardLease | None = None


_current = _Current()


class ForwardLease:
    """The groups that a forward has entered, and the KV ranges that it has written. Leases nest.

    `close()` may be called on any thread. One that was not closed, because something ended the forward that runs no
    hooks, is closed when its thread ends.
    """

    def __init__(self) -> None:
        self._groups: list[Group] = []
        self._ranges: dict[int, Range] = {}
        self._outer = _current.lease
        self._closed = False
        self._thread = threading.get_ident()
        _current.lease = self

    def enter_group(self, group: Group) -> None:
        """Leases the group until `close()`; once, however often it is asked for."""
        if not any(each is group for each in self._groups):
            group.enter()
            self._groups.append(group)

    def touched(self, kv: Range) -> None:
        """Notes that this forward has appended to the range."""
        self._ranges[id(kv)] = kv

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The KV ranges that this forward has appended to so far."""
        return tuple(self._ranges.values())

    def close(self) -> None:
        """Gives every group back, whether those inside it are closed or not. Closing again does nothing."""
        self._closed = True
        lease = _current.lease
        while lease is not None and lease._closed:
            lease = lease._outer
        _current.lease = lease
        self._ranges.clear()
        while self._groups:
            self._groups.pop().leave(self._thread)

    def __del__(self) -> None:
        self.close()


def current() -> ForwardLease | None:
    """The innermost lease of this thread."""
    return _current.lease


class Holding:
    """`with Holding(group):` leases it until this thread's lease ends, or without one until the block does."""

    __slots__ = ("_alone", "_group")

    def __init__(self, group: Group) -> None:
        self._group = group
        self._alone = False

    def __enter__(self) -> Self:
        lease = _current.lease
        if lease is None:
            self._group.enter()
            self._alone = True
        else:
            lease.enter_group(self._group)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__del__()

    def __del__(self) -> None:
        """Also where Ctrl-C came between the block and its end."""
        if self._alone:
            self._alone = False
            self._group.leave()
