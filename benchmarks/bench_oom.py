"""A `generate()` that dies of `torch.OutOfMemoryError` at a budget with stock completes there, with stock's tokens.

Stock says first what it needs without a limit, and its tokens. Budgets lie between that and the weights, which have to
fit. Each managed peer is a process that has the budget from its beginning, as a script would; see capped.py for what
stock is. A budget of which stock does not die is no such case, and shown all the same.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from budgets import OURS, STOCK, what
from common import MIB, Figure, Options, report
from peer import Functions, begin, peers

if TYPE_CHECKING:
    from capped import Held

CASES = {
    "cuda": (8, 4096, 32),
    "cpu": (8, 256, 16),
    "tiny": (8, 128, 3),
}  # sequences, tokens of the prompt, and new ones
SHARES = {"cuda": (0.4,), "cpu": (0.6, 0.3), "tiny": (0.7,)}  # of what stock needs beside the weights


def main() -> None:
    chosen = begin("oom", __doc__, functions)
    kind = chosen.kind
    rows = []
    with peers(__file__, chosen, (STOCK,)) as started:
        stock = started[STOCK]
        free = stock.ask("say")
        budgets = [int(free["weights"] + share * (free["peak"] - free["weights"])) for share in SHARES[kind]]
        theirs = [stock.ask("say", budget=budget) for budget in budgets]
    for budget, their in zip(budgets, theirs, strict=True):
        with peers(__file__, chosen, (OURS,)) as started:
            rows.append(row_of(budget, free, their, started[OURS].ask("say", budget=budget)))
    batch, length, tokens = CASES[kind]
    title = f"a budget of which stock dies: {batch} x {length} tokens and {tokens} more, {what(chosen)}"
    report(chosen, "oom", title, rows)


def row_of(budget: int, free: dict[str, Any], stock: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """`free`: what stock said without a limit."""
    differ = sum(a != b for a, b in zip(free["tokens"], ours["tokens"] or [-1] * len(free["tokens"]), strict=True))
    ms = Figure.of([ours["ms"]]) if ours["ms"] is not None else ""
    return {
        "budget, MiB": round(budget / MIB),
        "of what stock needs": Figure.of([budget / free["peak"]]),
        STOCK: ending(stock),
        OURS: ending(ours),
        "tokens that differ": Figure.of([float(differ)]).at_most(0),
        "ms per token": ms,
        "of stock without a limit": "" if ms == "" else Figure.of([ours["ms"] / free["ms"]]),
        "what gave pages": ours["decided"],
    }


def ending(answer: dict[str, Any]) -> str:
    return "completes" if answer["error"] is None else f"{answer['error']} after {answer['said']} tokens"


def functions(name: str, chosen: Options) -> Functions:
    held: list[Held] = []

    def say(budget: int | None = None) -> dict[str, Any]:
        from capped import Held

        if held:
            held[0].hold(budget)
        else:
            held.append(Held(name, chosen, budget))
        return generated(held[0], *CASES[chosen.kind])

    return {"say": say}


def generated(held: Held, batch: int, length: int, tokens: int) -> dict[str, Any]:
    """What came of it: the tokens, or how many there were until the `error`; ms per token; bytes; who gave pages."""
    import torch
    from capped import decided
    from generating import Clock, answer, words

    held.reset()
    weights, _ = held.memory()
    prompt = words(held.model, (batch, length), seed=1).to(held.device)
    clock = Clock(held.device)
    said, error = None, None
    try:
        output = answer(held.model, prompt, tokens, clock)
        said = output[:, length:].flatten().tolist()
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


if __name__ == "__main__":
    main()
