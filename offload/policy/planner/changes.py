"""The nearest changes of a question with which the limit no longer binds, each found by asking again.

Note [Nearest]
    A change is as far as the factor by which it changes what is asked: a budget of 30 GiB instead of 24 is nearer than
    half of the context. Whether it lifts the limit is not worked out in another way but answered by the same planner.
    Where nothing is wrong, as no copy is waited for and no SLO is missed, a change counts that has a token take a part
    less (`Planning.saved`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ..tuning import DEFAULT, Planning
from .answer import PlanAnswer

What = Literal["budget", "host", "context", "batch", "weights", "slo"]


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a run: device `pages`; `context`: tokens that each of `batch` sequences holds at the last token,
    of which the first `prompt` are given; `bits`: of an element of quantized weights, None as they are; `slo`: seconds
    that a decode step may take; `host`: pages there, None where not known."""

    pages: int
    context: int
    prompt: int
    batch: int
    bits: int | None = None
    slo: float | None = None
    host: int | None = None


@dataclass(frozen=True, slots=True)
class PlanChange:
    """`what` to change and the value to change it `to`: pages, tokens, sequences, bits, seconds; `factor`: see Note
    [Nearest]; `answer`: with that change."""

    what: What
    to: float
    factor: float
    answer: PlanAnswer


def nearest(
    asked: Question, answer: PlanAnswer, ask: Callable[[Question], PlanAnswer], tuning: Planning = DEFAULT.planning
) -> list[PlanChange]:
    """Returns the nearest changes, the nearest first, at most `tuning.changes`."""
    changes = [*_looser(asked, answer)]
    for changed in (_budget, _more_host, _shorter, _smaller, _quantized):
        changes += changed(asked, answer, ask, tuning)
    return sorted(changes, key=lambda change: (change.factor, change.what))[: tuning.changes]


def lifts(before: PlanAnswer, after: PlanAnswer, tuning: Planning = DEFAULT.planning) -> bool:
    """Does the limit no longer bind?"""
    if not after.fits:
        return False
    if not before.fits:
        return True
    if before.met is False:
        return after.met is True
    if before.limit == "link":
        return after.limit == "compute"
    old, new = before.slowest.tpot, after.slowest.tpot
    return old is not None and new is not None and new <= old * (1 - tuning.saved)


def _budget(
    asked: Question, answer: PlanAnswer, ask: Callable[[Question], PlanAnswer], tuning: Planning
) -> Iterator[PlanChange]:
    """Tries larger budgets, up to one that holds everything."""

    def at(pages: int) -> PlanAnswer:
        return ask(replace(asked, pages=pages))

    if lifts(answer, at(max(asked.pages, answer.all)), tuning):
        pages = _first(asked.pages, answer.all, lambda pages: lifts(answer, at(pages), tuning))
        yield PlanChange("budget", pages, pages / max(1, asked.pages), at(pages))


def _more_host(
    asked: Question, answer: PlanAnswer, ask: Callable[[Question], PlanAnswer], tuning: Planning
) -> Iterator[PlanChange]:
    """Tries more pages of the host, where those bind."""

    def at(pages: int) -> PlanAnswer:
        return ask(replace(asked, host=pages))

    if asked.host is not None and answer.limit == "host":
        pages = _first(asked.host, answer.all, lambda pages: lifts(answer, at(pages), tuning))
        yield PlanChange("host", pages, pages / max(1, asked.host), at(pages))


def _shorter(
    asked: Question, answer: PlanAnswer, ask: Callable[[Question], PlanAnswer], tuning: Planning
) -> Iterator[PlanChange]:
    """Tries shorter contexts, in multiples of `tuning.rounded` tokens."""
    unit = min(tuning.rounded, max(1, asked.context // 2))

    def at(units: int) -> PlanAnswer:
        context = units * unit
        return ask(replace(asked, context=context, prompt=min(asked.prompt, context)))

    units = _last((asked.context - 1) // unit, lambda units: lifts(answer, at(units), tuning))
    if units:
        yield PlanChange("context", units * unit, asked.context / (units * unit), at(units))


def _smaller(
    asked: Question, answer: PlanAnswer, ask: Callable[[Question], PlanAnswer], tuning: Planning
) -> Iterator[PlanChange]:
    """Tries smaller batches."""

    def at(batch: int) -> PlanAnswer:
        return ask(replace(asked, batch=batch))

    batch = _last(asked.batch - 1, lambda batch: lifts(answer, at(batch), tuning))
    if batch:
        yield PlanChange("batch", batch, asked.batch / batch, at(batch))


def _quantized(
    asked: Question, answer: PlanAnswer, ask: Callable[[Question], PlanAnswer], tuning: Planning
) -> Iterator[PlanChange]:
    """Tries weights of fewer bits: they are loaded on the device, where all of them have to fit."""
    for bits in tuning.bits:
        after = ask(replace(asked, bits=bits))
        if lifts(answer, after, tuning) and not any(model.plan and model.plan.streamed for model in after.models):
            yield PlanChange("weights", bits, 16 / bits, after)
            return


def _looser(asked: Question, answer: PlanAnswer) -> Iterator[PlanChange]:
    """Returns the SLO that is kept as it is."""
    tpot = answer.slowest.tpot
    if asked.slo is not None and answer.met is False and tpot is not None:
        yield PlanChange("slo", tpot, tpot / asked.slo, replace(answer, slo=tpot, met=True))


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Returns the smallest number above `low` for which it holds, as it does for `high`."""
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _last(high: int, holds: Callable[[int], bool]) -> int:
    """Returns the largest number from 1 to `high` for which it holds; 0 where it holds for none."""
    if high < 1 or not holds(1):
        return 0
    low, high = 1, high + 1
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
