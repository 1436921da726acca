"""The stores of prefixes, which give up what they keep before tokens or weights are told that memory is out.

What allocates in the middle of an operator asks nobody: it gets the pages of prefixes that the core may take.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from ...allocator import devices
from ...allocator._native import Device


class Giver(Protocol):
    """A store of prefixes."""

    def give_up(self, pages: int) -> int:
        """Up to so many pages of its device go back, or some more, as far as nobody uses them; how many do."""


class _Givers(weakref.WeakSet[Giver]):
    """The stores of one device."""


def add(device: Device, giver: Giver) -> None:
    """Until it is collected."""
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
