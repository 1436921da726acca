"""All that may be taken of a device's models and caches, as candidates of the ladder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..policy.layer_order import by_rung, of_layer
from ..policy.reclaim_order import Candidate, above_floors, claimed
from .client import INDICES_PER_SPLIT, Offer
from .client_state import PageState
from .situation import Situation


@dataclass(frozen=True, slots=True)
class Held:
    """A page client at the moment of a decision: what it offers; whether a forward uses it, or did so just now; when it
    was used last; its pages that are away, and how many of them are `near`, on the peer."""

    state: PageState
    offers: Sequence[Offer]
    active: bool
    used: float
    displaced: int
    near: int = 0


def listed(
    now: Situation, of_models: Iterable[Candidate], caches: Sequence[Held], owed: Mapping[int, int]
) -> list[Candidate]:
    """In the order of taking, above all floors. `of_models`: what `of_models` said last, if nothing has changed;
    `owed`: pages that models have to give back to others."""
    return above_floors(claimed([*of_models, *_of_caches(now, caches)], owed), _spare(now, caches))


def of_models(now: Situation) -> Iterator[Candidate]:
    """Layers, in the order of layer_order.py."""
    states = {state.name: state for state in now.states if state.auto and not state.held}
    gone = {name: {*state.model.plan.streamed, *state.taken} for name, state in states.items()}
    for rung, model, layer in by_rung([now.model(state) for state in states.values()], gone):
        yield of_layer(rung, model, layer, states[model.name].number)


def _of_caches(now: Situation, caches: Sequence[Held]) -> Iterator[Candidate]:
    priorities = {state.number: state.model.priority for state in now.states}
    seconds = now.leaving_seconds or 0.0
    for held in caches:
        number, owner = held.state.number, held.state.model
        for offer in held.offers:
            active = held.active and not offer.resting
            rung = offer.in_use if active else offer.idle
            recency = float(number) if active else held.used
            once = 0.0 if offer.clean else offer.pages * seconds
            lost = offer.readers * seconds if active else 0.0
            priority = priorities.get(owner, 0)
            divisible = INDICES_PER_SPLIT if offer.divisible else 0
            yield Candidate(
                rung, number, offer.index, offer.pages, priority, recency, lost, once, owner, divisible=divisible
            )


def _spare(now: Situation, caches: Sequence[Held]) -> dict[int, int]:
    """Device pages that models with a floor have beyond it, as far as they are known: their layers, and full pages of
    their caches."""
    spare = {
        state.number: now.standing(state).device_pages - state.model.floor for state in now.states if state.model.floor
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
