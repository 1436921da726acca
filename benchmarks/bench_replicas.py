"""What replicas gain by dropping parameters, against waiting, recomputing, swapping and migrating: simulated seconds.

    python benchmarks/bench_replicas.py [--traces azure_2023_code.csv]

235B: replicas of eight devices, of whose memory a mixture of experts takes most; answers are long and weights are what
a step reads. 14B, prompts of code: replicas of one device, and short answers: computing prompts is what takes time.
Prompts are those of the Azure code trace where it is given, else made ones with like lengths. The other rows are the
workloads of KunServe §5.2: prompts and answers with the mean lengths of three data sets, which come so many times as
fast for a quarter of two minutes, to dense models: 14B and 13B (which has many more KV heads) on replicas of one
device, 72B on replicas of four. With LongBench's prompts bubbles are 40 % of a pipeline's time (19 % with BurstGPT's,
24 % with ShareGPT's), so less is asked of that row. Costs are made up from the shapes and the devices' data sheets, and
calibrated by nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from harness import Benchmark, Figure, Options, main, report

from ballonet.hooks.server.arrivals import RecordedArrival, read
from ballonet.hooks.virtual_replicas.fleet import Shape, VirtualFleet
from ballonet.hooks.virtual_replicas.run import POLICIES, run
from ballonet.offload.policy.replicas.pipeline import ChunkCost
from ballonet.offload.policy.replicas.protocol import Commit, Decision, Entry

GB, PAGE = 10**9, 2**21
PEERS = [policy for policy in POLICIES if policy != "drop"]
# 94 layers, 4 KV heads of 128 in 16 bits; eight devices of 80 GB less 30 GB for activations, each with its own link
MOE = Shape((479 * GB // 94,) * 94, 2 * GB, 94 * 2 * 4 * 128 * 2, 4096 * 2)
MOE_COST = ChunkCost(2e-10, 3e-5, 0.03, decode=ChunkCost(0.0, 3e-5, 0.03, prefix=8e-9))
# 48 layers, 8 KV heads of 128; 190 TFLOP/s and 1.8 TB/s
DENSE = Shape((28 * GB // 48,) * 48, 3 * GB // 2, 48 * 2 * 8 * 128 * 2, 5120 * 2)
DENSE_COST = ChunkCost(3e-9, 1.6e-4, 0.016, decode=ChunkCost(0.0, 1.6e-4, 0.016, prefix=1.2e-7))
# 40 layers, 40 KV heads of 128, on the same device
MHA = Shape((26 * GB // 40,) * 40, GB // 2, 40 * 2 * 40 * 128 * 2, 5120 * 2)
MHA_COST = ChunkCost(2.2e-9, 1.4e-4, 0.0145, decode=ChunkCost(0.0, 1.4e-4, 0.0145, prefix=4.6e-7))
# 80 layers, 8 KV heads of 128, on four such devices
LARGE = Shape((140 * GB // 80,) * 80, 5 * GB, 80 * 2 * 8 * 128 * 2, 8192 * 2)
LARGE_COST = ChunkCost(1.7e-9, 1.9e-4, 0.02, decode=ChunkCost(0.0, 1.9e-4, 0.02, prefix=4.6e-8))
ANSWER = 1500  # tokens, in the median, of the larger model
SECONDS, BEGIN, END = 120.0, 0.375, 0.625  # of a mix; the parts of it between which its burst is
LONGEST = 16_000  # tokens of a prompt in it
PERIOD, PERIODS, HIGH = 600.0, 3, 50.0  # of the square wave, in seconds


@dataclass(frozen=True, slots=True)
class Mix:
    """Requests with prompts and answers of so many tokens in the mean, `rate` a second, and `burst` times as many in a
    burst."""

    what: str
    prompt: int
    answer: int
    rate: float
    burst: float

    def arrivals(self, seconds: float) -> list[RecordedArrival]:
        random, at, arrivals = Random(3), 0.0, list[RecordedArrival]()
        while at < seconds:
            at += random.expovariate(self.rate * (self.burst if BEGIN <= at / seconds < END else 1.0))
            prompt, new = (max(8, round(random.lognormvariate(math.log(mean) - 0.32, 0.8))) for mean in self.lengths)
            arrivals.append(RecordedArrival(at, min(LONGEST, prompt), new))
        return arrivals

    @property
    def lengths(self) -> tuple[int, int]:
        return self.prompt, self.answer


FLEETS = {
    "14B, 4 replicas": (VirtualFleet(DENSE, 4, 34 * GB, PAGE, 400 * GB, 25e9, 25e9), DENSE_COST),
    "13B, 8 replicas": (VirtualFleet(MHA, 8, 40 * GB, PAGE, 400 * GB, 25e9, 25e9), MHA_COST),
    "72B, 8 replicas": (VirtualFleet(LARGE, 8, 165 * GB, PAGE, 1600 * GB, 100e9, 100e9), LARGE_COST),
}
BURST_GPT, SHARE_GPT, LONG_BENCH = ("BurstGPT", 642, 262), ("ShareGPT", 1660, 373), ("LongBench", 5900, 499)
MIXES = (
    ("14B, 4 replicas", Mix(*BURST_GPT, rate=9.0, burst=2.0), 3.0),
    ("14B, 4 replicas", Mix(*SHARE_GPT, rate=4.0, burst=2.5), 3.0),
    ("14B, 4 replicas", Mix(*LONG_BENCH, rate=2.0, burst=3.0), 1.5),
    ("13B, 8 replicas", Mix(*SHARE_GPT, rate=8.0, burst=2.5), 1.0),
    ("72B, 8 replicas", Mix(*SHARE_GPT, rate=16.0, burst=2.5), 1.0),
)


def dropping(chosen: Options) -> None:
    prompts = [arrival.prompt for path in chosen.traces for arrival in read(path)] or list(made(3000))
    report(chosen, "replicas that drop parameters, simulated", list(policies(prompts, chosen)))


def row(what: str, peer: str, **figures: Figure | str) -> dict[str, Any]:
    """All rows have the same columns."""
    columns = ("value", "drop", "drops", "restores", "bubble")
    return {"what": what, "peer": peer, **{column: figures.get(column, "") for column in columns}}


def made(count: int) -> Iterator[int]:
    """Lengths of prompts: a median of 1,500 tokens, one in ten above 4,500."""
    random = Random(0)
    for _ in range(count):
        yield min(7500, max(3, round(random.lognormvariate(7.3, 0.9))))


def policies(prompts: list[int], chosen: Options) -> Iterator[dict[str, Any]]:
    """P99 of the seconds to the first token, by policy."""
    short, answer = (0.02, 30) if chosen.tiny else (1.0, ANSWER)
    moe = VirtualFleet(MOE, 4, 610 * GB, PAGE, 1000 * GB, 200e9, 200e9)
    mostly = wave(8, 40, 60 * short, 180 * short, 1, answer)
    yield from _compared("235B, 4 replicas, a burst", moe, MOE_COST, mostly, at_least=1.3)
    dense = VirtualFleet(DENSE, 8, 40 * GB, PAGE, 100 * GB, 25e9, 25e9)
    code = coding(prompts[: round(3000 * short)], 20.0)
    yield from _compared("14B, 8 replicas, prompts of code", dense, DENSE_COST, code, at_most=1.02)
    for name, mix, at_least in MIXES:
        what = f"{name}, lengths of {mix.what}, a burst"
        yield from _compared(what, *FLEETS[name], mix.arrivals(SECONDS * short), at_least=at_least)
    square = wave(1, 48, HIGH * short, PERIOD * short, PERIODS, answer)
    log: list[Entry] = []
    result = run(moe, MOE_COST, square, "drop", log=log.append)
    commits = [
        int(each.event.at / (PERIOD * short))
        for each in log
        if isinstance(each, Decision) and any(isinstance(action, Commit) for action in each.actions)
    ]
    yield row(
        f"235B, square wave of {PERIODS} periods",
        "epochs in a period, at most",
        value=Figure.of([max(map(commits.count, commits), default=0)]).at_most(2),
        drops=Figure.of([result["drops"]]).at_most(PERIODS),
        restores=Figure.of([result["restores"]]).at_most(PERIODS),
        bubble=Figure.of([result["bubble"]]),
    )


def _compared(
    what: str, fleet: VirtualFleet, cost: ChunkCost, arrivals: list[RecordedArrival], **limit: float
) -> Iterator[dict[str, Any]]:
    ours = run(fleet, cost, arrivals, "drop")
    drop = Figure.of([ours["ttft_p99"]])
    figures = {peer: Figure.of([run(fleet, cost, arrivals, peer)["ttft_p99"]]) for peer in PEERS}
    for peer, each in figures.items():
        yield row(f"{what}: P99 TTFT, s", peer, value=each, drop=drop)
    best = min(figures.values(), key=lambda each: each.median)
    if "at_least" in limit:
        ratio = Figure.ratio(best, drop).at_least(limit["at_least"])
        drops = Figure.of([ours["drops"]])
    else:
        ratio = Figure.ratio(drop, best).at_most(limit["at_most"])
        drops = Figure.of([ours["drops"]]).at_most(0)
    names = "best peer / drop" if "at_least" in limit else "drop / best peer"
    restores, bubble = Figure.of([ours["restores"]]), Figure.of([ours["bubble"]])
    yield row(f"{what}: P99 TTFT", names, value=ratio, drops=drops, restores=restores, bubble=bubble)


def wave(low: float, high: float, seconds: float, period: float, periods: int, answer: int) -> list[RecordedArrival]:
    """Requests that come at `low` a second, and at `high` for so many `seconds` of each period; prompts of 1,000 tokens
    and answers of `answer` in the median."""
    random, at, arrivals = Random(0), 0.0, list[RecordedArrival]()
    begin = (period - seconds) / 3
    while at < period * periods:
        at += random.expovariate(high if begin <= at % period < begin + seconds else low)
        prompt, new = (max(10, round(random.lognormvariate(math.log(each), 0.6))) for each in (1000, answer))
        arrivals.append(RecordedArrival(at, prompt, new))
    return arrivals


def coding(prompts: list[int], rate: float) -> list[RecordedArrival]:
    """Prompts of code at a rate that goes up and down by half in two minutes; answers are short."""
    random, at, arrivals = Random(0), 0.0, list[RecordedArrival]()
    for prompt in prompts:
        at += random.expovariate(rate * (1 + math.sin(at / 20) / 2))
        arrivals.append(RecordedArrival(at, prompt, 1 + round(random.expovariate(1 / 27))))
    return arrivals


BENCHMARKS = {"replicas": Benchmark(dropping)}

if __name__ == "__main__":
    main(__doc__, BENCHMARKS)
