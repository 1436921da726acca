"""What gives pages back before an allocation for tokens or weights fails: graphs that nobody uses, stores of prefixes.

What allocates in the middle of an operator asks no store: it gets the pages of prefixes that the core may take.
"""

from __future__ import annotations

import weakref
from itertools import count
from typing import Protocol

from ...allocator import devices
from ...allocator._native import Device


class Giver(Protocol):
    """A store of prefixes, or the graphs of a model."""

    @property
    def priority(self) -> int:
        """The priority of its model: those with the lowest give first."""

    def give_up(self, pages: int) -> int:
        """Gives back about so many pages of its device that are not in use; returns how many."""


class _Givers:
    """The givers of one device, in the order in which they came."""

    def __init__(self) -> None:
        self.numbers = count()
        self.graphs = weakref.WeakValueDictionary[int, Giver]()
        self.stores = weakref.WeakValueDictionary[int, Giver]()


def add(device: Device, giver: Giver, graphs: bool = False) -> None:
    """Adds a store of prefixes, or the `graphs` of a model, until it is collected."""
    givers = _of(device)
    (givers.graphs if graphs else givers.stores)[next(givers.numbers)] = giver


def give_up(device: Device, pages: int) -> int:
    """Gives back so many device pages of graphs and cached prefixes, or as many as there are; returns how many. Graphs
    go first, then those of the model with the lowest priority, of equals those that came first."""
    givers, gone = _of(device), 0
    for kind in (givers.graphs, givers.stores):
        for giver in sorted(kind.values(), key=lambda giver: giver.priority):
            if gone < pages:
                gone += giver.give_up(pages - gone)
    return gone


def give_up_graphs(device: Device) -> None:
    """Gives back the pages of all graphs that nobody uses."""
    for giver in list(_of(device).graphs.values()):
        giver.give_up(device.budget // device.page_size)


def _of(device: Device) -> _Givers:
    return devices.holding(device).parts.of(_Givers, _Givers)
