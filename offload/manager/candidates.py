"""What of a device's models and caches may be taken, in the reclaim order, and what gets spare pages back. Numbers in,
candidates, plans and pages out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from ..policy.plan import Plan
from ..policy.price import merged, of_layers, of_outside
from ..policy.reclaim_order import Absent, Candidate, Level, above_floors, claimed, restore_order, weights_order
from ..policy.remap import Model, by_level, of_layer, restore
from .client import INDICES_PER_SPLIT, OUTSIDE_LAYERS
from .clients import Held, ModelState
from .decision import Situation


def listed(
    now: Situation, of_models: Iterable[Candidate], caches: Sequence[Held], owed: Mapping[int, int]
) -> list[Candidate]:
    """In the order of taking, above all floors. `of_models`: what `of_models` said last, if nothing has changed;
    `owed`: pages that models have to give back to others."""
    if now.prices.on:
        sequences = _by_client([*of_models, *claimed(_of_caches(now, caches), owed)])
        return above_floors(merged(sequences, now.prices.horizon), _spare(now, caches))
    return above_floors(claimed([*of_models, *_of_caches(now, caches)], owed), _spare(now, caches))


def of_models(now: Situation) -> Iterator[Candidate]:
    """Layers, in the order of remap.py, and behind them what idle models have outside of them, with what they cost."""
    states = {state.name: state for state in now.states if state.auto and not state.held}
    models = {name: now.model(state) for name, state in states.items()}
    gone = {name: {*state.model.plan.streamed, *state.taken} for name, state in states.items()}
    offered = (
        of_layer(level, model, layer, states[model.name].number)
        for level, model, layer in by_level(models.values(), gone)
    )
    if not now.prices.on:
        yield from offered
    else:
        by_number = {state.number: state for state in states.values()}
        for sequence in _by_client(offered):
            state = by_number[sequence[0].client]
            yield from _priced(now, state, models[state.name], sequence)
    for model in sorted(models.values(), key=lambda model: weights_order(model, Fraction())):
        yield from _outside(now, states[model.name], model)


def _outside(now: Situation, state: ModelState, model: Model) -> Iterator[Candidate]:
    """What the model has outside of layers, while it is idle; of one with an SLO that needs it nothing."""
    pages = 0 if model.active or state.has_slo else state.model.outside()
    if not pages:
        return
    number = state.number
    candidate = Candidate(Level.IDLE_WEIGHTS, number, OUTSIDE_LAYERS, pages, model.priority, owner=number)
    if now.prices.on:
        price = of_outside(model.costs, now.uses(state))
        candidate.seconds, candidate.once, candidate.recency = price.rate, price.once * pages, model.used
    yield candidate


def _priced(now: Situation, state: ModelState, model: Model, layers: Sequence[Candidate]) -> Iterator[Candidate]:
    """Layers of a model at their prices, each as if those before it were gone."""
    order = [candidate.index for candidate in layers]
    prices = of_layers(model.plan, model.costs, now.uses(state), order, model.slots, now.prices.step)
    for candidate, (_, price) in zip(layers, prices, strict=False):
        candidate.seconds, candidate.once, candidate.recency = price.rate, price.once * candidate.pages, model.used
        yield candidate


def _by_client(candidates: Iterable[Candidate]) -> list[list[Candidate]]:
    """What each client offers, as it comes."""
    sequences: dict[int, list[Candidate]] = {}
    for candidate in candidates:
        sequences.setdefault(candidate.client, []).append(candidate)
    return list(sequences.values())


def _of_caches(now: Situation, caches: Sequence[Held]) -> Iterator[Candidate]:
    states = {state.number: state for state in now.states}
    leaving, back = now.leaving_seconds or 0.0, now.page_seconds or 0.0
    for held in caches:
        number, owner = held.state.number, held.state.model
        model = states.get(owner)
        uses = 1.0
        if now.prices.on:
            uses = now.uses(model) if model is not None and held.active else now.idle_uses(held.used)
        for offer in held.offers:
            active = held.active and not offer.resting
            level = offer.in_use if active else offer.idle
            recency = float(number) if active else held.used
            once = 0.0 if offer.clean else offer.pages * leaving
            lost = offer.readers * leaving if active else 0.0
            if now.prices.on:
                lost = 0.0 if level is Level.PREFIX else back * uses
                once += offer.pages * back if held.active else 0.0
            priority = 0 if model is None else model.model.priority
            divisible = INDICES_PER_SPLIT if offer.divisible else 0
            yield Candidate(
                level, number, offer.index, offer.pages, priority, recency, lost, once, owner, divisible=divisible
            )


def _spare(now: Situation, caches: Sequence[Held]) -> dict[int, int]:
    """Device pages that models with a floor have beyond it, as far as they are known: their weights, and full pages of
    their caches."""
    spare = {
        state.number: now.standing(state).device_pages + state.model.outside() - state.model.floor
        for state in now.states
        if state.model.floor
    }
    for held in caches:
        if held.state.model in spare:
            spare[held.state.model] += sum(offer.pages for offer in held.offers)
    return spare


def to_clean(candidates: Sequence[Candidate], caches: Sequence[Held], most: int, step: int) -> dict[int, int]:
    """Pages that caches should copy to the host now, by number: `step` each at a time, those that are taken first
    first, until so many as `most` of all caches are clean."""
    clean = {(held.state.number, offer.index): offer.clean for held in caches for offer in held.offers}
    dirty: dict[int, int] = {}
    for candidate in candidates:
        index = candidate.index % candidate.divisible if candidate.divisible else candidate.index
        if (candidate.client, index) not in clean or most <= 0:
            continue
        if not clean[candidate.client, index]:
            pages = min(candidate.pages, most) if candidate.divisible else candidate.pages
            dirty[candidate.client] = dirty.get(candidate.client, 0) + pages
        most -= candidate.pages
    return {number: min(pages, step) for number, pages in dirty.items()}


class Back(NamedTuple):
    """The outcome, by number of the state: plans with more resident layers, and pages of KV."""

    plans: Mapping[int, Plan]
    pages: Mapping[int, int]


def plan_restore(now: Situation, caches: Sequence[Held], spare: int, models: bool = True) -> Back:
    """Divides `spare` pages, in the order of reclaim_order.py, Note [What is restored first]. A model with an SLO gets
    none: its SLO decides. `models`: do models take part?"""
    states = {state.number: now.model(state) for state in now.states if models and state.auto and not state.has_slo}
    priorities = {state.number: state.model.priority for state in now.states}
    absent = [_of_model(number, model) for number, model in states.items() if model.freed or model.plan.streamed]
    for held in caches:
        if held.active and held.displaced:
            number, priority = held.state.number, priorities.get(held.state.model, 0)
            for count, seconds in ((held.displaced - held.near, now.page_seconds), (held.near, now.peer_seconds)):
                if count:
                    seconds = seconds or now.page_seconds or 0.0
                    absent.append(Absent(number, count, seconds, True, priority, held.used))
    plans: dict[int, Plan] = {}
    pages: dict[int, int] = {}
    for missing in restore_order(absent):
        if spare <= 0:
            break
        if missing.client in states:
            model = states[missing.client]
            plan = restore(model, spare)
            if plan is not None:
                plans[missing.client] = plan
                spare += model.plan.device_pages - plan.device_pages
        else:
            some = min(spare, missing.pages)
            pages[missing.client] = pages.get(missing.client, 0) + some
            spare -= some
    return Back(plans, pages)


def _of_model(number: int, model: Model) -> Absent:
    freed = model.freed
    seconds = model.stall / max(1, freed) if model.active else 0.0
    return Absent(number, freed, seconds, model.active, model.priority, model.used)


def restored_on_use(displaced: int, spare: int, offered: int) -> int:
    """Returns how many pages a cache restores when it is used again: it reads them in place in each step otherwise, so
    that they are worth taking from idle models and caches, which have `offered`."""
    return min(displaced, spare + offered)
