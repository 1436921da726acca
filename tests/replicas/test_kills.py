"""Replicas that are killed at random: every request ends once, with the answer of stock or with an error that says why.

`make kills SEEDS=50` runs more seeds than the suite, and every row of test_faults_live.py.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from ballonet.hooks.replicas.faults import Fault

from .fleet import Answer, Stock, drawn, made, serving

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


def test_whoever_is_killed_takes_no_answer_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = made(tmp_path)
    stock, total = Stock(model), Counter[str]()
    pool = drawn(REQUESTS)
    with serving(model, tmp_path, REPLICAS) as fleet:
        for seed in range(SEEDS):
            fleet.whole(REPLICAS)
            draw = random.Random(seed)
            begun = time.monotonic()
            victim = Fault(draw.choice(fleet.members), "microbatch", draw.randint(1, MICROBATCHES), "kill")
            asked = draw.sample(pool, REQUESTS)
            right = stock.answers(asked)
            before = fleet.server.supervisor.state()
            fleet.fault(victim)
            found = judged(fleet.burst(asked), right)
            after = fleet.server.supervisor.state()
            found["killed"] = len(fleet.happened)
            found["recomputed"] = after.recomputed - before.recomputed
            found["drops"], found["restores"] = after.drops - before.drops, after.restores - before.restores
            took = time.monotonic() - begun
            with capsys.disabled():
                print(f"seed {seed}: {victim.member} at {victim.count}: {dict(found)} in {took:.1f} s", flush=True)
            total += found
        fleet.whole(REPLICAS)
        assert fleet.server.supervisor.state().replaced == total["killed"], fleet.said
    with capsys.disabled():
        print(f"{SEEDS} seeds: {dict(total)}")
    assert total["killed"] > 0
    assert total["finished"] + total["typed"] == SEEDS * REQUESTS, total
