"""Replicas that are killed, paused or told wrong bytes, as processes: clients get the answers of stock, or an error
that says why, and the fleet is whole afterwards.

Of the seeds of kills every other one kills a member of a group, as soon as there is one. `make kills SEEDS=50` runs
more seeds than the suite, and every row of the matrix.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import pytest

from ballonet.hooks.replicas.recording import read_decisions
from ballonet.offload.policy.replicas.protocol import Alone, Committed, Decision, Load, Lost
from ballonet.testing.replica_faults import Fault

from .fleet import ALL, BURST, EAGER, LAYERS, NEEDS_ALL, Answer, Fleet, Stock, answered, drawn, made, serving

REPLICAS = 2


@dataclass(frozen=True)
class Row:
    """`which`: of the replicas, in the order of their numbers; `lost`: replicas that end; `discarded`, `recomputed`: an
    epoch is given up, requests are computed anew by the supervisor."""

    name: str
    which: int
    point: str
    count: int
    how: str
    lost: int = 1
    discarded: bool = False
    recomputed: bool = False
    quick: bool = False  # also in the suite


ROWS = [
    Row("killed in decode", 0, "decode", 5, "kill", recomputed=True),
    Row("killed in prefill", 1, "prefill", 2, "kill", recomputed=True),
    Row("killed in prepare", 1, "hear Prepare", 1, "kill", discarded=True),
    Row("killed as it is ready", 0, "say Prepared", 1, "kill", discarded=True),
    Row("killed at commit", 1, "hear Commit", 1, "kill", recomputed=True),
    Row("killed as it sends KV", 0, "send kv", 2, "kill", recomputed=True, quick=True),
    Row("killed as it gets KV", 1, "take kv", 3, "kill", recomputed=True),
    Row("killed as it pulls a layer", 1, "take weights", 1, "kill"),
    Row("killed as a layer is pulled from it", 0, "send weights", 1, "kill"),
    Row("link cut in the pipeline", 0, "send passing", 3, "cut", lost=0, recomputed=True, quick=True),
    Row("link cut in the exchange", 1, "send kv", 2, "cut", lost=0, recomputed=True),
    Row("link cut in the pull", 0, "send weights", 2, "cut", lost=0),
    Row("KV damaged", 0, "send kv", 1, "damage", lost=0, recomputed=True),
    Row("layer damaged", 0, "send weights", 2, "damage", lost=0),
]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Stock]:
    model = made(tmp_path_factory.mktemp("model"))
    return model, Stock(model)


@pytest.fixture(scope="module")
def fleet(stock: tuple[str, Stock], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with serving(stock[0], tmp_path_factory.mktemp("fleet"), REPLICAS) as served:
        yield served


@pytest.mark.parametrize("row", [row for row in ROWS if ALL or row.quick], ids=lambda row: row.name)
def test_row(fleet: Fleet, stock: tuple[str, Stock], row: Row) -> None:
    fleet.whole(REPLICAS)
    before = fleet.supervisor.state()
    wanted = Fault(fleet.members[row.which], row.point, row.count, row.how)
    fleet.fault(wanted)
    while not fleet.happened:
        answered(fleet, stock[1])
        fleet.whole(REPLICAS)  # the restore may be where it happens
    assert fleet.happened == [wanted]
    fleet.wait(lambda: fleet.supervisor.state().replaced >= before.replaced + row.lost)
    fleet.whole(REPLICAS)
    after = fleet.supervisor.state()
    assert (wanted.member in fleet.members) == (not row.lost), fleet.said
    assert after.replaced - before.replaced == row.lost, fleet.said
    if row.discarded:
        assert after.discarded > before.discarded, fleet.said
    if row.recomputed:
        assert after.recomputed > before.recomputed, fleet.said
    fleet.fault()
    answered(fleet, stock[1])


@NEEDS_ALL
def test_replica_that_stands_still_is_ended_and_replaced(stock: tuple[str, Stock], tmp_path: Path) -> None:
    with serving(stock[0], tmp_path, REPLICAS, tuning=replace(EAGER, silent=8.0)) as fleet:
        stopped = Fault(fleet.members[1], "decode", 5, "stop")
        fleet.fault(stopped)
        answered(fleet, stock[1])
        assert fleet.happened == [stopped]
        fleet.wait(lambda: fleet.supervisor.state().fenced > 0)
        fleet.wait(lambda: len(fleet.members) == REPLICAS)
        assert stopped.member not in fleet.members


@NEEDS_ALL
def test_a_file_of_weights_that_changes_is_no_source(tmp_path: Path) -> None:
    """Layers then come from the other replica, or are not dropped."""
    model = made(tmp_path)
    stock = Stock(model)
    stock.answers(drawn(BURST))
    with serving(model, tmp_path, REPLICAS) as fleet:
        answered(fleet, stock)
        fleet.whole(REPLICAS)
        (file,) = Path(model).glob("*.safetensors")
        os.utime(file, (time.time() + 5, time.time() + 5))
        for _ in range(2):
            answered(fleet, stock)
            fleet.wait(lambda: not fleet.supervisor.state().requests)
        assert fleet.supervisor.state().replaced == 0, fleet.said


@NEEDS_ALL
def test_client_that_leaves_frees_the_pages_of_its_request(fleet: Fleet, stock: tuple[str, Stock]) -> None:
    fleet.whole(REPLICAS)
    for asked in drawn(4, new=400):
        with fleet.opened(asked) as answer:
            assert answer.readline()
    fleet.whole(REPLICAS)  # no request is left
    answered(fleet, stock[1])
    fleet.whole(REPLICAS)
    fleet.at_rest()


# Kills at random


SEEDS = int(os.environ.get("BALLONET_KILLS", "2"))
RANKS = 3
REQUESTS = 18
MICROBATCHES = 20  # a replica of a burst has at least so many
ERRORS = ("no replica is left", "no replicas can compute it")


def judged(answers: Sequence[Answer], right: Sequence[str]) -> Counter[str]:
    """How many requests ended how."""
    counts: Counter[str] = Counter()
    for answer, text in zip(answers, right, strict=True):
        if answer.error is not None:
            counts["typed" if answer.error.startswith(ERRORS) and text.startswith(answer.text) else "untyped"] += 1
        elif answer.ends != 1 or len(answer.text) > len(text):
            counts["twice"] += 1
        else:
            counts["finished" if answer.text == text else "wrong"] += 1
    return counts


def noticed(log: Path, deaths: Sequence[tuple[float, int]]) -> tuple[list[float], list[float]]:
    """For each death, (when, of which member): seconds until the supervisor hears of it; and of those in groups until
    all others of the group have said that they are in an epoch without it. Both in ascending order."""
    heard, followed = list[float](), list[float]()
    entries = [entry for entry in read_decisions(log) if isinstance(entry, Decision)]
    for at, member in deaths:
        told = next(entry.event.at for entry in entries if entry.event == Lost(entry.event.at, member))
        heard.append(told - at)
        since = [entry for entry in entries if entry.event.at >= at]
        # A link may tell before the process does.
        alone = [a for entry in since if entry.event.at <= told for a in entry.actions if isinstance(a, Alone)]
        said = [entry.event for entry in since if isinstance(entry.event, Committed | Load)]
        begun = [next((e.at for e in said if (e.member, e.epoch) == (a.member, a.epoch)), None) for a in alone]
        if begun and None not in begun:  # else another change came before somebody had said so
            followed.append(max(entry for entry in begun if entry is not None) - at)
    return sorted(heard), sorted(followed)


def grouped(fleet: Fleet) -> list[int]:
    """The replicas that hold some of the layers only."""
    spans = fleet.supervisor.state().spans
    return sorted(member for member, span in spans.items() if span != (0, LAYERS))


def test_killed_replica_takes_no_answer_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, log = made(tmp_path), tmp_path / "log"
    stock, total = Stock(model), Counter[str]()
    pool, deaths = drawn(REQUESTS), list[tuple[float, int]]()
    with serving(model, tmp_path, RANKS, log=log) as fleet:
        for seed in range(SEEDS):
            fleet.whole(RANKS)
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
                counts = judged(answers.result(), right)
            after = fleet.supervisor.state()
            counts["killed"] = len(fleet.happened)
            if fleet.happened:
                deaths.append((fleet.happened_at(), victim.member))
            counts["recomputed"] = after.recomputed - before.recomputed
            counts["drops"], counts["restores"] = after.drops - before.drops, after.restores - before.restores
            took = time.monotonic() - begun
            with capsys.disabled():
                print(f"seed {seed}: {victim.member} at {victim.count}: {dict(counts)} in {took:.1f} s", flush=True)
            total += counts
        fleet.whole(RANKS)
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


# Cycles of drops and restores


CYCLES = 20
WEIGHTS = 487  # pages of the model
REQUESTS_EACH = 12  # of each replica: two levels of drops


class Widest:
    """Looks for the group of most replicas, in a thread of its own."""

    def __init__(self, fleet: Fleet) -> None:
        self.widest = 1
        self._fleet = fleet
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Widest:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.02):
            self.widest = max(self.widest, *map(len, self._fleet.supervisor.state().groups))


@NEEDS_ALL
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_tokens_stay_and_memory_comes_back(ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = made(tmp_path)
    asked = drawn(REQUESTS_EACH * ranks)
    right = Stock(model).answers(asked)
    with serving(model, tmp_path, ranks, BALLONET_CHAOS="7") as fleet, Widest(fleet) as widest:
        cycles = 0
        while cycles < CYCLES:
            drops = fleet.supervisor.state().restores
            answers = fleet.burst(asked)
            assert [answer.text for answer in answers] == right, fleet.said
            assert [answer.ends for answer in answers] == [1] * len(asked)
            fleet.whole(ranks)
            cycles += fleet.supervisor.state().restores > drops
            rest = fleet.at_rest()
            # twins of layers are kept ready, and a page that stands for those in files; nothing else is on the host
            assert max(view["host_pages"] - view["host_free"] for view in rest) <= WEIGHTS + 1
            with capsys.disabled():
                print(f"cycle {cycles}: groups of up to {widest.widest}", flush=True)
        state = fleet.supervisor.state()
        assert (state.replaced, state.fenced) == (0, 0), fleet.said
        assert widest.widest == ranks
