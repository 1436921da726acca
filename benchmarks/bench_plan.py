"""Plans against runs: the time to the first token and per token, predicted from a configuration, and as measured.

Everything in one process: the model is measured first, as `python -m ballonet profile` does it, and plans are made from
that record. Then each setting, a batch, a prompt and a budget, is planned, and run as planned: answers to random
prompts, of which the median counts. Settings come in random order, so that a drift of the machine meets all alike.
`off by` is the part of the measured time that the prediction is wrong by. Where the run streams other layers than were
planned that is told. The stand-in's link is slowed to 2 GB/s.
"""

from __future__ import annotations

import gc
import random
import tempfile
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

from common import GIB, MIB, Figure, Options, describe_few, report
from peer import Functions, begin, peers
from streamed import environment, page_size, titled

LAYERS = 16
BATCHES = {"cuda": (1, 3, 8), "cpu": (1, 3), "tiny": (1,)}
PROMPTS = {"cuda": (200, 1500), "cpu": (100, 180), "tiny": (70,)}  # tokens
PARTS = {"cuda": (1.0, 0.75, 0.5, 0.25), "cpu": (1.0, 0.8, 0.6, 0.4, 0.2, 0.0), "tiny": (1.0, 0.0)}
GRID = {"cuda": (8, 2048), "cpu": (4, 256), "tiny": (1, 128)}  # sequences and tokens that are measured beforehand
TOKENS = {"cuda": 24, "cpu": 12, "tiny": 5}
ROUNDS = {"cuda": 3, "cpu": 3, "tiny": 1}
PAGE = {"cuda": None, "cpu": MIB // 4}
SECONDS = 600.0  # that measuring may take
WARM = 2  # tokens before the first that counts: the first pass fills the slots
OFF = 0.1


@dataclass(frozen=True, slots=True)
class Setting:
    """`part`: of the way from the smallest budget to one that holds everything."""

    batch: int
    prompt: int
    part: float


def main() -> None:
    chosen = begin("plan", __doc__, functions)
    kind = chosen.kind
    settings = [Setting(*each) for each in product(BATCHES[kind], PROMPTS[kind], PARTS[kind])]
    random.Random(0).shuffle(settings)
    with tempfile.TemporaryDirectory() as folder:
        given = {**environment(chosen), "BALLONET_CACHE_DIR": folder}
        with peers(__file__, chosen, ("ballonet",), {"ballonet": given}) as found:
            peer = found["ballonet"]
            peer.ask("measure")
            taken = [(each, peer.ask("run", batch=each.batch, prompt=each.prompt, part=each.part)) for each in settings]
    rows = [row_of(*each) for each in sorted(taken, key=lambda each: (each[0].batch, each[0].prompt, -each[0].part))]
    rows.append(summary([facts for _, facts in taken], chosen))
    report(chosen, "plan", titled(chosen, f"plans against runs, {describe_few(chosen, LAYERS)}"), rows)


def row_of(setting: Setting, facts: dict[str, Any]) -> dict[str, Any]:
    """A setting, as planned and as run."""
    row: dict[str, Any] = {"sequences": setting.batch, "prompt": setting.prompt, "budget, MiB": facts["budget"] >> 20}
    row["layers that stream"] = f"{facts['planned']}" + (
        "" if facts["ran"] == facts["planned"] else f", ran {facts['ran']}"
    )
    row["pages"] = "as planned" if facts["pages"] else "others"
    for name in ("ttft", "tpot"):
        row[f"{name}, planned, ms"] = round(facts[name][0] * 1e3, 2)
        row[f"{name}, ms"] = Figure.of([each * 1e3 for each in facts[name][1]])
        row[f"{name} off by"] = Figure.of([off(facts, name)])
    return row


def off(facts: dict[str, Any], name: str) -> float:
    """The part of the measured time that the predicted one is wrong by."""
    measured = median(facts[name][1])
    return abs(float(facts[name][0]) / measured - 1)


def summary(taken: list[dict[str, Any]], chosen: Options) -> dict[str, Any]:
    """The median error of all settings, and the worst."""
    row: dict[str, Any] = dict.fromkeys(row_of(Setting(0, 0, 0.0), taken[0]), "")
    row["sequences"] = f"all {len(taken)}"
    row["pages"] = f"{sum(each['pages'] for each in taken)} as planned"
    for name in ("ttft", "tpot"):
        errors = Figure.of([off(each, name) for each in taken])
        row[f"{name} off by"] = errors if chosen.tiny else errors.at_most(OFF)
    return row


def functions(name: str, chosen: Options) -> Functions:
    run = Running(chosen)
    return {"measure": run.measure, "run": run.run}


class Running:
    """The process that loads the model, once for each setting."""

    def __init__(self, chosen: Options) -> None:
        import torch
        from llama import build, few

        import ballonet

        self._chosen = chosen
        self._tokens = TOKENS[chosen.kind]
        self._folder = tempfile.mkdtemp(prefix="ballonet-plan-")
        model = build(few(chosen, LAYERS), "cpu")
        if chosen.cuda:
            model = model.to(torch.bfloat16)
        model.save_pretrained(self._folder)
        self._budget = 60 * GIB if chosen.cuda else 2 * GIB
        ballonet.install(self._budget, page_size=page_size(chosen) or PAGE[chosen.kind])

    def _load(self) -> Any:
        import ballonet

        model = ballonet.from_pretrained(self._folder, dtype="auto")
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        return model

    def measure(self) -> None:
        """The record of the model goes to its file."""
        import ballonet
        from ballonet.allocator import runtime
        from ballonet.hooks.managed import pace_of
        from ballonet.hooks.profile import Grid, load_or_measure

        batch, length = GRID[self._chosen.kind]
        model = self._load()
        load_or_measure(model, pace_of(ballonet.manage(model)), runtime.require(), Grid(batch, length, SECONDS))

    def run(self, batch: int, prompt: int, part: float) -> dict[str, Any]:
        """Plans, and runs as planned."""
        import ballonet
        from ballonet.allocator import runtime
        from ballonet.hooks.plan.planner import Planner

        gc.collect()
        device = runtime.require()
        context = prompt + self._tokens - 1

        def planner(budget: int) -> Planner:
            return Planner(self._folder, context, batch, prompt, budget, device.page_size)

        wide = planner(self._budget)
        answer = wide.ask(wide.asked)
        budget = round(answer.least + part * (answer.all - answer.least)) * device.page_size
        plan = planner(budget).facts()
        device.set_budget(budget)
        try:
            model = self._load()
            times = [self._times(model, batch, prompt) for _ in range(1 + ROUNDS[self._chosen.kind])][1:]
            ran = len(ballonet.manage(model).report().streamed)
            pages = device.snapshot()["pages"]["weights"]
        finally:
            device.set_budget(self._budget)
        return {
            "budget": budget,
            "planned": plan["layers_streamed"],
            "ran": ran,
            "pages": pages == plan["pages"]["weights"],
            "ttft": (plan["ttft_seconds"], [first for first, _ in times]),
            "tpot": (plan["tpot_seconds"], [token for _, token in times]),
        }

    def _times(self, model: Any, batch: int, prompt: int) -> tuple[float, float]:
        """Seconds to the first token, and per token."""
        from generating import Clock, answer, words

        clock = Clock(self._chosen.device)
        ids = words(model, (batch, prompt), 1).to(self._chosen.device)
        clock.note()
        answer(model, ids, self._tokens, clock)
        return clock.times[1] - clock.times[0], clock.ms(1 + WARM) / 1e3


if __name__ == "__main__":
    main()
