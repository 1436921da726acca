"""What a budget of memory is enough for, and what it costs to lose a part of it.

oom: a `generate()` that dies of `torch.OutOfMemoryError` at a budget with stock completes there, with stock's tokens.
Stock says first what it needs without a limit, and its tokens. Budgets lie between that and the weights, which have to
fit. Each managed peer is a process that has the budget from its beginning, as a script would; see models.py for what
stock is. A budget of which stock does not die is no such case, and shown all the same.

context: the longest context, and the largest batch of long ones. A prompt is computed chunk by chunk until there is no
memory for the next one. "first token" is the time from its beginning until the token that follows the last of them is
known. The managed peer stops at `LONGER` times what stock reaches, so its figure is less than what it could. Both are
asked for the token that follows where stock ends, and for the one that follows where the managed peer does, which stock
is told without a limit. A batch is a cache of random keys and values for so many sequences of that length, and a few
tokens of `generate()`. The managed peer is asked for `MORE` times as many sequences as stock can, and for fewer where
that fails.

shrink: the budget shrinks while a model decodes, by `set_budget()` on another thread: the longest gap between two
tokens. Before it the budget is what decoding takes, so every page has to come from somebody: layers of weights, and
pages of the cache. The same is measured with nobody shrinking anything, from the same state. The difference is what it
costs the one who decodes; `set_budget()` itself takes as long as it takes until the pages are back with the driver.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from statistics import median
from threading import Event, Thread
from typing import Any

import torch
from harness import GIB, MIB, Benchmark, Figure, Functions, Options, Peer, main, peers, report
from models import (
    LAYERS,
    OURS,
    STOCK,
    WARM,
    Clock,
    Held,
    answer,
    decided,
    describe_few,
    filled,
    synchronize,
    timed,
    what,
    words,
)

import ballonet
from ballonet.allocator import devices
from ballonet.allocator.errors import BudgetInUse
from ballonet.hooks.compat import cache_name

Size = tuple[int, int]  # sequences, tokens of each

# Out of memory

DYING = {"cuda": (8, 4096, 32), "cpu": (8, 256, 16), "tiny": (8, 128, 3)}  # sequences, tokens of the prompt, new ones
SHARES = {"cuda": (0.4,), "cpu": (0.6, 0.3), "tiny": (0.7,)}  # of what stock needs beside the weights


def out_of_memory(chosen: Options) -> None:
    kind = chosen.kind
    with peers(chosen, (STOCK,)) as started:
        stock = started[STOCK]
        free = stock.ask("say")
        budgets = [int(free["weights"] + share * (free["peak"] - free["weights"])) for share in SHARES[kind]]
        theirs = [stock.ask("say", budget=budget) for budget in budgets]
    rows = []
    for budget, their in zip(budgets, theirs, strict=True):
        with peers(chosen, (OURS,)) as started:
            rows.append(row_of(budget, free, their, started[OURS].ask("say", budget=budget)))
    batch, length, tokens = DYING[kind]
    report(chosen, f"a budget of which stock dies: {batch} x {length} tokens and {tokens} more, {what(chosen)}", rows)


def row_of(budget: int, free: dict[str, Any], stock: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """`free`: what stock said without a limit."""
    differ = sum(a != b for a, b in zip(free["tokens"], ours["tokens"] or [-1] * len(free["tokens"]), strict=True))
    ms = ours["ms"]
    return {
        "budget, MiB": round(budget / MIB),
        "of what stock needs": Figure.of([budget / free["peak"]]),
        STOCK: ending(stock),
        OURS: ending(ours),
        "tokens that differ": Figure.of([float(differ)]).at_most(0),
        "ms per token": "" if ms is None else Figure.of([ms]),
        "of stock without a limit": "" if ms is None else Figure.of([ms / free["ms"]]),
        "what gave pages": ours["decided"],
    }


def ending(answer: dict[str, Any]) -> str:
    return "completes" if answer["error"] is None else f"{answer['error']} after {answer['said']} tokens"


def dying(name: str, chosen: Options) -> Functions:
    held: list[Held] = []

    def say(budget: int | None = None) -> dict[str, Any]:
        if held:
            held[0].hold(budget)
        else:
            held.append(Held(name, chosen, budget))
        return generated(held[0], *DYING[chosen.kind])

    return {"say": say}


def generated(held: Held, batch: int, length: int, tokens: int) -> dict[str, Any]:
    """What came of it: the tokens, or how many there were until the `error`; ms per token; bytes; who gave pages."""
    held.reset()
    weights, _ = held.memory()
    prompt = words(held.model, (batch, length), seed=1).to(held.device)
    clock = Clock(held.device)
    said, error = None, None
    try:
        said = answer(held.model, prompt, tokens, clock)[:, length:].flatten().tolist()
    except torch.OutOfMemoryError as failure:
        error = type(failure).__name__
    gc.collect()
    return {
        "tokens": said,
        "error": error,
        "said": len(clock.times),
        "ms": clock.ms() if said is not None else None,
        "weights": weights,
        "peak": held.memory()[1],
        "decided": decided() if held.peer == OURS else "",
    }


# The longest context and the largest batch

BUDGET = {"cuda": 24 * GIB, "cpu": 112 * MIB, "tiny": 22 * MIB}  # bytes
CHUNK = {"cuda": 2048, "cpu": 256, "tiny": 128}  # tokens that are computed at once
OF_A_BATCH = {"cuda": 32768, "cpu": 512, "tiny": 256}  # tokens of each sequence
LONGER, MORE = 4, 3  # times what stock reaches
TOKENS = 16  # of a generate() over a batch: over 4 the figure of the same machine changed by a tenth
MOST = 2**18  # tokens


def contexts(chosen: Options) -> None:
    kind, held = chosen.kind, OF_A_BATCH[chosen.kind]
    with peers(chosen, (STOCK,)) as started:
        stock, chunk = started[STOCK], CHUNK[kind]
        least = stock.ask("context", most=MOST, chunk=chunk)
        tried = largest(lambda sequences: stock.ask("batch", sequences=sequences, tokens=held), MOST)
        longer = stock.ask("context", most=LONGER * least["tokens"], chunk=chunk, limited=False)
    with peers(chosen, (OURS,)) as started:
        rows = [context(started[OURS], least, longer, chunk), batch(started[OURS], tried, held)]
    report(chosen, f"how much fits into {BUDGET[kind] / GIB:.3g} GiB, {what(chosen)}", rows)


def context(peer: Peer, least: dict[str, Any], longer: dict[str, Any], chunk: int) -> dict[str, Any]:
    """The row of the longest context. `least`, `longer`: stock's longest, and one `LONGER` times as long without a
    limit, which is enough."""
    ours = peer.ask("context", most=longer["tokens"], chunk=chunk)
    again = peer.ask("context", most=least["tokens"], chunk=chunk)
    differ = (again["next"] != least["next"]) + (ours["tokens"] == longer["tokens"] and ours["next"] != longer["next"])
    theirs = f"first token {least['seconds']:.3g} s"
    return {
        "": "longest context, tokens",
        STOCK: least["tokens"],
        OURS: ours["tokens"],
        "ballonet / stock": Figure.of([ours["tokens"] / least["tokens"]]).at_least(LONGER),
        "tokens per chunk": chunk,
        "stock: time": f"{theirs}; of {LONGER} x as many, without a limit, {longer['seconds']:.3g} s",
        "ballonet: time": f"first token {ours['seconds']:.3g} s; of as many as stock {again['seconds']:.3g} s",
        "next tokens that differ": Figure.of([float(differ)]).at_most(0),
        "what gave pages": ours["decided"],
    }


def batch(peer: Peer, stock: dict[int, dict[str, Any]], held: int) -> dict[str, Any]:
    """The row of the largest batch. `stock`: its answers, by their number of sequences."""

    def ask(sequences: int) -> dict[str, Any]:
        return peer.ask("batch", sequences=sequences, tokens=held)

    most = max(stock)
    tried = {MORE * most: ask(MORE * most)}
    if tried[MORE * most]["ms"] is None:
        tried = largest(ask, MORE * most)
    more = max(tried)
    return {
        "": f"largest batch of {held:,} tokens each",
        STOCK: most,
        OURS: more,
        "ballonet / stock": Figure.of([more / most]).at_least(MORE),
        "tokens per chunk": "",
        "stock: time": f"{stock[most]['ms']:.3g} ms per token",
        "ballonet: time": f"{tried[more]['ms']:.3g} ms per token",
        "next tokens that differ": "",
        "what gave pages": tried[more]["decided"],
    }


def largest(ask: Callable[[int], dict[str, Any]], high: int) -> dict[int, dict[str, Any]]:
    """The answers for the numbers that there was room for, the largest of which is below `high`; one has to be
    possible."""
    low, fitting, number = 0, dict[int, dict[str, Any]](), 1
    while high - low > 1:
        answer = ask(number)
        if answer["ms"] is None:
            high = number
        else:
            low, fitting[number] = number, answer
        number = min(2 * low, (low + high) // 2)
    if not fitting:
        raise SystemExit("there is no room for a single sequence")
    return fitting


def holding(name: str, chosen: Options) -> Functions:
    budget = BUDGET[chosen.kind]
    held = Held(name, chosen, budget)
    return {"context": partial(longest, held, budget), "batch": partial(decoded, held)}


def longest(held: Held, budget: int, most: int, chunk: int, limited: bool = True) -> dict[str, Any]:
    """The tokens that there was room for, at most `most`, the one that follows them, and seconds until it was there.
    `limited`: to the budget."""
    held.reset()
    if not limited:
        held.hold(None)
    before = ballonet.stats() if held.peer == OURS else None
    tokens, following, seconds = computed(held, most, chunk)
    if not limited:
        held.reset()
        held.hold(budget)
    gave = "" if before is None else decided(before)
    return {"tokens": tokens, "next": following, "seconds": seconds, "decided": gave}


def computed(held: Held, most: int, chunk: int) -> tuple[int, int, float]:
    """How many tokens there was room for, the one that follows, and seconds."""
    text = words(held.model, (1, MOST), seed=2).to(held.device)
    given = {cache_name(held.model): held.cache()}
    tokens, seconds, following = 0, 0.0, -1
    begin = time.perf_counter()
    with torch.no_grad(), suppress(torch.OutOfMemoryError):
        while tokens < most:
            part = text[:, tokens : min(tokens + chunk, most)]
            logits = held.model(part, use_cache=True, logits_to_keep=1, **given).logits
            following = int(logits[0, -1].argmax())
            synchronize(held.device)
            tokens, seconds = tokens + part.shape[1], time.perf_counter() - begin
    return tokens, following, seconds


def decoded(held: Held, sequences: int, tokens: int) -> dict[str, Any]:
    """ms per token, None where there is no room."""
    held.reset()
    before = ballonet.stats() if held.peer == OURS else None
    clock = Clock(held.device)
    ms = None
    with suppress(torch.OutOfMemoryError):
        cache = filled(held.peer, held.model.config, sequences, tokens, held.device)
        timed(held.model, cache, (sequences, tokens), held.device, TOKENS, clock)
        ms = clock.ms()
    return {"ms": ms, "decided": "" if before is None else decided(before)}


# A budget that shrinks

LESS = {"cuda": GIB, "cpu": 16 * MIB, "tiny": MIB // 2}  # bytes
DECODING = {"cuda": (4, 4096), "cpu": (4, 512), "tiny": (2, 64)}  # sequences, tokens of each
STEPS = {"cuda": 32, "cpu": 24, "tiny": 8}  # tokens
ROUNDS = {"cuda": 3, "cpu": 3, "tiny": 1}
LATER = 50.0  # ms


def shrinking(chosen: Options) -> None:
    kind = chosen.kind
    with peers(chosen, (OURS,)) as started:
        started[OURS].ask("round")
        rounds = [started[OURS].ask("round") for _ in range(ROUNDS[kind])]
    columns = {name: Figure.of([said[name] for said in rounds]) for name in rounds[0] if name != "decided"}
    later = Figure.of([said["gap"] - said["quiet"] for said in rounds])
    row = {
        "shrinks by, MiB": round(LESS[kind] / MIB),
        "longest gap, ms": columns["gap"],
        "nobody shrinks, ms": columns["quiet"],
        "longer by, ms": later.at_most(LATER) if chosen.cuda else later,
        "set_budget took, ms": columns["took"],
        "ms per token before": columns["before"],
        "after": columns["after"],
        "refused": columns["refused"].at_most(0),
        "what gave pages": rounds[-1]["decided"],
    }
    batch, length = DECODING[kind]
    title = f"the budget shrinks while {batch} x {length} tokens decode, {describe_few(chosen, LAYERS[kind])}"
    report(chosen, title, [row])


def losing(name: str, chosen: Options) -> Functions:
    held, kind = Held(name, chosen), chosen.kind
    return {"round": lambda: measured(held, DECODING[kind], STEPS[kind], LESS[kind])}


def measured(held: Held, size: Size, tokens: int, less: int) -> dict[str, Any]:
    """ms of the longest gaps, of `set_budget`, and per token before and after."""
    quiet, _, _ = decode(held, size, tokens, None)
    before = ballonet.stats()
    gaps, took, refused = decode(held, size, tokens, less)
    return {
        "gap": max(gaps),
        "quiet": max(quiet),
        "took": took,
        "before": median(quiet),
        "after": median(gaps[-len(gaps) // 4 :]),
        "refused": refused,
        "decided": decided(before),
    }


def decode(held: Held, size: Size, tokens: int, less: int | None) -> tuple[list[float], float, float]:
    """ms between two tokens; ms that the budget took to shrink by `less`, after a quarter of the tokens; 1 if that was
    refused."""
    device = devices.require()
    held.hold(None)
    held.settle()
    held.reset()
    cache = filled(OURS, held.model.config, *size, held.device)

    def generate(clock: Clock) -> None:
        timed(held.model, cache, size, held.device, tokens, clock)
        cache.crop(size[1] - cache.get_seq_length())

    generate(Clock(held.device))
    ballonet.set_budget(held.memory()[1])  # with few pages left, host copies are made
    generate(Clock(held.device))
    reached = Event()
    took, refused = 0.0, 0.0

    def shrink() -> None:
        nonlocal took, refused
        reached.wait()
        if less is None:
            return
        begin = time.perf_counter()
        try:
            ballonet.set_budget(device.budget - less)
        except BudgetInUse:
            refused = 1.0
        took = (time.perf_counter() - begin) * 1e3

    def count() -> int:
        if len(clock.times) > tokens // 4:
            reached.set()
        return 0

    clock = Clock(held.device, count)
    other = Thread(target=shrink)
    other.start()
    try:
        generate(clock)
    finally:
        reached.set()
        other.join()
    return clock.gaps(WARM), took, refused


BENCHMARKS = {
    "oom": Benchmark(out_of_memory, dying),
    "context": Benchmark(contexts, holding),
    "shrink": Benchmark(shrinking, losing),
}

if __name__ == "__main__":
    main(__doc__, BENCHMARKS)
