"""What a token costs the host in Python: calls of one decode step of `generate()`, stock and managed, and its time.

Each peer is a process with its own copy of the same model. Calls are those of Python functions, whoever's they are, and
those of ballonet alone; they do not depend on load. The times are those of the fastest of other steps, in which nothing
is counted. Layers are small: what is over stock's is nearly all of it the host's.

On a GPU, and on the simulated one, "pieces" is the managed model as it is, "resident" with `pieces=None`; padded, there
are two sequences of different length. There calls of C functions are counted as well.

On a CPU one row is of the resident model while `ballonet top` looks at its process fifty times per second, and says
what looks as often as `top` makes them by itself take: CPU time of the thread that answers, which does not depend on
load either.
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
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from common import Figure, Options, describe_few, report
from peer import Functions, begin, in_turns, peers
from streamed import interval_of, page_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LAYERS = {"cuda": 32, "cpu": 16, "tiny": 4}
PEERS = {
    "cuda": ("stock", "resident", "pieces", "stock, padded", "resident, padded", "pieces, padded"),
    "cpu": ("stock", "resident", "interval 4", "interval 1"),
}
PADDED = ", padded"
WATCHED = "resident"  # the peer that `top` looks at
EVERY = 0.02  # seconds between looks
LOOKS = {"cuda": 50, "cpu": 50, "tiny": 3}
SHARE = 0.5  # % of the process's time that `top` may take
LIMITS = {"interval 4": 1.25, "interval 1": 2.0, "pieces": 0.2, "pieces, padded": 0.3}  # times stock's calls
HELD = 256  # tokens
TOKENS = {"cuda": 24, "cpu": 48, "tiny": 8}  # of each generate()
WARM = 4


def main() -> None:
    chosen = begin("calls", __doc__, functions)
    rows = on_a_device(chosen) if chosen.cuda else on_the_host(chosen)
    title = f"Python per decoded token, {describe_few(small(chosen), LAYERS[chosen.kind])}"
    report(chosen, "calls", title, rows)


def on_a_device(chosen: Options) -> list[dict[str, Any]]:
    """Calls alone, as a simulated device has no times."""
    with peers(__file__, chosen, PEERS["cuda"]) as found:
        counted = {name: found[name].ask("calls") for name in found}
    rows = []
    for name, (calls, ours, c_calls) in counted.items():
        stock, _, stocks_c = counted["stock" + PADDED * name.endswith(PADDED)]
        both = of_stock(name, calls + c_calls, stock + stocks_c)
        row = {"peer": name, "calls": calls, "ballonet's": ours, "times stock's": of_stock(name, calls, stock)}
        rows.append({**row, "of C functions": c_calls, "both, times stock's": both})
    return rows


def on_the_host(chosen: Options) -> list[dict[str, Any]]:
    """Calls and times on the stand-in, and what `top` takes."""
    names = PEERS["cpu"]
    with peers(__file__, chosen, names) as found:
        counted = {name: found[name].ask("calls") for name in names}
        taken = in_turns(found, chosen.repetitions, "ms")
        seen = found[WATCHED].ask("watched")
    name = f"{WATCHED}, top looks"
    counted[name], taken[name] = seen["calls"], Figure.of([seen["ms"]])
    share = Figure.of([seen["share"] * 100]).at_most(SHARE)
    rows = []
    for name in counted:
        calls, ours, _ = counted[name]
        times = of_stock(name, calls, counted["stock"][0])
        over = (taken[name].median - taken["stock"].median) / LAYERS[chosen.kind] * 1e3
        row = {"peer": name, "calls": calls, "ballonet's": ours, "times stock's": times, "ms": taken[name]}
        more = {"us per layer over stock": Figure.of([over]), "% for top": share if name not in names else ""}
        rows.append({**row, **more})
    return rows


def of_stock(name: str, calls: int, stock: int) -> Figure:
    """How many times stock's calls these are, with the peer's limit."""
    times = Figure.of([calls / stock])
    return times.at_most(LIMITS[name]) if name in LIMITS else times


def small(chosen: Options) -> Options:
    """The same with layers that are small on every device: their number decides, and not their size."""
    return replace(chosen, tiny=True)


def functions(name: str, chosen: Options) -> Functions:
    import torch
    from llama import build, few

    import ballonet

    torch.set_num_threads(1)
    managed = not name.startswith("stock")
    if managed:
        ballonet.install("4GiB", page_size=page_size(chosen))
    model = build(few(small(chosen), LAYERS[chosen.kind]), chosen.device)
    if managed:
        pieces: Any = "auto" if name.startswith("pieces") else None
        ballonet.manage(model, interval=interval_of(name), pieces=pieces)
    return {
        "calls": lambda: calls(name, model, chosen),
        "ms": lambda: ms(name, model, chosen),
        "watched": lambda: watched(name, model, chosen),
    }


def calls(peer: str, model: PreTrainedModel, chosen: Options) -> tuple[int, int, int]:
    """Python's calls of a step, all and ballonet's, and those of C functions: the median by the first."""
    counts = {"call": 0, "c_call": 0, "ours": 0}

    def count(frame: Any, event: str, _: Any) -> None:
        if event in counts:
            counts[event] += 1
            if event == "call":
                counts["ours"] += frame.f_globals.get("__name__", "").startswith("ballonet.")

    marks: list[tuple[int, int, int]] = []

    def note() -> int:
        marks.append((counts["call"], counts["ours"], counts["c_call"]))
        return 0

    sys.setprofile(count)
    try:
        generated(peer, model, chosen, note)
    finally:
        sys.setprofile(None)
    steps = [tuple(after - before for before, after in zip(*pair, strict=True)) for pair in pairwise(marks[WARM:])]
    all_of_them, ours, c_calls = sorted(steps)[len(steps) // 2]
    return all_of_them, ours, c_calls


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

    device, padded = chosen.device, peer.endswith(PADDED)
    size = 1 + padded, HELD
    cache = filled("stock" if peer.startswith("stock") else "ballonet", model.config, *size, device)
    clock = Clock(device, note)
    return timed(model, cache, size, device, TOKENS[chosen.kind], clock, HELD // 8 * padded).times


if __name__ == "__main__":
    main()
