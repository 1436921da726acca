"""The sizes of SwiftCache's caches by its equations: an oracle for what the library stores and streams (§3.2, §3.4).

Note [Errata]
    Everything is in bytes: models differ in their types. The regular cache of Eq. 5 is clamped at 0. With two slots a
    streamed block takes a place in both, which is what it means that a double slot halves K_master. A model of one
    layer has one slot, for a second one would serve nothing: with that, Eq. 4 and 5 store as many blocks as can be. The
    paper's example stores 17 + 8 = 25 blocks, against 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def block_bytes(tokens: int, heads: int, dim: int, itemsize: int, layers: int = 1) -> int:
    """Bytes of a block of keys and values in one layer (Eq. 1), or in `layers` (Eq. 6 and 7)."""
    return 2 * layers * tokens * heads * dim * itemsize


@dataclass(frozen=True, slots=True)
class Split:
    """A division of blocks: `streamed` ones, whose layers take turns in the layer-stream cache, and `regular` ones,
    with all layers on the device."""

    streamed: int
    regular: int

    @property
    def blocks(self) -> int:
        return self.streamed + self.regular


def split(layers: int, block: int, master: int, workers: Sequence[int], slots: int = 1) -> Split:
    """Returns the two caches that store the most (Eq. 2-5). `block`: bytes of one in one layer (Eq. 1); `master`: bytes
    of the device, `workers`: of each place that lends. See Note [Errata]."""
    slots = min(slots, layers)
    lent = sum(worker // (block * layers) for worker in workers)
    own = master // block
    streamed = min(lent, own // slots)
    return Split(streamed, max(0, (own - slots * streamed) // layers))
