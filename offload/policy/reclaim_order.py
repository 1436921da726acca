"""The reclaim order: what gives its device pages in which order. Numbers in, an order out.

What is reclaimed first is what costs least while it is away (price.py). The native core reclaims: it goes down the list
that was published, in the middle of any operator. In front of that list, without entries, it does what costs nothing;
behind it come waiting, pages of the host, and refusal. What needs somebody's consent (`DUPLICATES`) is not on the list:
where the core takes what each pass waits for, that is asked for as well (overview.py).

Note [Limits and prices]
    Limits come before prices: floors, and the pages that an SLO needs, are not on the list. Then what costs nothing
    goes, whoever has it; then what belongs to models of the lowest priority; of these what costs least; of equals what
    is idle, then what was used last. Models that run alike give in turns, whoever gave the smallest part.

Note [A sequence]
    Each entry is priced as if all before it of its client were gone: alone every layer hides, and all together none
    does. So what a client offers is a sequence, and the order of all is their merge.

Note [Floors]
    A model keeps `floor` device pages for its weights and its caches together. So each candidate is passed over that
    would leave it with less once all before it are taken. The core may take some and not others (a thread leases them),
    but never more than the list has, so that what is left is never less. A model that frees its own KV may be below it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

from .price import Price


class PageSource(IntEnum):
    """What pages are taken from, as events and people call it. Their numbers say nothing of the order of taking."""

    TRIM = 0  # free blocks, cached ranges, reserves
    PREFIX = 1  # KV that is only kept in case that a prompt begins with it, and lies on the host as well
    IDLE_ACTIVATIONS = 2  # free pages of activations become KV, or the reverse
    LEND = 3  # KV that nobody uses, of a model that has more than its own, while another one lacks that (lending.py)
    IDLE_WEIGHTS = 4
    IDLE_KV = 5
    HIDDEN_WEIGHTS = 6  # of models that run, while the copies hide
    DUPLICATES = 7  # layers that other replicas hold as well: dropped by consent of their controller, never by the core
    STALLING_WEIGHTS = 8  # beyond that
    RUNNING_KV = 9  # read in place
    WAIT = 10  # for what other threads use
    SPILL = 11  # pages of the host in the place of pages of the device
    REFUSE = 12

    @property
    def label(self) -> str:
        """As events and people call it."""
        return self.name.lower().replace("_", " ").replace("kv", "KV")

    @property
    def idle(self) -> bool:
        """Does nobody use it?"""
        return self < PageSource.HIDDEN_WEIGHTS

    @property
    def exposed(self) -> bool:
        """Does each pass wait for it once it is away?"""
        return self in (PageSource.STALLING_WEIGHTS, PageSource.RUNNING_KV)


LISTED: Final = (
    PageSource.PREFIX,
    PageSource.LEND,
    PageSource.IDLE_WEIGHTS,
    PageSource.IDLE_KV,
    PageSource.HIDDEN_WEIGHTS,
    PageSource.STALLING_WEIGHTS,
    PageSource.RUNNING_KV,
)
OF_LAYERS: Final = (PageSource.IDLE_WEIGHTS, PageSource.HIDDEN_WEIGHTS, PageSource.STALLING_WEIGHTS)  # not of pages
BORROWED: Final = (
    PageSource.PREFIX,
    PageSource.IDLE_KV,
)  # what may lie in pages that are due to others, see lending.py


NOTHING: Final = Price(0.0, 0.0)


@dataclass(slots=True)
class Candidate:
    """What is taken at a time: `index` of the `client` with that number, so many device `pages`, at a price per page.

    `leaving`: seconds in which its bytes go to where they will lie; `priority`: those with the lowest give first;
    `recency`: of equals the one with the highest: when what is idle was used, when KV that is read came, less the part
    that a model that runs has given. `owner`: the model whose floor it counts for, 0 for none. `borrowed`: it lies in
    what is another's. `divisible`: any number of its pages may be taken, and it may be made two candidates, the second
    with an index higher by this."""

    source: PageSource
    client: int
    index: int
    pages: int
    price: Price = NOTHING
    leaving: float = 0.0
    priority: int = 0
    recency: float = 0.0
    owner: int = 0
    borrowed: bool = False
    divisible: int = 0

    def split(self, pages: int) -> tuple[Candidate, Candidate]:
        """A candidate of so many of its pages, fewer than it has, and one of the others."""
        rest, part = self.pages - pages, self.leaving / self.pages
        return (
            replace(self, pages=pages, leaving=part * pages),
            replace(self, index=self.index + self.divisible, pages=rest, leaving=part * rest),
        )

    @property
    def label(self) -> str:
        """As events call it."""
        return (PageSource.LEND if self.borrowed else self.source).label


def ordered(sequences: Iterable[Sequence[Candidate]], horizon: float) -> list[Candidate]:
    """The candidates of all clients in the order of taking, each client's own in its order, where pages stay away for
    `horizon` seconds. See Note [Limits and prices] and Note [A sequence]."""
    heads = [
        (*_place(sequence[0], horizon), 0, number, sequence) for number, sequence in enumerate(sequences) if sequence
    ]
    heapq.heapify(heads)
    order = []
    while heads:
        *_, at, number, sequence = heads[0]
        order.append(sequence[at])
        if at + 1 < len(sequence):
            heapq.heapreplace(heads, (*_place(sequence[at + 1], horizon), at + 1, number, sequence))
        else:
            heapq.heappop(heads)
    return order


def _place(candidate: Candidate, horizon: float) -> tuple[bool, int, float, bool, float]:
    """The place of a candidate among others. Costs to one part in 2^20, so that equals are equal."""
    mantissa, exponent = math.frexp(candidate.price.over(horizon))
    cost = math.ldexp(round(mantissa * 2**20), exponent - 20)
    return cost > 0, candidate.priority, cost, not candidate.source.idle, -candidate.recency


def claimed(order: Iterable[Candidate], owed: Mapping[int, int]) -> list[Candidate]:
    """What is due to others first, when owners owe so many pages: as many of their candidates of KV that nobody uses,
    those that would be taken first, are borrowed. `order`: of taking. See lending.py, Note [Due]."""
    left, due, rest = dict(owed), list[Candidate](), list[Candidate]()
    for candidate in order:
        owes = left.get(candidate.owner, 0)
        if candidate.source not in BORROWED or owes <= 0:
            rest.append(candidate)
            continue
        if candidate.divisible and owes < candidate.pages:
            candidate, other = candidate.split(owes)
            rest.append(other)
        left[candidate.owner] -= candidate.pages
        due.append(replace(candidate, borrowed=True))
    return due + rest


def above_floors(candidates: Iterable[Candidate], spare: Mapping[int, int]) -> list[Candidate]:
    """Without those that would leave a model with less than its floor. `spare`: pages that each owner has beyond it;
    those who are not named have no floor. See Note [Floors]."""
    left, kept = dict(spare), []
    for candidate in candidates:
        if candidate.owner in left:
            if candidate.divisible and 0 < left[candidate.owner] < candidate.pages:
                candidate, _ = candidate.split(left[candidate.owner])
            if candidate.pages > left[candidate.owner]:
                continue
            left[candidate.owner] -= candidate.pages
        kept.append(candidate)
    return kept
