"""Copies layers in pieces, and reports progress after each, so the replica is not taken for dead.

Note [A layer takes seconds]
    The main loop of a replica prepares, drops or restores a layer in one iteration. A large layer takes seconds over a
    slow link, or from a slow file, and a replica whose count of iterations stands still for a second counts as dead
    (policy/replicas/heartbeat.py). So a layer is copied, compared and summed piece by piece, and the count grows after
    each piece. If a copy hangs, the count stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from ...allocator._native import Device, Transfer
from ...offload.residency.slots import Copies

if TYPE_CHECKING:
    from ...allocator._native import Place


def _ignore() -> None:
    """Reports no progress."""


class Piecewise:
    """Copies weights piece by piece. `on_progress`: called after each piece of work on a layer; it must not use the
    model; an error that it raises ends the work, with no copy under way."""

    def __init__(self, device: Device, most: int) -> None:
        """`most`: bytes of a piece."""
        self.on_progress: Callable[[], object] = _ignore
        self._most = most
        self._pages = max(1, most // device.page_size)
        self._transfer = Transfer(device)

    def done(self) -> None:
        """Reports that a piece of work is done."""
        self.on_progress()

    def copy(self, parts: Copies, after: int | None, to: Place) -> None:
        """Copies in pieces, as `Transfer.copy`, and waits. DriverError."""
        for piece in cut(parts, self._most):
            self._transfer.copy(piece, after=after, owner="weights", to=to).wait()
            self.on_progress()

    def end(self) -> None:
        """Stops reporting progress. Idempotent."""
        self.on_progress = _ignore

    def spans(self, runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Yields the runs of pages, (first, count), cut to the size of a piece; reports progress after each."""
        for first, count in runs:
            for at in range(first, first + count, self._pages):
                yield at, min(self._pages, first + count - at)
                self.on_progress()


def cut(parts: Copies, most: int) -> Iterator[Copies]:
    """Yields the copies, in order, in lists of `most` bytes each; the last may have fewer."""
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
