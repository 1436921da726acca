"""Many requests at once where memory suffices: what elasticity costs continuous batching when there is no need of it.

The requests of bench_serve.py, with room for all of them. CPU seconds are those of the process, whose torch has one
thread on a CPU. Calls of the driver that change what lies behind an address are counted per decoded token, once more
when the same requests come again and find their pages mapped, and so are pages that weights, caches or others gave:
nothing is lent while pages are free.
"""

from __future__ import annotations

from common import GIB, MIB, report
from peer import begin
from serving import OURS, STOCK, differing, figure, functions, in_rounds, ratio, title

BUDGETS = {"cuda": 60 * GIB, "cpu": 1 * GIB, "tiny": 96 * MIB}


def main() -> None:
    chosen = begin("serve-plain", __doc__, functions)
    found = in_rounds(__file__, chosen, (STOCK, OURS), BUDGETS[chosen.kind], chosen.repetitions, again=True)
    rows = []
    for name, said in found.items():
        cpu, given = figure(said, "cpu"), figure(said, "given")
        more = ratio(said, found[STOCK], "cpu")
        if name == OURS:
            more, given = more.at_most(1.03), given.at_most(0)
        row = {"peer": name, "steps": figure(said, "steps"), "CPU seconds": cpu, "CPU / stock's": more}
        row |= {"tokens per second": figure(said, "speed"), "page calls per token": figure(said, "page_calls")}
        row |= {"the same, again": figure(said, "page_calls_again").at_most(0.01)}
        rows.append({**row, "pages given": given, "answers that differ": differing(said, found[STOCK])})
    report(chosen, "serve-plain", f"{title(chosen)}, memory for all", rows)


if __name__ == "__main__":
    main()
