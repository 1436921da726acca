"""The longest context, and the largest batch of long ones, at a fixed budget: stock's cache and the elastic one.

Context: a prompt is computed chunk by chunk until there is no memory for the next one. "first token" is the time from
its beginning until the token that follows the last of them is known. The managed peer stops at `LONGER` times what
stock reaches, so its figure is less than what it could. Both are asked for the token that follows where stock ends, and
for the one that follows where the managed peer does, which stock is told without a limit.

Batch: a cache of random keys and values for so many sequences of that length, and a few tokens of `generate()`. The
managed peer is asked for `MORE` times as many sequences as stock can, and for fewer where that fails. The largest batch
need not be the fastest: a row of its own says which of the batches that were tried made the most tokens per second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from budgets import OURS, STOCK, what
from common import GIB, MIB, Figure, Options, report
from peer import Functions, Peer, begin, peers

import ballonet

if TYPE_CHECKING:
    from capped import Held

BUDGET = {"cuda": 24 * GIB, "cpu": 112 * MIB, "tiny": 22 * MIB}  # bytes
CHUNK = {"cuda": 2048, "cpu": 256, "tiny": 128}  # tokens that are computed at once
HELD = {"cuda": 32768, "cpu": 512, "tiny": 256}  # tokens of each sequence of a batch
LONGER, MORE = 4, 3  # times what stock reaches
TOKENS = 16  # of a generate() over a batch: over 4 the figure of the same machine changed by a tenth
MOST = 2**18  # tokens


def main() -> None:
    chosen = begin("context", __doc__, functions)
    kind = chosen.kind
    with peers(__file__, chosen, (STOCK,)) as found:
        stock = of_stock(found[STOCK], CHUNK[kind], HELD[kind])
    with peers(__file__, chosen, (OURS,)) as found:
        rows = [context(found[OURS], stock, CHUNK[kind]), *batches(found[OURS], stock, HELD[kind])]
    title = f"how much fits into {BUDGET[kind] / GIB:.3g} GiB, {what(chosen)}"
    report(chosen, "context", title, rows)


class Stock(NamedTuple):
    """What stock can: the answers for its longest context, for one that is `LONGER` times as long without a limit, and
    for batches, by their number of sequences."""

    context: dict[str, Any]
    longer: dict[str, Any]
    batches: dict[int, dict[str, Any]]


def of_stock(peer: Peer, chunk: int, held: int) -> Stock:
    """Asks stock."""
    found = peer.ask("context", most=MOST, chunk=chunk)
    tried = largest(lambda sequences: peer.ask("batch", sequences=sequences, tokens=held), MOST)
    longer = peer.ask("context", most=LONGER * found["tokens"], chunk=chunk, limited=False)
    return Stock(found, longer, tried)


def context(peer: Peer, stock: Stock, chunk: int) -> dict[str, Any]:
    """The row of the longest context; `LONGER` times as long as stock's it is enough."""
    least, longer = stock.context, stock.longer
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


def batches(peer: Peer, stock: Stock, held: int) -> list[dict[str, Any]]:
    """The rows of the largest batch, and of the fastest one."""

    def ask(sequences: int) -> dict[str, Any]:
        return peer.ask("batch", sequences=sequences, tokens=held)

    most = max(stock.batches)
    tried = {MORE * most: ask(MORE * most)}
    if tried[MORE * most]["ms"] is None:
        tried = largest(ask, MORE * most)
    more = max(tried)
    tried |= {sequences: ask(sequences) for sequences in stock.batches if sequences not in tried}
    (slow, stocks), (fast, ours) = fastest(stock.batches), fastest(tried)
    largest_row = {
        "": f"largest batch of {held:,} tokens each",
        STOCK: most,
        OURS: more,
        "ballonet / stock": Figure.of([more / most]).at_least(MORE),
        "tokens per chunk": "",
        "stock: time": told(most, stock.batches[most]),
        "ballonet: time": told(more, tried[more]),
        "next tokens that differ": "",
        "what gave pages": tried[more]["decided"],
    }
    return [
        largest_row,
        largest_row
        | {
            "": f"fastest batch of {held:,} tokens each, tokens per second",
            STOCK: Figure.of([stocks]),
            OURS: Figure.of([ours]),
            "ballonet / stock": Figure.of([ours / stocks]).at_least(1.0),
            "stock: time": told(slow, stock.batches[slow]),
            "ballonet: time": told(fast, tried[fast]),
            "what gave pages": tried[fast]["decided"],
        },
    ]


def told(sequences: int, answer: dict[str, Any]) -> str:
    """How fast a batch was."""
    return f"{sequences} sequences: {answer['ms']:.3g} ms per token, {speed(sequences, answer):.3g} tokens per second"


def speed(sequences: int, answer: dict[str, Any]) -> float:
    """Tokens per second of a batch."""
    return float(sequences / answer["ms"] * 1e3)


def fastest(tried: dict[int, dict[str, Any]]) -> tuple[int, float]:
    """The batch with the most tokens per second, and these."""
    best = max((n for n in tried if tried[n]["ms"] is not None), key=lambda n: speed(n, tried[n]))
    return best, speed(best, tried[best])


def largest(ask: Callable[[int], dict[str, Any]], high: int) -> dict[int, dict[str, Any]]:
    """The answers for the numbers that there was room for, the largest of which is below `high`; one has to be
    possible."""
    low, found, number = 0, dict[int, dict[str, Any]](), 1
    while high - low > 1:
        answer = ask(number)
        if answer["ms"] is None:
            high = number
        else:
            low, found[number] = number, answer
        number = min(2 * low, (low + high) // 2)
    if not found:
        raise SystemExit("there is no room for a single sequence")
    return found


def functions(name: str, chosen: Options) -> Functions:
    from capped import Held

    budget = BUDGET[chosen.kind]
    held = Held(name, chosen, budget)
    return {"context": partial(longest, held, budget), "batch": partial(decoded, held)}


def longest(held: Held, budget: int, most: int, chunk: int, limited: bool = True) -> dict[str, Any]:
    """The tokens that there was room for, at most `most`, the one that follows them, and seconds until it was there.
    `limited`: to the budget."""
    from capped import decided

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
    import torch
    from generating import words
    from peer import synchronize

    from ballonet.hooks.compat import cache_name

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
    import torch
    from capped import decided
    from generating import Clock, timed
    from llama import filled

    held.reset()
    before = ballonet.stats() if held.peer == OURS else None
    clock = Clock(held.device)
    ms = None
    with suppress(torch.OutOfMemoryError):
        cache = filled(held.peer, held.model.config, sequences, tokens, held.device)
        timed(held.model, cache, (sequences, tokens), held.device, TOKENS, clock)
        ms = clock.ms()
    return {"ms": ms, "decided": "" if before is None else decided(before)}


if __name__ == "__main__":
    main()
