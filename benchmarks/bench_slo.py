"""Models with an SLO: what they take, and how much of their weights they do without.

Everything in one process: a model is managed with SLOs of so many times what a step and a prompt take with all layers
resident, as its record has them (Select-N §4.4), then two models that share the link. `interval` is the one that it
streams at, `smallest` the one that alone keeps both SLOs by the schedule. An SLO that no interval meets is refused,
with the nearest that one does.

On a GPU clocks judge. Elsewhere other programs make any clock wrong, so none is read: the record is given, its costs in
proportions of the 8B shape on an H200, but so long that nothing that runs here takes as long, and the manager's clock
stands still. Counted is, for each token of an answer, which layers stream and how many bytes of weights come:
those beyond the layers that stream are moved, because one plan follows another. A token takes what the schedule says
for its layers, and what is moved before; of two models with the part of the link that each gets where both copy all the
time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch
from harness import MIB, Benchmark, Figure, Functions, Options, main, peers, report
from models import Clock, answer, build, describe_few, few, layer_page_size, or_link, seconds

import ballonet
from ballonet.allocator import devices
from ballonet.allocator.config import cache_dir
from ballonet.allocator.errors import SLOError
from ballonet.hooks.device import managers
from ballonet.hooks.device.key import key_of
from ballonet.hooks.managed import Managed, pace_of, residency_of
from ballonet.hooks.profile import Grid, load_or_measure
from ballonet.offload.policy.plan import Costs, Plan, meeting
from ballonet.offload.policy.schedule import every
from ballonet.offload.record import record
from ballonet.offload.record.record import PHASES, Phase, Point, Record

LAYERS = 16
BELOW = 0.5  # of the resident time: nothing meets it
PROMPT = 120  # tokens
TOKENS, ROUNDS = 8, 3
LONGEST = 1024  # tokens of the longest prompt that is measured beforehand
UNIT = 1000.0  # seconds that a layer takes in a step, where costs are given


class GivenCosts(NamedTuple):
    """Times of a layer in units, of which one is 0.72 ms on an H200: of its copy, and of a prompt."""

    name: str
    copying: float
    prompt: float


GIVEN = (
    GivenCosts("55 GB/s, prompts of 10 x a step", 11.0, 10.0),
    GivenCosts("450 GB/s, prompts of a step", 1.35, 1.0),
)
ENTERING = 0.05  # units that the host takes for a layer that streams
TIMES: Mapping[Phase, str] = {"decode": "ms per token / SLO", "prefill": "first token / SLO"}
COUNTS: Mapping[Phase, str] = {"decode": "counted: token / SLO", "prefill": "counted: first token / SLO"}
MOVED = "MiB moved per answer"


class Quotients(NamedTuple):
    """The SLOs of a step and of a prompt, over their times with all layers resident."""

    step: float
    prompt: float

    def __str__(self) -> str:
        apart = "" if self.prompt == self.step else f", first token {self.prompt:g} x"
        return f"{self.step:g} x resident{apart}"


ALONE = (*(Quotients(both, both) for both in (1.1, 1.5, 3.0)), Quotients(1.1, 3.0), Quotients(3.0, 1.1))
TOGETHER = (Quotients(1.5, 1.5), Quotients(3.0, 3.0))


def measuring(chosen: Options) -> None:
    names = ("ballonet", "link") if chosen.cuda else ("ballonet",)
    with ExitStack() as stack:
        given = {"BALLONET_CACHE_DIR": stack.enter_context(tempfile.TemporaryDirectory())}
        started = stack.enter_context(peers(chosen, names, dict.fromkeys(names, given)))
        started["ballonet"].ask("about")  # it has its models; what follows has its own time
        rows = started["ballonet"].ask("rows", link=started["link"].ask("link") if chosen.cuda else 0.0)
    limits = dict.fromkeys((TIMES if chosen.cuda else COUNTS).values(), 1.0) | ({} if chosen.cuda else {MOVED: 0.0})
    for row in rows:
        for column in {*TIMES.values(), *COUNTS.values(), MOVED}.intersection(row):
            if row[column] != "":
                figure = Figure.of([row[column]])
                row[column] = figure.at_most(limits[column]) if column in limits else figure
    how = "" if chosen.cuda else ", costs given, counted"
    report(chosen, f"models with an SLO, {describe_few(chosen, LAYERS)}{how}", rows)


def functions(name: str, chosen: Options) -> Functions:
    return {"about": dict, "rows": Measuring(chosen).rows}


class Measuring:
    """The process that has the models."""

    def __init__(self, chosen: Options) -> None:
        ballonet.install("60GiB" if chosen.cuda else "4GiB", page_size=layer_page_size(chosen))
        self._chosen = chosen
        self._rounds, self._tokens = (1, 3) if chosen.tiny else (ROUNDS, TOKENS)
        self._alone, self._together = (ALONE[-1:], TOGETHER[-1:]) if chosen.tiny else (ALONE, TOGETHER)
        self._device = devices.require()
        if not chosen.cuda:
            torch.set_num_threads(1)  # nothing is timed
            still = managers.composed_with(self._device)._replace(clock=lambda: 0.0)
            managers.compose_with(still, self._device)
        self._models = [build(few(chosen, LAYERS), chosen.device) for _ in range(2)]
        self._prompt = torch.ones(1, PROMPT, dtype=torch.long, device=chosen.device)
        with ballonet.manage(self._models[0], interval=None) as managed:
            self._pages = managed.report().pages
            self._layers = residency_of(managed).plan.pages

    def rows(self, link: float) -> list[dict[str, Any]]:
        """`link`: bytes per second, where it is measured. Of times what is above 1 misses its SLO."""
        rows = [row for what in self._records(link) for row in self._asked(what)]
        return [*rows, dict.fromkeys(rows[0], "") | {"": self._refused()}]

    def _records(self, link: float) -> Iterator[str]:
        """Makes one record after the other, and yields what its rows begin with."""
        if self._chosen.cuda:
            with ballonet.manage(self._models[0], interval=None) as managed:
                grid, some = Grid(batch=1, length=128 if self._chosen.tiny else LONGEST), residency_of(managed)
                pace, more = pace_of(managed), some.streaming_some
                known = load_or_measure(self._models[0], pace, self._device, grid, streaming=more).record
                self._costs = self._costed(self._times(self._models[0]), link, known.entering)
            yield ""
            return
        for given in GIVEN[-1:] if self._chosen.tiny else GIVEN:
            seconds: dict[Phase, float] = {"decode": LAYERS * UNIT, "prefill": LAYERS * UNIT * given.prompt}
            link = self._layers[0] * self._device.page_size / (given.copying * UNIT)
            self._costs = self._costed(seconds, link, ENTERING * UNIT)
            key = key_of(self._models[0], self._device)
            points = {Point(phase, 1, 2 * PROMPT): seconds[phase] for phase in PHASES}
            path = record.path_of(cache_dir(devices.of().settings), key)
            record.save(Record(key, link, points, entering=ENTERING * UNIT), path)
            yield f"{given.name}: "

    def _costed(self, seconds: Mapping[Phase, float], link: float, entering: float) -> dict[Phase, Costs]:
        """`seconds` of iterations with all layers resident."""
        page_seconds = self._device.page_size / link
        return {phase: Costs(self._layers, seconds[phase], page_seconds, entering) for phase in PHASES}

    def _asked(self, what: str) -> Iterator[dict[str, Any]]:
        for asked in self._alone:
            yield from self._managed({f"{what}{asked}": self._models[0]}, asked)
        for asked in self._together:
            names = (f"{what}{number} of two, {asked}" for number in ("first", "second"))
            yield from self._managed(dict(zip(names, self._models, strict=True)), asked)

    def _refused(self) -> str:
        resident = self._costs["decode"].seconds
        try:
            ballonet.manage(self._models[0], tpot_slo=BELOW * resident).release()
        except SLOError as error:
            nearest = None if error.slo is None else f"{error.slo / resident:.4g} x"
            return f"{BELOW:g} x resident: refused, nearest: {nearest}"
        return f"{BELOW:g} x resident: not refused"

    def _managed(self, models: Mapping[str, Any], asked: Quotients) -> Iterator[dict[str, Any]]:
        """The rows of models that all have these SLOs, by name."""
        slos: dict[Phase, float] = {"decode": asked.step, "prefill": asked.prompt}
        slos = {phase: slos[phase] * costs.seconds for phase, costs in self._costs.items()}
        with ExitStack() as stack:
            options = {"tpot_slo": slos["decode"], "ttft_slo": slos["prefill"]}
            managed = {name: stack.enter_context(ballonet.manage(model, **options)) for name, model in models.items()}
            for model in [*models.values(), *models.values()]:  # so that each has its plan beside others that run
                self._say(model, 1 + self._tokens)
            for name, model in models.items():
                others = [residency_of(other).plan for other in managed.values() if other is not managed[name]]
                yield {"": name, **self._row(model, managed[name], others, slos)}

    def _row(self, model: Any, managed: Managed, others: Sequence[Plan], slos: Mapping[Phase, float]) -> dict[str, Any]:
        """`others`: the plans of models beside it."""
        figures: dict[str, Any] = {}
        if self._chosen.cuda:
            figures["SLO, ms"] = round(slos["decode"] * 1e3, 2)
            figures |= {TIMES[phase]: taken / slos[phase] for phase, taken in self._times(model).items()}
        tokens = self._counted(model, managed)
        costs = self._beside(others)
        first, *later = (
            costs[phase].of(plan) + moved * self._costs[phase].page_seconds / self._device.page_size
            for phase, (plan, moved) in zip(("prefill", *("decode",) * self._tokens), tokens, strict=True)
        )
        figures |= {COUNTS["decode"]: max(later) / slos["decode"], COUNTS["prefill"]: first / slos["prefill"]}
        plan = residency_of(managed).plan
        intervals = (interval for interval in range(1, LAYERS + 1) if every(LAYERS, interval) == plan.streamed)
        alone = [meeting(self._costs[phase], slos[phase]) or 0 for phase in PHASES]
        return figures | {
            "MiB per token": round(plan.copied_pages * self._device.page_size / MIB, 1),
            MOVED: sum(moved for _, moved in tokens) / MIB,
            "interval": next(intervals, ""),
            "smallest": max(alone),
            "MiB freed": round((self._pages - managed.report().pages) * self._device.page_size / MIB),
        }

    def _times(self, model: Any) -> dict[Phase, float]:
        """Seconds of a decode step and of a prompt's first token: medians."""
        rounds, tokens = range(self._rounds), self._tokens
        self._say(model, 2)
        first = median(self._say(model, 1) for _ in rounds)
        token = median((self._say(model, 1 + tokens) - self._say(model, 1)) / tokens for _ in rounds)
        return {"decode": token, "prefill": first}

    def _counted(self, model: Any, managed: Managed) -> list[tuple[Plan, int]]:
        """For each token of an answer that follows another: what streams, and the bytes of weights that come beside
        that."""
        seen: list[tuple[Plan, int]] = []

        def look() -> int:
            seen.append((residency_of(managed).plan, came := ballonet.stats().copied.weights_h2d))
            return came

        clock = Clock(self._chosen.device, look)
        clock.note()
        answer(model, self._prompt, 1 + self._tokens, clock)
        befores = [came for _, came in seen]
        return [
            (plan, came - before - plan.copied_pages * self._device.page_size)
            for (plan, came), before in zip(seen[1:], befores, strict=False)
        ]

    def _beside(self, others: Sequence[Plan]) -> dict[Phase, Costs]:
        """The costs with what a link that serves all alike leaves beside the `others`."""
        taken = 0.0  # the part of the link
        for plan in others:
            busy = plan.copied_pages * self._costs["decode"].page_seconds
            taken += max(busy / costs.of(plan) for costs in self._costs.values())
        part = max(1 - taken, 1 / (1 + len(others)))
        return {phase: replace(costs, page_seconds=costs.page_seconds / part) for phase, costs in self._costs.items()}

    def _say(self, model: Any, tokens: int) -> float:
        return seconds(self._chosen.device, lambda: answer(model, self._prompt, tokens))


BENCHMARKS = {"slo": Benchmark(measuring, or_link(functions))}

if __name__ == "__main__":
    main(__doc__, BENCHMARKS)
