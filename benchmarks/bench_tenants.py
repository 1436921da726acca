"""Two and three models on one device, against the other ways to share it: time simulated, pages real (`whatif`).

    python benchmarks/bench_tenants.py [tenants | tenants-parts | tenants-rates] [--cases 4] [--traces FILE...]

`SETTINGS` are those of docs/measuring.md. A setting whose trace is a file is left out unless it is given; the others
are of requests that are made here. Each is measured with three seeds, of dealing requests to models and of making them,
and with each policy: `unlimited` is the floor, `split`, `swap`, `recompute` and `pie` are peers (hooks/plan/run.py,
Note [Peers]). A run is kept as soon as it has ended, in build/tenants.jsonl, until code that it ran changes: what was
cut off goes on where it was. Two processes measure at a time.

What a step of 8B takes: 8.8 ms, 40 us for each new token, 36.6 ns for each that is read. The first and the third were
measured on an H200 (a decode step under a CUDA graph; attention over 65,536 tokens); the second is what 16 GFLOP take
at two fifths of its peak, and is assumed. A 13B model's are by its bytes of weights, its operations, its bytes of KV.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Final

import torch
from harness import GIB, MIB, ROOT, Benchmark, Figure, Options, keep, main, report
from transformers import LlamaConfig

from ballonet.allocator.errors import BallonetError
from ballonet.hooks.plan.machine import Machine, Tenant, dealt
from ballonet.hooks.plan.run import POLICIES, StockPolicy, run
from ballonet.hooks.server.arrivals import RecordedArrival, lengthened, read
from ballonet.offload.policy.step_costs import Parts

OURS, FLOOR = "fast", "unlimited"
PEERS: Final = ("split", "swap", "recompute", "pie")
ABLATIONS: Final = (*("no-turns", "no-return", "no-once", "weights-fixed", "activations-apart", "no-buffer"),)
SLOS: Final = 4.0, 0.2  # seconds to the first token, and of each gap, that goodput counts by; no request asks for them
ANSWERED = 0.99  # of the requests, by a peer that is compared
SEEDS: Final = (1, 2, 3)
FLOORS, PRESSURE = 2.0, 1.5  # the floor's P99 TTFT is so many s at most, and the best peer's so many times as long
REQUESTS = 500
RATES: Final = (0.4, 0.55, 0.7, 0.85, 1.0, 1.15, 1.3, 1.5)  # times the speed of a setting
SHRINK = 128
TURN, PERIOD, BURST = 1.0, 20.0, 0.25  # s of a turn; of bursts and calms, and the part of it that is burst
ROWS = ROOT / "build" / "tenants.jsonl"
LENGTHS = {"mooncake_conversation_trace.jsonl": 1 / 9}  # of traces with prompts for which no setting has memory
COSTS = {
    "8B": Parts(8.8e-3, 4e-5, 3.66e-8, 0.0),
    "13B": Parts(14.3e-3, 6.5e-5, 2.3e-7, 0.0),
    "tiny": Parts(8.8e-3, 4e-5, 3.66e-8, 0.0),
}
SHAPES = {  # hidden, intermediate, layers, heads, heads of KV, vocabulary
    "8B": (4096, 14336, 32, 32, 8, 128256),
    "13B": (5120, 13824, 40, 40, 40, 32000),
    "tiny": (256, 1024, 8, 4, 4, 256),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """Models, separated by `+`, that are asked `how` (together, turns, bursts), on a device of `gib` with a link of
    `link` GB/s; `trace`: the name of a file, or `code` or `chat` that are made here; `speed`: so many times as fast."""

    models: str
    how: str
    gib: float
    link: float
    trace: str
    speed: float

    def __str__(self) -> str:
        trace = self.trace.partition("_")[0]
        return f"{self.models}, {self.how}, {self.gib:g} GiB, {self.link:g} GB/s, {trace} x {self.speed:g}"

    @property
    def made(self) -> bool:
        """Whether the requests are made here."""
        return self.trace in LENGTHS_MADE


AZURE, MOONCAKE, SHAREGPT = "azure_2023_code.csv", "mooncake_conversation_trace.jsonl", "sharegpt_turn_lengths.csv"
TWO, THREE, LARGE = "8B+8B", "8B+8B+8B", "13B+8B+8B"
SETTINGS: Final = (
    Setting(TWO, "together", 34, 55, "code", 5.2),
    Setting(TWO, "turns", 24, 55, "code", 5.5),
    Setting(TWO, "turns", 34, 450, "code", 8.5),
    Setting(THREE, "bursts", 48, 55, "code", 1.4),
    Setting(TWO, "bursts", 24, 450, "code", 1.8),
    Setting(TWO, "turns", 34, 25, "chat", 24.0),
    Setting(TWO, "bursts", 34, 55, "chat", 6.8),
    Setting(THREE, "together", 34, 55, "code", 5.5),
    Setting(LARGE, "bursts", 48, 55, "code", 1.2),
    Setting(LARGE, "turns", 48, 450, "code", 3.6),
    Setting(TWO, "together", 34, 55, AZURE, 0.37),
    Setting(THREE, "turns", 48, 25, AZURE, 0.4),
    Setting(TWO, "together", 34, 450, MOONCAKE, 1.7),
    Setting(TWO, "together", 48, 25, SHAREGPT, 18.0),
)
TINY: Final = (
    Setting("tiny+tiny", "turns", 80 / 1024, 0.2, "code", 8.0),
    Setting("tiny+tiny", "bursts", 96 / 1024, 450, "chat", 8.0),
)
# of made requests: the median of prompts and answers, their spread (sigma of a log-normal), and the most of each
LENGTHS_MADE: Final = {"code": ((1200, 1.1, 7500), (16, 0.8, 300)), "chat": ((500, 1.0, 4000), (60, 0.8, 400))}
COLUMNS = (
    *("setting", "policy", "answered", "kept", "TTFT P99, s", "gap P99, s", "tokens per second"),
    *("kept / best", "tokens / best", "behind a peer", "over the floor / split's", "gap / floor's", "peer / floor"),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One run: a setting and its seed, and a policy."""

    setting: Setting
    seed: int
    policy: str
    requests: int

    def key(self, digests: Mapping[bool, str]) -> str:
        """What the run's figures depend on. `digests`: of the code, of stock policies (True) and of ballonet's."""
        stock = isinstance(POLICIES[self.policy], StockPolicy)
        return json.dumps([asdict(self.setting), self.seed, self.policy, self.requests, digests[stock]])


Rows = dict[Run, dict[str, Any]]


def digests() -> dict[bool, str]:
    """Returns digests of the code that is run by stock policies (True), and by ballonet's (False)."""
    folders = {True: ("hooks/plan",), False: ("allocator", "hooks", "offload")}
    return {
        stock: hashlib.sha256(
            b"".join(path.read_bytes() for name in names for path in sorted((ROOT / name).rglob("*.py")))
            + b"".join((ROOT / "hooks" / "server" / name).read_bytes() for name in ("arrivals.py", "load.py"))
        ).hexdigest()[:12]
        for stock, names in folders.items()
    }


def made(kind: str, requests: int, seed: int) -> list[RecordedArrival]:
    """Makes requests of log-normal lengths, one a second on average."""
    draw, at, arrivals = Random(f"{kind} {seed}"), 0.0, []
    for _ in range(requests):
        lengths = (
            min(most, max(1, round(draw.lognormvariate(math.log(middle), spread))))
            for middle, spread, most in LENGTHS_MADE[kind]
        )
        arrivals.append(RecordedArrival(at, *lengths))
        at += draw.expovariate(1.0)
    return arrivals


def arrivals_of(run: Run, traces: Sequence[Path]) -> list[list[RecordedArrival]]:
    """Returns the requests of each model."""
    setting = run.setting
    if setting.made:
        arrivals = made(setting.trace, run.requests, run.seed)
    else:
        (path,) = (path for path in traces if path.name == setting.trace)
        arrivals = lengthened(read(path, limit=run.requests), LENGTHS.get(setting.trace, 1.0))
    arrivals = [replace(request, at=request.at / setting.speed, blocks=()) for request in arrivals]
    if setting.how == "bursts":
        arrivals = [replace(one, at=one.at - (1 - BURST) * (one.at % PERIOD)) for one in arrivals]
    models = len(setting.models.split("+"))
    return dealt(arrivals, models, TURN if setting.how == "turns" else None, run.seed)


def measure(one: Run, traces: Sequence[Path]) -> dict[str, Any]:
    """Returns the figures of one run, or `error`, where it does not fit."""
    torch.set_num_threads(1)
    setting = one.setting
    tiny = "tiny" in setting.models
    budget, page = int(setting.gib * GIB), 256 * 1024 if tiny else 8 * MIB
    machine = Machine(budget, budget * 2, page, setting.link * 1e9, 1 if tiny else SHRINK)
    batching = {
        "page_size": 32 if tiny else 256,
        "max_batch_tokens": 256 if tiny else 2048,
        "allow_block_sharing": False,  # the traces do not say what prompts have in common
    }
    names = setting.models.split("+")
    asked = arrivals_of(one, traces)
    if tiny:
        asked = [lengthened(requests, 0.05) for requests in asked]
    tenants = [
        Tenant("abc"[number], config(name), COSTS[name], requests)
        for number, (name, requests) in enumerate(zip(names, asked, strict=True))
    ]
    try:
        figures = run(tenants, machine, one.policy, batching, SLOS)
    except BallonetError as error:
        return {"error": str(error)}
    return {name: value for name, value in figures.items() if name != "models"}


def config(name: str) -> LlamaConfig:
    """The configuration of a model."""
    hidden, intermediate, layers, heads, kv_heads, vocabulary = SHAPES[name]
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        dtype=torch.float32 if name == "tiny" else torch.bfloat16,
    )


def measured(runs: Sequence[Run], traces: Sequence[Path], path: Path | None) -> Iterator[Rows]:
    """Yields the figures of runs that are known so far, after each that has ended. `path`: where they are kept; None:
    nowhere, and all are measured in this process."""
    if path is None:
        rows: Rows = {}
        for one in runs:
            rows[one] = measure(one, traces)
            yield rows
        return
    code = digests()
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    kept = {line["key"]: line["figures"] for line in lines}
    rows = {one: kept[key] for one in runs if (key := one.key(code)) in kept}
    if rows:
        yield rows
    missing = [one for one in runs if one not in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    # processes that are as good as new now and then, by pools: with max_tasks_per_child Python 3.11 waits for ever
    for first in range(0, len(missing), 16):
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            running = {pool.submit(measure, one, traces): one for one in missing[first : first + 16]}
            for done in as_completed(running):
                one = running[done]
                rows[one] = done.result()
                with path.open("a") as file:
                    file.write(json.dumps({"key": one.key(code), "figures": rows[one]}) + "\n")
                yield rows


def chosen_settings(chosen: Options) -> list[Setting]:
    """Returns the settings whose requests are there."""
    settings = TINY if chosen.tiny else SETTINGS
    names = {path.name for path in chosen.traces}
    for setting in settings:
        if not setting.made and setting.trace not in names:
            print(f"left out: {setting}: {setting.trace} is not given (--traces)", flush=True)
    return [setting for setting in settings if setting.made or setting.trace in names][: chosen.cases]


def measure_all(chosen: Options, runs: Sequence[Run], title: str, rows_of: Any) -> None:
    """Measures the runs, and shows the rows that `rows_of` makes of their figures."""
    rows: list[dict[str, Any]] = []
    for figures in measured(runs, chosen.traces, None if chosen.tiny else ROWS):
        rows = list(rows_of(figures))
        keep(chosen, title, rows)
    report(chosen, title, rows)


def sharing(chosen: Options) -> None:
    requests, seeds = (12, SEEDS[:1]) if chosen.tiny else (REQUESTS, SEEDS)
    settings = chosen_settings(chosen)
    policies = (FLOOR, *PEERS, OURS)
    runs = [Run(setting, seed, policy, requests) for seed in seeds for setting in settings for policy in policies]
    title = f"several models on one device, {requests} requests, {len(seeds)} seeds, time simulated, pages real"
    measure_all(chosen, runs, title, table)


def parts(chosen: Options) -> None:
    requests = 12 if chosen.tiny else REQUESTS
    settings = chosen_settings(chosen)[: 1 if chosen.tiny else 4]
    policies = (OURS, *(ABLATIONS[:1] if chosen.tiny else ABLATIONS))
    runs = [Run(setting, SEEDS[0], policy, requests) for setting in settings for policy in policies]
    measure_all(chosen, runs, f"ballonet with a part switched off, {requests} requests, simulated", ablated)


def rates(chosen: Options) -> None:
    requests = 12 if chosen.tiny else REQUESTS
    settings = chosen_settings(chosen)[: 1 if chosen.tiny else 2]
    factors = RATES[:2] if chosen.tiny else RATES
    runs = [
        Run(replace(setting, speed=round(setting.speed * factor, 3)), SEEDS[0], policy, requests)
        for setting in settings
        for factor in factors
        for policy in ("split", "swap", OURS)
    ]
    measure_all(chosen, runs, f"goodput by the rate of requests, {requests} requests, simulated", swept)


def table(rows: Rows) -> Iterator[dict[str, Any]]:
    """Yields a row for each setting and policy that was measured, with the limits of ballonet's; and a row against
    recomputing, where the link is the fastest."""
    for setting in dict.fromkeys(one.setting for one in rows):
        seeds = sorted({one.seed for one in rows if one.setting == setting})
        there = [
            {one.policy: row for one, row in rows.items() if one.setting == setting and one.seed == seed}
            for seed in seeds
        ]
        for policy in (FLOOR, *PEERS, OURS):
            if runs := [by_policy[policy] for by_policy in there if policy in by_policy]:
                limits: Mapping[str, Figure | None] = {}
                if policy in (OURS, FLOOR):
                    limits = judged(there, setting.link) if policy == OURS else pressure(there)
                yield row_of(setting, policy, runs, limits)
        pairs = [(it[OURS], it["recompute"]) for it in there if {OURS, "recompute"} <= it.keys()]
        if setting.link == 450 and pairs and not any("error" in row for pair in pairs for row in pair):
            ttft, gap = (
                limited([ratio(ours[name], peer[name]) for ours, peer in pairs], limit)
                for name, limit in (("ttft_p99", 0.23), ("tbt_p99", 0.55))
            )
            yield line_of(setting=str(setting), policy="ballonet / recompute (Oneiros' headline)") | {
                "TTFT P99, s": ttft,
                "gap P99, s": gap,
            }


def line_of(**values: Any) -> dict[str, Any]:
    """A row of the table with these values by column, and None in the others."""
    return {column: values.get(column) for column in COLUMNS}


def row_of(
    setting: Setting, policy: str, runs: Sequence[dict[str, Any]], limits: Mapping[str, Figure | None]
) -> dict[str, Any]:
    """A row of the table: figures over the seeds."""
    line = line_of(setting=str(setting), policy="ballonet" if policy == OURS else policy)
    if any("error" in row for row in runs):
        return line | {"answered": "does not fit"}
    total = sum(row["requests"] for row in runs)
    answered = total - sum(row["failed"] for row in runs)
    line |= {
        "answered": f"{answered / total:.1%}"
        + ("" if answered >= ANSWERED * total or policy == OURS else ", not compared"),
        "kept": figure([row["kept"] / row["requests"] for row in runs]),
        "TTFT P99, s": figure([row["ttft_p99"] for row in runs]),
        "gap P99, s": figure([row["tbt_p99"] for row in runs]),
        "tokens per second": figure([row["tokens_per_second"] for row in runs]),
    }
    return line | limits


def judged(seeds: Sequence[Mapping[str, dict[str, Any]]], link: float) -> dict[str, Figure | None]:
    """Returns ballonet's figures that have limits, over the seeds (figures by policy). A limit is kept if it is with
    every seed. `link`: GB/s."""
    values: dict[str, list[float]] = {}
    gap_limit = False
    for there in seeds:
        ours = there.get(OURS)
        peers = [row for policy in PEERS if (row := there.get(policy)) and compared(row)]
        if ours is None or "error" in ours:
            return {}
        new: dict[str, float] = {}
        if peers:
            new["kept / best"] = ratio(ours["kept"], max(row["kept"] for row in peers))
            new["tokens / best"] = ratio(ours["tokens_per_second"], max(row["tokens_per_second"] for row in peers))
            new["behind a peer"] = max(
                min(ratio(ours[name], row[name]) for name in ("ttft_p99", "tbt_p99")) for row in peers
            )
            gap_limit |= any(known(row["tbt_p99"]) <= SLOS[1] for row in peers)
        floor, split = there.get(FLOOR), there.get("split")
        if link == 450 and floor is not None and "error" not in floor:
            new["gap / floor's"] = ratio(ours["tbt_p99"], floor["tbt_p99"])
            if split is not None and compared(split):
                over = [known(row["ttft_p99"]) - floor["ttft_p99"] for row in (ours, split)]
                new["over the floor / split's"] = max(0.0, over[0]) / over[1] if over[1] > 0 else float(over[0] > 0)
        new["gap P99, s"] = known(ours["tbt_p99"])
        for name, value in new.items():
            values.setdefault(name, []).append(value)
    least = {"kept / best": 0.99, "tokens / best": 0.98}
    most = {"behind a peer": 1.05, "over the floor / split's": 0.1, "gap / floor's": 1.05}
    if gap_limit:
        most["gap P99, s"] = SLOS[1]
    return {
        name: limited(values[name], limit, above=name in least)
        for name, limit in (least | most).items()
        if name in values
    }


def pressure(seeds: Sequence[Mapping[str, dict[str, Any]]]) -> dict[str, Figure | None]:
    """Returns the floor's figures that say whether the speed of a setting is right, over the seeds."""
    floors = [there[FLOOR]["ttft_p99"] for there in seeds if FLOOR in there]
    best = [
        ratio(min(known(row["ttft_p99"]) for row in peers), there[FLOOR]["ttft_p99"])
        for there in seeds
        if FLOOR in there
        and (peers := [there[policy] for policy in PEERS if policy in there and compared(there[policy])])
    ]
    shown = {"TTFT P99, s": limited([known(value) for value in floors], FLOORS)}
    return shown | ({"peer / floor": limited(best, PRESSURE, above=True)} if best else {})


def compared(row: Mapping[str, Any]) -> bool:
    """Whether a peer's run is compared: one that answered next to all requests."""
    return "error" not in row and row["requests"] - row["failed"] >= ANSWERED * row["requests"]


def known(value: float | None) -> float:
    """A percentile; infinity where so many failed that there is none."""
    return math.inf if value is None else value


def ratio(ours: float | None, other: float | None) -> float:
    """Ours over another's; infinite where ours is. 1 where both are."""
    above, below = known(ours), known(other)
    return 1.0 if above == below else above / below if below else math.inf


def limited(values: Sequence[float], limit: float, *, above: bool = False) -> Figure | None:
    """A figure over the seeds whose limit is kept if all are; None where one is infinite."""
    shown = figure(values)
    if shown is None:
        return Figure(0.0, 0.0, 0.0, f"{'>=' if above else '<='} {limit:g}", met=False)
    if above:
        return replace(shown, limit=f">= {limit:g}", met=shown.least >= limit)
    return replace(shown, limit=f"<= {limit:g}", met=shown.most <= limit)


def figure(values: Sequence[float | None]) -> Figure | None:
    """A figure over the seeds; None where one of them has none."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return Figure.of(finite) if finite and len(finite) == len(values) else None


def ablated(rows: Rows) -> Iterator[dict[str, Any]]:
    """Yields a row for each setting and part; no part may be worth less than nothing."""
    for one, row in rows.items():
        whole = rows.get(replace(one, policy=OURS))
        if "error" in row or whole is None or "error" in whole:
            continue
        better = max(ratio(row["kept"], whole["kept"]), ratio(row["tokens_per_second"], whole["tokens_per_second"]))
        both = min(ratio(whole[name], row[name]) for name in ("ttft_p99", "tbt_p99"))
        part = one.policy != OURS
        yield {
            "setting": str(one.setting),
            "policy": f"without: {one.policy}" if part else "ballonet",
            "kept": figure([row["kept"] / row["requests"]]),
            "TTFT P99, s": figure([row["ttft_p99"]]),
            "gap P99, s": figure([row["tbt_p99"]]),
            "tokens per second": figure([row["tokens_per_second"]]),
            "better in kept or tokens": limited([better], 1.03) if part else None,
            "better in both latencies": limited([both], 1.03) if part else None,
        }


def swept(rows: Rows) -> Iterator[dict[str, Any]]:
    """Yields a row for each setting and rate."""
    for setting in dict.fromkeys(one.setting for one in rows):
        kept = {
            one.policy: row["kept"] / row["requests"]
            for one, row in rows.items()
            if one.setting == setting and "error" not in row
        }
        peers = [kept[policy] for policy in ("split", "swap") if policy in kept]
        yield {
            "setting": str(setting),
            **{policy: figure([kept.get(policy)]) for policy in ("split", "swap")},
            "ballonet": limited([kept[OURS]], max(peers, default=0.0), above=True) if OURS in kept else None,
        }


BENCHMARKS = {
    "tenants": Benchmark(sharing),
    "tenants-parts": Benchmark(parts),
    "tenants-rates": Benchmark(rates),
}

if __name__ == "__main__":
    main(__doc__, BENCHMARKS)
