"""Decides what a model streams in its next iteration: a snapshot of the device's models in (`Situation`), a decision
out.

Which intervals the models of one link get together (Select-N §4.5) is the ledger's answer (coordinator.py), `settled`.

Note [Whose pages]
    A model that takes weights back counts with the free pages, but for those that the next tokens need, and with what
    idle models have in the reclaim list, layers and KV: the core takes that when the free ones are not enough.

Note [Together]
    On a link one model may have to give up device pages so that another can stream less. So what is best for all
    together is tried first, as if each could have any plan, and holds if those that grow find their pages in what is
    free and in what the others give up. Each comes by itself, before its own next iteration: who has to grow waits, as
    it is, until the others have made room. Where that would not fit, it is decided for one model at a time, with the
    others as they are: free pages can be promised once. Combinations that use less of the host and would fit are not
    looked for.

Note [Two reasons to stream]
    Without an SLO layers stream because memory demands it and for nothing else: those that did not fit when the model
    came, and those that were taken since, as pages ran out. With an SLO as many stream as the SLO allows
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
    flaps, also where prompts and answers come in turns. An SLO chooses its own plan, and two that for both phases.

Note [Back by rent]
    Layers come back as soon as their absence has cost what their way there and back takes, or twice as much, where
    others' pages go for them (rental.py). What iterations wait for them is measured. Where free pages are enough for
    all layers, the time counts as well that the link was used for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ...allocator.units import format_time
from ..policy.coordinator import (
    FIXED,
    LinkClient,
    LinkOption,
    PhaseDemand,
    Refusal,
    RunningShares,
    Shares,
    possible,
    share,
    share_running,
)
from ..policy.giving import Model
from ..policy.plan import ASSUMED_RATIO, Costs, Plan, fewest, fitting, loaded, meeting
from ..policy.price import until_used
from ..policy.rental import threshold
from ..policy.tuning import DEFAULT, Tuning
from ..record.record import Phase, Point
from .activity import Activity
from .client import ModelClient
from .clients import FIRST, ModelState


@dataclass(frozen=True, slots=True)
class Lendable:
    """Memory that the layers of a model could give: `offered` device pages, as published. Pages copied in each
    iteration: `copied` now, and `then`, with as many pages fewer as was asked."""

    offered: int
    copied: int
    then: int


@dataclass(slots=True)
class Situation:
    """`states`: in the order in which they came; `active`: numbers of those that run; `free`: pages, of which `mark`
    are for the next tokens; `offered`: pages in the reclaim list by number of the client; `bandwidth`: of the link, and
    others' `traffic` on it, bytes per second; `settled`: the shares of the link's models, None once anything has
    changed; `floors`: device pages that the weights of a model keep for its floor, by state number; `peer_seconds`: to
    copy a page to the peer, None where it is not known or has no free page."""

    states: Sequence[ModelState]
    active: frozenset[int]
    free: int
    mark: int
    offered: Mapping[int, int]
    page_size: int
    bandwidth: float | None
    traffic: float
    settled: RunningShares | None
    floors: Mapping[int, int]
    peer_seconds: float | None
    present: frozenset[int]  # models that are to be present as a whole (turns.py)
    tuning: Tuning
    horizon: float  # seconds that what is taken stays away
    at: float  # seconds, by the manager's clock
    short: bool = False  # did a model get fewer pages than it would take?

    @property
    def measured_page_seconds(self) -> float | None:
        """Seconds to copy a page; None where the link is not measured."""
        return None if self.bandwidth is None else self.page_size / self.bandwidth

    @property
    def page_seconds(self) -> float:
        """Seconds to copy a page."""
        return self.page_size / (self.bandwidth or self.tuning.kv_reads.link)

    @property
    def spare(self) -> int:
        """Free pages that weights may take."""
        return max(0, self.free - self.mark)

    def costs(self, state: ModelState, point: Point) -> tuple[Costs, bool]:
        """Returns (costs of such an iteration, are they measured)."""
        return state.costs_at(point, self.measured_page_seconds)

    def standing(self, state: ModelState) -> Plan:
        """Returns ModelState.standing for the iteration that the model does, or will do when it has work again."""
        point = state.point if state.number in self.active else None
        return state.standing(point or state.last["prefill"], self.measured_page_seconds)

    def uses(self, state: ModelState) -> float:
        """Passes per second of the model, as they would be with every layer present: models that run take turns."""
        if state.number not in self.active:
            return self.idle_uses(state.used, state.usual)
        running = [other for other in self.states if other.number in self.active]
        return 1 / sum(self.costs(other, other.last["decode"])[0].seconds for other in running)

    def idle_uses(self, used: float, usual: float | None) -> float:
        """The same of what is idle, was used last at `used`, and is idle for `usual` seconds as a rule."""
        return 1 / until_used(self.at - used, usual, self.tuning.pages.idle, self.horizon)

    def room(self, state: ModelState) -> int:
        """Pages with which the model may take weights back. See Note [Whose pages]."""
        idle = self.offered.keys() - self.active - {state.number}
        return self.spare + sum(self.offered[number] for number in idle)

    def model(self, state: ModelState) -> Model:
        """The model as giving.py takes it."""
        active = state.number in self.active
        phase: Phase = "decode" if active else "prefill"
        return Model(
            state.name,
            self.standing(state),
            self.costs(state, state.last[phase])[0],
            active,
            state.model.priority,
            0.0 if active else state.used,
            max(self._least(state, phase), self.floors.get(state.number, 0)),
            state.tuning.slots,
        )

    def planned(self, state: ModelState, point: Point, option: LinkOption) -> Plan:
        """Returns the plan that an option of `client` stands for."""
        return self.standing(state) if option.interval == FIXED else self.costs(state, point)[0].plan(option.interval)

    def client(self, state: ModelState, point: Point, room: int) -> LinkClient:
        """Returns the model as coordinator.py takes it, with so many pages beside those that it has."""
        (costs, slo), *beside = self.demands(state, point)
        plan = self.standing(state)
        available = plan.device_pages + room
        idle = state.number not in self.active
        free = state.auto and slo < math.inf and fitting(costs, available) is not None
        fixed = None if free else plan
        least = 0 if fixed else _kept(costs, state.model.floor, available)
        return LinkClient(
            state.name,
            costs,
            self.page_size,
            slo,
            available,
            idle,
            fixed=fixed,
            least=least,
            beside=tuple(beside) if free else (),
            standing=plan,
        )

    def demands(self, state: ModelState, point: Point) -> list[PhaseDemand]:
        """What the plan of an iteration like `point` has to keep, that one first. Where phases take turns the longest
        iteration of late counts for each, as it was measured. See coordinator.py, Note [Phases in turn]."""
        here = [PhaseDemand(self.costs(state, point)[0], state.slo(point.phase))]
        if not state.alternates:
            return here
        for phase, sizes in sorted(state.sizes.items(), key=lambda its: its[0] != point.phase):
            measured = [costs for size in sizes for costs, known in [self.costs(state, size)] if known]
            if phase == point.phase:
                here = [PhaseDemand(max([here[0].costs, *measured], key=lambda costs: costs.seconds), here[0].slo)]
            elif measured:
                here.append(PhaseDemand(max(measured, key=lambda costs: costs.seconds), state.slo(phase)))
        return here

    def is_late(self, state: ModelState, point: Point, plan: Plan) -> bool:
        """Would the next iteration miss its SLO for what is loaded for `plan` before, though its plan so far keeps
        both, with no more of the link? The plan then waits for an iteration that has the time."""
        demands, before = self.demands(state, point), self.standing(state)
        if not state.alternates or state.taken or before.host_pages > plan.host_pages:
            return False
        (costs, slo), *_ = demands
        late = costs.of(plan) + loaded(before, plan) * costs.page_seconds > slo >= costs.of(plan)
        return late and before != plan and all(demand.costs.of(before) <= demand.slo for demand in demands)

    def _least(self, state: ModelState, phase: Phase) -> int:
        """Device pages that the model's SLO needs: those of the plan that it was given, or would be given alone."""
        slo = state.slo(phase)
        if slo == math.inf:
            return 0
        if state.lent is not None and state.point == state.last[phase]:
            return state.lent.device_pages
        return max(_needed(demand) for demand in self.demands(state, state.last[phase]))


@lru_cache(maxsize=256)
def _kept(costs: Costs, floor: int, available: int) -> int:
    """Device pages that layers keep of a floor, as far as an interval that fits allows."""
    every = (costs.plan(interval).device_pages for interval in range(1, costs.none + 1)) if floor else ()
    return min(floor, max((pages for pages in every if pages <= available), default=0))


@lru_cache(maxsize=256)
def _needed(demand: PhaseDemand) -> int:
    """Device pages of the plan with which an SLO is kept, alone on the link; of all layers where it cannot be."""
    interval = meeting(demand.costs, demand.slo)
    return demand.costs.plan(demand.costs.none if interval is None else interval).device_pages


def settled(now: Situation, state: ModelState, point: Point) -> RunningShares:
    """Returns the shares of the models on the link. Called between iterations; `state` is about to have one like
    `point`. See Note [Together]."""
    assert now.bandwidth is not None
    points = {member.name: member.point or FIRST["prefill"] for member in now.states} | {state.name: point}
    clients = [now.client(member, points[member.name], _all(member)) for member in now.states]
    shares = _together(now, clients, now.room(state))
    if shares is not None:
        return RunningShares(shares, {})
    clients = [
        now.client(member, points[member.name], now.room(state) if member is state else 0) for member in now.states
    ]
    return share_running(clients, now.bandwidth, now.traffic)


def admit(now: Situation, model: ModelClient, available: int) -> Refusal | None:
    """Returns why a model cannot join those that are there, should they all decode; None where it can. See
    MemoryManager.admit."""
    assert now.bandwidth is not None
    now.active = frozenset(state.number for state in now.states)
    taken = any(state.name == model.name for state in now.states)
    new = ModelState(-1, f"{model.name} (new)" if taken else model.name, Activity(), model)
    only = model.interval if isinstance(model.interval, int) else None
    kept: list[PhaseDemand] = []
    for phase, point in FIRST.items():
        costs, measured = now.costs(new, point)
        if new.slo(phase) == math.inf or not measured:
            continue
        slo = new.slo(phase)
        client = LinkClient(new.name, costs, now.page_size, slo, available, only=only, beside=tuple(kept))
        kept.append(PhaseDemand(costs, slo))
        wide = [now.client(state, state.last["decode"], _all(state)) for state in now.states]
        if _together(now, [*wide, client], available - now.mark) is not None:
            continue
        others = [now.client(state, state.last["decode"], 0) for state in now.states]
        verdict = share([*others, client], now.bandwidth, now.traffic)
        if isinstance(verdict, Refusal):
            return verdict
    return None


def _together(now: Situation, clients: Sequence[LinkClient], room: int) -> Shares | None:
    """Returns the best shares for all, if `room` beside the pages that they have allows them."""
    assert now.bandwidth is not None
    shares = possible(clients, now.bandwidth, now.traffic)
    if shares is None:
        return None
    has: Mapping[str, int] = {state.name: now.standing(state).device_pages for state in now.states}
    plans = {client.name: client.plan(shares.options[client.name].interval) for client in clients if not client.idle}
    takes = sum(plan.device_pages - has.get(name, 0) for name, plan in plans.items())
    return shares if takes <= room else None


def _all(state: ModelState) -> int:
    return sum(state.model.plan.pages)


@dataclass(frozen=True, slots=True)
class StreamDecision:
    """`plan`: what to stream in the next iteration, and `why`; `refusal`: why the SLO is missed, where it is; `notice`:
    a text to be shown once. It is decided anew once iterations have waited for `rent` seconds, or copies have taken
    `toll`: see Note [Back by rent]."""

    plan: Plan
    why: str
    refusal: Refusal | None = None
    notice: str | None = None
    rent: float = math.inf
    toll: float = math.inf


def decide(now: Situation, state: ModelState, point: Point) -> StreamDecision:
    """Decides what the model streams in an iteration like `point`. See Note [Two reasons to stream]."""
    if not state.auto:
        return _made(now, state, point, state.model.plan, "as was asked for")
    if state.slo(point.phase) < math.inf:
        return _by_slo(now, state, point)
    standing = now.standing(state)
    if not standing.streamed:
        return _made(now, state, point, standing, "every layer is resident")
    if state.faster is not None and state.faster.device_pages <= standing.device_pages:
        return _made(now, state, point, state.faster, "by what was measured this is faster in no more pages")
    if state.number in now.present:
        plan = _within(now, state, point, standing, now.room(state))
        return _made(now, state, point, plan, "its turn: as few layers stream as those that wait leave room for")
    if point.phase == "decode" and state.lent == state.model.plan:
        plan = _within(now, state, point, standing, now.spare)
        return _made(now, state, point, plan, "decoding has no SLO: as few layers stream as the free pages allow")
    return _coming_back(now, state, point, standing)


def _within(now: Situation, state: ModelState, point: Point, standing: Plan, more: int) -> Plan:
    """Returns the plan with the fewest streamed layers in so many pages `more`, where that is better."""
    costs, _ = now.costs(state, point)
    plan = fewest(standing.pages, standing.device_pages + more, costs.ratio, slots=state.tuning.slots)
    if plan is None or (costs.of(plan), plan.host_pages) >= (costs.of(standing), standing.host_pages):
        return standing
    return plan


def _coming_back(now: Situation, state: ModelState, point: Point, standing: Plan) -> StreamDecision:
    """Decides whether layers come back, to pages that are free or in exchange for what idle models have. See Note [Back
    by rent]."""
    freed, rent, toll = _within(now, state, point, standing, now.spare), math.inf, math.inf
    if freed != standing:
        price = _change(now, standing, freed)
        rent, toll = price, math.inf if freed.streamed else price
        if state.returning or state.model.waited >= rent or state.model.copied >= toll:
            return _made(now, state, point, freed, "pages are free, and copies have taken as long as that takes")
    costs, _ = now.costs(state, point)
    exchanged = _within(now, state, point, standing, now.room(state))
    if state.number in now.active and costs.of(exchanged) < costs.of(freed):
        price = _change(now, standing, exchanged)
        if state.model.waited >= price:
            return _made(now, state, point, exchanged, "its iterations have waited for as long as that takes")
        rent = min(rent, price)
    now.short |= freed.streamed != ()
    return replace(_made(now, state, point, standing, "memory demands it"), rent=rent, toll=toll)


def _change(now: Situation, standing: Plan, plan: Plan) -> float:
    """Seconds of waiting for all that streams that are worth the other plan: what it brings has its share of them."""
    comes = max(1, standing.host_pages - plan.host_pages)
    goes = max(0, plan.device_pages - standing.device_pages - now.spare)
    return now.tuning.prices.returns * threshold(comes, goes, now.page_seconds) * max(1, standing.host_pages) / comes


def faster(now: Situation, state: ModelState) -> Plan | None:
    """Returns the plan with which its iterations of late would have been faster, in no more pages; None where there is
    none, or it is not known. See Note [One slot or two]."""
    standing = now.standing(state)
    if not state.auto or state.has_slo or state.taken or not standing.copied:
        return None
    page_seconds = now.measured_page_seconds
    done = [(count, state.expected(state.last[phase], page_seconds)) for phase, count in state.passes.items()]
    known = [(count, costs) for count, costs in done if costs is not None]
    plan = fastest(standing, known, state.tuning.margin, state.tuning.slots)
    return None if plan == standing else plan


def fastest(
    standing: Plan,
    done: Sequence[tuple[int, Costs]],
    margin: float,
    slots: tuple[int, ...] = DEFAULT.weights.slots,
) -> Plan:
    """Returns `standing`, or the plan of `fewest` for its pages that saves the part `margin` of the time of so many
    iterations of each kind."""

    def seconds(plan: Plan) -> float:
        return sum(count * costs.expected(plan) for count, costs in done)

    plans = [fewest(standing.pages, standing.device_pages, costs.ratio, slots=slots) for _, costs in done]
    best = min((plan for plan in plans if plan is not None), key=seconds, default=standing)
    return best if seconds(best) < (1 - margin) * seconds(standing) else standing


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
    plan, on_interval = now.planned(state, point, option), option.interval != FIXED
    if now.is_late(state, point, plan):
        plan, on_interval = standing, False
    state.lent = plan
    aim = f"a {'decode step' if point.phase == 'decode' else 'prefill'} within {format_time(state.slo(point.phase))}"
    refusal = now.settled.missed.get(state.name)
    if refusal is None:
        what = f"of the intervals that keep {aim} that with most on the host" if on_interval else "what memory demands"
        return _made(now, state, point, plan, what)
    now.short = True
    least = "of what fits that at which the fewest SLOs are missed, by the least" if state.alternates else ""
    if state.name in now.settled.kept:
        return _made(now, state, point, plan, f"{aim} is kept, the SLO of the other phase is not: {least}")
    why = f"{aim} is not kept, and {least or 'as little streams as memory allows'}. {refusal}"
    made = _made(now, state, point, plan, why, refusal)
    if point.phase in state.noticed:
        return made
    state.noticed.add(point.phase)
    return replace(made, notice=f"{state.name}: {made.why}")


def _as_asked(now: Situation, state: ModelState, point: Point, standing: Plan) -> StreamDecision:
    """Decides on what memory demands, as long as that keeps the SLO, of the model or of the batch's requests; else on
    as little as there are pages for."""
    costs, measured = now.costs(state, point)
    if measured and costs.of(standing) <= state.slo(point.phase):
        return _made(now, state, point, standing, "what memory demands is within what requests ask")
    plan = _within(now, state, point, standing, now.spare)
    return _made(now, state, point, plan, "requests ask for more: as few layers stream as the free pages allow")


def _made(
    now: Situation, state: ModelState, point: Point, plan: Plan, why: str, refusal: Refusal | None = None
) -> StreamDecision:
    _, measured = now.costs(state, point)
    if not measured and (plan.streamed or refusal):
        why += f" (not measured: assumed that a layer takes {ASSUMED_RATIO} times as long to copy as to compute)"
    return StreamDecision(plan, why, refusal)
