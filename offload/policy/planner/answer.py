"""The answer to a question about a run: what fits, how fast, what binds, and the nearest changes of the question with
which that no longer binds, each found by asking again.

Note [What binds]
    `memory`: it does not fit, whatever streams. `host`: it would, but what leaves the device has no room there.
    `link`: tokens wait for copies, of layers or of KV, by more than copies may add and count as hidden. `compute`: all
    else, the device's own memory included: with every page resident it would be no faster. What sets the least budget
    is another question, which `memory` answers in numbers: what finds no room with a page less (memory.py, `binding`).

Note [Nearest]
    A change is as far as the factor by which it changes what is asked: a budget of 30 GiB instead of 24 is nearer than
    half of the context. Whether it lifts the limit is not worked out in another way but answered by the same planner.
    Where nothing is wrong, as no copy is waited for and no SLO is missed, a change counts that has a token take a part
    less (`Planning.saved`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from ..kv_pages import LEFT, LayerReads, Way, choose
from ..plan import Costs, Plan
from ..rental import threshold
from ..tuning import DEFAULT, Tuning
from .memory import Binding, Moment, Needs, Placed, PlanBudget, binding, everything, least, placed


@dataclass(frozen=True, slots=True)
class Planning:
    """The changes that are named."""

    changes: int = 3  # that are named. Chosen
    saved: float = 0.1  # part of a token's time that one has to save where nothing else is wrong. Chosen
    rounded: int = 256  # tokens that contexts are rounded to: a prediction knows no more. Chosen


PLANNING = Planning()
BITS: Final = (8, 4)  # of an element, with which quantized weights are tried, the mildest first
Limit = Literal["memory", "host", "link", "compute"]


@dataclass(frozen=True, slots=True)
class Forecast:
    """One model at the last token. `plan`: what streams, None where it does not fit; device pages by owner; `host`:
    pages of KV on the host; seconds, None where not known; `waits`: the part of `tpot` that waits for copies;
    `settled`: see `Placed`."""

    needs: Needs
    plan: Plan | None
    weights: int
    kv: int
    activations: int
    host: int = 0
    ttft: float | None = None
    tpot: float | None = None
    waits: float = 0.0
    settled: bool = False


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """`models`: in the order of the question; `least`: pages of the smallest budget that fits; `all`: pages with which
    nothing streams; `binding`: what sets `least`; `limit`: see Note [What binds], None where no times are known."""

    fits: bool
    models: Sequence[Forecast]
    least: int
    all: int
    binding: Binding
    limit: Limit | None
    slo: float | None = None
    met: bool | None = None

    @property
    def slowest(self) -> Forecast:
        """The model whose tokens take longest, which sets the limit."""
        return max(self.models, key=lambda model: model.tpot or 0.0)


def answered(models: Sequence[Needs], budget: PlanBudget, tokens: int = 0, tuning: Tuning = DEFAULT) -> PlanAnswer:
    """Returns the answer for models under the budget, once they have generated so many `tokens`."""
    places = placed(models, budget, tuning)
    fewest, whole = least(models, budget, tuning), everything(models)
    short = binding(models, replace(budget, pages=fewest), tuning)
    if places is None:
        lacking = [Forecast(model, None, model.weights, sum(model.last.kv), model.last.activations) for model in models]
        hosted = placed(models, replace(budget, host=None), tuning) is not None
        met = None if budget.slo is None else False
        return PlanAnswer(False, lacking, fewest, whole, short, "host" if hosted else "memory", budget.slo, met)
    forecasts = _forecasts(models, places, budget, tuning)
    if tokens > threshold(1, 0, 1.0) + 1:  # as many read what is away before it comes back
        forecasts = _forecasts(models, placed(models, budget, tuning, rested=True) or places, budget, tuning)
    answer = PlanAnswer(True, forecasts, fewest, whole, short, None, budget.slo)
    tpot, waits = answer.slowest.tpot, answer.slowest.waits
    if tpot is None:
        return answer
    limit: Limit = "link" if waits > tuning.prices.hidden * (tpot - waits) else "compute"
    return replace(answer, limit=limit, met=None if budget.slo is None else tpot <= budget.slo)


def _forecasts(models: Sequence[Needs], places: Sequence[Placed], budget: PlanBudget, tuning: Tuning) -> list[Forecast]:
    """Returns the forecasts of all models. `budget.page_seconds`: with the link to itself."""
    streaming = sum(bool(place.plan.copied) for place in places)
    shared = None if budget.page_seconds is None else budget.page_seconds * max(1, streaming)
    beside = replace(budget, page_seconds=shared)
    forecasts = [_forecast(needs, at, beside, tuning) for needs, at in zip(models, places, strict=True)]
    idle = budget.pages - sum(forecast.weights + forecast.kv + forecast.activations for forecast in forecasts)
    return [_with_idle(forecast, max(0, idle) // len(forecasts)) for forecast in forecasts]


def _with_idle(forecast: Forecast, idle: int) -> Forecast:
    """Returns the forecast with `idle` pages, which the prompt needed and the heap keeps."""
    more = max(0, forecast.needs.prompt.activations - forecast.activations)
    return replace(forecast, activations=forecast.activations + min(more, idle))


def _forecast(needs: Needs, at: Placed, budget: PlanBudget, tuning: Tuning) -> Forecast:
    """Returns the forecast of one model. `budget.page_seconds`: beside the other models that copy."""
    host, slots, waits = _read(needs.last, at.away, needs.decode, budget, tuning)
    ttft, tpot = (_seconds(needs, at.plan, seconds, budget) for seconds in (needs.prefill, needs.decode))
    if ttft is not None and at.early:
        _, _, more = _read(needs.prompt, at.early, needs.prefill, budget, tuning, needs.rows)
        ttft += more
    stall = 0.0 if tpot is None or needs.decode is None else tpot - needs.decode + waits
    once, per_token = needs.aside
    return Forecast(
        needs,
        at.plan,
        at.weights,
        sum(needs.last.kv) - host + slots,
        needs.last.activations,
        host,
        None if ttft is None else ttft + once,
        None if tpot is None else tpot + waits + per_token,
        stall,
        at.settled,
    )


def _seconds(needs: Needs, plan: Plan, seconds: float | None, budget: PlanBudget) -> float | None:
    if seconds is None or (plan.copied and budget.page_seconds is None):
        return None
    page = budget.page_seconds or 0.0
    expected = Costs(needs.layers, seconds, page).expected(plan)
    return max(expected, seconds + plan.copied_pages * page * budget.copying)


def _read(
    moment: Moment, away: int, seconds: float | None, budget: PlanBudget, tuning: Tuning, rows: int = 1
) -> tuple[int, int, float]:
    """Returns how KV with so many pages away is read by `rows` of each sequence: (pages on the host, pages of slots,
    seconds that an iteration waits for it)."""
    if not away:
        return 0, 0, 0.0
    link = tuning.kv_reads.link if budget.page_seconds is None else budget.page_size / budget.page_seconds
    total = sum(moment.kv)
    computes = total * budget.page_size / link if seconds is None else seconds
    left = max(0, total - away - budget.pages // LEFT)
    layers = [LayerReads(pages, 0.0, computes / len(moment.kv)) for pages in moment.kv]
    choice = choose(layers, page=budget.page_size, link=link, free=left, rows=rows, tuning=tuning.kv_reads)
    if choice.way is not Way.STREAMED:
        return away, 0, choice.exposed
    return sum(min(pages, choice.streamed) for pages in moment.kv), choice.slots * choice.streamed, choice.exposed


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
    asked: Question, answer: PlanAnswer, ask: Callable[[Question], PlanAnswer], tuning: Planning = PLANNING
) -> list[PlanChange]:
    """Returns the nearest changes, the nearest first, at most `tuning.changes`."""
    changes = [*_looser(asked, answer)]
    for changed in (_budget, _more_host, _shorter, _smaller, _quantized):
        changes += changed(asked, answer, ask, tuning)
    return sorted(changes, key=lambda change: (change.factor, change.what))[: tuning.changes]


def lifts(before: PlanAnswer, after: PlanAnswer, tuning: Planning = PLANNING) -> bool:
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
    for bits in BITS:
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
