"""The order in which the native core may take layers in the middle of an operator: numbers in, a list out.

Note [Nested]
    `remap.reclaimable` gives the plan that a model has after each step, and its plans for m and for m + 1 streamed
    layers have few layers in common. The core takes layer by layer, and cannot put back what it took before. So the
    list has the layers in an order of which every beginning is spread around the circle as well as it can be: the next
    layer is always the one farthest from those that stream. Where there are 2^k equal layers that is the order of van
    der Corput, in which no gap is below half of what even spacing would give. What was taken is arranged exactly before
    the model runs next.

Note [As much as can be arranged]
    A layer that is taken gives all its pages, and streamed layers need slots, whose pages come from streamed layers as
    well: m streamed layers free fewer than m layers' pages. So a model gives as many pages as the plan that frees most
    under its cap, and never more: then there is always a plan for what is left. Beyond the cap, at the end of the list,
    it gives as many as the plan that frees most at all: a budget far below, or an allocation that would fail, is met by
    a model that is slow. The pages that an SLO needs (`Model.least`) stay even then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

from .plan import smallest
from .reclaim_order import Candidate, Rung, weights_order
from .remap import Model


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


def listing(
    models: Iterable[Model], gone: Mapping[str, Collection[int]]
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """(model, layer) of all that may be taken, in the order of `reclaim_order.weights_order`: idle models each until it
    has given what it can, then those that run, in turns. The first list stays within the caps, the second goes on
    beyond them. `gone`: layers of each model that have no pages of their own. See Note [As much as can be arranged]."""
    givers = [_Giver.of(model, gone[model.name]) for model in models]
    within = _in_turns(givers)
    for giver in givers:
        giver.left += giver.beyond
    return within, _in_turns(givers)


def by_rung(models: Iterable[Model], gone: Mapping[str, Collection[int]]) -> Iterator[tuple[Rung, Model, int]]:
    """Iterates over what `listing` has, with the rung of the ladder that takes each layer."""
    known = {model.name: model for model in models}
    hidden = {name: givable(replace(model, base=0)) for name, model in known.items()}  # while the copies hide
    within, beyond = listing(known.values(), gone)
    for name, layer in within:
        model = known[name]
        hidden[name] -= model.plan.pages[layer]
        if not model.active:
            yield Rung.IDLE_WEIGHTS, model, layer
        else:
            yield Rung.HIDDEN_WEIGHTS if hidden[name] >= 0 else Rung.STALLING_WEIGHTS, model, layer
    for name, layer in beyond:
        yield Rung.LAST_WEIGHTS, known[name], layer


def of_layer(rung: Rung, model: Model, layer: int, number: int) -> Candidate:
    """Returns a layer as a candidate. `number`: of the model. All have one recency: equals are in their order
    already."""
    stalls = model.active and rung in (Rung.STALLING_WEIGHTS, Rung.LAST_WEIGHTS)
    seconds = model.costs.page_seconds if stalls else 0.0
    return Candidate(rung, number, layer, model.plan.pages[layer], model.priority, 0.0, seconds, owner=number)


def _in_turns(those: Iterable[_Giver]) -> list[tuple[str, int]]:
    """Returns the layers that models give in turns, until none has pages `left` to give."""
    givers, taken = list(those), []
    while givers:
        giver = min(givers, key=lambda it: weights_order(it.model, it.given))
        layer = next((candidate for candidate in giver.order if giver.model.plan.pages[candidate] <= giver.left), None)
        if layer is None:
            givers.remove(giver)
        else:
            taken.append((giver.model.name, layer))
            giver.give(layer)
    return taken


def givable(model: Model) -> int:
    """Device pages that a model can give under its cap. See Note [As much as can be arranged]."""
    return model.plan.device_pages - max(model.least, _least(model.plan.pages, model.cap))


@dataclass(slots=True)
class _Giver:
    model: Model
    order: list[int]
    left: int  # pages that it can still give
    beyond: int  # and so many more beyond its cap
    freed: int

    @classmethod
    def of(cls, model: Model, gone: Collection[int]) -> _Giver:
        order, within = list(nested(model.plan.pages, tuple(sorted(gone)))), givable(model)
        most = givable(replace(model, base=len(model.plan.pages)))
        return cls(model, order, within, most - within, model.freed)

    @property
    def given(self) -> Fraction:
        return Fraction(self.freed, max(1, sum(self.model.plan.pages)))

    def give(self, layer: int) -> None:
        pages = self.model.plan.pages[layer]
        self.order.remove(layer)
        self.left -= pages
        self.freed += pages


_least = lru_cache(maxsize=256)(smallest)
