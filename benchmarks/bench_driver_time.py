"""How much of a prefill and of decoding the calling thread spends in calls of the driver that change page tables.

A managed model generates several times: the first prefill finds no pages at all, later ones those of caches that are
gone. Decoding is long enough for every layer's cache to grow by a page. The pages of the next step are mapped ahead on
another thread: "ahead" is the most that was mapped and not yet used, looked at after every token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from budgets import LAYERS, OURS, kind_of
from common import Figure, Options, describe_few, options, report
from peer import peers, serve, synchronize
from streamed import MIB

if TYPE_CHECKING:
    from capped import Held

# sequences, tokens of the prompt, and new ones
CASES = {"cuda": (8, 2048, 300), "cpu": (4, 256, 72), "tiny": (4, 16, 20)}
ROUNDS = {"cuda": 2, "cpu": 3, "tiny": 1}
PREFILL, DECODE = 0.01, 0.02  # of the time
AHEAD = 50e6  # bytes, or a page
COLUMNS = ["", "ms", "ms in the driver", "share of the time", "driver calls by others, ms", "ahead, MiB"]


def main() -> None:
    chosen = options("driver-time", __doc__)
    kind = kind_of(chosen)
    if chosen.peer is not None:
        serve(functions(chosen.peer, chosen))
        return
    with peers(__file__, chosen, (OURS,)) as found:
        first, *later = [found[OURS].ask("say") for _ in range(1 + ROUNDS[kind])]
    batch, length, tokens = CASES[kind]
    rows = [
        row(f"prefill of {batch} x {length} tokens, the first", [first["prefill"]], None),
        row("the same, later", [each["prefill"] for each in later], PREFILL),
        row(f"decoding {tokens} tokens", [each["decode"] for each in later], DECODE),
    ]
    most = max(each["ahead"] for each in (first, *later))
    limit = max(AHEAD, first["page"]) / MIB
    rows.append(["mapped ahead and not yet used, at most", "", "", "", "", Figure.of([most / MIB]).at_most(limit)])
    title = f"time in driver calls that change page tables, {describe_few(chosen, LAYERS[kind])}"
    report(chosen, "driver-time", title, COLUMNS, rows)


def functions(name: str, chosen: Options) -> Mapping[str, Callable[..., Any]]:
    """What a peer answers, see peer.serve()."""
    from capped import Held

    held = Held(name, chosen)
    return {"say": lambda: say(held, *CASES[kind_of(chosen)])}


def row(what: str, answers: list[dict[str, float]], limit: float | None) -> list[Any]:
    """Of several rounds: seconds, of these in the driver, and of other threads there."""
    share = Figure.of([each["driver"] / each["seconds"] for each in answers])
    return [
        what,
        Figure.of([each["seconds"] * 1e3 for each in answers]),
        Figure.of([each["driver"] * 1e3 for each in answers]),
        share if limit is None else share.at_most(limit),
        Figure.of([each["others"] * 1e3 for each in answers]),
        "",
    ]


def say(held: Held, batch: int, length: int, tokens: int) -> dict[str, Any]:
    """One `generate()`: its prefill, which ends with the first token, and the decode steps after it."""
    import torch
    from generating import Clock

    from ballonet.allocator import runtime

    device = runtime.require()
    others: list[int] = []
    ahead = 0

    def look() -> int:
        nonlocal ahead
        found = device.snapshot()
        ahead = max(ahead, found["ahead"] * found["page_size"])
        others.append(found["driver_ns"]["background"])
        return device.driver_ns()

    prompt = torch.ones(batch, length, dtype=torch.long, device=held.device)
    clock = Clock(lambda: synchronize(held.device), look)
    synchronize(held.device)
    clock.counts.append(look())
    clock.times.append(time.perf_counter())
    held.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        do_sample=False,
        stopping_criteria=[clock],
    )

    def between(first: int, last: int) -> dict[str, float]:
        return {
            "seconds": clock.times[last] - clock.times[first],
            "driver": (clock.counts[last] - clock.counts[first]) / 1e9,
            "others": (others[last] - others[first]) / 1e9,
        }

    return {"prefill": between(0, 1), "decode": between(1, tokens), "ahead": ahead, "page": device.page_size}


if __name__ == "__main__":
    main()
