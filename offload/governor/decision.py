"""What a model streams in its next iteration, from all that is known at that moment: numbers in, a decision out.

Note [Two reasons to stream]
    Without an SLO layers stream because memory demands it and for nothing else: those that did not fit when the model
    came, and those that were taken since, by exhaustion only (Oneiros). With an SLO as many stream as the SLO allows
    (Select-N §4.1: "maximize host memory usage"), at once, and the pages are free for whoever wants them: nobody waits
    for exhaustion, because an SLO is what says how slow is fast enough. A phase without an SLO of a model that has one
    for the other: a decode step streams as little as the free pages allow; a prefill hides what decoding hides, and
    changes nothing. An interval that was given as a number is kept, and None never streams: neither gives any pages.

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
from ..policy.interval import Costs
from ..policy.ledger import FIXED, Refusal
from ..policy.plan import Plan, fewest
from ..policy.remap import activate
from ..record.record import Point
from .seat import Seat
from .sharing import settled
from .situation import Situation


@dataclass(frozen=True, slots=True)
class Decision:
    """`plan`: what to stream in the next iteration, and `why`; `interval`: where the plan is one; `seconds`: that the
    iteration takes by the record, None where nobody measured; `refusal`: why the SLO is missed, where it is; `notice`:
    to be shown, said once."""

    plan: Plan
    why: str
    interval: int | None = None
    seconds: float | None = None
    refusal: Refusal | None = None
    notice: str | None = None


def decide(now: Situation, seat: Seat, point: Point) -> Decision:
    """See Note [Two reasons to stream]."""
    if not seat.auto:
        return _told(now, seat, point)
    if seat.slo(point.phase) < math.inf:
        return _by_slo(now, seat, point)
    standing = now.standing(seat)
    if seat.grant is not None and seat.grant.device_pages - standing.device_pages <= now.spare:
        return _made(now, seat, point, seat.grant, "pages were empty long enough: weights take some back")
    if seat.faster is not None and seat.faster.device_pages <= standing.device_pages:
        return _made(now, seat, point, seat.faster, "by what was measured this is faster in no more pages")
    if point.phase == "decode":
        if seat.lent == seat.model.plan and standing.streamed:
            costs, _ = now.costs(seat, point)
            plan = fewest(standing.pages, standing.device_pages + now.spare, costs.ratio) or standing
            return _made(now, seat, point, plan, "decoding has no SLO: as few layers stream as the free pages allow")
        if seat.waking:
            return _woken(now, seat, point)
    return _made(now, seat, point, standing, _reason(seat, standing))


def faster(now: Situation, seat: Seat) -> Plan | None:
    """The plan that its iterations of late would have been faster with, in no more pages; None where there is none, or
    nobody knows. See Note [One slot or two]."""
    standing = now.standing(seat)
    if not seat.auto or seat.has_slo or seat.taken or not standing.copied:
        return None
    done = [(count, now.expected(seat, seat.last[phase])) for phase, count in seat.passes.items()]
    known = [(count, costs) for count, costs in done if costs is not None]
    most = None if len(standing.streamed) == seat.base else now.model(seat).cap
    found = fastest(standing, known, seat.tuning.margin, most)
    return None if found == standing else found


def fastest(standing: Plan, done: Sequence[tuple[int, Costs]], margin: float, most: int | None = None) -> Plan:
    """`standing`, or that of the plans of `fewest` for its pages that saves the part `margin` of the time of so many
    iterations of each kind."""

    def seconds(plan: Plan) -> float:
        return sum(count * costs.expected(plan) for count, costs in done)

    plans = [fewest(standing.pages, standing.device_pages, costs.ratio, most) for _, costs in done]
    best = min((plan for plan in plans if plan is not None), key=seconds, default=standing)
    return best if seconds(best) < (1 - margin) * seconds(standing) else standing


def _told(now: Situation, seat: Seat, point: Point) -> Decision:
    """Somebody said how."""
    interval = seat.model.interval if isinstance(seat.model.interval, int) else None
    return _made(now, seat, point, seat.model.plan, "as was asked for", interval)


def _by_slo(now: Situation, seat: Seat, point: Point) -> Decision:
    standing = now.standing(seat)
    within = standing.device_pages + now.room(seat)
    option = None if now.settled is None else now.settled.shares.options.get(seat.name)
    if now.settled is None or option is None or now.planned(seat, point, option).device_pages > within:
        now.settled = settled(now, seat, point)
        option = now.settled.shares.options[seat.name]
        if now.planned(seat, point, option).device_pages > within:
            now.short = True
            return _made(now, seat, point, standing, "as it is, until others on the link have made room")
    plan = seat.lent = now.planned(seat, point, option)
    interval = None if option.interval == FIXED else option.interval
    aim = f"a {'decode step' if point.phase == 'decode' else 'prefill'} within {format_time(seat.slo(point.phase))}"
    refusal = now.settled.missed.get(seat.name)
    if refusal is None:
        what = (
            "what memory demands"
            if interval is None
            else f"of the intervals that keep {aim} that with most on the host"
        )
        return _made(now, seat, point, plan, what, interval)
    now.short = True
    why = f"{aim} is not kept, and as little streams as memory allows. {refusal}"
    made = _made(now, seat, point, plan, why, interval, refusal)
    if point.phase in seat.noticed:
        return made
    seat.noticed.add(point.phase)
    return replace(made, notice=f"{seat.name}: {made.why}")


def _woken(now: Situation, seat: Seat, point: Point) -> Decision:
    """The first decode step after it was idle: no more layers stream than its cap. Should the cap fall later, `revert`
    gives layers back in time; to do so at once would flap with the batch."""
    standing = now.standing(seat)
    models = [now.model(each) for each in now.seats if each is seat or (each.auto and not each.held)]
    change = activate(models, seat.name, now.spare)
    plan = change.plans.get(seat.name)
    if plan is None:
        return _made(now, seat, point, standing, _reason(seat, standing))
    if not change.short:
        return _made(now, seat, point, plan, "it decodes: no more layers stream than hide behind that")
    now.short = True
    costs, _ = now.costs(seat, point)
    plan = fewest(plan.pages, plan.device_pages - change.short, costs.ratio) or standing
    return _made(now, seat, point, plan, f"it decodes, and {change.short} pages are missing to hide what streams")


def _reason(seat: Seat, plan: Plan) -> str:
    count = len(plan.streamed)
    if not count:
        return "every layer is resident"
    if count <= seat.base:
        return "memory demands it"
    return "pages ran out, and weights gave theirs"


def _made(
    now: Situation,
    seat: Seat,
    point: Point,
    plan: Plan,
    why: str,
    interval: int | None = None,
    refusal: Refusal | None = None,
) -> Decision:
    costs, measured = now.costs(seat, point)
    if not measured and (plan.streamed or refusal):
        ratio = seat.tuning.assumed_ratio
        why += f" (not measured: assumed that a layer takes {ratio} times as long to copy as to compute)"
    return Decision(plan, why, interval, costs.of(plan) if measured else None, refusal)
