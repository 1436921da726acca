"""Plans against runs: the time to the first token and per token, predicted from a configuration, and as measured.

Two processes take turns. One measures the model at the points around a setting, all layers resident, as `python -m
ballonet profile` does it. The other one runs the setting, a batch, a prompt and a budget, as planned: answers to random
prompts. Each answer is compared with what is predicted from the measurements just before and just after it, as a
machine that has neighbours computes faster for a while and then slower for another: a round does not count where these
two differ by more than a tenth, unless all do. Settings come in random order. `off by` is the part of the measured time
that the prediction is wrong by, the median of the rounds; `again` the part by which a point differs that the first
process measures twice in a row, below which no prediction can be known to be better. Where the run streams other layers
than were planned that is told. The stand-in's link is slowed to 2 GB/s.
"""

from __future__ import annotations

import gc
import random
import tempfile
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import median
from typing import Any

from common import GIB, MIB, Figure, Options, describe_few, report
from peer import Functions, begin, peers
from streamed import environment, page_size, titled

LAYERS = {"cuda": 16, "cpu": 16, "tiny": 4}
BATCHES = {"cuda": (1, 3, 8), "cpu": (1, 3), "tiny": (1,)}
PROMPTS = {"cuda": (200, 1500), "cpu": (100, 180), "tiny": (70,)}  # tokens
PARTS = {"cuda": (1.0, 0.75, 0.5, 0.25), "cpu": (1.0, 0.8, 0.6, 0.4, 0.2, 0.0), "tiny": (1.0, 0.0)}
TOKENS = {"cuda": 24, "cpu": 12, "tiny": 5}
ROUNDS = {"cuda": 3, "cpu": 5, "tiny": 1}
PAGE = {"cuda": None, "cpu": MIB // 4}
BUDGET = {"cuda": 60 * GIB, "cpu": 2 * GIB}
SECONDS = 600.0  # that measuring may take
WARM = 2  # tokens before the first that counts: the first pass fills the slots
OFF = 0.1
PHASES = {"ttft": "prefill", "tpot": "decode"}
Size = tuple[int, int]  # sequences, tokens of each


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
        with peers(__file__, chosen, ("resident", "planned"), dict.fromkeys(("resident", "planned"), given)) as found:
            taken = [(each, taken_of(each, found["resident"], found["planned"], ROUNDS[kind])) for each in settings]
    rows = [row_of(*each) for each in sorted(taken, key=lambda each: (each[0].batch, each[0].prompt, -each[0].part))]
    rows.append(summary([facts for _, facts in taken], chosen))
    report(chosen, "plan", titled(chosen, f"plans against runs, {describe_few(chosen, LAYERS[kind])}"), rows)


def taken_of(setting: Setting, resident: Any, planned: Any, rounds: int) -> dict[str, Any]:
    """What the two processes say of a setting."""
    sizes = sorted(product(around(setting.batch), around(setting.prompt)))
    measured = [resident.ask("measure", sizes=sizes)]
    planned.ask("load", batch=setting.batch, prompt=setting.prompt, part=setting.part, record=measured[0])
    ran = []
    for _ in range(rounds):
        ran.append(planned.ask("answer"))
        measured.append(resident.ask("measure", sizes=sizes))
    again = [differing(*each) for each in pairwise(measured)]
    kept = [n for n, each in enumerate(again) if max(map(median, each.values())) <= OFF] or list(range(rounds))
    between = [mean(measured[n], measured[n + 1]) for n in kept]
    facts: dict[str, Any] = planned.ask("compare", records=between)
    return {
        **facts,
        "ttft": (facts["ttft"], [ran[n][0] for n in kept]),
        "tpot": (facts["tpot"], [ran[n][1] for n in kept]),
        "again": {phase: [other for each in again for other in each[phase]] for phase in again[0]},
    }


def around(number: int) -> set[int]:
    """The powers of two on either side, one where it is one."""
    above = 1 << (number - 1).bit_length()
    return {above, above if above == number else above // 2}


def differing(before: dict[str, Any], after: dict[str, Any]) -> dict[str, list[float]]:
    """By phase, the part by which each point differs."""
    found: dict[str, list[float]] = {}
    for (phase, *_, one), (*_, other) in zip(before["points"], after["points"], strict=True):
        found.setdefault(phase, []).append(abs(other / one - 1))
    return found


def mean(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """A record with the mean of each figure of two."""
    points = zip(before["points"], after["points"], strict=True)
    return {
        "points": [[*at, (one + other) / 2] for (*at, one), (*_, other) in points],
        "beside": {phase: (each + after["beside"][phase]) / 2 for phase, each in before["beside"].items()},
        "bandwidth": (before["bandwidth"] + after["bandwidth"]) / 2,
        "copying": (before["copying"] + after["copying"]) / 2,
    }


def row_of(setting: Setting, facts: dict[str, Any]) -> dict[str, Any]:
    """A setting, as planned and as run."""
    row: dict[str, Any] = {"sequences": setting.batch, "prompt": setting.prompt, "budget, MiB": facts["budget"] >> 20}
    row["layers that stream"] = f"{facts['planned']}" + (
        "" if facts["ran"] == facts["planned"] else f", ran {facts['ran']}"
    )
    row["pages"] = "as planned" if facts["pages"] else "others"
    for name in ("ttft", "tpot"):
        for what, times in zip((f"{name}, planned, ms", f"{name}, ms"), facts[name], strict=True):
            row[what] = Figure.of([each * 1e3 for each in times])
        row[f"{name} off by"] = Figure.of([off(facts, name)])
        row[f"{PHASES[name]} again"] = Figure.of(facts["again"][PHASES[name]])
    return row


def off(facts: dict[str, Any], name: str) -> float:
    """The part of the time that the predicted one is wrong by, in the median of the rounds."""
    return abs(median(planned / ran for planned, ran in zip(*facts[name], strict=True)) - 1)


def summary(taken: list[dict[str, Any]], chosen: Options) -> dict[str, Any]:
    """The median error of all settings, and the worst."""
    row: dict[str, Any] = dict.fromkeys(row_of(Setting(0, 0, 0.0), taken[0]), "")
    row["sequences"] = f"all {len(taken)}"
    row["pages"] = f"{sum(each['pages'] for each in taken)} as planned"
    for name in ("ttft", "tpot"):
        errors = Figure.of([off(each, name) for each in taken])
        row[f"{name} off by"] = errors if chosen.tiny else errors.at_most(OFF)
        phase = PHASES[name]
        row[f"{phase} again"] = Figure.of([each for facts in taken for each in facts["again"][phase]])
    return row


def functions(name: str, chosen: Options) -> Functions:
    if name == "resident":
        return {"measure": Resident(chosen).measure}
    planned = Planned(chosen)
    return {"load": planned.load, "answer": planned.answer, "compare": planned.compare}


def built(chosen: Options) -> str:
    """The folder of the model, which this process made, after it has installed the pool."""
    import torch
    from llama import build, few

    import ballonet

    folder = tempfile.mkdtemp(prefix="ballonet-plan-")
    model = build(few(chosen, LAYERS[chosen.kind]), "cpu")
    if chosen.cuda:
        model = model.to(torch.bfloat16)
    model.save_pretrained(folder)
    ballonet.install(BUDGET[chosen.device], page_size=page_size(chosen) or PAGE[chosen.kind])
    return folder


def loaded(folder: str) -> Any:
    import ballonet

    model = ballonet.from_pretrained(folder, dtype="auto")
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


class Resident:
    """The process that measures, with every layer resident."""

    def __init__(self, chosen: Options) -> None:
        self._model = loaded(built(chosen))

    def measure(self, sizes: list[Size]) -> dict[str, Any]:
        """A record of these sizes, as plain values."""
        import ballonet
        from ballonet.allocator import devices
        from ballonet.hooks.managed import pace_of
        from ballonet.hooks.profile import Grid, measured, measured_link
        from ballonet.offload.record.record import Record

        class Given(Grid):
            def sizes(self, longest: int = 0) -> list[Size]:
                return [(batch, length) for batch, length in sizes]

        bandwidth, copying = measured_link(devices.require())
        assert bandwidth is not None
        pace = pace_of(ballonet.manage(self._model))
        found, _ = measured(self._model, pace, Record({}, bandwidth), Given(seconds=SECONDS, rounds=1))
        points = [[*point, seconds] for point, seconds in sorted(found.seconds.items())]
        return {"points": points, "beside": dict(found.beside), "bandwidth": bandwidth, "copying": copying}


class Planned:
    """The process that runs settings as planned."""

    def __init__(self, chosen: Options) -> None:
        self._chosen = chosen
        self._tokens = TOKENS[chosen.kind]
        self._folder = built(chosen)
        self._model: Any = None
        self._budget = BUDGET[chosen.device]
        self._asked = (0, 0)

    def load(self, batch: int, prompt: int, part: float, record: dict[str, Any]) -> None:
        """The budget of the setting holds, and the model is loaded under it, and has answered once."""
        from ballonet.allocator import devices

        gc.collect()
        device, self._asked = devices.require(), (batch, prompt)
        device.set_budget(BUDGET[self._chosen.device])
        self._remember(record)
        wide = self._planner(device.budget)
        answer = wide.ask(wide.asked)
        self._budget = round(answer.least + part * (answer.all - answer.least)) * device.page_size
        device.set_budget(self._budget)
        self._model = loaded(self._folder)
        self.answer()

    def answer(self) -> tuple[float, float]:
        """Seconds to the first token, and per token, of the second of two answers: the other process has used the
        caches of the processor before the first, which its own measurements leave out as well."""
        from generating import Clock, answer, words

        ids = words(self._model, self._asked, 1).to(self._chosen.device)
        for _ in range(2):
            clock = Clock(self._chosen.device)
            clock.note()
            answer(self._model, ids, self._tokens, clock)
        return clock.times[1] - clock.times[0], median(clock.gaps(1 + WARM)) / 1e3

    def compare(self, records: list[dict[str, Any]]) -> dict[str, Any]:
        """What is planned, the times by each of these records, and what ran."""
        import ballonet
        from ballonet.allocator import devices

        ran = len(ballonet.manage(self._model).report().streamed)
        weights = devices.require().snapshot()["pages"]["weights"]
        self._model = None
        plans = []
        for each in records:
            self._remember(each)
            plans.append(self._planner(self._budget).facts())
        plan = plans[0]
        return {
            "budget": self._budget,
            "planned": plan["layers_streamed"],
            "ran": ran,
            "pages": weights == plan["pages"]["weights"],
            "ttft": [each["ttft_seconds"] for each in plans],
            "tpot": [each["tpot_seconds"] for each in plans],
        }

    def _planner(self, budget: int) -> Any:
        from ballonet.allocator import devices
        from ballonet.hooks.plan.planner import Planner

        batch, prompt = self._asked
        page = devices.require().page_size
        return Planner(self._folder, prompt + self._tokens - 1, batch, prompt, budget, page)

    def _remember(self, found: dict[str, Any]) -> None:
        """Keeps the record where plans and runs look for it."""
        from ballonet.allocator import devices
        from ballonet.allocator.config import cache_dir
        from ballonet.hooks.device.key import key_for
        from ballonet.hooks.plan.shape import shape_of
        from ballonet.offload.record import record
        from ballonet.offload.record.record import Point, Record

        device, settings = devices.require(), devices.of().settings
        key = key_for(shape_of(self._folder).model, device.kind, device.ordinal, settings)
        points = {Point(phase, batch, length): seconds for phase, batch, length, seconds in found["points"]}
        kept = Record(key, found["bandwidth"], points, beside=found["beside"], copying=found["copying"])
        record.save(kept, record.path_of(cache_dir(settings), key))


if __name__ == "__main__":
    main()
