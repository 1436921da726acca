"""`ballonet serve --replicas` as a program: clients get the answers of stock, and nothing of it is left at its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from ballonet.hooks.virtual_replicas.costs import read_costs
from ballonet.testing import replica_faults

from .fleet import (
    ENVIRONMENT,
    NEEDS_ALL,
    Asked,
    Program,
    Running,
    Stock,
    drawn,
    free_port,
    made,
    post,
    text_of,
    wait,
    wait_gone,
)


class Measuring(Program):
    """A program that measures what batches take, and writes it down. Small ones: those are measured soon."""

    def options(self, folder: Path) -> list[str]:
        return ["--batch-tokens", "48", "--costs", str(folder / "costs.json")]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    measuring = Measuring(tmp_path_factory.mktemp("model"), 2)
    try:
        yield measuring
        assert measuring.end() == 0, measuring.said()
        wait_gone(measuring.processes())
    finally:
        if measuring.process.poll() is None:
            measuring.kill()


def test_measured_costs_are_written_to_the_file(program: Program) -> None:
    cost, fitted = read_costs(Path(program.model) / "costs.json")
    assert fitted is None
    assert cost.batch([(0, 100)]) > 0
    assert program.said().count("what a batch takes is predicted within") == 2


def test_a_client_gets_scores_of_its_prompt_or_why_its_form_cannot_be_held(program: Program) -> None:
    asked: Any = {"model": program.model, "prompt": text_of(drawn(1)[0]), "max_tokens": 1, "temperature": 0}
    client = OpenAI(base_url=f"{program.url}/v1", api_key="none", max_retries=0, timeout=1800)
    stock = Stock(program.model)
    got = client.completions.create(**asked, echo=True, logprobs=0).choices[0].logprobs
    assert got is not None
    assert (got.token_logprobs or [])[1:-1] == pytest.approx(stock.scores(drawn(1)[0]), abs=1e-3)
    with pytest.raises(BadRequestError, match=r"no token that ends an answer|llguidance"):
        client.completions.create(**asked, extra_body={"structured_outputs": {"choice": ["w3", "w4"]}})


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


# Its end


SIZES = ("--budget", "37MiB", "--page-size", "64KiB", "--host-budget", "64MiB", "--block-size", "16")


class OwnSession(Running):
    """A server in a session of its own. `said`: the file of its lines."""

    def __init__(self, model: str, said: Path, *more: str) -> None:
        port = free_port()
        self.model = model
        self.url = f"http://127.0.0.1:{port}"
        self._said = said.open("w")
        command = [sys.executable, "-m", "ballonet", "serve", model, "--replicas", "2", "--port", str(port), *SIZES]
        self.process = subprocess.Popen(
            [*command, "--batch-tokens", "32", "--grace", "5s", "--ray", "off", *more],
            stderr=self._said,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )

    def serves(self) -> None:
        """Waits until both replicas do."""
        self.wait(lambda: self.said().count("has joined") == 2 and "ready: " in self.said())

    def left(self) -> list[int]:
        """Processes of its session, and those of replicas, which have sessions of their own."""
        processes = [int(process) for process in re.findall(r"has joined, process (\d+)", self.said())]
        session = str(self.process.pid)
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                text = stat.read_text()
                environ = (stat.parent / "environ").read_bytes()
            except OSError:
                continue
            state, _, _, its = text.rpartition(")")[2].split()[:4]
            if state != "Z" and (its == session or f"{self.model}\0".encode() in environ):
                processes.append(int(stat.parent.name))
        return [process for process in processes if Path(f"/proc/{process}").exists() and process != self.process.pid]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return made(tmp_path_factory.mktemp("model"))


@contextmanager
def running(model: str, tmp_path: Path, *more: str) -> Iterator[OwnSession]:
    program = OwnSession(model, tmp_path / "said", *more)
    try:
        yield program
    finally:
        program.process.kill()
        program.process.wait()
        wait(lambda: not program.left())  # nobody has to end them


def begin(asked: Asked, program: OwnSession) -> str:
    """Returns a client's answer, or how its connection ended."""
    try:
        with post(program.url, program.model, asked) as answer:
            return str(answer.read().decode())
    except (OSError, HTTPException) as error:
        return f"error: {error}"


SCENES = [
    ("as they load", signal.SIGTERM),
    ("as they load", signal.SIGINT),
    ("idle", signal.SIGTERM),
    ("in requests", signal.SIGTERM),
    ("in requests", signal.SIGINT),
    ("in requests", signal.SIGKILL),
    ("as a group is prepared", signal.SIGTERM),
    ("in a pipeline", signal.SIGTERM),
    ("as layers come home", signal.SIGTERM),
    ("as they load", signal.SIGKILL),
]


@NEEDS_ALL
@pytest.mark.parametrize(
    ("phase", "number"),
    SCENES,
    ids=lambda value: value if isinstance(value, str) else signal.Signals(value).name,
)
def test_server_that_ends_leaves_no_process(
    phase: str, number: signal.Signals, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it ends, and whenever: no process, and so no page; whoever waits is told."""
    file = tmp_path / "faults"
    if phase == "as a group is prepared":  # which lasts: a member stands still
        monkeypatch.setenv("BALLONET_REPLICA_FAULTS", str(file))
        replica_faults.write(file, [replica_faults.Fault(0, "hear Prepare", 1, "stop")])
    with running(model, tmp_path) as program, ThreadPoolExecutor(32) as pool:
        answers = []
        if phase == "as they load":
            program.wait(lambda: "loading" in program.said())
        else:
            program.serves()
        if phase not in ("as they load", "idle"):
            answers = [pool.submit(begin, asked, program) for asked in drawn(32, new=200)]
            program.wait(lambda: program.figure("ballonet_replica_requests") > 16)
        if phase == "as a group is prepared":
            program.wait(replica_faults.done(file).exists)
        if phase == "in a pipeline":  # KV of requests is still exchanged
            program.wait(lambda: "holds layers 0 to 3" in program.said())
        if phase == "as layers come home":
            program.wait(lambda: "layers come home" in program.said())
        program.process.send_signal(number)
        code = program.process.wait()
        for answer in answers:
            assert answer.result()
        wait(lambda: not program.left())
        if phase != "as they load" and number is not signal.SIGKILL:
            assert code == 0, program.said()
            assert "Traceback" not in program.said()
        if phase == "as they load" and number is not signal.SIGINT:  # which ends them
            assert "its supervisor has gone" in program.said()
