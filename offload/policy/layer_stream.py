"""How attention reads KV that is on the host, and how much memory each way takes (SwiftCache §3.2, §3.3). Pure.

Words
    streamed    pages of a layer's KV that stay on the host and are copied into a *slot* each time it attends to them
    regular     KV that has device pages of its own
    exposed     seconds of an iteration in which compute waits for the link

Note [Errata]
    Everything is in bytes: models differ in their types. The regular cache of Eq. 5 is clamped at 0. With two slots a
    streamed block takes a place in both, which is what it means that a double slot halves K_master. A model of one
    layer has one slot, for a second one would serve nothing: with that, Eq. 4 and 5 store as many blocks as can be. The
    paper's example stores 17 + 8 = 25 blocks, against 10.

Note [What is left over]
    Pages that are free serve as slots and as regular cache at once, as in Eq. 4 and 5: so few pages of each layer
    stream that the others, and the slots for these, fit. In place needs no slots, and so a few pages less stream.

Note [A pass]
    Copies are submitted in the order of the layers, one at a time on the link. That of layer j starts when the
    attention of the layer that had its slot is over, layer j - 1 for one slot, j - 2 for two; its attention starts
    when the layer before is done and its copy is. For layers all alike a layer costs, with one slot, its attention
    and the longer of its copy and the rest; with two the longer of its copy and its compute. The first copies of a pass
    are waited for: whether they could have begun in the pass before is not for here to know.

Note [In place]
    A kernel that reads host pages in place runs at the link's speed, with nothing to overlap. The bytes are read once
    for every 256 rows. Above 64 rows copying is better even where it cannot hide, unless there is no room at all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from .tuning import DEFAULT, KVReads


def block_bytes(tokens: int, heads: int, dim: int, itemsize: int) -> int:
    """Bytes of a block of keys and values in one layer (Eq. 1): of `tokens` of `heads` times `dim` elements."""
    return 2 * tokens * heads * dim * itemsize


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
    of the device, `workers`: of each place that lends. ValueError. See Note [Errata]."""
    if layers < 1 or block < 1 or slots < 1 or master < 0 or min(workers, default=0) < 0:
        raise ValueError("layers, bytes of a block and slots are at least 1, and no place is smaller than nothing")
    slots = min(slots, layers)
    lent = sum(worker // (block * layers) for worker in workers)
    own = master // block
    streamed = min(lent, own // slots)
    return Split(streamed, max(0, (own - slots * streamed) // layers))


@dataclass(frozen=True, slots=True)
class LayerReads:
    """One layer. `pages`: of its KV that are away. Seconds of its compute: `attention`, and the `rest`."""

    pages: int
    rest: float
    attention: float = 0.0


class Way(StrEnum):
    RESIDENT = "resident"
    STREAMED = "through slots"
    ZERO_COPY = "in place"


@dataclass(frozen=True, slots=True)
class Choice:
    """A way to read. `streamed`: pages of each layer, or as many as it has away, that stay on the host; the others are
    restored. `slots`: how many, of so many pages each. `pages`: device pages that all this takes. `seconds`: of an
    iteration once pages are restored, `exposed` of them waiting for the link. `first`: seconds of the iteration that
    restores them.
    """

    way: Way
    streamed: int
    slots: int
    pages: int
    seconds: float
    exposed: float
    first: float


def choose(
    layers: Sequence[LayerReads],
    *,
    page: int,
    link: float,
    free: int,
    rows: int,
    tuning: KVReads = DEFAULT.kv_reads,
) -> Choice:
    """Returns the fastest way that fits `free` device pages; of equals the one that takes the fewest.

    `page`: bytes; `link`: bytes per second; `rows`: of queries in one attention, batch times new tokens.
    ValueError.
    """
    if page < 1 or link <= 0 or free < 0 or rows < 1 or tuning.in_place <= 0:
        raise ValueError("pages, the link and rows are more than nothing, and no less than no page is free")
    slower = -(-rows // tuning.rows_of_a_pass) / tuning.in_place
    costs = _Costs(tuple(layers), page / link, tuning.copy, slower)
    if sum(layer.pages for layer in layers) <= free:
        return costs.choice(Way.RESIDENT, 0, 0)
    through = [
        costs.choice(Way.STREAMED, streamed, slots)
        for slots in (1, 2)
        if (streamed := fewest_streamed([layer.pages for layer in layers], free, slots)) is not None
    ]
    if through and rows > tuning.rows:
        return min(through, key=_better)
    streamed = fewest_streamed([layer.pages for layer in layers], free, 0)
    assert streamed is not None  # nothing resident and no slot always fits
    return min((*through, costs.choice(Way.ZERO_COPY, streamed, 0)), key=_better)


def _better(choice: Choice) -> tuple[float, int]:
    return choice.seconds, choice.pages


def fewest_streamed(away: Sequence[int], free: int, slots: int) -> int | None:
    """Returns the least w such that `slots` of w pages, and all that layers have away beyond w, fit `free`; or None.

    The need falls with w while more than `slots` layers have more than w away, and rises from there on.
    """
    most = sorted(away, reverse=True)
    least = most[slots] if slots < len(most) else 0
    if needed(away, least, slots) > free:
        return None
    return bisect_left(range(least), -free, key=lambda w: -needed(away, w, slots))


def needed(away: Sequence[int], streamed: int, slots: int) -> int:
    """Device pages for `slots` of `streamed` pages, and for all that layers have away beyond that."""
    return slots * streamed + sum(max(0, pages - streamed) for pages in away)


@dataclass(frozen=True, slots=True)
class _Costs:
    layers: tuple[LayerReads, ...]
    seconds_of_page: float
    seconds_of_copy: float
    slower: float  # in place than a copy

    def choice(self, way: Way, streamed: int, slots: int) -> Choice:
        """Returns the choice with its times. See Note [A pass]."""
        stay = [min(layer.pages, streamed) for layer in self.layers]
        reads = [0.0] * len(stay) if slots else [pages * self.seconds_of_page * self.slower for pages in stay]
        compute = sum(layer.attention + layer.rest for layer in self.layers)
        seconds = self._pass(stay if slots else [0] * len(stay), reads, slots)
        arriving = [layer.pages - (0 if slots else pages) for layer, pages in zip(self.layers, stay, strict=True)]
        first = self._pass(arriving, reads, slots)
        pages = needed([layer.pages for layer in self.layers], streamed, slots)
        return Choice(way, streamed, slots, pages, seconds, seconds - compute, first)

    def _pass(self, copied: Sequence[int], reads: Sequence[float], slots: int) -> float:
        """Seconds of a pass in which so many pages of each layer are copied, and its attention takes so much longer."""
        now = link = 0.0
        over: list[float] = []  # when the attention of each layer ended
        for layer, pages, read in zip(self.layers, copied, reads, strict=True):
            if pages:
                link = max(link, over[-slots] if 0 < slots <= len(over) else 0.0)
                link += self.seconds_of_copy + pages * self.seconds_of_page
                now = max(now, link)
            over.append(now + layer.attention + read)
            now = over[-1] + layer.rest
        return now
