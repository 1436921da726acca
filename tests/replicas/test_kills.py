"""Replicas that are killed at random: every request ends once, with the answer of stock or with an error that says why.

At every other seed one of a group is, as soon as there is one.

`make kills SEEDS=50` runs more seeds than the suite, and every row of test_faults_live.py.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import pytest

from ballonet.hooks.replicas.recording import read_decisions
from ballonet.offload.policy.replicas.protocol import Alone, Committed, Decision, Load, Lost
from ballonet.testing.replica_faults import Fault

from .fleet import LAYERS, Answer, Fleet, Stock, drawn, made, serving

SEEDS = int(os.environ.get("BALLONET_KILLS", "2"))
REPLICAS = 3
REQUESTS = 18
MICROBATCHES = 20  # a replica of a burst has at least so many
ERRORS = ("no replica is left", "no replicas can compute it")


def judged(answers: Sequence[Answer], right: Sequence[str]) -> Counter[str]:
    """How many requests ended how."""
    found: Counter[str] = Counter()
    for answer, text in zip(answers, right, strict=True):
        if answer.error is not None:
            found["typed" if answer.error.startswith(ERRORS) and text.startswith(answer.text) else "untyped"] += 1
        elif answer.ends != 1 or len(answer.text) > len(text):
            found["twice"] += 1
        else:
            found["finished" if answer.text == text else "wrong"] += 1
    return found


def noticed(log: Path, deaths: Sequence[tuple[float, int]]) -> tuple[list[float], list[float]]:
    """For each death, (when, of which member): seconds until the supervisor hears of it; and of those in groups until
    all others of the group have said that they are in an epoch without it. Both in ascending order."""
    heard, followed = list[float](), list[float]()
    entries = [each for each in read_decisions(log) if isinstance(each, Decision)]
    for at, member in deaths:
        told = next(each.event.at for each in entries if each.event == Lost(each.event.at, member))
        heard.append(told - at)
        since = [each for each in entries if each.event.at >= at]
        # A link may tell before the process does.
        alone = [a for each in since if each.event.at <= told for a in each.actions if isinstance(a, Alone)]
        said = [each.event for each in since if isinstance(each.event, Committed | Load)]
        begun = [next((e.at for e in said if (e.member, e.epoch) == (a.member, a.epoch)), None) for a in alone]
        if begun and None not in begun:  # else another change came before somebody had said so
            followed.append(max(each for each in begun if each is not None) - at)
    return sorted(heard), sorted(followed)


def grouped(fleet: Fleet) -> list[int]:
    """The replicas that hold some of the layers only."""
    spans = fleet.supervisor.state().spans
    return sorted(member for member, span in spans.items() if span != (0, LAYERS))


def test_whoever_is_killed_takes_no_answer_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, log = made(tmp_path), tmp_path / "log"
    stock, total = Stock(model), Counter[str]()
    pool, deaths = drawn(REQUESTS), list[tuple[float, int]]()
    with serving(model, tmp_path, REPLICAS, log=log) as fleet:
        for seed in range(SEEDS):
            fleet.whole(REPLICAS)
            draw = random.Random(seed)
            begun = time.monotonic()
            asked = draw.sample(pool, REQUESTS)
            right = stock.answers(asked)
            before = fleet.supervisor.state()
            with ThreadPoolExecutor(1) as beside:
                answers = beside.submit(fleet.burst, asked)
                if in_group := seed % 2 == 1:
                    fleet.wait(lambda burst=answers: grouped(fleet) or burst.done())
                chosen = draw.choice((in_group and grouped(fleet)) or fleet.members)
                victim = Fault(chosen, "microbatch", draw.randint(1, MICROBATCHES), "kill")
                fleet.fault(victim)
                found = judged(answers.result(), right)
            after = fleet.supervisor.state()
            found["killed"] = len(fleet.happened)
            if fleet.happened:
                deaths.append((fleet.happened_at(), victim.member))
            found["recomputed"] = after.recomputed - before.recomputed
            found["drops"], found["restores"] = after.drops - before.drops, after.restores - before.restores
            took = time.monotonic() - begun
            with capsys.disabled():
                print(f"seed {seed}: {victim.member} at {victim.count}: {dict(found)} in {took:.1f} s", flush=True)
            total += found
        fleet.whole(REPLICAS)
        assert fleet.supervisor.state().replaced == total["killed"], fleet.said
    heard, followed = noticed(log, deaths)
    with capsys.disabled():
        print(f"{SEEDS} seeds: {dict(total)}")
        for what, seconds in (("heard of", heard), ("all others of a group in another epoch", followed)):
            middle = f"{median(seconds):.3f} s in the median, {seconds[-1]:.3f} s at most" if seconds else "never"
            print(f"deaths {what} after {middle} ({len(seconds)})", flush=True)
    assert len(heard) == total["killed"]
    assert total["killed"] > 0
    assert total["finished"] + total["typed"] == SEEDS * REQUESTS, total
