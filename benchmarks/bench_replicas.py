"""What replicas gain by dropping parameters, against waiting, recomputing, swapping and migrating: simulated seconds.

    python benchmarks/bench_replicas.py [azure_2023_code.csv]

Two fleets. 235B: replicas of eight devices, of whose memory a mixture of experts takes most; answers are long and
weights are what a step reads. 14B: replicas of one device with prompts of code and short answers: computing prompts is
what takes time. Costs are made up from the shapes and the devices' data sheets, and calibrated by nothing; how
well such costs predict batches is measured (batch_cost.py). Prompts are
those of the Azure code trace where it is given, else made ones with like lengths.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random
from typing import Any

import batch_cost
import mail_cost
from common import Figure, Options, Row, options, report

from ballonet.hooks.server.arrivals import RecordedArrival, read
from ballonet.hooks.whatif.replicas.fleet import Shape, VirtualFleet
from ballonet.hooks.whatif.replicas.run import POLICIES, run
from ballonet.offload.policy.replicas.actions import Commit
from ballonet.offload.policy.replicas.chunk_cost import ChunkCost
from ballonet.offload.policy.replicas.controller import Controller
from ballonet.offload.policy.replicas.decisions import Decision, Entry
from ballonet.offload.policy.replicas.demand import KVSize
from ballonet.offload.policy.replicas.events import Arrived, Joined, Load, Tick
from ballonet.offload.policy.replicas.microbatches import Batch, ChunkSize, by_tokens, equal_cost, fig11
from ballonet.offload.policy.replicas.pipeline_time import evenly, floor, pipeline_time

GB, PAGE = 10**9, 2**21
PEERS = [each for each in POLICIES if each != "drop"]
# 94 layers, 4 KV heads of 128 in 16 bits; eight devices of 80 GB less 30 GB for activations, each with its own link
MOE = Shape((479 * GB // 94,) * 94, 2 * GB, 94 * 2 * 4 * 128 * 2, 4096 * 2)
MOE_COST = ChunkCost(2e-10, 3e-5, 0.03, decode=ChunkCost(0.0, 3e-5, 0.03, prefix=8e-9))
# 48 layers, 8 KV heads of 128; 190 TFLOP/s and 1.8 TB/s
DENSE = Shape((28 * GB // 48,) * 48, 3 * GB // 2, 48 * 2 * 8 * 128 * 2, 5120 * 2)
DENSE_COST = ChunkCost(3e-9, 1.6e-4, 0.016, decode=ChunkCost(0.0, 1.6e-4, 0.016, prefix=1.2e-7))
# attention to 2,500 tokens takes as long as all else, as where kernels know little of it
DEAR = ChunkCost(4e-9, 1e-5, 4e-3)
LEAST = 2048  # tokens of a microbatch
ANSWER = 1500  # tokens, in the median, of the larger model
PERIOD, PERIODS, HIGH = 600.0, 3, 50.0  # of the square wave, in seconds
SIZES = (8, 64, 512, 4096)  # replicas, for the cost of a decision
FLEETS = (8, 32, 128)  # replicas, for what is said between them and the supervisor
BURST = 75  # prompts that are queued at once


def main() -> None:
    chosen = options("replicas", __doc__)
    prompts = [each.prompt for path in chosen.files for each in read(path)] or list(made(3000))
    rows: list[Row] = [*bubbles(prompts, chosen), *policies(prompts, chosen), *decisions(chosen)]
    rows += control(prompts, chosen)
    measured = *batch_cost.errors(chosen), *mail_cost.told(chosen)
    rows += [row(what, peer, value=found) for what, peer, found in measured]
    report(chosen, "replicas", "replicas that drop parameters, simulated", rows)


def row(what: str, peer: str, **figures: Figure | str) -> dict[str, Any]:
    """All rows have the same columns."""
    columns = ("value", "drop", "drops", "restores", "bubble")
    return {"what": what, "peer": peer, **{each: figures.get(each, "") for each in columns}}


def made(count: int) -> Iterator[int]:
    """Lengths of prompts: a median of 1,500 tokens, one in ten above 4,500."""
    random = Random(0)
    for _ in range(count):
        yield min(7500, max(3, round(random.lognormvariate(7.3, 0.9))))


# Microbatches


def bubbles(prompts: list[int], chosen: Options) -> Iterator[dict[str, Any]]:
    """The bubble of two stages, over bursts of prompts, one in five behind a cached prefix."""
    queue = [ChunkSize(n, 2000 if n % 5 == 4 else 0, each) for n, each in enumerate(prompts)]
    bursts = [queue[at : at + BURST] for at in range(0, 2 * BURST if chosen.tiny else len(queue), BURST)]
    for named, cost in (("14B", DENSE_COST), ("dear attention", DEAR)):
        formers: dict[str, Callable[[list[ChunkSize]], list[Batch]]] = {
            "by tokens": lambda burst: by_tokens(burst, LEAST),
            "Fig. 11": lambda burst, cost=cost: fig11(burst, LEAST, cost),  # type: ignore[misc]
            "equal cost": lambda burst, cost=cost: equal_cost(burst, _batches(burst), cost),  # type: ignore[misc]
        }
        for peer, former in formers.items():
            found = zip(*(_judged(former(burst), cost) for burst in bursts), strict=True)
            longest, above, bubble = (Figure.of(list(values)) for values in found)
            figures = [Figure.of([each.most]) for each in (longest, above)]
            if peer == "equal cost":
                figures = [figures[0].at_most(1.15), figures[1].at_most(0.03)]
            yield row(f"{named}: longest microbatch / mean, at most", peer, value=figures[0])
            yield row(f"{named}: bubble of 2 stages above the floor, at most", peer, value=figures[1], bubble=bubble)


def _batches(burst: list[ChunkSize]) -> int:
    return max(1, sum(each.new for each in burst) // LEAST)


def _judged(batches: list[Batch], cost: ChunkCost) -> tuple[float, float, float]:
    """The longest by the mean, the bubble above the floor, and the bubble."""
    took = [cost.batch((each.before, each.new) for each in batch) for batch in batches]
    bubble = pipeline_time(evenly(took, 2)).bubble
    return max(took) / statistics.fmean(took), bubble - floor(len(took), 2), bubble


# Policies


def policies(prompts: list[int], chosen: Options) -> Iterator[dict[str, Any]]:
    """P99 of the seconds to the first token, by policy."""
    short, answer = (0.02, 30) if chosen.tiny else (1.0, ANSWER)
    moe = VirtualFleet(MOE, 4, 610 * GB, PAGE, 1000 * GB, 200e9, 200e9)
    mostly = wave(8, 40, 60 * short, 180 * short, 1, answer)
    yield from _compared("235B, 4 replicas, a burst", moe, MOE_COST, mostly, at_least=1.3)
    dense = VirtualFleet(DENSE, 8, 40 * GB, PAGE, 100 * GB, 25e9, 25e9)
    code = coding(prompts[: round(3000 * short)], 20.0)
    yield from _compared("14B, 8 replicas, prompts of code", dense, DENSE_COST, code, at_most=1.02)
    square = wave(1, 48, HIGH * short, PERIOD * short, PERIODS, answer)
    log: list[Entry] = []
    found = run(moe, MOE_COST, square, "drop", log=log.append)
    commits = [
        int(each.event.at / (PERIOD * short))
        for each in log
        if isinstance(each, Decision) and any(isinstance(action, Commit) for action in each.actions)
    ]
    yield row(
        f"235B, square wave of {PERIODS} periods",
        "epochs in a period, at most",
        value=Figure.of([max(map(commits.count, commits), default=0)]).at_most(2),
        drops=Figure.of([found["drops"]]).at_most(PERIODS),
        restores=Figure.of([found["restores"]]).at_most(PERIODS),
        bubble=Figure.of([found["bubble"]]),
    )


def _compared(
    what: str, fleet: VirtualFleet, cost: ChunkCost, arrivals: list[RecordedArrival], **limit: float
) -> Iterator[dict[str, Any]]:
    ours = run(fleet, cost, arrivals, "drop")
    drop = Figure.of([ours["ttft_p99"]])
    found = {peer: Figure.of([run(fleet, cost, arrivals, peer)["ttft_p99"]]) for peer in PEERS}
    for peer, each in found.items():
        yield row(f"{what}: P99 TTFT, s", peer, value=each, drop=drop)
    best = min(found.values(), key=lambda each: each.median)
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
    random, at, found = Random(0), 0.0, list[RecordedArrival]()
    begin = (period - seconds) / 3
    while at < period * periods:
        at += random.expovariate(high if begin <= at % period < begin + seconds else low)
        prompt, new = (max(10, round(random.lognormvariate(math.log(each), 0.6))) for each in (1000, answer))
        found.append(RecordedArrival(at, prompt, new))
    return found


def coding(prompts: list[int], rate: float) -> list[RecordedArrival]:
    """Prompts of code at a rate that goes up and down by half in two minutes; answers are short."""
    random, at, found = Random(0), 0.0, list[RecordedArrival]()
    for each in prompts:
        at += random.expovariate(rate * (1 + math.sin(at / 20) / 2))
        found.append(RecordedArrival(at, each, 1 + round(random.expovariate(1 / 27))))
    return found


# Decisions


def decisions(chosen: Options) -> Iterator[dict[str, Any]]:
    """Calls of Python functions that one look at an overloaded fleet takes, as it decides for a drop."""
    counts = {size: _calls(size) for size in (SIZES[:2] if chosen.tiny else SIZES)}
    for size, calls in counts.items():
        yield row(f"calls of the controller's look, {size:,} replicas", "in all", value=Figure.of([calls]))
    for (small, few), (large, many) in pairwise(counts.items()):
        growth = many * small * math.log2(small) / (few * large * math.log2(large))
        what = f"calls per N log N, {large:,} against {small:,} replicas"
        yield row(what, "ratio", value=Figure.of([growth]).at_most(1.2))


def control(prompts: list[int], chosen: Options) -> Iterator[dict[str, Any]]:
    """Bytes of control where prompts of code come to ever more replicas, 2.5 a second to each."""
    for replicas in FLEETS[:1] if chosen.tiny else FLEETS:
        fleet = VirtualFleet(DENSE, replicas, 40 * GB, PAGE, 100 * GB, 25e9, 25e9)
        asked = [prompts[at % len(prompts)] for at in range(replicas * (5 if chosen.tiny else 100))]
        found = mail_cost.carried(fleet, DENSE_COST, coding(asked, 2.5 * replicas))
        yield row(f"bytes of control per replica and second, {replicas} replicas", "drop", value=Figure.of([found]))


def _calls(replicas: int) -> int:
    fleet = VirtualFleet(DENSE, replicas, 40 * GB, PAGE, 0, 25e9, 25e9)
    controller = Controller(fleet.layer_pages, KVSize(DENSE.kv, PAGE), MOE_COST)
    for member in range(replicas):
        controller.on(Joined(0.0, member, fleet.pages))
    for number in range(4 * replicas):
        controller.on(Arrived(0.0, str(number), fleet.tokens // 2, 200))
    room = fleet.pages - sum(fleet.layer_pages)
    for member, epoch in enumerate(range(1, replicas + 1)):
        controller.on(Load(0.1, member, epoch, room, 0, room, 1))
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        actions = controller.on(Tick(0.1))
    finally:
        sys.setprofile(None)
    assert actions, "it decides nothing"
    return calls


if __name__ == "__main__":
    main()
