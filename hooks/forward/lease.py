"""Leases: what one forward of one model uses, from its entry to its exit, on the thread that runs it.

Groups that a lease has entered are in use even before their kernels are launched: another thread neither moves nor
takes their pages. The module hooks of a managed model open a lease around every forward; KV layers enter the group of
their cache at their first update in it. A cache that is used outside of any lease leases its group for each call, and
its thread holds a lease on what it appends to (`ThreadLease`).

Note [Left in any case]
    Ctrl-C comes between any two lines, those of a finalizer too. So an object of the core (`Lease`) knows the groups
    that were entered, and leaves them when it is freed. A thread refers to its open leases weakly, so that a lease is
    freed with the forward that has it, however that ended.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from types import TracebackType
from typing import Any, Self

from ...allocator._native import Group, Lease


class _Opened(threading.local):
    """Leases that this thread has opened, the innermost last."""

    def __init__(self) -> None:
        self.leases: list[weakref.ref[ForwardLease]] = []


def _no_model() -> None:
    """The model of a lease that is no model's."""


on_this_thread = _Opened()
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
        self._entered = Lease()
        self._written: dict[int, weakref.ref[Any]] = {}

    def open(self, group: Group | None = None) -> Self:
        """Makes it the innermost lease of this thread, and leases the group."""
        self.closed = False
        on_this_thread.leases.append(weakref.ref(self))
        if group is not None:
            self._entered.enter(group)
        return self

    def enter_group(self, group: Group) -> None:
        """Leases the group until `close()`. Idempotent."""
        self._entered.enter(group)

    def touched(self, pages: object) -> None:
        """Notes that this forward has appended to these KV pages."""
        self._written[id(pages)] = weakref.ref(pages)

    @property
    def written(self) -> tuple[object, ...]:
        """The KV pages that this forward has appended to so far, and that still exist. For `ballonet.testing`."""
        return tuple(pages for reference in self._written.values() if (pages := reference()) is not None)

    def close(self) -> None:
        """Gives every group back, whether leases inside it are closed or not. Idempotent."""
        self.closed = True
        current()  # forgets those that are closed by now
        self._written.clear()
        self._entered.close()


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
