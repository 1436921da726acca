"""What a model gives of its weights (Oneiros §5): which of its layers is next, what a page of it costs, and how those
that are left are arranged. Numbers in, plans and candidates out.

Note [What became of Algorithm 1]
    The paper takes layers of idle models, the one used last first, and of each as many as hide behind an iteration.
    Here each layer has a price (price.py), and the lowest goes. An idle model is worth what it costs when it is used
    next, whatever it gave; of one that runs, layers that hide cost no more than their way there and back, so they go
    first, and where copies begin to be waited for the price leaves that: this is the paper's cap, T_T·N ≤ T_compute
    (§5.3). One layer always stays, as a slot (§5.2). How many slots (β) is decided by the times that the schedule of
    either number gives (§5.4).

Note [Nested]
    Plans for m and for m + 1 streamed layers have few layers in common. The core takes layer by layer, and cannot put
    back what it took before. So the list has the layers in an order of which every beginning is spread around the
    circle as well as it can be: the next layer is always the one farthest from those that stream. Where there are 2^k
    equal layers that is the order of van der Corput, in which no gap is below half of what even spacing would give.
    What was taken is arranged exactly before the model runs next.

Note [As much as can be arranged]
    A layer that is taken gives all its pages, and streamed layers need slots, whose pages come from streamed layers as
    well: m streamed layers free fewer than m layers' pages. So a model gives as many pages as the plan that frees most,
    and never more: then there is always a plan for what is left. The pages that an SLO needs (`Model.least`) stay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from .plan import Costs, Plan, fewest, smallest
from .price import of_layers
from .reclaim_order import Candidate, PageSource
from .tuning import DEFAULT


@dataclass(frozen=True, slots=True)
class Model:
    """A managed model. `plan`: what it streams; `costs`: of the iteration that it does next; `active`: does it run?
    `priority`: those with the lowest give first; `used`: when it last ran, on any clock; `least`: device pages that it
    keeps, as an SLO or a floor needs them; `slots`: as `tuning.WeightPlans` has them."""

    name: str
    plan: Plan
    costs: Costs
    active: bool = False
    priority: int = 0
    used: float = 0.0
    least: int = 0
    slots: tuple[int, ...] = DEFAULT.weights.slots

    @property
    def givable(self) -> int:
        """Device pages that it can give. See Note [As much as can be arranged]."""
        return self.plan.device_pages - max(self.least, _smallest(self.plan.pages))


def standing(plan: Plan, taken: Iterable[int], costs: Costs, slots: tuple[int, ...]) -> Plan:
    """Returns the plan of a model once these layers of its plan are `taken`: the fastest plan for the pages that are
    left to it."""
    left = plan.device_pages - sum(plan.pages[layer] for layer in taken)
    if left == plan.device_pages:
        return plan
    best = fewest(plan.pages, left, costs.ratio, slots=slots) or fewest(plan.pages, left, costs.ratio, slots=(1,))
    best = best or fewest(plan.pages, smallest(plan.pages), costs.ratio)
    assert best is not None
    return best


@lru_cache(maxsize=256)
def nested(pages: tuple[int, ...], streamed: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The layers with pages that are not among `streamed`, each as far as possible, by what there is to compute
    between, from those and from the ones before it; of equals one from the widest gap. See Note [Nested]."""
    total, ends = sum(pages), list(accumulate(pages))

    def room(layer: int) -> tuple[int, int, int]:
        around = [(ends[layer] - ends[other]) % total for other in there]
        behind, ahead = min(around, default=total), total - max(around, default=0)
        return min(behind, ahead), behind + ahead, -layer

    there, order = list(streamed), []
    left = {layer for layer in range(len(pages)) if pages[layer]}.difference(there)
    while left:
        order.append(max(left, key=room))
        there.append(order[-1])
        left.remove(order[-1])
    return tuple(order)


def layers_given(model: Model, gone: Collection[int]) -> Iterator[int]:
    """Iterates over the layers that may be taken of a model, in the order of taking. `gone`: those that have no pages
    of their own."""
    left = model.givable
    for layer in nested(model.plan.pages, tuple(sorted(gone))):
        if model.plan.pages[layer] <= left:
            left -= model.plan.pages[layer]
            yield layer


def candidates(
    model: Model, number: int, gone: Collection[int], uses: float, hidden: float, step: float = 0.0
) -> list[Candidate]:
    """Returns the layers that may be taken of a model with that `number`, at their prices, each as if those before it
    were gone. `uses`: passes per second; `hidden`: the part of itself by which a pass may take longer while copies
    count as hidden; `step`: see price.stepped."""
    prices = of_layers(model.plan, model.costs, uses, layers_given(model, gone), model.slots, step)
    pages, offered = model.plan.pages, list[Candidate]()
    total, given = max(1, sum(pages)), sum(pages) - model.plan.device_pages
    for layer, price, exposed in prices:
        source = PageSource.HIDDEN_WEIGHTS if exposed <= hidden else PageSource.STALLING_WEIGHTS
        source = source if model.active else PageSource.IDLE_WEIGHTS
        recency = -given / total if model.active else model.used
        offered.append(
            Candidate(
                source, number, layer, pages[layer], price, priority=model.priority, recency=recency, owner=number
            )
        )
        given += pages[layer]
    return offered


_smallest = lru_cache(maxsize=256)(smallest)
