"""Layers that are copied in pieces, after each of which whoever watches the replica hears that it goes on.

Note [A layer takes seconds]
    The main loop of a replica makes a layer ready, drops it or brings it home in one turn. A large layer takes seconds
    over a slow link, or from a slow file, and a count of turns that stands still for one second is a death
    (policy/replicas/heartbeat.py). So a layer is copied, compared and added up piece by piece, and the loop counts on
    after each. A copy that hangs still ends the count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from ...allocator._native import Device, Transfer
from ...offload.residency.slots import Copies

if TYPE_CHECKING:
    from ...allocator._native import Place


def _nobody() -> None:
    """Nobody watches."""


class Piecewise:
    """Copies of weights, one piece after the other. `told`: is called after each piece of work on a layer, in its
    middle, so it may not touch the model; what it raises ends that work, and nothing is under way then."""

    def __init__(self, device: Device, most: int) -> None:
        """`most`: bytes of a piece."""
        self.told: Callable[[], object] = _nobody
        self._most = most
        self._pages = max(1, most // device.page_size)
        self._transfer = Transfer(device)

    def done(self) -> None:
        """A piece of work is done, of whatever kind."""
        self.told()

    def copy(self, parts: Copies, after: int | None, to: Place) -> None:
        """Copies as `Transfer.copy`, and waits. DriverError."""
        for piece in cut(parts, self._most):
            self._transfer.copy(piece, after=after, owner="weights", to=to).wait()
            self.told()

    def end(self) -> None:
        """Nobody watches any more. Idempotent."""
        self.told = _nobody

    def spans(self, runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """The same (first, count) of pages, none longer than a piece. `told` is called after each was used."""
        for first, count in runs:
            for at in range(first, first + count, self._pages):
                yield at, min(self._pages, first + count - at)
                self.told()


def cut(parts: Copies, most: int) -> Iterator[Copies]:
    """The copies in their order, in lists of `most` bytes, of which the last may have fewer."""
    piece: Copies = []
    left = most
    for to, source, nbytes in parts:
        at = 0
        while at < nbytes:
            some = min(left, nbytes - at)
            piece.append((to + at, source + at, some))
            at, left = at + some, left - some
            if not left:
                yield piece
                piece, left = [], most
    if piece:
        yield piece
