"""What a page costs while it is away from the device, whatever lies in it: one price, by which all that takes pages
takes, and all that is away comes back. Numbers in, an order out.

Note [The price]
    While an extent (a layer, pages of KV, a kept prefix) is away its users lose time:

        rate = uses per second * exposed seconds per use / pages
        once = seconds to take it there and back / pages

    Uses are those that would be if everything were present: a model that streams runs more seldom, and must not look
    cheaper for it. Models of one device take turns, so a model is used once in the time that all that run take
    together; one that is idle, once in the time until it is likely to be used again. Exposed are the seconds that hide
    behind nothing: of a layer what a pass takes longer without it, of KV that is read over the link all of them.

    What is taken goes by `rate + once / horizon`, the lowest first. The horizon is how long what was taken has stayed
    away of late: pages that are soon back should be cheap to move, others cheap to do without.

Note [What of the papers falls out]
    Free pages cost nothing (eLLM). A layer of an idle model costs a copy, one that hides behind a pass too, and none
    more than that until a pass waits for it: the cap of Oneiros (§5.3) is where the price leaves that. The model that
    ran last is, in a round, the one that is not used for longest (MRU). KV that nobody reads is lent (SwiftCache).

Note [A sequence]
    Each entry is priced as if all before it of its client were gone: alone every layer hides, and all together none
    does. So what a client offers is a sequence, and the order of all is their merge. Of equals the lowest priority
    goes first, then what was used last, then as each client offers it: models that run alike give in turns.

Note [Lumps]
    A layer may cost less than the one before it, as a slot is worth its pages only with the second. Then both cost what
    they cost together, by pages: else a model that has begun to give would give all, and another one just like it none.

Note [Made seldom]
    What a model's pass takes in so many pages is a simulation of its schedule, and a list asks for each of its layers.
    So the parts of a pass that are lost are kept by plan and ratio, whose steps are of a tenth (`Prices.step`), and the
    manager prices layers when plans, costs, the link or who runs have changed, and not with each list.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from .plan import Costs, Plan, fewest
from .reclaim_order import Candidate


class Price(NamedTuple):
    """What a page costs: `rate`, seconds lost in each second that it is away; `once`, seconds of its way there and
    back."""

    rate: float
    once: float

    def over(self, horizon: float) -> float:
        """The seconds lost per second by a page that is away for so many."""
        return self.rate + self.once / horizon


def until_used(since: float, usual: float | None, least: float) -> float:
    """The seconds until what is idle is likely to be used again. `since`: it has been idle; `usual`: it is idle as a
    rule, None where nobody knows; `least`: after which it counts as idle. What is overdue is taken to stay away for as
    long as it is late, as what nobody knows is for as long as it has been idle."""
    return max(least, since if usual is None else abs(usual - since))


def of_layers(
    plan: Plan, costs: Costs, uses: float, order: Iterable[int], slots: tuple[int, ...], step: float = 0.0
) -> list[tuple[int, Price]]:
    """Returns (layer, price) of each, as if those before it were gone, until nothing could be arranged any more.
    `plan`: what streams now; `uses`: passes per second. A layer takes its pages along; how the rest is arranged then is
    the fastest plan for what is left. `step`: see `stepped`."""
    order, lost = tuple(order), costs.seconds * uses
    parts = _lost_parts(plan, stepped(costs.ratio, step), order, slots)
    return [(layer, Price(part * lost, costs.page_seconds)) for layer, part in zip(order, parts, strict=False)]


def of_outside(costs: Costs, uses: float) -> Price:
    """The price of what an idle model has outside of its layers: nothing hides its copy. `uses`: passes per second."""
    return Price(costs.page_seconds * uses, costs.page_seconds)


def stepped(ratio: Fraction, step: float) -> Fraction:
    """The nearest power of 1 + `step`, so that prices are worked out again only for a ratio that is off by more than
    half of that; 0: the ratio itself."""
    if not step or ratio <= 0:
        return ratio
    return round(Fraction((1 + step) ** round(math.log(ratio) / math.log1p(step))), 6)


@lru_cache(maxsize=512)
def _lost_parts(plan: Plan, ratio: Fraction, order: tuple[int, ...], slots: tuple[int, ...]) -> tuple[float, ...]:
    """By what part of itself a pass takes longer for each page of the next layer of the order that is gone. See Note
    [Lumps]."""
    left, longest = plan.device_pages, _exposed(plan, ratio)
    lumps: list[tuple[float, int, int]] = []  # part of a pass, pages, layers
    for layer in order:
        left -= plan.pages[layer]
        exposed = exposed_part(plan.pages, left, ratio, slots)
        if exposed is None:
            break
        part, pages, layers = max(0.0, exposed - longest), plan.pages[layer], 1
        longest = max(longest, exposed)
        while lumps and part * lumps[-1][1] < lumps[-1][0] * pages:
            before = lumps.pop()
            part, pages, layers = part + before[0], pages + before[1], layers + before[2]
        lumps.append((part, pages, layers))
    return tuple(part / pages for part, pages, layers in lumps for _ in range(layers))


@lru_cache(maxsize=4096)
def exposed_part(pages: tuple[int, ...], left: int, ratio: Fraction, slots: tuple[int, ...]) -> float | None:
    """By what part of itself a pass takes longer in so many device pages than with every layer present; None where
    nothing can be arranged in them."""
    plan = fewest(pages, left, ratio, slots=slots) or fewest(pages, left, ratio, slots=(1,))
    return None if plan is None else _exposed(plan, ratio)


def _exposed(plan: Plan, ratio: Fraction) -> float:
    return float(plan.expected(ratio).time / len(plan.pages)) - 1 if plan.copied else 0.0


def merged(sequences: Iterable[Sequence[Candidate]], horizon: float) -> list[Candidate]:
    """The candidates of all clients in the order of taking: what costs least next, each client's own in its order.
    See Note [A sequence]."""
    heads = []
    for number, sequence in enumerate(sequences):
        if sequence:
            heads.append((*_key(sequence[0], horizon), 0, number, sequence))
    heapq.heapify(heads)
    order = []
    while heads:
        *_, at, number, sequence = heads[0]
        order.append(sequence[at])
        if at + 1 < len(sequence):
            heapq.heapreplace(heads, (*_key(sequence[at + 1], horizon), at + 1, number, sequence))
        else:
            heapq.heappop(heads)
    return order


def _key(candidate: Candidate, horizon: float) -> tuple[bool, float, int, float]:
    """What is due to others goes first, then what costs least. To one part in 2^20, so that equals are equal."""
    cost = Price(candidate.seconds, candidate.once / max(1, candidate.pages)).over(horizon)
    return not candidate.borrowed, _rounded(cost), candidate.priority, -candidate.recency


def _rounded(cost: float) -> float:
    mantissa, exponent = math.frexp(cost)
    return math.ldexp(round(mantissa * 2**20), exponent - 20)
