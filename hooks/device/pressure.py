"""The stores of prefixes of each device, which free pages before an allocation for tokens or weights fails.

An allocation within an operator does not ask them: it gets only pages of prefixes that the core may take by itself.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from ...allocator import devices
from ...allocator._native import Device


class Giver(Protocol):
    """A store of prefixes."""

    def give_up(self, pages: int) -> int:
        """Gives back about so many pages of its device that are not in use; returns how many."""


class _Givers(weakref.WeakSet[Giver]):
    """The stores of one device."""


def add(device: Device, giver: Giver) -> None:
    """Adds a store, until it is collected."""
    _of(device).add(giver)


def give_up(device: Device, pages: int) -> int:
    """Gives back so many device pages of cached prefixes, or as many as there are; returns how many."""
    gone = 0
    for each in tuple(_of(device)):
        if gone < pages:
            gone += each.give_up(pages - gone)
    return gone


def _of(device: Device) -> _Givers:
    return devices.holding(device).parts.of(_Givers, _Givers)
