"""Which weights give their pages to the KV cache, and get them back (Oneiros §5), and the order in which the native
core may take layers in the middle of an operator: numbers in, plans and lists out.

Note [Algorithm 1]
    Read here: a model is at its end when it streams as many layers as its cap, not as many as it has; the model that
    was popped is asked again until then; what lines 7-12 do gives layers back, and remaps nothing. A cap counts the
    layers that stream (m) and not those whose pages are free (m - β): N in §5.3 is m. It is the largest m with T_T·m ≤
    T_compute (§5.3), which has what the host takes for these layers (`Costs.entering`), of a decode step for a model
    that runs and of a prefill for one that waits for work, and always leaves one layer (§5.2). How many slots (β) is
    decided by the times that the schedule of either number gives (§5.4).

Note [Calm]
    Taking is immediate, giving back waits: weights come back over the link, and would have to go again. Pages count as
    spare that were free all through `dwell` seconds in which no thread waited for any, but for `mark` pages, so that
    the next tokens find room, and for as many as went meanwhile: a load that grows would soon have them again. With a
    load that comes and goes faster than that nothing moves.

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

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, takewhile

from .plan import Costs, Plan, fewest, smallest, spread
from .reclaim_order import Candidate, Level, weights_order
from .tuning import DEFAULT


@dataclass(frozen=True, slots=True)
class Model:
    """A managed model. `plan`: what it streams; `decode`, `prefill`: costs of an iteration of either kind; `active`:
    does it run? `priority`: those with the lowest give first; `used`: when it last ran, on any clock; `most`: layers
    that it may stream, where set; `base`: layers that it may stream in any case, as it came with so many; `least`:
    device pages that it keeps, as an SLO needs them. `slots`, `mru`, `capped`: as `tuning.WeightPlans` has them."""

    name: str
    plan: Plan
    decode: Costs
    prefill: Costs
    active: bool = False
    priority: int = 0
    used: float = 0.0
    most: int | None = None
    base: int = 0
    least: int = 0
    slots: tuple[int, ...] = DEFAULT.weights.slots
    mru: bool = True
    capped: bool = True

    @property
    def costs(self) -> Costs:
        """The costs of the iteration that it does next."""
        return self.decode if self.active else self.prefill

    @property
    def cap(self) -> int:
        """Layers that it may stream."""
        limit = cap(self.costs, self.capped)
        return max(self.base, limit if self.most is None else min(limit, self.most))

    @property
    def freed(self) -> int:
        """Device pages of its weights that serve something else."""
        return sum(self.plan.pages) - self.plan.device_pages

    @property
    def given(self) -> Fraction:
        """The part of its weights that serves something else."""
        return Fraction(self.freed, max(1, sum(self.plan.pages)))

    @property
    def stall(self) -> float:
        """Seconds that the next iteration waits for copies."""
        return self.costs.of(self.plan) - self.costs.seconds


@dataclass(frozen=True, slots=True)
class Remapping:
    """New plans by model, the device pages that they free, and the pages wanted that they do not give."""

    plans: Mapping[str, Plan]
    freed: int
    short: int


@lru_cache(maxsize=256)
def cap(costs: Costs, capped: bool = True) -> int:
    """Returns the most layers whose copies take no longer than the iteration, or where not `capped` that there are;
    never all that have pages. See Note [Algorithm 1]."""
    pages, total = costs.pages, sum(costs.pages)
    entering = costs.host * total / max(1, len(pages))  # in pages computed

    def hidden(count: int) -> bool:
        at = spread(pages, count)
        return not capped or sum(pages[layer] for layer in at) * costs.ratio <= total + len(at) * entering

    return max(takewhile(hidden, range(max(1, sum(map(bool, pages))))))


def standing(
    plan: Plan, taken: Iterable[int], costs: Costs, base: int, slots: tuple[int, ...], capped: bool = True
) -> Plan:
    """Returns the plan of a model once these layers of its plan are `taken`: the fastest plan for the pages that are
    left to it. Beyond its cap with one slot: pages are so short that the next layer may have to go, and a slot
    cannot."""
    left = plan.device_pages - sum(plan.pages[layer] for layer in taken)
    if left == plan.device_pages:
        return plan
    best = fewest(plan.pages, left, costs.ratio, max(cap(costs, capped), base), slots)
    best = best or fewest(plan.pages, left, costs.ratio, slots=(1,))
    best = best or fewest(plan.pages, smallest(plan.pages), costs.ratio)
    assert best is not None
    return best


@dataclass(frozen=True, slots=True)
class RemapStep:
    """A model's next plan, and the device pages that it frees beyond those of the plan before it."""

    model: str
    plan: Plan
    freed: int


def reclaimable(models: Iterable[Model]) -> Iterator[RemapStep]:
    """Iterates over all that weights can give, in order: the steps to take while pages are wanted."""
    giving = {model.name: model for model in models}
    while giving:
        giver = min(giving.values(), key=lambda model: weights_order(model, model.given))
        plan = _freeing_more(giver)
        if plan is None:
            del giving[giver.name]
            continue
        yield RemapStep(giver.name, plan, giver.plan.device_pages - plan.device_pages)
        giving[giver.name] = replace(giver, plan=plan)


def remap(models: Iterable[Model], wanted: int, free: int) -> Remapping:
    """Frees `wanted` device pages for the KV cache, of which `free` are there: while that is enough nothing is remapped
    (§5.1)."""
    short, freed = max(0, wanted - free), 0
    plans: dict[str, Plan] = {}
    steps = reclaimable(models)
    while freed < short and (step := next(steps, None)) is not None:
        plans[step.model] = step.plan
        freed += step.freed
    return Remapping(plans, freed, max(0, short - freed))


def activate(models: Sequence[Model], name: str, free: int) -> Remapping:
    """Plans the first decode step of an idle model that has work again: it streams no more than its decode cap, however
    many it came with, and pages for that are taken from others where too few are `free`. Where the result is `short`
    the model must wait. `freed`: of all plans together, negative where free pages are taken. KeyError."""
    model = next((candidate for candidate in models if candidate.name == name), None)
    if model is None:
        raise KeyError(name)
    running = replace(model, active=True, base=0)
    if len(model.plan.streamed) <= running.cap:
        return Remapping({}, 0, 0)
    least = smallest(model.plan.pages, running.cap)
    plan = fewest(model.plan.pages, least, running.costs.ratio, running.cap, model.slots) or fewest(
        model.plan.pages, least, running.costs.ratio, running.cap
    )
    assert plan is not None
    taken = plan.device_pages - model.plan.device_pages
    others = remap([other for other in models if other.name != name], taken, free)
    return Remapping({name: plan, **others.plans}, others.freed - taken, others.short)


def restore(model: Model, spare: int) -> Plan | None:
    """The plan with which a model's weights take back up to `spare` pages; None where none costs less time, or as much
    with fewer host pages."""
    costs, now = model.costs, model.plan
    most = max(model.cap, len(now.streamed))
    plan = fewest(now.pages, now.device_pages + spare, costs.ratio, most, model.slots) if spare > 0 else None
    if plan is not None and (costs.of(plan), plan.host_pages) < (costs.of(now), now.host_pages):
        return plan
    return None


@dataclass(frozen=True, slots=True)
class CalmClock:
    """A time without waiting for pages: `since` when, in seconds, the fewest that were `free`, and how many at
    `first`."""

    since: float
    free: int
    first: int


def observe(
    calm: CalmClock | None, now: float, free: int, waiting: bool, mark: int, dwell: float
) -> tuple[CalmClock | None, int]:
    """Updates the clock between iterations, `now` in seconds. Returns the clock for the next call, and how many pages
    may be given back. See Note [Calm]."""
    if waiting or free < mark:
        return None, 0
    if calm is None or free < calm.free:  # else it is unchanged
        calm = CalmClock(now, free, free) if calm is None else replace(calm, free=free)
    if now - calm.since < dwell:
        return calm, 0
    return None, max(0, calm.free - mark - max(0, calm.first - free))


def _freeing_more(model: Model) -> Plan | None:
    """Returns the fastest plan under the model's cap that frees more than the present one."""
    plan = fewest(model.plan.pages, model.plan.device_pages - 1, model.costs.ratio, model.cap, model.slots)
    return plan if plan is not None and plan.device_pages >= model.least else None


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


def by_level(models: Iterable[Model], gone: Mapping[str, Collection[int]]) -> Iterator[tuple[Level, Model, int]]:
    """Iterates over what `listing` has, with the level of the reclaim order that takes each layer."""
    known = {model.name: model for model in models}
    hidden = {name: givable(replace(model, base=0)) for name, model in known.items()}  # while the copies hide
    within, beyond = listing(known.values(), gone)
    for name, layer in within:
        model = known[name]
        hidden[name] -= model.plan.pages[layer]
        if not model.active:
            yield Level.IDLE_WEIGHTS, model, layer
        else:
            yield Level.HIDDEN_WEIGHTS if hidden[name] >= 0 else Level.STALLING_WEIGHTS, model, layer
    for name, layer in beyond:
        yield Level.LAST_WEIGHTS, known[name], layer


def of_layer(level: Level, model: Model, layer: int, number: int) -> Candidate:
    """Returns a layer as a candidate. `number`: of the model. All have one recency: equals are in their order
    already."""
    stalls = model.active and level in (Level.STALLING_WEIGHTS, Level.LAST_WEIGHTS)
    seconds = model.costs.page_seconds if stalls else 0.0
    return Candidate(level, number, layer, model.plan.pages[layer], model.priority, 0.0, seconds, owner=number)


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
