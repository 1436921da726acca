"""What of a device's models and caches may be taken, in the reclaim order. Numbers in, candidates and pages out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..policy import giving
from ..policy.price import Price, of_outside
from ..policy.reclaim_order import Candidate, PageSource, above_floors, claimed, ordered
from .client import INDICES_PER_SPLIT, OUTSIDE_LAYERS
from .clients import Held
from .decision import Situation


def listed(
    now: Situation, of_models: Iterable[Candidate], caches: Sequence[Held], owed: Mapping[int, int]
) -> list[Candidate]:
    """In the order of taking, above all floors. `of_models`: what `of_models` said last, if nothing has changed;
    `owed`: pages that models have to give back to others."""
    sequences: dict[int, list[Candidate]] = {}
    for candidate in of_models:
        sequences.setdefault(candidate.client, []).append(candidate)
    order = ordered([*sequences.values(), *(_of_cache(now, held) for held in caches)], now.horizon)
    return above_floors(claimed(order, owed), _spare(now, caches))


def of_models(now: Situation) -> Iterator[Candidate]:
    """Layers, those of each model in the order of giving.py, and behind them what idle models have outside of them."""
    for state in now.states:
        if state.auto and not state.held:
            gone = {*state.model.plan.streamed, *state.taken}
            uses, hidden, step = now.uses(state), now.tuning.prices.hidden, now.tuning.prices.step
            yield from giving.candidates(now.model(state), state.number, gone, uses, hidden, step)
            if state.number not in now.active and not state.has_slo and (pages := state.model.outside()):
                costs, _ = now.costs(state, state.last["prefill"])
                yield Candidate(
                    PageSource.IDLE_WEIGHTS,
                    state.number,
                    OUTSIDE_LAYERS,
                    pages,
                    of_outside(costs, uses),
                    priority=state.model.priority,
                    recency=state.used,
                    owner=state.number,
                )


def _of_cache(now: Situation, held: Held) -> list[Candidate]:
    """What a cache offers, what costs least first, and equals as it offers them."""
    owner = next((state for state in now.states if state.number == held.state.model), None)
    back = now.page_seconds if owner is None else now.costs(owner, owner.last["decode"])[0].page_seconds
    leaving = back if now.peer_seconds is None else now.peer_seconds
    candidates = []
    for offer in held.offers:
        active = held.active and not offer.resting
        if not active:
            uses = now.idle_uses(held.state.used, None if owner is None else owner.usual)
        elif owner is None:
            uses = 1 / now.tuning.pages.idle  # or it would be idle
        else:
            uses = now.uses(owner) * offer.readers
        out = 0.0 if offer.clean else leaving
        candidates.append(
            Candidate(
                offer.in_use if active else offer.idle,
                held.state.number,
                offer.index,
                offer.pages,
                Price(uses * back, out + back if active else out),
                leaving=out * offer.pages,
                priority=0 if owner is None else owner.model.priority,
                recency=float(held.state.number) if active else held.state.used,
                owner=held.state.model,
                divisible=INDICES_PER_SPLIT if offer.divisible else 0,
            )
        )
    return sorted(candidates, key=lambda candidate: candidate.price.over(now.horizon))


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
