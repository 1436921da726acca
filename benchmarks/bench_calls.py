"""What a token costs the host in Python: calls of one decode step of `generate()`, stock and managed, and its time.

Each peer is a process with its own copy of the same model. Calls are those of Python functions, whoever's they are, and
those of ballonet alone; they do not depend on load. The times are of other steps, in which nothing is counted. Layers
are small: what is over stock's is nearly all of it the host's.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from common import Figure, Options, describe_few, interleaved, report
from peer import Functions, begin, peers, synchronize
from streamed import interval_of, is_managed, page_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LAYERS = {"cuda": 16, "cpu": 16, "tiny": 4}
PEERS = ("stock", "resident", "interval 4", "interval 1")
TINY = ("stock", "interval 4")  # of tiny sizes
LIMITS = {"interval 4": 1.25, "interval 1": 2.0}  # times stock's calls
HELD = 256  # tokens
TOKENS = 24  # of each generate()
WARM = 4


def main() -> None:
    chosen = begin("calls", __doc__, functions)
    names, layers = TINY if chosen.tiny else PEERS, LAYERS[chosen.kind]
    with peers(__file__, chosen, names) as found:
        counted = {name: found[name].ask("calls") for name in names}
        taken = interleaved({name: (lambda n=name: found[n].ask("ms")) for name in names}, chosen.repetitions)
    rows = []
    for name in names:
        calls, ours = counted[name]
        times = Figure.of([calls / counted["stock"][0]])
        over = (taken[name].median - taken["stock"].median) / layers * 1e3
        if name in LIMITS:
            times = times.at_most(LIMITS[name])
        rows.append([name, calls, ours, times, taken[name], Figure.of([over])])
    report(
        chosen,
        "calls",
        f"Python per decoded token, {describe_few(chosen, layers)}",
        ["peer", "calls", "ballonet's", "times stock's", "ms", "us per layer over stock"],
        rows,
    )


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
    return {"calls": lambda: calls(name, model, chosen.device), "ms": lambda: ms(name, model, chosen.device)}


def calls(peer: str, model: PreTrainedModel, device: str) -> tuple[int, int]:
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
        generated(peer, model, device, note)
    finally:
        sys.setprofile(None)
    for (first, first_ours), (last, last_ours) in zip(marks[WARM:], marks[WARM + 1 :], strict=False):
        found.append((last - first, last_ours - first_ours))
    return sorted(found)[len(found) // 2]


def ms(peer: str, model: PreTrainedModel, device: str) -> float:
    """Milliseconds of a step."""
    times = generated(peer, model, device, int)
    return (times[-1] - times[WARM]) / (len(times) - 1 - WARM) * 1e3


def generated(peer: str, model: PreTrainedModel, device: str, note: Any) -> list[float]:
    """When each token of a generate() was there; `note` is called after each."""
    from generating import Clock, timed
    from llama import filled

    cache = filled("ballonet" if is_managed(peer) else peer, model.config, 1, HELD, device)
    return timed(model, cache, (1, HELD), device, TOKENS, Clock(lambda: synchronize(device), note)).times


if __name__ == "__main__":
    main()
