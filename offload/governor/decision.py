"""Decides what a model streams in its next iteration: numbers in, a decision out.

Note [Two reasons to stream]
    Without an SLO layers stream because memory demands it and for nothing else: those that did not fit when the model
    came, and those that were taken since, by exhaustion only (Oneiros). With an SLO as many stream as the SLO allows
    (Select-N §4.1: "maximize host memory usage"), at once, and the pages are free for others: no model waits for
    exhaustion, because an SLO is what says how slow is fast enough. A phase without an SLO of a model that has one for
    the other: a decode step streams as little as the free pages allow; a prefill hides what decoding hides, and changes
    nothing. An interval that was given as a number is kept, and None never streams: neither gives any pages. While
    requests wait for the end of a batch an SLO is a limit and no aim: a batch that takes as long as it may keeps those
    waiting. In the time machine 25 of 60 requests were served where SLOs were always aims (bench_tenants.py).

Note [One slot or two]
    How many slots are best, and with them how many layers stream for the same pages, follows from r, which is assumed
    when a model comes. Once its iterations and the link have been measured `faster` compares again, over all that the
    model did of late, each phase by its share. To change costs copies and may cost host pages, so the other plan has
    to save a part of the time (`WeightPlans.margin`), needs no more pages, and is looked for ever more seldom: nothing
    flaps, also where prompts and answers come in turns. An SLO chooses its own plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...allocator.units import format_time
from ..policy.coordinator import FIXED, Refusal
from ..policy.interval import Costs
from ..policy.plan import Plan, fewest
from ..policy.remap import activate
from ..policy.tuning import DEFAULT
from ..record.record import Point
from .client_state import ModelState
from .sharing import settled
from .situation import Situation


@dataclass(frozen=True, slots=True)
class StreamDecision:
    """`plan`: what to stream in the next iteration, and `why`; `interval`: where the plan is one; `seconds`: of the
    iteration by the record, None where not measured; `refusal`: why the SLO is missed, where it is; `notice`: a text to
    be shown once."""

    plan: Plan
    why: str
    interval: int | None = None
    seconds: float | None = None
    refusal: Refusal | None = None
    notice: str | None = None


def decide(now: Situation, state: ModelState, point: Point) -> StreamDecision:
    """Decides what the model streams in an iteration like `point`. See Note [Two reasons to stream]."""
    if not state.auto:
        return _told(now, state, point)
    if state.slo(point.phase) < math.inf:
        return _by_slo(now, state, point)
    standing = now.standing(state)
    if state.grant is not None and state.grant.device_pages - standing.device_pages <= now.spare:
        return _made(now, state, point, state.grant, "pages were empty long enough: weights take some back")
    if state.faster is not None and state.faster.device_pages <= standing.device_pages:
        return _made(now, state, point, state.faster, "by what was measured this is faster in no more pages")
    if point.phase == "decode":
        if state.lent == state.model.plan and standing.streamed:
            costs, _ = now.costs(state, point)
            within, slots = standing.device_pages + now.spare, state.tuning.slots
            plan = fewest(standing.pages, within, costs.ratio, slots=slots) or standing
            return _made(now, state, point, plan, "decoding has no SLO: as few layers stream as the free pages allow")
        if state.waking:
            return _woken(now, state, point)
    return _made(now, state, point, standing, _reason(state, standing))


def faster(now: Situation, state: ModelState) -> Plan | None:
    """Returns the plan with which its iterations of late would have been faster, in no more pages; None where there is
    none, or it is not known. See Note [One slot or two]."""
    standing = now.standing(state)
    if not state.auto or state.has_slo or state.taken or not standing.copied:
        return None
    done = [(count, now.expected(state, state.last[phase])) for phase, count in state.passes.items()]
    known = [(count, costs) for count, costs in done if costs is not None]
    most = None if len(standing.streamed) == state.base else now.model(state).cap
    plan = fastest(standing, known, state.tuning.margin, most, state.tuning.slots)
    return None if plan == standing else plan


def fastest(
    standing: Plan,
    done: Sequence[tuple[int, Costs]],
    margin: float,
    most: int | None = None,
    slots: tuple[int, ...] = DEFAULT.weights.slots,
) -> Plan:
    """Returns `standing`, or the plan of `fewest` for its pages that saves the part `margin` of the time of so many
    iterations of each kind."""

    def seconds(plan: Plan) -> float:
        return sum(count * costs.expected(plan) for count, costs in done)

    plans = [fewest(standing.pages, standing.device_pages, costs.ratio, most, slots) for _, costs in done]
    best = min((plan for plan in plans if plan is not None), key=seconds, default=standing)
    return best if seconds(best) < (1 - margin) * seconds(standing) else standing


def _told(now: Situation, state: ModelState, point: Point) -> StreamDecision:
    """Decides for an interval that the user gave."""
    interval = state.model.interval if isinstance(state.model.interval, int) else None
    return _made(now, state, point, state.model.plan, "as was asked for", interval)


def _by_slo(now: Situation, state: ModelState, point: Point) -> StreamDecision:
    standing = now.standing(state)
    if state.model.others_wait:
        return _as_asked(now, state, point, standing)
    within = standing.device_pages + now.room(state)
    option = None if now.settled is None else now.settled.shares.options.get(state.name)
    if now.settled is None or option is None or now.planned(state, point, option).device_pages > within:
        now.settled = settled(now, state, point)
        option = now.settled.shares.options[state.name]
        if now.planned(state, point, option).device_pages > within:
            now.short = True
            return _made(now, state, point, standing, "as it is, until others on the link have made room")
    plan = state.lent = now.planned(state, point, option)
    interval = None if option.interval == FIXED else option.interval
    aim = f"a {'decode step' if point.phase == 'decode' else 'prefill'} within {format_time(state.slo(point.phase))}"
    refusal = now.settled.missed.get(state.name)
    if refusal is None:
        what = (
            "what memory demands"
            if interval is None
            else f"of the intervals that keep {aim} that with most on the host"
        )
        return _made(now, state, point, plan, what, interval)
    now.short = True
    why = f"{aim} is not kept, and as little streams as memory allows. {refusal}"
    made = _made(now, state, point, plan, why, interval, refusal)
    if point.phase in state.noticed:
        return made
    state.noticed.add(point.phase)
    return replace(made, notice=f"{state.name}: {made.why}")


def _as_asked(now: Situation, state: ModelState, point: Point, standing: Plan) -> StreamDecision:
    """Decides on what memory demands, as long as that keeps the SLO, of the model or of the batch's requests; else on
    as little as there are pages for."""
    costs, measured = now.costs(state, point)
    if measured and costs.of(standing) <= state.slo(point.phase):
        return _made(now, state, point, standing, f"{_reason(state, standing)}, within what requests ask")
    within = standing.device_pages + now.spare
    plan = fewest(standing.pages, within, costs.ratio, slots=state.tuning.slots) or standing
    return _made(now, state, point, plan, "requests ask for more: as few layers stream as the free pages allow")


def _woken(now: Situation, state: ModelState, point: Point) -> StreamDecision:
    """Decides for the first decode step after idling: no more layers stream than its cap. Should the cap fall later,
    `revert` gives layers back in time; to do so at once would flap with the batch."""
    standing = now.standing(state)
    models = [now.model(member) for member in now.states if member is state or (member.auto and not member.held)]
    change = activate(models, state.name, now.spare)
    plan = change.plans.get(state.name)
    if plan is None:
        return _made(now, state, point, standing, _reason(state, standing))
    if not change.short:
        return _made(now, state, point, plan, "it decodes: no more layers stream than hide behind that")
    now.short = True
    costs, _ = now.costs(state, point)
    within = plan.device_pages - change.short
    plan = fewest(plan.pages, within, costs.ratio, slots=state.tuning.slots) or standing
    return _made(now, state, point, plan, f"it decodes, and {change.short} pages are missing to hide what streams")


def _reason(state: ModelState, plan: Plan) -> str:
    count = len(plan.streamed)
    if not count:
        return "every layer is resident"
    if count <= state.base:
        return "memory demands it"
    return "pages ran out, and weights gave theirs"


def _made(
    now: Situation,
    state: ModelState,
    point: Point,
    plan: Plan,
    why: str,
    interval: int | None = None,
    refusal: Refusal | None = None,
) -> StreamDecision:
    costs, measured = now.costs(state, point)
    if not measured and (plan.streamed or refusal):
        ratio = state.tuning.assumed_ratio
        why += f" (not measured: assumed that a layer takes {ratio} times as long to copy as to compute)"
    return StreamDecision(plan, why, interval, costs.of(plan) if measured else None, refusal)
