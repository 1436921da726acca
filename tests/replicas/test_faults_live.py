"""Each fault of REPLICAS' matrix, on processes: clients get the answers of stock, and the fleet is whole afterwards."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ballonet.testing.replica_faults import Fault

from .fleet import ALL, BURST, EAGER, NEEDS_ALL, Fleet, Stock, answered, drawn, made, serving

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
    with serving(stock[0], tmp_path_factory.mktemp("fleet"), REPLICAS) as found:
        yield found


@pytest.mark.parametrize("row", [each for each in ROWS if ALL or each.quick], ids=lambda row: row.name)
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
def test_who_stands_still_is_ended_and_replaced(stock: tuple[str, Stock], tmp_path: Path) -> None:
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
def test_who_leaves_frees_what_it_had(fleet: Fleet, stock: tuple[str, Stock]) -> None:
    fleet.whole(REPLICAS)
    for asked in drawn(4, new=400):
        with fleet.opened(asked) as answer:
            assert answer.readline()
    fleet.whole(REPLICAS)  # no request is left
    answered(fleet, stock[1])
    fleet.whole(REPLICAS)
    fleet.at_rest()
