"""The answer to a question about a run: what fits, how fast, and what binds.

Note [What binds]
    `memory`: it does not fit, whatever streams. `host`: it would, but what leaves the device has no room there.
    `link`: tokens wait for copies, of layers or of KV, by more than copies may add and count as hidden. `compute`: all
    else, the device's own memory included: with every page resident it would be no faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..interval import Costs
from ..layer_stream import LayerReads, Way, choose
from ..plan import Plan
from ..tuning import DEFAULT, Tuning
from .memory import Placed, PlanBudget, everything, least, placed
from .needs import Moment, Needs

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
    nothing streams; `limit`: see Note [What binds], None where no times are known."""

    fits: bool
    models: Sequence[Forecast]
    least: int
    all: int
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
    if places is None:
        lacking = [Forecast(model, None, model.weights, sum(model.last.kv), model.last.activations) for model in models]
        short = placed(models, replace(budget, host=None), tuning) is not None
        met = None if budget.slo is None else False
        return PlanAnswer(False, lacking, fewest, whole, "host" if short else "memory", budget.slo, met)
    forecasts = _forecasts(models, places, budget, tuning)
    if tokens * max(forecast.tpot or 0.0 for forecast in forecasts) > tuning.pages.dwell:
        forecasts = _forecasts(models, placed(models, budget, tuning, rested=True) or places, budget, tuning)
    answer = PlanAnswer(True, forecasts, fewest, whole, None, budget.slo)
    tpot, waits = answer.slowest.tpot, answer.slowest.waits
    if tpot is None:
        return answer
    limit: Limit = "link" if waits > (tuning.records.hidden - 1) * (tpot - waits) else "compute"
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
    left = max(0, total - away - budget.pages // tuning.kv_reads.left)
    layers = [LayerReads(pages, 0.0, computes / len(moment.kv)) for pages in moment.kv]
    choice = choose(layers, page=budget.page_size, link=link, free=left, rows=rows, tuning=tuning.kv_reads)
    if choice.way is not Way.STREAMED:
        return away, 0, choice.exposed
    return sum(min(pages, choice.streamed) for pages in moment.kv), choice.slots * choice.streamed, choice.exposed
