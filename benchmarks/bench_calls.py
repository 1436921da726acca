"""What a token costs the host in Python: calls of one decode step of `generate()`, stock and managed, and its time.

Each peer is a process with its own copy of the same model. Calls are those of Python functions, whoever's they are, and
those of ballonet alone; they do not depend on load. The times are those of the fastest of other steps, in which nothing
is counted. Layers are small: what is over stock's is nearly all of it the host's.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from common import Figure, Options, describe_few, report
from peer import Functions, begin, in_turns, peers
from streamed import interval_of, is_managed, page_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LAYERS = {"cuda": 16, "cpu": 16, "tiny": 4}
PEERS = ("stock", "resident", "interval 4", "interval 1")
LIMITS = {"interval 4": 1.25, "interval 1": 2.0}  # times stock's calls
HELD = 256  # tokens
TOKENS = {"cuda": 24, "cpu": 48, "tiny": 8}  # of each generate()
WARM = 4


def main() -> None:
    chosen = begin("calls", __doc__, functions)
    with peers(__file__, chosen, PEERS) as found:
        counted = {name: found[name].ask("calls") for name in PEERS}
        taken = in_turns(found, chosen.repetitions, "ms")
    rows = []
    for name in PEERS:
        calls, ours = counted[name]
        times = Figure.of([calls / counted["stock"][0]])
        over = (taken[name].median - taken["stock"].median) / LAYERS[chosen.kind] * 1e3
        if name in LIMITS:
            times = times.at_most(LIMITS[name])
        row = {"peer": name, "calls": calls, "ballonet's": ours, "times stock's": times, "ms": taken[name]}
        rows.append({**row, "us per layer over stock": Figure.of([over])})
    report(chosen, "calls", f"Python per decoded token, {describe_few(chosen, LAYERS[chosen.kind])}", rows)


def functions(name: str, chosen: Options) -> Functions:
    import torch
    from llama import build, few

    import ballonet

    torch.set_num_threads(1)
    if is_managed(name):
        ballonet.install("60GiB" if chosen.cuda else "4GiB", page_size=page_size(chosen))
    model = build(few(chosen, LAYERS[chosen.kind]), chosen.device)
    if is_managed(name):
        ballonet.manage(model, interval=interval_of(name))
    return {"calls": lambda: calls(name, model, chosen), "ms": lambda: ms(name, model, chosen)}


def calls(peer: str, model: PreTrainedModel, chosen: Options) -> tuple[int, int]:
    """Python's calls of a step, all and ballonet's: the median by the first."""
    all_of_them, ours = [0], [0]

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            all_of_them[0] += 1
            ours[0] += frame.f_globals.get("__name__", "").startswith("ballonet.")

    found: list[tuple[int, int]] = []
    marks: list[tuple[int, int]] = []

    def note() -> int:
        marks.append((all_of_them[0], ours[0]))
        return 0

    sys.setprofile(count)
    try:
        generated(peer, model, chosen, note)
    finally:
        sys.setprofile(None)
    for (first, first_ours), (last, last_ours) in pairwise(marks[WARM:]):
        found.append((last - first, last_ours - first_ours))
    return sorted(found)[len(found) // 2]


def ms(peer: str, model: PreTrainedModel, chosen: Options) -> float:
    """Milliseconds of the fastest step."""
    times = generated(peer, model, chosen, int)
    return min(after - before for before, after in pairwise(times[WARM:])) * 1e3


def generated(peer: str, model: PreTrainedModel, chosen: Options, note: Any) -> list[float]:
    """When each token of a generate() was there; `note` is called after each."""
    from generating import Clock, timed
    from llama import filled

    device = chosen.device
    cache = filled("ballonet" if is_managed(peer) else peer, model.config, 1, HELD, device)
    return timed(model, cache, (1, HELD), device, TOKENS[chosen.kind], Clock(device, note)).times


if __name__ == "__main__":
    main()
