"""One model on several replicas, served by one program: whatever becomes of them, clients get the answers of stock."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ballonet.hooks.virtual_replicas.costs import read_costs

from .fleet import Stock, drawn
from .program import Program, wait_gone


class Measuring(Program):
    """A program that measures what batches take, and writes it down. Small ones: those are measured soon."""

    def options(self, folder: Path) -> list[str]:
        return ["--batch-tokens", "48", "--costs", str(folder / "costs.json")]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    found = Measuring(tmp_path_factory.mktemp("model"), 2)
    try:
        yield found
        assert found.end() == 0, found.said()
        wait_gone(found.processes())
    finally:
        if found.process.poll() is None:
            found.kill()


def test_what_was_measured_is_written(program: Program) -> None:
    cost, fitted = read_costs(Path(program.model) / "costs.json")
    assert fitted is None
    assert cost.batch([(0, 100)]) > cost.gamma > 0
    assert program.said().count("what a batch takes is predicted within") == 2


def test_a_replica_that_is_killed_takes_no_answer_with_it(program: Program) -> None:
    asked = drawn(24)
    right = Stock(program.model).answers(asked)
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(program.burst, asked)
        program.wait(lambda: program.figure("ballonet_replica_requests") > 0)
        os.kill(program.processes()[0], signal.SIGKILL)
        assert answers.result() == right
    program.wait(
        lambda: program.figure("ballonet_replicas_replaced_total") and program.figure("ballonet_replicas ") == 2
    )
    assert "SIGKILL; another one is started" in program.said()
