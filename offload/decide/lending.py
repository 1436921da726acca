"""Models that lend each other KV pages: in which units, and how many (SwiftCache §3.4, §3.5). Pure.

Words
    master    the model that borrows
    worker    a model that lends; it comes first in what it needs for itself
    unit      the minimum elastic unit: what changes hands is a multiple of it, and whole blocks on either side

Note [Errata]
    Sizes are in bytes where Eq. 6-8 count elements: two models may have different types. In Algorithm 1 a worker takes
    back what it lacks rounded up to units, and lends what it can spare rounded down. It spares what no moment of the
    last while needed: the paper takes the longest request, but requests run side by side, and what counts is the most
    blocks that were in use at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import lcm


def block_bytes(layers: int, tokens: int, heads: int, dim: int, itemsize: int) -> int:
    """Bytes of a block of keys and values in all layers (Eq. 6 and 7, in bytes)."""
    return 2 * layers * tokens * heads * dim * itemsize


@dataclass(frozen=True, slots=True)
class Unit:
    """Of one size for both: `nbytes` are `worker` blocks of the one and `master` blocks of the other."""

    nbytes: int
    worker: int
    master: int


def unit(worker: int, master: int, page: int = 1) -> Unit:
    """The smallest that is whole blocks of either model, and whole pages (Eq. 8 and 9). In bytes: a block of the
    worker's, one of the master's, a page. ValueError."""
    if worker < 1 or master < 1 or page < 1:
        raise ValueError("a block and a page have at least one byte")
    nbytes = lcm(worker, master, page)
    return Unit(nbytes, nbytes // worker, nbytes // master)


@dataclass(frozen=True, slots=True)
class Exchange:
    """So many units go from one to the other, which are so many blocks of either."""

    units: int
    worker: int
    master: int


def scale_up(blocks: int, needed: int, unit: Unit) -> Exchange:
    """What a worker that has `blocks` takes back to have at least `needed`."""
    return _exchange(-(-max(0, needed - blocks) // unit.worker), unit)


def scale_down(blocks: int, needed: int, unit: Unit) -> Exchange:
    """What a worker that has `blocks` may lend and still have `needed`, the most of a `Window`."""
    return _exchange(max(0, blocks - needed) // unit.worker, unit)


def _exchange(units: int, unit: Unit) -> Exchange:
    return Exchange(units, units * unit.worker, units * unit.master)


class Window:
    """The most blocks that were in use at one time of the last `seconds`. Times do not go back. O(1) amortized."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._falling: deque[tuple[float, int]] = deque([(0.0, 0)])  # (until when, blocks): most first, each less

    def use(self, now: float, blocks: int) -> None:
        """From `now` on so many blocks are in use, of all requests together."""
        self._until(now)
        while self._falling and self._falling[-1][1] <= blocks:
            self._falling.pop()
        self._falling.append((now, blocks))

    def most(self, now: float) -> int:
        self._until(now)
        return self._falling[0][1]

    def _until(self, now: float) -> None:
        """What is in use has been until now."""
        self._falling[-1] = (now, self._falling[-1][1])
        while self._falling[0][0] < now - self.seconds:
            self._falling.popleft()
