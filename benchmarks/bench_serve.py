"""Many requests at once at a fixed budget: transformers' continuous batching by its own sizing, and on the pool.

Stock sizes its cache by what the device has free: here it is told the budget, and that the weights are in it. With
`space on the host` it has as much host memory (`cpu_offload_space`) as ballonet may use, which it pins, so that it runs
only where there is CUDA; so does vLLM, where it is installed, with random weights of its own. With `weights fixed` no
layer leaves the device: what is gained then comes of the KV alone. With `full batches` as many requests are in a batch
as fit, else as many as make the most tokens per second. All answer the same requests, greedily, and answers are
compared token by token. Steps, preemptions and the largest batch are counts; tokens per second are those of one run
after a short one that is not measured, in a process of its own. All peers run in turn, some times.
"""

from __future__ import annotations

from collections.abc import Sequence

import vllm_peer
from common import GIB, MIB, Options, report
from peer import begin
from serving import FIXED, FULL, OURS, SPACED, STOCK, VLLM, differing, figure, functions, in_rounds, ratio, title

BUDGETS = {"cuda": (16 * GIB, 18 * GIB), "cpu": (288 * MIB, 240 * MIB), "tiny": (24 * MIB,)}
STEPS = {288 * MIB: 0.75, 240 * MIB: 0.5}  # at most, of stock's
FASTER, LATER = 1.3, 1.5  # times stock's tokens per second, at least, and P99 of later tokens, at most
ROUNDS = 3  # of all peers, a process each; fewer where fewer repetitions are asked for

COUNTED = {  # columns, by what a run says
    "steps": "steps",
    "preempted": "preempted",
    "largest": "largest batch",
    "speed": "tokens per second",
    "first": "first token, P99 s",
    "later": "later tokens, P99 s",
}


def main() -> None:
    chosen = begin("serve", __doc__, functions)
    theirs = ((SPACED, VLLM) if vllm_peer.is_here() else (SPACED,)) if chosen.cuda else ()
    names = (STOCK, *theirs, FIXED, FULL, OURS)
    rows = [row for budget in BUDGETS[chosen.kind][: chosen.cases] for row in compared(chosen, budget, names)]
    report(chosen, "serve", title(chosen), rows)


def compared(chosen: Options, budget: int, names: Sequence[str]) -> list[dict[str, object]]:
    """A row for each peer at this budget."""
    found = in_rounds(__file__, chosen, names, budget, min(ROUNDS, chosen.repetitions))
    stock, rows = found[STOCK], list[dict[str, object]]()
    for name, said in found.items():
        counts = {column: figure(said, what) if what in said[0] else "" for what, column in COUNTED.items()}
        fewer, differ = ("", "") if name == VLLM else (ratio(said, stock, "steps"), differing(said, stock))
        faster, later = ratio(said, stock, "speed"), ratio(said, stock, "later")
        if name == OURS and budget in STEPS:
            fewer, faster = fewer.at_most(STEPS[budget]), faster.at_least(FASTER)
            later = later.at_most(LATER)
            counts["preempted"] = figure(said, "preempted").at_most(figure(stock, "preempted").median / 4)
        row = {"budget, MiB": round(budget / MIB), "peer": name, **counts, "steps / stock's": fewer}
        row |= {"speed / stock's": faster, "later / stock's": later, "answers that differ": differ}
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
