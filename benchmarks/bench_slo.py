"""Models with an SLO: what they take, and how much of their weights they do without.

Everything in one process: a model is measured (Select-N §4.4), then managed with SLOs of so many times what a token and
a prompt take it with all layers resident; last come two models that share the link. `interval` is the one that it
decodes at, `smallest` the one that the schedule gives for the time and the link measured here. An SLO that no interval
meets is refused, with the nearest that one does. The stand-in's link is slowed to 2 GB/s.
"""

from __future__ import annotations

import tempfile
from statistics import median
from typing import Any

import torch
from harness import MIB, Benchmark, Figure, Functions, Options, main, peers, report
from models import answer, build, describe_few, environment, few, layer_page_size, or_link, seconds

import ballonet
from ballonet.allocator import devices
from ballonet.allocator.errors import SLOError
from ballonet.hooks.managed import pace_of, residency_of
from ballonet.hooks.profile import Grid, load_or_measure
from ballonet.offload.policy.plan import Costs, meeting
from ballonet.offload.policy.schedule import every

LAYERS = 16
QUOTIENTS = {"cuda": (1.1, 1.5, 3.0), "cpu": (1.1, 1.5, 3.0), "tiny": (3.0,)}
BELOW = 0.5  # of the resident time: nothing meets it
PROMPT = 120  # tokens
TOKENS, ROUNDS = 8, 3
GRID = {"cuda": 1024, "cpu": 256, "tiny": 128}  # tokens of the longest prompt that is measured beforehand


def measuring(chosen: Options) -> None:
    names = ("ballonet", "link")
    with tempfile.TemporaryDirectory() as folder:
        given = {**environment(chosen), "BALLONET_CACHE_DIR": folder}
        with peers(chosen, names, dict.fromkeys(names, given)) as started:
            rows = started["ballonet"].ask("rows", link=started["link"].ask("link"))
    for row in rows:
        for column in ("ms per token / SLO", "first token / SLO"):
            if row[column] != "":
                figure = Figure.of([row[column]])
                row[column] = figure.at_most(1.0) if chosen.cuda else figure
    report(chosen, f"models with an SLO, {describe_few(chosen, LAYERS)}", rows)


def functions(name: str, chosen: Options) -> Functions:
    return {"rows": Measuring(chosen).rows}


class Measuring:
    """The process that has the models."""

    def __init__(self, chosen: Options) -> None:
        kind = chosen.kind
        ballonet.install("60GiB" if chosen.cuda else "4GiB", page_size=layer_page_size(chosen))
        self._device = chosen.device
        self._quotients = QUOTIENTS[kind]
        self._rounds, self._tokens = (1, 3) if chosen.tiny else (ROUNDS, TOKENS)
        self._models = [build(few(chosen, LAYERS), chosen.device) for _ in range(2)]
        self._prompt = torch.ones(1, PROMPT, dtype=torch.long, device=chosen.device)
        model = self._models[0]
        with ballonet.manage(model, interval=None) as managed:
            grid, some = Grid(batch=1, length=GRID[kind]), residency_of(managed).streaming_some
            load_or_measure(model, pace_of(managed), devices.require(), grid, streaming=some)
            self._pages = managed.report().pages
            self._token, self._first = self._times(model)
        with ballonet.manage(model, interval=1) as managed:
            self._layer = managed.report().host_pages // len(managed.report().streamed)

    def rows(self, link: float) -> list[dict[str, Any]]:
        """`link`: bytes per second. Of times what is above 1 misses its SLO."""
        page = ballonet.stats().page_size
        costs = Costs((self._layer,) * LAYERS, self._token / 1e3, page / link)
        found: list[dict[str, Any]] = []
        model, other = self._models
        for quotient in self._quotients:
            slo, first = quotient * self._token, quotient * self._first
            with ballonet.manage(model, tpot_slo=slo / 1e3, ttft_slo=first / 1e3) as managed:
                row = self._row(f"{quotient:g} x resident", model, managed, slo, first)
            found.append(row | {"smallest": meeting(costs, slo / 1e3)})
        try:
            ballonet.manage(model, tpot_slo=BELOW * self._token / 1e3).release()
            refused = "not refused"
        except SLOError as error:
            nearest = None if error.slo is None else f"{error.slo * 1e3:.3g} ms"
            refused = f"refused, nearest: {nearest}"
        refusal = {"": f"{BELOW:g} x resident: {refused}", "SLO, ms": round(BELOW * self._token, 2)}
        found.append(dict.fromkeys(found[0], "") | refusal)
        slo, first = self._quotients[-1] * self._token, self._quotients[-1] * self._first
        asked = {"tpot_slo": slo / 1e3, "ttft_slo": first / 1e3}
        with ballonet.manage(model, **asked) as one, ballonet.manage(other, **asked) as two:
            for name, looked, managed in (("first of two", model, one), ("second of two", other, two)):
                found.append(self._row(f"{name}, {self._quotients[-1]:g} x resident", looked, managed, slo, first))
        return found

    def _row(self, what: str, model: Any, managed: Any, slo: float, first: float) -> dict[str, Any]:
        token, prompt = self._times(model)
        freed = (self._pages - managed.report().pages) * ballonet.stats().page_size
        intervals = (
            interval for interval in range(1, LAYERS + 1) if every(LAYERS, interval) == managed.report().streamed
        )
        return {
            "": what,
            "SLO, ms": round(slo, 2),
            "ms per token / SLO": token / slo,
            "first token / SLO": prompt / first,
            "interval": next(intervals, ""),
            "smallest": "",
            "MiB freed": round(freed / MIB),
        }

    def _times(self, model: Any) -> tuple[float, float]:
        """ms of a decode step and of a prompt's first token: medians."""
        rounds, tokens = range(self._rounds), self._tokens
        self._say(model, 2)
        first = median(self._say(model, 1) for _ in rounds)
        token = median((self._say(model, 1 + tokens) - self._say(model, 1)) / tokens for _ in rounds)
        return token, first

    def _say(self, model: Any, tokens: int) -> float:
        return seconds(self._device, lambda: answer(model, self._prompt, tokens)) * 1e3


BENCHMARKS = {"slo": Benchmark(measuring, or_link(functions))}

if __name__ == "__main__":
    main(__doc__, BENCHMARKS)
