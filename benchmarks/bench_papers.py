"""Settings of the papers: eLLM's goodput and SwiftCache's conversations beside a lender, simulated; Select-N's memory.

goodput: a model of the 8B Llama shape, requests of 2,000 and of 32,000 tokens with answers of 2,000 (eLLM §6.2), at
several rates. Goodput: requests per second that keep SLOs of 25 times what a prompt, and what a token, takes alone; the
best of the rates counts. The peer is transformers' own scheduler and cache, with all memory that weights leave.

lending: two such models. One answers conversations, each turn of which begins with all that was said before; the other,
the lender, gets a short prompt now and then. The peer is transformers' own scheduler and cache, with half of the memory
for each model. Blocks of prompts that lie in the cache are not computed again, with either. The lender misses its
limits: models' steps take turns, and those of the other one read KV of its conversations on the host, whether new
prompts may begin there or not. Of 73 s between the lender's tokens its own steps take 3 s, the other's computing 14 s,
the other's reads over the link 57 s.

host-memory: bytes of weights that models have on the host, at SLOs of so many times what a token takes with all of them
resident, on one link (Select-N §4.5). The peer gives each model an equal part of the link for good.

Time is that of a cost model, as in bench_tenants.py, and pages are real; for host memory nothing runs at all: the
schedule of an iteration is computed for what the policy chooses.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import product
from random import Random
from typing import Any

import torch
from harness import GIB, MIB, Benchmark, Figure, Options, main, report
from models import EIGHT_B, LARGER

from ballonet.hooks.plan.machine import Machine, MachineSizes, Tenant
from ballonet.hooks.plan.run import run
from ballonet.hooks.server.arrivals import RecordedArrival
from ballonet.offload.policy.coordinator import LinkClient, Refusal, share
from ballonet.offload.policy.plan import Costs
from ballonet.offload.policy.step_costs import Parts, Step

PARTS = Parts(8.8e-3, 4e-5, 3.66e-8, 0.0)  # seconds of a step; bench_tenants.py says where they are from
LINK, PAGE, SHRINK = 55e9, 8 * MIB, 64
STRICT = 25  # times what a prompt and a token take alone: the SLOs of goodput
LENDER = 1.10
BLOCK = 512  # tokens
QUOTIENTS = (1.1, 1.5, 2.0, 3.0)  # SLOs by the time of a token with all layers resident
LINKS = (25e9, 55e9)
# what, tokens of a prompt and of an answer, GiB of the device, requests, and rates per second
LOADS = (
    ("2k-2k", 2048, 2048, 24, 48, (0.5, 1.0, 1.5)),
    ("32k-2k", 32768, 2048, 48, 16, (0.05, 0.1, 0.2)),
)
TINY_LOADS = (("64-16", 64, 16, 32 / 1024, 8, (20.0,)),)
COLUMNS = ("paper", "what", "peer's", "ballonet's", "ballonet / peer")


def papers(chosen: Options) -> None:
    tell(chosen, "settings of the papers, simulated", [*goodput(chosen), *lending(chosen)])


def host_memories(chosen: Options) -> None:
    tell(chosen, "weights on the host at an SLO, 8B shape in bfloat16, costs given, computed", [*host_memory()])


def tell(chosen: Options, title: str, rows: Sequence[tuple[Any, ...]]) -> None:
    report(chosen, title, [dict(zip(COLUMNS, row, strict=True)) for row in rows])


def row(paper: str, what: str, peer: float, ours: float, **limit: float) -> tuple[Any, ...]:
    ratio = Figure.of([ours / peer]) if peer else None  # without one ballonet's is no less
    if ratio is not None:
        ratio = ratio.at_least(limit["least"]) if "least" in limit else ratio.at_most(limit["most"])
    return paper, what, Figure.of([peer]), Figure.of([ours]), ratio


def machine(chosen: Options, gib: float) -> Machine:
    budget = round(gib * GIB)
    if chosen.tiny:
        return Machine(budget, 2 * budget, 256 * 1024, 200.0 * MIB)
    return Machine(budget, 4 * budget, PAGE, LINK, SHRINK)


def tenants(chosen: Options, *arrivals: Sequence[RecordedArrival]) -> list[Tenant]:
    config = copy.deepcopy(LARGER if chosen.tiny else EIGHT_B)
    config.dtype = torch.float32 if chosen.tiny else torch.bfloat16
    return [Tenant("abc"[number], config, PARTS, theirs) for number, theirs in enumerate(arrivals)]


def batching(chosen: Options, shared: bool) -> dict[str, Any]:
    sizes = {"page_size": 32, "max_batch_tokens": 256} if chosen.tiny else {"page_size": 256, "max_batch_tokens": 2048}
    return {**sizes, "allow_block_sharing": shared}


# eLLM


def goodput(chosen: Options) -> Iterator[tuple[Any, ...]]:
    for what, prompt, answer, gib, requests, rates in TINY_LOADS if chosen.tiny else LOADS:
        slos = STRICT * PARTS.seconds(Step(prompt, prompt)), STRICT * PARTS.seconds(Step(1, prompt))
        best = dict.fromkeys(("stock", "fast"), 0.0)
        for policy, rate in product(best, rates):
            asked = tenants(chosen, poisson(requests, rate, prompt, answer))
            answered = run(asked, machine(chosen, gib), policy, batching(chosen, shared=False), slos)
            best[policy] = max(best[policy], answered["goodput"])
        yield row("eLLM", f"goodput, {what}, on {gib:g} GiB, requests/s", best["stock"], best["fast"], least=1.0)


def poisson(requests: int, rate: float, prompt: int, answer: int) -> list[RecordedArrival]:
    random, at, arrivals = Random(0), 0.0, list[RecordedArrival]()
    for _ in range(requests):
        at += random.expovariate(rate)
        arrivals.append(RecordedArrival(at, prompt, answer))
    return arrivals


# SwiftCache


def lending(chosen: Options) -> Iterator[tuple[Any, ...]]:
    talks, others, rate = (3, 4, 8.0) if chosen.tiny else (24, 40, 1.2)
    longest = 256 if chosen.tiny else 24_000
    asked = conversations(talks, rate, longest), poisson(others, rate / 3, 64, 8)
    at = machine(chosen, 64 / 1024 if chosen.tiny else 44)
    sharing = batching(chosen, shared=True)
    split, fast = (run(tenants(chosen, *asked), at, policy, sharing)["models"] for policy in ("split", "fast"))
    yield row("SwiftCache", "conversations, P99 TTFT, s", split[0]["ttft_p99"], fast[0]["ttft_p99"], most=1.0)
    for figure, name in (("ttft_p99", "P99 TTFT, s"), ("tbt_p99", "P99 gap, s")):
        yield row("SwiftCache", f"the lender's {name}", split[1][figure], fast[1][figure], most=LENDER)


def conversations(talks: int, rate: float, longest: int) -> list[RecordedArrival]:
    """Turns of conversations that go on at random, each until it is longer than that."""
    random, at, arrivals = Random(0), 0.0, list[RecordedArrival]()
    said = dict.fromkeys(range(talks), 0)
    while said:
        at += random.expovariate(rate)
        talk = random.choice([*said])
        said[talk] += random.randint(longest // 12, longest // 4)
        blocks = tuple(talk * 10**4 + number for number in range(said[talk] // BLOCK))
        arrivals.append(RecordedArrival(at, said[talk], random.randint(8, 64), blocks, BLOCK))
        if said[talk] > longest:
            del said[talk]
    return arrivals


# Select-N


def host_memory() -> Iterator[tuple[Any, ...]]:
    """The SLO of the first of two models is the one named, that of the second twice as long."""
    config = copy.deepcopy(EIGHT_B)
    config.dtype = torch.bfloat16
    pages = tuple(-(-layer // PAGE) for layer in MachineSizes.of(config).layers)
    for link, quotient, models in product(LINKS, QUOTIENTS, (1, 2)):
        seconds = PARTS.seconds(Step(1, 1024))
        slos = [quotient * seconds * (1 + number) for number in range(models)]

        def chosen_for(part: int, slos: Sequence[float], link: float = link, seconds: float = seconds) -> float:
            """Bytes on the host of models that share such a part of the link."""
            costs = Costs(pages, seconds, PAGE / (link / part))
            clients = [LinkClient(str(slo), costs, PAGE, slo, 2 * sum(pages)) for slo in slos]
            shares = share(clients, link / part)
            return 0.0 if isinstance(shares, Refusal) else float(shares.host)

        equal = sum(chosen_for(models, [slo]) for slo in slos)
        ours = chosen_for(1, slos)
        what = f"{models} on {link / 1e9:g} GB/s at {quotient:g} x resident: GiB on the host"
        yield row("Select-N", what, equal / GIB, ours / GIB, least=1.0)


BENCHMARKS = {"papers": Benchmark(papers), "host-memory": Benchmark(host_memories)}

if __name__ == "__main__":
    main(__doc__, BENCHMARKS)
