"""Models with an SLO: what they take, and how much of their weights they do without.

Everything in one process: a model is measured (Select-N §4.4), then managed with SLOs of so many times what a token and
a prompt take it with all layers resident; last come two models that share the link. `interval` is the one that it
decodes at, `smallest` the one that the schedule gives for the time and the link measured here. An SLO that no interval
meets is refused, with the nearest that one does. The stand-in's link is slowed to 2 GB/s.

On a GPU clocks judge. Elsewhere other programs make any clock wrong, so times are counted: by the record of the model's
iterations, of which the SLOs are so many times; a step or a prompt takes what the schedule says for the layers that
stream in it, and no less than what the link takes for the bytes of weights that came meanwhile, those of layers that
stream in one phase and not in the other included.
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
from ballonet.offload.policy.plan import Costs, Plan, meeting
from ballonet.offload.policy.schedule import every

LAYERS = 16
QUOTIENTS = {"cuda": (1.1, 1.5, 3.0), "cpu": (1.1, 1.5, 3.0), "tiny": (3.0,)}
BELOW = 0.5  # of the resident time: nothing meets it
PROMPT = 120  # tokens
TOKENS, ROUNDS = 8, 3
JUDGED = ("ms per token / SLO", "first token / SLO"), ("counted: token / SLO", "counted: first token / SLO")
GRID = {"cuda": 1024, "cpu": 256, "tiny": 128}  # tokens of the longest prompt that is measured beforehand


def measuring(chosen: Options) -> None:
    names = ("ballonet", "link")
    with tempfile.TemporaryDirectory() as folder:
        given = {**environment(chosen), "BALLONET_CACHE_DIR": folder}
        with peers(chosen, names, dict.fromkeys(names, given)) as started:
            rows = started["ballonet"].ask("rows", link=started["link"].ask("link"))
    for row in rows:
        for column in JUDGED[not chosen.cuda]:
            row[column] = Figure.of([row[column]]).at_most(1.0) if row[column] != "" else ""
        for column in JUDGED[chosen.cuda]:
            row[column] = Figure.of([row[column]]) if row[column] != "" else ""
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
            known = load_or_measure(model, pace_of(managed), devices.require(), grid, streaming=some).record
            self._pages = managed.report().pages
            steps, prompts = (known.time(phase, 1, PROMPT + self._tokens) for phase in (known.decoding, "prefill"))
            assert steps is not None
            assert prompts is not None
            self._token, self._first = self._times(model) if chosen.cuda else (steps * 1e3, prompts * 1e3)
        with ballonet.manage(model, interval=1) as managed:
            self._layer = managed.report().host_pages // len(managed.report().streamed)

    def rows(self, link: float) -> list[dict[str, Any]]:
        """`link`: bytes per second. Of times what is above 1 misses its SLO."""
        page = ballonet.stats().page_size
        self._link = link
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
        counted, counted_prompt = self._counted(model, managed)
        freed = (self._pages - managed.report().pages) * ballonet.stats().page_size
        intervals = (
            interval for interval in range(1, LAYERS + 1) if every(LAYERS, interval) == managed.report().streamed
        )
        return {
            "": what,
            "SLO, ms": round(slo, 2),
            "ms per token / SLO": token / slo,
            "first token / SLO": prompt / first,
            "counted: token / SLO": counted / slo,
            "counted: first token / SLO": counted_prompt / first,
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

    def _counted(self, model: Any, managed: Any) -> tuple[float, float]:
        """ms as `_times`, by what streams and by the bytes that come."""
        self._say(model, 1 + self._tokens)
        decoding, all_bytes = self._bytes(model, managed, 1 + self._tokens)
        prefilling, first_bytes = self._bytes(model, managed, 1)  # behind an answer, as every prompt of a conversation
        step = (all_bytes - first_bytes) / self._tokens
        return self._taken(self._token, decoding, step), self._taken(self._first, prefilling, first_bytes)

    def _bytes(self, model: Any, managed: Any, tokens: int) -> tuple[Plan, float]:
        """What streams once so many tokens were said, and the bytes of weights that came to the device meanwhile."""
        before = ballonet.stats().copied.weights_h2d
        self._say(model, tokens)
        return residency_of(managed).plan, ballonet.stats().copied.weights_h2d - before

    def _taken(self, resident: float, plan: Plan, nbytes: float) -> float:
        """ms of an iteration that takes so many with all layers resident."""
        costs = Costs(plan.pages, resident / 1e3, ballonet.stats().page_size / self._link)
        return 1e3 * max(costs.of(plan), nbytes / self._link)

    def _say(self, model: Any, tokens: int) -> float:
        return seconds(self._device, lambda: answer(model, self._prompt, tokens)) * 1e3


BENCHMARKS = {"slo": Benchmark(measuring, or_link(functions))}

if __name__ == "__main__":
    main(__doc__, BENCHMARKS)
