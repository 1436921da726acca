"""How much of a prefill and of decoding the calling thread spends in calls of the driver that change page tables.

A managed model generates several times: the first prefill finds no pages at all, later ones those of caches that are
gone. Decoding is long enough for every layer's cache to grow by a page. Pages are mapped ahead on another thread, those
of the next layer in a prefill and of the next step in decoding: "ahead" is the most that was mapped and not yet used,
looked at after every token.

On the stand-in the kernel makes the pages, 4 KiB at a time, while the driver is called: the last rows say how long it
takes for the bytes of the first prefill alone, without ballonet, and what the same calls take at the measured cost of
a GPU's.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import TYPE_CHECKING, Any

from budgets import LAYERS, OURS
from common import MIB, Figure, Options, describe_few, report
from peer import Functions, begin, peers

if TYPE_CHECKING:
    from capped import Held

# sequences, tokens of the prompt, and new ones
CASES = {"cuda": (8, 2048, 300), "cpu": (4, 256, 72), "tiny": (4, 16, 20)}
ROUNDS = {"cuda": 2, "cpu": 3, "tiny": 1}
PREFILL, DECODE = 0.01, 0.02  # of the time
AHEAD = 50e6  # bytes, or a page
# s per page of any size: one H200, driver 580
COSTS = {"cuMemCreate": 7e-6, "cuMemMap": 0.6e-6, "access": 20e-6, "cuMemUnmap": 14e-6}
MADE = "pages made, mapped; calls that open; unmapped"
CALLS = ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap")


def main() -> None:
    chosen = begin("driver-time", __doc__, functions)
    kind = chosen.kind
    with peers(__file__, chosen, (OURS,)) as found:
        first, *later = [found[OURS].ask("say") for _ in range(1 + ROUNDS[kind])]
    batch, length, tokens = CASES[kind]
    rows = [
        row(f"prefill of {batch} x {length} tokens, the first", [first["prefill"]], PREFILL),
        row("the same, later", [each["prefill"] for each in later], PREFILL),
        row(f"decoding {tokens} tokens", [each["decode"] for each in later], DECODE),
    ]
    most = max(each["ahead"] for each in (first, *later))
    limit = max(AHEAD, first["page"]) / MIB
    more = [{"": "mapped ahead and not yet used, at most", "ahead, MiB": Figure.of([most / MIB]).at_most(limit)}]
    if not chosen.cuda:
        more += beside(first["prefill"], first["page"])
    rows += [dict.fromkeys(rows[0], "") | row for row in more]
    title = f"time in driver calls that change page tables, {describe_few(chosen, LAYERS[kind])}"
    report(chosen, "driver-time", title, rows)


def beside(prefill: dict[str, Any], page: int) -> list[dict[str, Any]]:
    """What the calls of the first prefill on its own thread come to without ballonet, and at a GPU's cost."""
    made, mapped, _, unmapped = prefill["calls"]
    counts = {"cuMemCreate": made, "cuMemMap": mapped, "access": mapped, "cuMemUnmap": unmapped}
    taken = {
        "as many bytes from the kernel alone": [kernel(made, page) for _ in range(3)],
        "these calls at a GPU's cost": [sum(COSTS[name] * count for name, count in counts.items())],
    }
    rows = []
    for what, seconds in taken.items():
        share = Figure.of([each / prefill["seconds"] for each in seconds])
        driver = milliseconds(seconds)
        rows.append({"": what, "ms in the driver": driver, "share of the time": share, MADE: calls(prefill["calls"])})
    return rows


def kernel(pages: int, page: int) -> float:
    """Seconds to make so many pages of a memfd and to map them."""
    memory = os.memfd_create("pages")
    try:
        begin = time.perf_counter()
        for index in range(pages):
            os.posix_fallocate(memory, index * page, page)
        if pages:
            mmap.mmap(memory, pages * page, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE).close()
        return time.perf_counter() - begin
    finally:
        os.close(memory)


def calls(counts: list[int]) -> str:
    return ", ".join(map(str, counts)) if any(counts) else "0"


def functions(name: str, chosen: Options) -> Functions:
    from capped import Held

    held = Held(name, chosen)
    return {"say": lambda: say(held, *CASES[chosen.kind])}


def milliseconds(seconds: list[float]) -> Figure:
    return Figure.of([each * 1e3 for each in seconds])


def row(what: str, answers: list[dict[str, Any]], limit: float) -> dict[str, Any]:
    """Returns the row of several rounds: seconds, of these in the driver, and of other threads there; calls of the last
    one."""
    last = answers[-1]
    ms, driver, others = (milliseconds([each[name] for each in answers]) for name in ("seconds", "driver", "others"))
    share = Figure.of([each["driver"] / each["seconds"] for each in answers]).at_most(limit)
    return {
        "": what,
        "ms": ms,
        "ms in the driver": driver,
        "share of the time": share,
        MADE: calls(last["calls"]),
        "on other threads, ms": others,
        "the same there": calls(last["calls_of_others"]),
        "ahead, MiB": "",
    }


def say(held: Held, batch: int, length: int, tokens: int) -> dict[str, Any]:
    """One `generate()`: its prefill, which ends with the first token, and the decode steps after it."""
    import torch
    from generating import Clock, answer

    from ballonet.allocator import devices

    device = devices.require()
    seen: list[dict[str, Any]] = []
    ahead = 0

    def look() -> int:
        nonlocal ahead
        found = device.snapshot()
        ahead = max(ahead, found["ahead"] * found["page_size"])
        seen.append(found)
        return device.driver_ns()

    prompt = torch.ones(batch, length, dtype=torch.long, device=held.device)
    clock = Clock(held.device, look)
    clock.note()
    answer(held.model, prompt, tokens, clock)

    def between(first: int, last: int) -> dict[str, Any]:
        def more(which: str) -> list[int]:
            return [seen[last][which][name] - seen[first][which][name] for name in CALLS]

        others = more("background_calls")
        return {
            "seconds": clock.times[last] - clock.times[first],
            "driver": (clock.counts[last] - clock.counts[first]) / 1e9,
            "others": (seen[last]["driver_ns"]["background"] - seen[first]["driver_ns"]["background"]) / 1e9,
            "calls": [every - theirs for every, theirs in zip(more("driver_calls"), others, strict=True)],
            "calls_of_others": others,
        }

    return {"prefill": between(0, 1), "decode": between(1, tokens), "ahead": ahead, "page": device.page_size}


if __name__ == "__main__":
    main()
