"""The budget shrinks while a model decodes, by `set_budget()` on another thread: the longest gap between two tokens.

Before it the budget is what decoding takes, so every page has to come from somebody: layers of weights, and pages of
the cache. The same is measured with nobody shrinking anything, from the same state. The difference is what it costs the
one who decodes; `set_budget()` itself takes as long as it takes until the pages are back with the driver.
"""

from __future__ import annotations

import time
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from budgets import LAYERS, OURS
from common import GIB, MIB, Figure, Options, describe_few, report
from peer import Functions, begin, peers
from streamed import WARM

if TYPE_CHECKING:
    from capped import Held

LESS = {"cuda": GIB, "cpu": 16 * MIB, "tiny": MIB // 2}  # bytes
HELD = {"cuda": (4, 4096), "cpu": (4, 512), "tiny": (2, 64)}  # sequences, tokens of each
TOKENS = {"cuda": 32, "cpu": 24, "tiny": 8}
ROUNDS = {"cuda": 3, "cpu": 3, "tiny": 1}
LONGER = 50.0  # ms


def main() -> None:
    chosen = begin("shrink", __doc__, functions)
    kind = chosen.kind
    with peers(__file__, chosen, (OURS,)) as found:
        found[OURS].ask("round")
        rounds = [found[OURS].ask("round") for _ in range(ROUNDS[kind])]
    columns = {name: Figure.of([each[name] for each in rounds]) for name in rounds[0] if name != "decided"}
    longer = Figure.of([each["gap"] - each["quiet"] for each in rounds])
    row = {
        "shrinks by, MiB": round(LESS[kind] / MIB),
        "longest gap, ms": columns["gap"],
        "nobody shrinks, ms": columns["quiet"],
        "longer by, ms": longer.at_most(LONGER) if chosen.cuda else longer,
        "set_budget took, ms": columns["took"],
        "ms per token before": columns["before"],
        "after": columns["after"],
        "refused": columns["refused"].at_most(0),
        "what gave pages": rounds[-1]["decided"],
    }
    batch, length = HELD[kind]
    title = f"the budget shrinks while {batch} x {length} tokens decode, {describe_few(chosen, LAYERS[kind])}"
    report(chosen, "shrink", title, [row])


def functions(name: str, chosen: Options) -> Functions:
    from capped import Held

    held, kind = Held(name, chosen), chosen.kind
    return {"round": lambda: measured(held, HELD[kind], TOKENS[kind], LESS[kind])}


def measured(held: Held, size: tuple[int, int], tokens: int, less: int) -> dict[str, Any]:
    """ms of the longest gaps, of `set_budget`, and per token before and after."""
    from statistics import median

    from capped import decided

    import ballonet

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


def decode(held: Held, size: tuple[int, int], tokens: int, less: int | None) -> tuple[list[float], float, float]:
    """ms between two tokens; ms that the budget took to shrink by `less`, after a quarter of the tokens; 1 if that was
    refused."""
    from generating import Clock, timed
    from llama import filled

    import ballonet
    from ballonet.allocator import devices
    from ballonet.allocator.errors import BudgetInUse

    device = devices.require()
    held.hold(None)
    held.settle()
    held.reset()
    cache = filled(OURS, held.model.config, *size, held.device)
    timed(held.model, cache, size, held.device, tokens, Clock(held.device))
    cache.crop(size[1] - cache.get_seq_length())
    _, peak = held.memory()
    ballonet.set_budget(peak)  # with few pages left, host copies are made
    timed(held.model, cache, size, held.device, tokens, Clock(held.device))
    cache.crop(size[1] - cache.get_seq_length())
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
        timed(held.model, cache, size, held.device, tokens, clock)
    finally:
        reached.set()
        other.join()
    return clock.gaps(WARM), took, refused


if __name__ == "__main__":
    main()
