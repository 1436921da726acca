"""The stores of prefixes of each device, which free pages before an allocation for tokens or weights fails.

What allocates in the middle of an operator asks no store: it gets the pages of prefixes that the core may take.
"""

from __future__ import annotations

import weakref
from itertools import count
from typing import Protocol

from ...allocator import devices
from ...allocator._native import Device


class Giver(Protocol):
    """A store of prefixes."""

    @property
    def priority(self) -> int:
        """The priority of its model: those with the lowest give first."""

    def give_up(self, pages: int) -> int:
        """Gives back about so many pages of its device that are not in use; returns how many."""


class _Givers:
    """The stores of one device, in the order in which they came."""

    def __init__(self) -> None:
        self.numbers = count()
        self.stores = weakref.WeakValueDictionary[int, Giver]()


def add(device: Device, giver: Giver) -> None:
    """Adds a store until it is collected."""
    givers = _of(device)
    givers.stores[next(givers.numbers)] = giver


def give_up(device: Device, pages: int) -> int:
    """Gives back so many device pages of cached prefixes, or as many as there are; returns how many. The store of the
    model with the lowest priority gives first, of equals the one that came first."""
    gone = 0
    for each in sorted(_of(device).stores.values(), key=lambda store: store.priority):
        if gone < pages:
            gone += each.give_up(pages - gone)
    return gone


def _of(device: Device) -> _Givers:
    return devices.holding(device).parts.of(_Givers, _Givers)
