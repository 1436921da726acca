"""How often a prefix cache has what requests begin with, by its size: the store's policy, least recently used, and a
cache that never evicts. For a trace made here, and any given as files (JSON lines with `hash_ids`).

    python benchmarks/bench_hit_rate.py [TRACE.jsonl ...]

The trace made here: conversations that begin one after another, each with one of a few system prompts, and go on for a
while, a turn now and then; each turn sends all that was said before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from common import Figure, options, report

from ballonet.offload.policy.prefixes import Hits, Index
from ballonet.offload.policy.worth import Odds, Policy, Recency

TURNS = {False: 4000, True: 60}  # of the trace made here, by whether it is tiny
SIZES = (0.02, 0.05, 0.1, 0.25, 0.5)  # of the distinct blocks
CLOSE = 0.01  # to a cache that never evicts, of the recorded trace at `AT` blocks
AT = 50_000


def main() -> None:
    chosen = options("hit-rate", __doc__)
    rows = [row for trace in [None, *chosen.files] for row in measure(trace, TURNS[chosen.tiny])]
    report(chosen, "hit-rate", "blocks of prompts that a prefix cache has", rows)


def measure(path: Path | None, turns: int) -> Iterator[dict[str, Any]]:
    """A row for each size."""
    trace = list(made(turns)) if path is None else list(recorded(path))
    distinct = len({key for keys in trace for key in keys})
    best = hits(trace, None, Recency())
    for size in sorted({round(distinct * part) for part in SIZES} | ({AT} if distinct > AT else set())):
        found = Figure.of([hits(trace, size, Odds()).hit_rate])
        if size == AT and path is not None:
            found = found.at_least(round(best.hit_rate - CLOSE, 4))
        yield {
            "trace": "made here" if path is None else path.name,
            "requests": best.requests,
            "blocks stored, at most": size,
            "hit rate": found,
            "least recently used": Figure.of([hits(trace, size, Recency()).hit_rate]),
            "without a limit": Figure.of([best.hit_rate]),
        }


def hits(trace: list[list[int]], blocks: int | None, policy: Policy) -> Hits:
    """What a cache of so many blocks finds, any number if None: each request asks for its blocks, then stores them."""
    index = Index(blocks, policy)
    for request, keys in enumerate(trace):
        index.match(keys)
        index.insert(keys, request)
        index.evict(index.excess())
    return index.hits


def recorded(path: Path) -> Iterator[list[int]]:
    """Returns the blocks of each request."""
    with path.open() as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)["hash_ids"]


def made(turns: int) -> Iterator[list[int]]:
    """See above. Seeded."""
    random, fresh = Random(0), iter(range(10**9))
    systems = [[next(fresh) for _ in range(random.randrange(1, 12))] for _ in range(8)]
    talking: list[list[int]] = []
    for _ in range(turns):
        if not talking or random.random() < 0.2:
            talking.append([*random.choice(systems)])
        said = random.choice(talking[-40:])
        said += [next(fresh) for _ in range(random.randrange(1, 8))]
        yield list(said)
        if random.random() < 0.15:
            talking.remove(said)


if __name__ == "__main__":
    main()
