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

Note [Lumps]
    A layer may cost less than the one before it, as a slot is worth its pages only with the second. Then both cost what
    they cost together, by pages: else a model that has begun to give would give all, and another one just like it none.

Note [Made seldom]
    What a model's pass takes in so many pages is a simulation of its schedule, and a list asks for each of its layers.
    So the parts of a pass that are lost are kept by plan and ratio, whose steps are of a tenth (`Prices.step`), and the
    manager prices layers when plans, costs, the link or who runs have changed, and not with each list.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from .plan import Costs, Plan, fewest
from .tuning import Prices


class Price(NamedTuple):
    """What a page costs: `rate`, seconds lost in each second that it is away; `once`, seconds of its way there and
    back."""

    rate: float
    once: float

    def over(self, horizon: float) -> float:
        """The seconds lost per second by a page that is away for so many."""
        return self.rate + self.once / horizon


def until_used(since: float, usual: float | None, least: float, horizon: float) -> float:
    """The seconds until what is idle is likely to be used again. `since`: it has been idle; `usual`: it is idle as a
    rule, None where nobody knows; `least`: after which it counts as idle. What is overdue is taken to stay away for as
    long as it is late; what nobody knows, for as long as it has been idle, and for the `horizon` at least."""
    return max(horizon, since) if usual is None else max(least, abs(usual - since))


def horizon_after(horizon: float, away: float, tuning: Prices) -> float:
    """The horizon once pages have come back that were `away` for so many seconds: a mean that fades, within bounds."""
    mean = horizon + (away - horizon) / tuning.remembered
    return min(tuning.longest, max(tuning.shortest, mean))


class LayerPrice(NamedTuple):
    """What a page of a layer costs, and by what part of itself a pass takes longer once it and those before it are
    gone."""

    layer: int
    price: Price
    exposed: float


def of_layers(
    plan: Plan, costs: Costs, uses: float, order: Iterable[int], slots: tuple[int, ...], step: float = 0.0
) -> list[LayerPrice]:
    """Returns the price of each layer as if those before it were gone, until nothing could be arranged any more.
    `plan`: what streams now; `uses`: passes per second. A layer takes its pages along; how the rest is arranged then is
    the fastest plan for what is left. `step`: see `stepped`."""
    order, lost = tuple(order), costs.seconds * uses
    parts = _lost_parts(plan, stepped(costs.ratio, step), stepped(costs.host, step), order, slots)
    return [
        LayerPrice(layer, Price(part * lost, costs.page_seconds), exposed)
        for layer, (part, exposed) in zip(order, parts, strict=False)
    ]


def of_outside(costs: Costs, uses: float) -> Price:
    """The price of what an idle model has outside of its layers: nothing hides its copy. `uses`: passes per second."""
    return Price(costs.page_seconds * uses, costs.page_seconds)


def stepped(value: Fraction, step: float) -> Fraction:
    """The nearest power of 1 + `step`, so that prices are worked out again only for a value that is off by more than
    half of that; 0: the value itself."""
    if not step or value <= 0:
        return value
    return round(Fraction((1 + step) ** round(math.log(value) / math.log1p(step))), 6)


@lru_cache(maxsize=512)
def _lost_parts(
    plan: Plan, ratio: Fraction, entering: Fraction, order: tuple[int, ...], slots: tuple[int, ...]
) -> tuple[tuple[float, float], ...]:
    """By what part of itself a pass takes longer for each page of the next layer of the order that is gone, and by what
    part for all so far. See Note [Lumps]."""
    left, begun = plan.device_pages, _exposed(plan, ratio, entering)
    longest = begun
    lumps: list[tuple[float, int, int]] = []  # part of a pass, pages, layers
    so_far = list[float]()
    for layer in order:
        left -= plan.pages[layer]
        exposed = exposed_part(plan.pages, left, ratio, entering, slots)
        if exposed is None:
            break
        part, pages, layers = max(0.0, exposed - longest), plan.pages[layer], 1
        longest = max(longest, exposed)
        so_far.append(longest)
        while lumps and part * lumps[-1][1] < lumps[-1][0] * pages:
            before = lumps.pop()
            part, pages, layers = part + before[0], pages + before[1], layers + before[2]
        lumps.append((part, pages, layers))
    rates = (part / pages for part, pages, layers in lumps for _ in range(layers))
    return tuple(zip(rates, so_far, strict=True))


@lru_cache(maxsize=4096)
def exposed_part(
    pages: tuple[int, ...], left: int, ratio: Fraction, entering: Fraction, slots: tuple[int, ...]
) -> float | None:
    """By what part of itself a pass takes longer in so many device pages than with every layer present; None where
    nothing can be arranged in them."""
    plan = fewest(pages, left, ratio, slots=slots) or fewest(pages, left, ratio, slots=(1,))
    return None if plan is None else _exposed(plan, ratio, entering)


def _exposed(plan: Plan, ratio: Fraction, entering: Fraction) -> float:
    return float(plan.expected(ratio, entering) / len(plan.pages)) - 1 if plan.streamed else 0.0
