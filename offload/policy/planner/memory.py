"""Which layers stream and which KV leaves in a run, by the decisions that the run makes: pages in, pages out.

Note [A run, foreseen]
    Three moments decide. `manage()` moves the models in one after the other, each with as few layers streaming as the
    room beside it demands (hooks/weights/room.py); where there is none, models that came before give layers, as they
    are idle. When prompts are computed, all run, and what their KV and activations lack comes off the ladder, in its
    order (ladder.py): layers whose copies hide (remap.py), full pages of KV, then layers beyond. At the last token the
    cache is as long as it gets, and activations are few. What left at one moment is not back at the next: that takes
    the dwell of pages (remap.py, Note [Calm]). A run whose answers take longer than that has come to rest.
    With an SLO as many layers stream as that allows (ledger.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..interval import Costs
from ..ledger import Client, Refusal, share
from ..plan import Fewest, Plan
from ..remap import Model, remap
from ..tuning import DEFAULT, WeightPlans
from .needs import Needs


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a model is at the last token. `plan`: its layers; `weights`: device pages of all its weights, slots
    included; `away`: pages of its KV on the host, and `early`: those that had to leave for the prompt; `settled`: it is
    as `manage()` left it, so that nothing hangs on when pages were lacking."""

    plan: Plan
    weights: int
    away: int
    early: int
    settled: bool


@dataclass(frozen=True, slots=True)
class Budget:
    """`pages` of the device, of `page_size` bytes; `page_seconds`: to copy one to it, None where nobody knows; `slo`:
    seconds that a decode step may take."""

    pages: int
    page_size: int
    page_seconds: float | None = None
    slo: float | None = None


def placed(
    models: Sequence[Needs], budget: Budget, tuning: WeightPlans = DEFAULT.weights, *, rested: bool = False
) -> list[Placed] | None:
    """Where all models are at the last token; None where they do not fit, whatever streams. `rested`: what had to leave
    for the prompt has had the time to come back. See Note [A run, foreseen]."""
    managed = _managed(models, budget, tuning)
    if managed is None:
        return None
    running = [_model(needs, plan, budget, tuning, active=True) for needs, plan in zip(models, managed, strict=True)]
    if budget.slo is not None:
        running = _by_slo(models, running, budget)
    begun = [each.plan for each in running]
    early = _pressed(models, running, budget, [0] * len(models), "prompt")
    if early is None:
        return None
    if rested:
        away = [0] * len(models)
    else:
        running, away = early
    late = _pressed(models, running, budget, away, "last")
    if late is None:
        return None
    running, last = late
    return [
        Placed(
            model.plan, needs.beside + model.plan.device_pages, gone, first, model.plan == start and not gone + first
        )
        for needs, model, start, gone, first in zip(models, running, begun, last, early[1], strict=True)
    ]


def least(models: Sequence[Needs], budget: Budget, tuning: WeightPlans = DEFAULT.weights) -> int:
    """The fewest pages that fit all of them."""
    low, high = 0, 1
    while placed(models, replace(budget, pages=high), tuning) is None:
        low, high = high, 2 * high
    while low + 1 < high:
        middle = (low + high) // 2
        if placed(models, replace(budget, pages=middle), tuning) is None:
            low = middle
        else:
            high = middle
    return high


def everything(models: Sequence[Needs]) -> int:
    """Pages with which nothing streams and nothing leaves."""
    running = sum(max(each.prompt.pages, each.last.pages) for each in models)
    return sum(each.weights for each in models) + max(running, max((each.working for each in models), default=0))


def costs_of(needs: Needs, seconds: float | None, page_seconds: float | None, tuning: WeightPlans) -> Costs:
    """The costs of an iteration, as the governor has them: assumed where nobody measured."""
    pages, ratio = max(1, sum(needs.layers)), float(tuning.assumed_ratio)
    if seconds is None:
        seconds = pages * (page_seconds or 1.0) / ratio
    if page_seconds is None:
        page_seconds = seconds * ratio / pages
    return Costs(needs.layers, seconds, page_seconds)


def _managed(models: Sequence[Needs], budget: Budget, tuning: WeightPlans) -> list[Plan] | None:
    """The plans with which `manage()` is done with all of them."""
    rule, plans, used = Fewest(slots=tuning.slots), list[Plan](), 0
    for number, needs in enumerate(models):
        before = [_model(*each, budget, tuning, active=False) for each in zip(models[:number], plans, strict=True)]
        fixed = needs.beside + needs.working
        for wanted, capped in ((sum(needs.layers), True), (rule.smallest(needs.layers), False)):
            lack = used + fixed + wanted - budget.pages
            if lack > 0 and before:
                givers = before if capped else [replace(each, base=len(each.plan.pages)) for each in before]
                gives = remap(givers, lack, 0)
                before = [replace(each, plan=gives.plans.get(each.name, each.plan)) for each in before]
                used -= gives.freed
        plan = rule.choose(needs.layers, budget.pages - used - fixed)
        if plan is None:
            return None
        plans = [*(each.plan for each in before), plan]
        used += needs.beside + plan.device_pages
    return plans


def _model(needs: Needs, plan: Plan, budget: Budget, tuning: WeightPlans, *, active: bool) -> Model:
    decode, prefill = (
        costs_of(needs, seconds, budget.page_seconds, tuning) for seconds in (needs.decode, needs.prefill)
    )
    base = len(plan.streamed)
    return Model(
        needs.name, plan, decode, prefill, active, base=base, slots=tuning.slots, mru=tuning.mru, capped=tuning.capped
    )


def _by_slo(models: Sequence[Needs], running: Sequence[Model], budget: Budget) -> list[Model]:
    """As many layers stream as the SLO allows, where it can be kept and it is known what iterations take: no more may
    then."""
    if budget.slo is None or budget.page_seconds is None or any(each.decode is None for each in models):
        return list(running)
    free = budget.pages - sum(
        needs.beside + model.plan.device_pages + needs.last.pages for needs, model in zip(models, running, strict=True)
    )
    clients = [
        Client(each.name, each.decode, budget.page_size, budget.slo, max(0, each.plan.device_pages + free))
        for each in running
    ]
    found = share(clients, budget.page_size / budget.page_seconds)
    if isinstance(found, Refusal):
        return list(running)
    plans = {client.name: client.plan(found.options[client.name].interval) for client in clients}
    return [
        replace(each, plan=plans[each.name], base=len(plans[each.name].streamed), least=plans[each.name].device_pages)
        for each in running
    ]


def _pressed(
    models: Sequence[Needs], running: Sequence[Model], budget: Budget, away: Sequence[int], when: str
) -> tuple[list[Model], list[int]] | None:
    """The models after what KV and activations lack `when` has been taken, and their pages of KV that are away by then;
    None where that cannot be."""
    moments = [each.prompt if when == "prompt" else each.last for each in models]
    held = sum(each.beside for each in models) + sum(each.plan.device_pages for each in running)
    wanted = sum(each.pages for each in moments) - sum(away)
    free = budget.pages - held
    if wanted <= free:
        return list(running), list(away)
    within = remap(running, wanted, free)
    running = _with(running, within.plans)
    gone, short = list(away), within.short
    for number in reversed(range(len(gone))):  # the cache that came last gives first
        more = min(short, max(0, moments[number].movable - gone[number]))
        gone[number] += more
        short -= more
    if short:
        beyond = remap([replace(each, base=len(each.plan.pages)) for each in running], short, 0)
        running, short = _with(running, beyond.plans), beyond.short
    return None if short else (running, gone)


def _with(running: Sequence[Model], plans: Mapping[str, Plan]) -> list[Model]:
    return [replace(each, plan=plans.get(each.name, each.plan)) for each in running]
