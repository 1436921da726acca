"""What a token costs the host in Python: calls of one decode step of `generate()`, stock and managed, and its time.

Each peer is a process with its own copy of the same model. Calls are those of Python functions, whoever's they are, and
those of ballonet alone; they do not depend on load. The times are those of the fastest of other steps, in which nothing
is counted. Layers are small: what is over stock's is nearly all of it the host's.

One row is of the resident model while `ballonet top` looks at its process fifty times per second, and says what looks
as often as `top` makes them by itself take: CPU time of the thread that answers, which does not depend on load either.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from common import Figure, Options, describe_few, report
from peer import Functions, begin, in_turns, peers
from streamed import interval_of, is_managed, page_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LAYERS = {"cuda": 16, "cpu": 16, "tiny": 4}
PEERS = ("stock", "resident", "interval 4", "interval 1")
WATCHED = "resident"  # the peer that `top` looks at
EVERY = 0.02  # seconds between looks
LOOKS = {"cuda": 50, "cpu": 50, "tiny": 3}
SHARE = 0.5  # % of the process's time that `top` may take
LIMITS = {"interval 4": 1.25, "interval 1": 2.0}  # times stock's calls
HELD = 256  # tokens
TOKENS = {"cuda": 24, "cpu": 48, "tiny": 8}  # of each generate()
WARM = 4


def main() -> None:
    chosen = begin("calls", __doc__, functions)
    with peers(__file__, chosen, PEERS) as found:
        counted = {name: found[name].ask("calls") for name in PEERS}
        taken = in_turns(found, chosen.repetitions, "ms")
        seen = found[WATCHED].ask("watched")
    name = f"{WATCHED}, top looks"
    counted[name], taken[name] = seen["calls"], Figure.of([seen["ms"]])
    share = Figure.of([seen["share"] * 100]).at_most(SHARE)
    rows = []
    for name in counted:
        calls, ours = counted[name]
        times = Figure.of([calls / counted["stock"][0]])
        over = (taken[name].median - taken["stock"].median) / LAYERS[chosen.kind] * 1e3
        if name in LIMITS:
            times = times.at_most(LIMITS[name])
        row = {"peer": name, "calls": calls, "ballonet's": ours, "times stock's": times, "ms": taken[name]}
        more = {"us per layer over stock": Figure.of([over]), "% for top": share if name not in PEERS else ""}
        rows.append({**row, **more})
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
    return {
        "calls": lambda: calls(name, model, chosen),
        "ms": lambda: ms(name, model, chosen),
        "watched": lambda: watched(name, model, chosen),
    }


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


def watched(peer: str, model: PreTrainedModel, chosen: Options) -> dict[str, Any]:
    """The same while `top` looks at this process: `calls`, `ms`; and the `share` of time that its looks would take if
    they came as often as they do by themselves."""
    from ballonet.offload.policy.tuning import DEFAULT

    with looked_at() as looks:
        counted, before, began = calls(peer, model, chosen), looks(), answering()
        fastest = ms(peer, model, chosen)
        while looks() < before + LOOKS[chosen.kind]:
            fastest = min(fastest, ms(peer, model, chosen))
        per_look = (answering() - began) / (looks() - before)
    return {"calls": counted, "ms": fastest, "share": per_look / DEFAULT.watching.period}


@contextmanager
def looked_at() -> Iterator[Callable[[], int]]:
    """Within it `top` looks at this process. Hands out how often it has."""
    command = [sys.executable, "-m", "ballonet", "top", str(os.getpid()), "--json", "--every", f"{EVERY}s"]
    with tempfile.TemporaryFile() as said, subprocess.Popen(command, stdout=said) as top:

        def looks() -> int:
            if top.poll() is not None:
                raise RuntimeError(f"top ended with status {top.returncode}")
            said.seek(0)
            return said.read().count(b"\n")

        try:
            while not looks():
                time.sleep(EVERY)
            yield looks
        finally:
            top.kill()


def answering() -> float:
    """Seconds of CPU time of the thread that answers who watches."""
    (thread,) = [each for each in threading.enumerate() if each.name == "ballonet-control"]
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def generated(peer: str, model: PreTrainedModel, chosen: Options, note: Any) -> list[float]:
    """When each token of a generate() was there; `note` is called after each."""
    from generating import Clock, timed
    from llama import filled

    device = chosen.device
    cache = filled("ballonet" if is_managed(peer) else peer, model.config, 1, HELD, device)
    return timed(model, cache, (1, HELD), device, TOKENS[chosen.kind], Clock(device, note)).times


if __name__ == "__main__":
    main()
