"""How many layers stream for nothing: the time per token over their number, and where it begins to grow.

Oneiros §5.3 puts the knee at the most layers whose copies take no longer than the pass: T_T·m ≤ T_compute. It is worked
out from the time with every layer resident and from the link, both measured here, and compared with the largest number
of layers at which a token takes no more than 3 % longer. One sequence, `generate()`; the stand-in's link is slowed to
2 GB/s.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from common import Figure, Options, describe_few, interleaved, report
from peer import Functions, answering, begin, peers
from streamed import WARM, environment

from ballonet.offload.policy.interval import Costs
from ballonet.offload.policy.remap import cap

LAYERS = 16
INTERVALS = {"cuda": (5, 4, 3, 2, 1), "cpu": (5, 4, 3, 2, 1), "tiny": (2,)}
ROUNDS = {"cuda": 2, "cpu": 2, "tiny": 1}
HELD = {"cuda": 1024, "cpu": 256, "tiny": 16}
OVER = 1.03  # of the resident time is still hidden
PREDICTED = 0.1


def main() -> None:
    chosen = begin("knee", __doc__, functions)
    kind = chosen.kind
    tokens = WARM + (2 if chosen.tiny else 5)
    names = ("ballonet", "link")
    with peers(__file__, chosen, names, dict.fromkeys(names, environment(chosen))) as started:
        found = answering(started, names, "about")
        layer = found["ballonet"].ask("about")["layer"]
        turns: dict[str, Any] = {"link": lambda: found["link"].ask("link")}
        decode = partial(found["ballonet"].ask, "decode", held=HELD[kind], tokens=tokens)
        turns |= {str(interval): partial(decode, interval=interval) for interval in (None, *INTERVALS[kind])}
        taken = interleaved(turns, ROUNDS[kind])
    resident = taken["None"]
    costs = Costs((1,) * LAYERS, resident.median / 1e3, layer / taken["link"].median)
    most, rows = cap(costs), []
    for interval in INTERVALS[kind]:
        count, ms, predicted = LAYERS // interval, taken[str(interval)], costs.expected(costs.plan(interval)) * 1e3
        longer, off = Figure.ratio(ms, resident), Figure.of([abs(ms.median / predicted - 1)])
        rows.append(
            {
                "layers that stream": count,
                "ms per token": ms,
                "of resident": longer,
                "predicted ms": round(predicted, 1),
                "off by": off.at_most(PREDICTED) if chosen.cuda else off,
                "hidden, predicted": "yes" if count <= most else "no",
                "hidden": "yes" if longer.median <= OVER else "no",
            }
        )
    title = f"how many layers stream for nothing: {most} predicted; {describe_few(chosen, LAYERS)}"
    report(chosen, "knee", title, rows)


def functions(name: str, chosen: Options) -> Functions:
    from decoding import at_any_interval

    return at_any_interval(chosen, LAYERS)


if __name__ == "__main__":
    main()
