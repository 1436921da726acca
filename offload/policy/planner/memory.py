"""The pages that a model needs of a device; and which layers stream and which KV leaves in a run, by the decisions that
the run makes: pages in, pages out.

Note [A run, foreseen]
    `manage()` moves the models in one after the other, each with as few layers streaming as the room beside it demands
    (hooks/weights/ranges.py); where there is none, earlier models give layers, as they are idle. Then all run.
    The prompt is followed stage by stage, from one layer's append of its tokens to the next one's, as what may be taken
    differs: KV of layers that have not run is not there yet. Of what is lacking the reclaim order takes in its order
    (reclaim_order.py, giving.py), whole layers and single pages of KV, all of it or nothing. Between two forwards the
    plan of what is left is arranged (giving.standing). The answer is followed from page to page of KV. What left comes
    back once its absence has cost that (rental.py); a run with longer answers has come to rest. With an SLO as many
    layers stream as that allows (coordinator.py).

Note [What cannot be foreseen]
    Kernels allocate inside of themselves, on a CPU for each thread, and blocks lie on pages as they happen to: so pages
    of operators are known as at least and at most so many. And whether copies hide is judged by what iterations were
    measured to take, which is unknown without a record, and differs by the noise of a machine with one. The run is
    followed with the least and the most of either. Where that ends elsewhere, as KV leaves page by page for what is
    lacking at the moment, `Placed.settled` is False: it fits with the most, and what is said is what the least comes
    to, which is nearer to what runs do. So it is in 3 of the 14 settings of tests/test_planner_pages.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from typing import Final

from ..coordinator import LinkClient, possible
from ..giving import Model, candidates, standing
from ..kv_pages import mark, scarce, worth_telling
from ..plan import ASSUMED_RATIO, Costs, Fewest, Plan, fewest
from ..price import Price, until_used
from ..reclaim_order import Candidate, PageSource, ordered
from ..tuning import DEFAULT, Tuning, WeightPlans

# Times that an iteration may take longer, or shorter, than was measured when it is asked whether copies hide. Chosen:
# two processes on two cores.
_NOISE: Final = 2.0


class Phase(Enum):
    """The phase of a model: its weights are moved in; the prompt; an answer to it."""

    LOADING = 0
    PROMPT = 1
    ANSWER = 2


@dataclass(frozen=True, slots=True)
class Moment:
    """Device pages at one moment of a run, should nothing leave. `kv`: of each range of its cache, in the order in
    which layers compute; `movable`: those of them that may leave, as they are full; `activations`: of what operators
    allocate, at the peak and at most; `fewest`: the same at least, None as many."""

    kv: tuple[int, ...]
    movable: int
    activations: int
    fewest: int | None = None

    @property
    def pages(self) -> int:
        """The most pages."""
        return sum(self.kv) + self.activations

    @property
    def least(self) -> int:
        """Pages of operators at least."""
        return self.activations if self.fewest is None else self.fewest


@dataclass(frozen=True, slots=True)
class Judged:
    """Seconds of iterations by which a run decides what leaves, None where not measured: of the least decode step that
    was, of the prompt, and of the last decode step."""

    first: float | None = None
    prefill: float | None = None
    decode: float | None = None


@dataclass(frozen=True, slots=True)
class Needs:
    """Pages of one model. `layers`: of the weights of each decoder layer; `beside`: of all other weights; `working`:
    that `manage()` keeps free for a short use; `prompt`: when the prompt is computed, of which each sequence has so
    many `rows`; `last`: at the last token. `stages`: the prompt, from one layer's append to the next one's; `growth`:
    the answer, from one new page to the next; a single moment each where not given. Seconds, None where not known, of
    iterations with every layer resident: `prefill` of the prompt, `decode` of the last token; `judged`: see Judged,
    None for these two; `aside`: that `generate()` takes beside the first forward, and beside each other."""

    name: str
    layers: tuple[int, ...]
    beside: int
    working: int
    prompt: Moment
    last: Moment
    rows: int
    prefill: float | None = None
    decode: float | None = None
    stages: tuple[Moment, ...] = ()
    growth: tuple[Moment, ...] = ()
    judged: Judged | None = None
    aside: tuple[float, float] = (0.0, 0.0)

    @property
    def weights(self) -> int:
        """Pages of all weights."""
        return sum(self.layers) + self.beside

    @property
    def judging(self) -> Judged:
        """The times that a run decides by."""
        return self.judged or Judged(self.decode, self.prefill, self.decode)

    def moments(self, phase: Phase) -> tuple[Moment, ...]:
        """The moments of that phase."""
        return self.stages or (self.prompt,) if phase is Phase.PROMPT else self.growth or (self.last,)


@dataclass(frozen=True, slots=True)
class Placed:
    """The pages of a model at the last token. `plan`: its layers; `weights`: device pages of all its weights, slots
    included; `away`: pages of its KV on the host, and `early`: those that had to leave for the prompt; `settled`: would
    every run end so? See Note [What cannot be foreseen]."""

    plan: Plan
    weights: int
    away: int
    early: int
    settled: bool = True


@dataclass(frozen=True, slots=True)
class Binding:
    """The moment that sets the least budget. `weights`, `kv`, `activations`: device pages of all models that it needs
    at once, when all has left that may; `on_host`: with less on the device the host would lack room."""

    phase: Phase
    weights: int
    kv: int
    activations: int
    on_host: bool = False

    @property
    def what(self) -> str:
        """What has the most pages then: "weights", "kv" or "activations"; or "host"."""
        pages = {"activations": self.activations, "kv": self.kv, "weights": self.weights}
        return "host" if self.on_host else max(pages, key=lambda owner: pages[owner])


@dataclass(frozen=True, slots=True)
class PlanBudget:
    """`pages` of the device, of `page_size` bytes; `page_seconds`: to copy one to it, None where not known; `slo`:
    seconds that a decode step may take; `host`: host pages for what leaves, None where not known; `copying`: seconds
    that computing loses to each second of copies."""

    pages: int
    page_size: int
    page_seconds: float | None = None
    slo: float | None = None
    host: int | None = None
    copying: float = 0.0


def placed(
    models: Sequence[Needs], budget: PlanBudget, tuning: Tuning = DEFAULT, *, rested: bool = False
) -> list[Placed] | None:
    """Returns the pages of all models at the last token; None where they do not fit, whatever streams, or the host
    lacks room. `rested`: what had to leave for the prompt has had the time to come back. See Note [A run, foreseen]."""
    managed = _managed(models, budget, tuning)
    if managed is None:
        return None
    places = _followed(models, managed, budget, tuning, rested)
    if places is None or all(
        at.plan == plan and not at.away + at.early for at, plan in zip(places, managed, strict=True)
    ):
        return places  # with the most nothing is lacking, so that nothing hangs on anything
    known = budget.page_seconds is not None and all(model.judging.decode is not None for model in models)
    likely = _followed(models, managed, budget, tuning, rested, least=True) or places
    settled = all(
        _followed(models, managed, budget, tuning, rested, least=least, slower=slower) == likely
        for least in (False, True)
        for slower in ((1 / _NOISE, _NOISE) if known else (0.0, math.inf))
    )
    return [replace(place, settled=settled) for place in likely]


def _followed(
    models: Sequence[Needs],
    managed: Sequence[Plan],
    budget: PlanBudget,
    tuning: Tuning,
    rested: bool,
    *,
    least: bool = False,
    slower: float = 1.0,
) -> list[Placed] | None:
    """Follows a run from the plans that `manage()` leaves; None where something finds no room. `least`: operators have
    as few pages as they may; `slower`: times that decode steps take longer than is known."""
    run = _begun(models, managed, budget, tuning, least, slower)
    running = run.models
    if not run.prompt():
        return None
    early = [state.away for state in running]
    if rested:
        run.rest()
    if not run.answer():
        return None
    on_host = sum(state.away + state.model.plan.host_pages for state in running)
    if budget.host is not None and on_host > budget.host:
        return None  # a page that leaves needs one there, whatever else would leave in its place
    return [
        Placed(state.model.plan, state.needs.beside + state.model.plan.device_pages, state.away, first)
        for state, first in zip(running, early, strict=True)
    ]


def _begun(
    models: Sequence[Needs],
    managed: Sequence[Plan],
    budget: PlanBudget,
    tuning: Tuning,
    least: bool = False,
    slower: float = 1.0,
) -> _Run:
    """Returns a run at its beginning, see `_followed`."""
    begun = [
        _model(needs, plan, budget, tuning.weights, active=True) for needs, plan in zip(models, managed, strict=True)
    ]
    if budget.slo is not None:
        begun = _by_slo(models, begun, budget)
    running = [_Running(needs, model, tuning.weights, slower) for needs, model in zip(models, begun, strict=True)]
    return _Run(running, budget, tuning, least)


@dataclass(slots=True)
class _Running:
    """A model that runs. `taken`: layers since `model.plan` was arranged; `away`: pages of its KV on the host;
    `listed`: full pages of its KV that the core knows of."""

    needs: Needs
    model: Model
    tuning: WeightPlans
    slower: float
    taken: set[int] = field(default_factory=set)
    away: int = 0
    listed: int = 0

    @property
    def held(self) -> int:
        """Device pages of its weights."""
        plan = self.model.plan
        return self.needs.beside + plan.device_pages - sum(plan.pages[layer] for layer in self.taken)

    def stands(self, phase: Phase, budget: PlanBudget) -> Model:
        """Returns the model as it would be arranged now, for an iteration of that phase. Before the first decode step
        the least measured time counts, or an assumed one."""
        judging, model = self.needs.judging, self.model
        if phase is Phase.PROMPT:
            decode, now = self._costs(judging.first, budget), self._costs(judging.prefill, budget)
        else:
            decode = now = self._costs(judging.decode, budget, self.slower)
        return replace(model, plan=standing(model.plan, self.taken, now, model.slots), costs=decode)

    def _costs(self, seconds: float | None, budget: PlanBudget, slower: float = 1.0) -> Costs:
        costs = costs_of(self.needs, seconds, budget.page_seconds, self.tuning)
        if slower in (0.0, math.inf):  # nothing hides, or everything does
            return replace(costs, seconds=1e-6 if not slower else 1e6, page_seconds=1.0 if not slower else 1e-6)
        return replace(costs, seconds=costs.seconds * slower)


class _Run:
    """Models that run under a budget. `least`: operators have as few pages as they may; `short`: the moment that found
    no room."""

    def __init__(self, models: Sequence[_Running], budget: PlanBudget, tuning: Tuning, least: bool) -> None:
        self.models = models
        self.short: Binding | None = None
        self._budget = budget
        self._tuning = tuning
        self._least = least
        self._mapped: list[int] = []  # pages that operators of each had so far, as the heap keeps them

    def prompt(self) -> bool:
        """Follows the prompts. Is there room for all?"""
        mapped = self._mapped = [0] * len(self.models)
        for model in self.models:
            model.listed = 0 if model.needs.stages else model.needs.prompt.movable  # where all is one moment
        stages = self._moments(Phase.PROMPT)
        for before, now in pairwise([stages[0], *stages]):
            kv = sum(sum(moment.kv) for moment in now)
            held = sum(min(self._of(at), self._of(was)) for at, was in zip(now, before, strict=True))
            if not self._room(kv, held, Phase.PROMPT):
                for state, was in zip(self.models, before, strict=True):
                    state.listed = was.movable  # a failed mapping of KV has all of it listed (hooks/kv/pages.py)
                if not self._room(kv, held, Phase.PROMPT):
                    return False
            self._tell(now, kv + sum(mapped))
            mapped[:] = [max(most, self._of(at)) for most, at in zip(mapped, now, strict=True)]
            if not self._room(kv, sum(map(self._of, now)), Phase.PROMPT):
                return False
        self._arrange()
        return True

    def rest(self) -> None:
        """Brings back what had to leave for the prompt, as far as pages are free: KV first, which is read sooner, and
        layers where they are waited for, or all fit."""
        now = self._moments(Phase.PROMPT)[-1]
        kept = sum(max(most, self._of(at)) for most, at in zip(self._mapped, now, strict=True))
        total = self._budget.pages
        free = total - self._held - sum(sum(at.kv) for at in now) - kept - mark(total)
        for state in self.models:
            back = max(0, min(state.away, free))
            state.away, free = state.away - back, free - back
        for state in self.models:
            model, held = state.stands(Phase.ANSWER, self._budget), state.model.plan.device_pages
            plan = fewest(model.plan.pages, held + max(0, free), model.costs.ratio, slots=model.slots)
            waits = state.needs.judging.decode is not None and model.costs.expected(model.plan) > model.costs.seconds
            if plan is not None and plan.host_pages < model.plan.host_pages and (waits or not plan.streamed):
                state.model, free = replace(model, plan=plan), free + held - plan.device_pages

    def answer(self) -> bool:
        """Follows the answers to the last token. Is there room for all?"""
        last = (model.needs.last for model in self.models)
        if self._held + sum(sum(at.kv) + self._of(at) for at in last) <= self._budget.pages:
            return True  # as caches only grow
        for now in self._moments(Phase.ANSWER):
            for state, at in zip(self.models, now, strict=True):
                state.listed = at.movable
            if not self._room(sum(sum(at.kv) for at in now), sum(map(self._of, now)), Phase.ANSWER):
                return False
            self._arrange()
        return True

    def _moments(self, phase: Phase) -> list[list[Moment]]:
        """Returns the moments of all models together: one that has fewer stays at its last."""
        moments = [model.needs.moments(phase) for model in self.models]
        return [[those[min(step, len(those) - 1)] for those in moments] for step in range(max(map(len, moments)))]

    def _of(self, moment: Moment) -> int:
        return moment.least if self._least else moment.activations

    def _tell(self, now: Sequence[Moment], used: int) -> None:
        """Lists pages that are full by now, where pages are short, as manager/kv_tier.py does."""
        total = self._budget.pages
        if scarce(max(0, total - used - self._held), total, self._tuning.pages):
            for model, at in zip(self.models, now, strict=True):
                if worth_telling(at.movable - model.listed, total):
                    model.listed = at.movable

    @property
    def _held(self) -> int:
        return sum(model.held - model.away for model in self.models)

    def _room(self, kv: int, activations: int, phase: Phase) -> bool:
        """Takes what is lacking for so many pages of KV and of operators, of all models; all of it, or nothing."""
        lack = self._held + kv + activations - self._budget.pages
        if lack <= 0:
            return True
        offered = self._offered(phase)
        if sum(candidate.pages for candidate in offered) < lack:
            gone = sum(candidate.pages for candidate in offered if candidate.source is PageSource.RUNNING_KV)
            layers = sum(candidate.pages for candidate in offered) - gone
            gone += sum(state.away for state in self.models)
            self.short = Binding(phase, sum(state.held for state in self.models) - layers, kv - gone, activations)
            return False
        for candidate in offered:
            state = self.models[candidate.client]
            if candidate.source is PageSource.RUNNING_KV:
                state.away += min(lack, candidate.pages)
            else:
                state.taken.add(candidate.index)
            lack -= candidate.pages
            if lack <= 0:
                break
        return True

    def _offered(self, phase: Phase) -> list[Candidate]:
        """Returns what the reclaim order takes, in its order."""
        models, prices = [state.stands(phase, self._budget) for state in self.models], self._tuning.prices
        uses = 1 / sum(model.costs.seconds for model in models)
        sequences = []
        for number, (giver, model) in enumerate(zip(self.models, models, strict=True)):
            gone = {*giver.model.plan.streamed, *giver.taken}
            sequences.append(candidates(model, number, gone, uses, prices.hidden, prices.step))
            if (pages := giver.listed - giver.away) > 0:
                copy = model.costs.page_seconds
                price = Price(copy * uses, 2 * copy)
                sequences.append([Candidate(PageSource.RUNNING_KV, number, 0, pages, price, recency=float(number))])
        return ordered(sequences, prices.horizon)

    def _arrange(self) -> None:
        """Arranges what was taken, before the next forward."""
        for model in self.models:
            if model.taken:
                model.model = model.stands(Phase.ANSWER, self._budget)
                model.taken = set()


def least(models: Sequence[Needs], budget: PlanBudget, tuning: Tuning = DEFAULT) -> int:
    """Returns the fewest pages that fit all models. Where the host lacks room whatever the budget, as an SLO has layers
    stream: as if it had it."""

    def fits(pages: int) -> bool:
        within = replace(budget, pages=pages)
        managed = _managed(models, within, tuning)
        return managed is not None and _followed(models, managed, within, tuning, rested=False) is not None

    if not fits(everything(models)):
        budget = replace(budget, host=None)
    low, high = 0, 1
    while not fits(high):
        low, high = high, 2 * high
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def binding(models: Sequence[Needs], budget: PlanBudget, tuning: Tuning = DEFAULT) -> Binding:
    """Returns what finds no room with a page less than `budget`, the least that fits."""
    within = replace(budget, pages=budget.pages - 1)
    managed = _managed(models, within, tuning)
    if managed is None:
        smallest = Fewest(slots=tuning.weights.slots).smallest
        weights = sum(needs.beside + smallest(needs.layers) for needs in models)
        return Binding(Phase.LOADING, weights, 0, max(needs.working for needs in models))
    run = _begun(models, managed, within, tuning)
    if run.prompt() and run.answer():
        last = [needs.last for needs in models]
        kv, held = (sum(count) for count in zip(*((sum(at.kv), at.activations) for at in last), strict=True))
        away = sum(state.away for state in run.models)
        return Binding(Phase.ANSWER, sum(state.held for state in run.models), kv - away, held, on_host=True)
    assert run.short is not None
    return run.short


def everything(models: Sequence[Needs]) -> int:
    """Returns the pages with which nothing streams and nothing leaves."""
    running = sum(max(model.prompt.pages, model.last.pages) for model in models)
    return sum(model.weights for model in models) + max(running, *(model.working for model in models))


def costs_of(needs: Needs, seconds: float | None, page_seconds: float | None, tuning: WeightPlans) -> Costs:
    """Returns the costs of an iteration, as the manager has them: assumed where not measured."""
    pages, ratio = max(1, sum(needs.layers)), float(ASSUMED_RATIO)
    if seconds is None:
        seconds = pages * (page_seconds or 1.0) / ratio
    if page_seconds is None:
        page_seconds = seconds * ratio / pages
    return Costs(needs.layers, seconds, page_seconds)


def _managed(models: Sequence[Needs], budget: PlanBudget, tuning: Tuning) -> list[Plan] | None:
    """Returns the plans that `manage()` arrives at for all models."""
    rule, plans, used = Fewest(slots=tuning.weights.slots), list[Plan](), 0
    for number, needs in enumerate(models):
        before = [
            _model(*pair, budget, tuning.weights, active=False) for pair in zip(models[:number], plans, strict=True)
        ]
        fixed = needs.beside + needs.working
        lack = used + fixed + sum(needs.layers) - budget.pages
        held = sum(model.plan.device_pages for model in before)
        before = _given(before, lack, tuning)
        used -= held - sum(model.plan.device_pages for model in before)
        plan = rule.choose(needs.layers, budget.pages - used - fixed)
        if plan is None:
            return None
        plans = [*(model.plan for model in before), plan]
        used += needs.beside + plan.device_pages
    return plans


def _given(models: Sequence[Model], lack: int, tuning: Tuning) -> list[Model]:
    """Returns idle models once they have given so many pages, or as many as they have."""
    uses, prices = 1 / until_used(0.0, None, 0.0, tuning.prices.horizon), tuning.prices
    offered = (
        candidates(model, number, model.plan.streamed, uses, prices.hidden, prices.step)
        for number, model in enumerate(models)
    )
    taken: list[set[int]] = [set() for _ in models]
    for candidate in ordered(offered, prices.horizon):
        if lack > 0:
            taken[candidate.client].add(candidate.index)
            lack -= candidate.pages
    return [
        replace(model, plan=standing(model.plan, gone, model.costs, model.slots))
        for model, gone in zip(models, taken, strict=True)
    ]


def _model(needs: Needs, plan: Plan, budget: PlanBudget, tuning: WeightPlans, *, active: bool) -> Model:
    seconds = needs.judging.decode if active else needs.judging.prefill
    costs = costs_of(needs, seconds, budget.page_seconds, tuning)
    return Model(needs.name, plan, costs, active, slots=tuning.slots)


def _by_slo(models: Sequence[Needs], running: Sequence[Model], budget: PlanBudget) -> list[Model]:
    """Returns the models streaming as many layers as the SLO allows, where it can be kept and times are known: no more
    may then."""
    if budget.slo is None or budget.page_seconds is None or any(needs.decode is None for needs in models):
        return list(running)
    free = budget.pages - sum(
        needs.beside + model.plan.device_pages + needs.last.pages for needs, model in zip(models, running, strict=True)
    )
    clients = [
        LinkClient(model.name, model.costs, budget.page_size, budget.slo, max(0, model.plan.device_pages + free))
        for model in running
    ]
    shares = possible(clients, budget.page_size / budget.page_seconds)
    if shares is None:
        return list(running)
    plans = {client.name: client.plan(shares.options[client.name].interval) for client in clients}
    return [replace(model, plan=plans[model.name], least=plans[model.name].device_pages) for model in running]
