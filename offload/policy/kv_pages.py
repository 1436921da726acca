"""Where pages of KV lie: which are mapped ahead of their use (eLLM §5.1), which leave the peer for the host, and how
attention reads those on the host, with the memory that each way takes (SwiftCache §3.2, §3.3). Pure.

Words
    streamed    pages of a layer's KV that stay on the host and are copied into a *slot* each time it attends to them
    regular     KV that has device pages of its own
    exposed     seconds of an iteration in which compute waits for the link

Note [What is left over]
    Pages that are free serve as slots and as regular cache at once, as in Eq. 4 and 5 (tests/swiftcache.py): so few
    pages of each layer stream that the others, and the slots for these, fit. In place needs no slots, and so a few
    pages less stream.

Note [A pass]
    Copies are submitted in the order of the layers, one at a time on the link. That of layer j starts when the
    attention of the layer that had its slot is over, layer j - 1 for one slot, j - 2 for two; its attention starts
    when the layer before is done and its copy is. For layers all alike a layer costs, with one slot, its attention
    and the longer of its copy and the rest; with two the longer of its copy and its compute. The first copies of a pass
    are waited for: whether they could have begun in the pass before is not for here to know.

Note [In place]
    A kernel that reads host pages in place runs at the link's speed, with nothing to overlap. The bytes are read once
    for every 256 rows. Above 64 rows copying is better even where it cannot hide, unless there is no room at all.

Note [Window]
    The layers of a cache reach the end of their pages in the same iteration, and all of their next pages at once would
    be more than may lie ahead unused. So those of the first layers are asked for in the iteration before, and each
    layer that takes its page asks for that of the layer a window behind it.

Note [Room]
    What leaves the device goes to the peer while that has pages, as it is nearer, and to the host from then on, however
    hot. So where fewer than an eighth of the peer's pages are free, the coldest of them go to the host, in the
    background, until a quarter is. What is on the peer and not used costs nothing there, so that idle caches go before
    those that run, and of each kind those first that were used longest ago: the reverse of the order in which they
    leave the device (reclaim_order.py), where what was used last is taken first as its owner has just had its turn.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from .tuning import DEFAULT, FreePages, KVReads


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
    iteration once pages are restored, `exposed` of them waiting for the link."""

    way: Way
    streamed: int
    slots: int
    pages: int
    seconds: float
    exposed: float


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
    slower = -(-rows // _ROWS_OF_A_PASS) / tuning.in_place
    costs = _Costs(tuple(layers), page / link, tuning.copy, slower)
    if sum(layer.pages for layer in layers) <= free:
        return costs.choice(Way.RESIDENT, 0, 0)
    through = [
        costs.choice(Way.STREAMED, streamed, slots)
        for slots in (1, 2)
        if (streamed := fewest_streamed([layer.pages for layer in layers], free, slots)) is not None
    ]
    if through and rows > ROWS:
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
        now = link = 0.0
        over: list[float] = []  # when the attention of each layer ended
        for layer in self.layers:
            stay = min(layer.pages, streamed)
            if stay and slots:
                link = max(link, over[-slots] if slots <= len(over) else 0.0)
                link += self.seconds_of_copy + stay * self.seconds_of_page
                now = max(now, link)
            over.append(now + layer.attention + (0.0 if slots else stay * self.seconds_of_page * self.slower))
            now = over[-1] + layer.rest
        compute = sum(layer.attention + layer.rest for layer in self.layers)
        pages = needed([layer.pages for layer in self.layers], streamed, slots)
        return Choice(way, streamed, slots, pages, now, now - compute)


def window(page: int, limit: int) -> int:
    """Returns how many pages of `page` bytes may lie ahead of their use: `limit` bytes in all, or one page."""
    return max(1, limit // page)


def ahead(layer: int, layers: int, width: int, *, took: bool, next_takes: bool) -> tuple[int, ...]:
    """Returns the layers, of ranges of their own, whose next page is requested once `layer` has appended a token.
    `took`: it took a new page for that; `next_takes`: it will for the next one. At most `width` pages lie ahead, while
    all layers append alike."""
    asked = []
    if took and layer + width < layers:
        asked.append(layer + width)
    if next_takes and layer < width:
        asked.append(layer)
    return tuple(asked)


# 1/32 of the budget never goes back to clients that gave pages, so that the next tokens find room. Chosen.
SPARE: Final = 32
# 1/64 of the budget in new full pages of a prefill: then the manager is told at once, and makes a new list, which takes
# milliseconds (docs/mechanisms.md). Chosen.
_TELL: Final = 64
# 1/8 of the peer's pages is free at least, or 1/4 is made free. Chosen, apart so that it is not done all the time.
_LOW: Final = 8
_ENOUGH: Final = 4
# Bytes that may be mapped ahead of their use in all, or one page (eLLM §5.1). The core has the same (tuning.h).
AHEAD: Final = 50_000_000
# 1/32 of the budget stays with a cache, to be taken where activations need it before slots are. Chosen.
LEFT: Final = 32
# Rows of queries, or of a product, up to which the host is read in place at full speed; above them copying is better
# even where it cannot hide. Measured: 47 to 51 of 55 GB/s with 1 to 64 rows, half of it with 512; bf16.
ROWS: Final = 64
# Rows after which a kernel reads the same bytes again. Measured: 26 GB/s with 512 rows where 64 have 50.
_ROWS_OF_A_PASS: Final = 256


def scarce(free: int, total: int, tuning: FreePages) -> bool:
    """Are so many free pages of a budget few?"""
    return free * tuning.short < total


def mark(total: int) -> int:
    """Pages of a budget that stay free, so that the next tokens find room."""
    return max(1, total // SPARE)


def worth_telling(pages: int, total: int) -> bool:
    """Are so many pages that became full, and may be taken, worth a new list?"""
    return pages > 0 and pages * _TELL >= total


@dataclass(frozen=True, slots=True)
class Near:
    """A cache with so many `pages` on the peer that could go. `active`: is it in use? `used`: when it was last."""

    client: int
    pages: int
    active: bool
    used: float


def lacking(free: int, total: int) -> int:
    """Returns how many pages should leave a peer of `total`, of which so many are free or on their way."""
    return 0 if free * _LOW >= total else -(-total // _ENOUGH) - free


def leaving(caches: Iterable[Near], pages: int) -> dict[int, int]:
    """Returns how many pages leave, by client, the coldest first."""
    counts: dict[int, int] = {}
    for cache in sorted(caches, key=lambda cache: (cache.active, cache.used)):
        if (going := min(pages, cache.pages)) > 0:
            counts[cache.client] = going
            pages -= going
    return counts


def mean_seconds(near: int, far: int, peer: float | None, host: float | None) -> float | None:
    """Mean seconds to copy a page, of so many on the peer and so many on the host. A link that was not measured counts
    as the other; None where neither was."""
    peer, host = (host if peer is None else peer), (peer if host is None and near else host)
    if peer is None or host is None or not near + far:
        return host
    return (near * peer + far * host) / (near + far)
