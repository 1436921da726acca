"""The stores of prefixes, which give up what they keep before tokens or weights are told that memory is out.

What allocates in the middle of an operator asks nobody: it gets the pages of prefixes that the core may take.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from ...allocator._native import Device


class Giver(Protocol):
    """A store of prefixes."""

    def give_up(self, device: Device, pages: int) -> int:
        """Up to so many pages of the device go back, or some more, as far as nobody uses them; how many do."""


_givers: weakref.WeakSet[Giver] = weakref.WeakSet()


def add(giver: Giver) -> None:
    """Until it is collected."""
    _givers.add(giver)


def give_up(device: Device, pages: int) -> int:
    """Gives back so many device pages of cached prefixes, or as many as there are; returns how many."""
    gone = 0
    for each in tuple(_givers):
        if gone < pages:
            gone += each.give_up(device, pages - gone)
    return gone
