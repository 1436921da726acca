"""One model on several replicas, as processes: whatever becomes of them, clients get the answers of stock."""

from __future__ import annotations

import functools
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from openai import OpenAI
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from ballonet.hooks.replicas.placement import Placement
from ballonet.hooks.replicas.serving import Fleet as ReplicaFleet
from ballonet.hooks.replicas.serving import ReplicaServer
from ballonet.hooks.replicas.supervisor import State
from ballonet.hooks.server.application import Address
from ballonet.offload.policy.tuning import DEFAULT

from ..models import build
from ..serving.test_server import saved

TOKENS = 32
BURST = 40  # which is about twice what two replicas have KV for
# Every drop that frees memory is made, whatever it is predicted to gain, and a loaded machine makes nobody dead.
EAGER = replace(
    DEFAULT.replicas, gain=-math.inf, full=0.3, dwell=1.0, settle=1.0, again=1.0, silent=300.0, answer=300.0, bulk=900.0
)
# the smallest whose layers can stream
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


class Fleet:
    """A server in a process of its own, of a model of 8 layers on so many replicas; `folder`: of the model."""

    def __init__(self, folder: Path, replicas: int) -> None:
        self.model = made(folder)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._said = (folder / "said").open("w+")
        self.process = self.start(folder, replicas, port)
        self.wait(lambda: self.said().count("has joined") == replicas)

    def start(self, folder: Path, replicas: int, port: int) -> subprocess.Popen[bytes]:
        """Starts it."""
        sizes = ("--budget", "44MiB", "--page-size", "64KiB", "--host-budget", "64MiB", "--block-size", "16")
        command = ["-m", "ballonet", "serve", self.model, "--replicas", str(replicas), "--port", str(port), *sizes]
        environment = {**os.environ, "BALLONET_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([sys.executable, *command, "--batch-tokens", "256"], stderr=self._said, env=environment)

    def said(self) -> str:
        """What it has written so far."""
        return Path(self._said.name).read_text(errors="replace")

    def wait(self, until: Callable[[], object]) -> None:
        """Returns once that is so; how long that takes is not judged."""
        while not until():
            assert self.process.poll() is None, self.said()
            time.sleep(0.05)

    def figure(self, name: str) -> float:
        """The sum of what `/metrics` has by a name."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def burst(self, seed: int) -> list[str]:
        """The answers to many requests at once."""
        return burst(self.url, self.model, seed)

    def processes(self) -> list[int]:
        """The processes of replicas that have joined so far, in that order."""
        return [int(each) for each in re.findall(r"has joined, process (\d+)", self.said())]

    def children(self) -> list[int]:
        """The processes that it has started: of its replicas, or where they come from."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(each) for each in path.read_text().split()]

    def end(self) -> int:
        """SIGTERM, and what it ends with."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


def made(folder: Path) -> str:
    """A model of 8 layers that can stream, with a tokenizer."""
    name = saved(folder, 8)
    build("llama", num_hidden_layers=8, max_position_embeddings=2048, **SHAPE).save_pretrained(folder)
    return name


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait(until: Callable[[], object]) -> None:
    """Returns once that is so; how long that takes is not judged."""
    while not until():
        time.sleep(0.05)


def burst(url: str, model: str, seed: int, count: int = BURST) -> list[str]:
    """The answers to many requests at once."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=1800)

    def ask(prompt: str) -> str:
        found = client.completions.create(model=model, prompt=prompt, max_tokens=TOKENS, temperature=0)
        return found.choices[0].text

    with ThreadPoolExecutor(BURST) as pool:
        return list(pool.map(ask, prompts(seed, count)))


def prompts(seed: int, count: int = BURST) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(f"w{draw.randrange(2, 190)}" for _ in range(50 + n)) for n in range(count)]


@functools.lru_cache
def expected(folder: str, seed: int, count: int = BURST) -> list[str]:
    """The answers of transformers alone, to a model of `made`."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = []
    for prompt in prompts(seed, count):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        tokens = model.generate(ids, do_sample=False, max_new_tokens=TOKENS)
        found.append(str(tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all servers have their model: the same, so that what is right is worked out once."""
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[Fleet]:
    server = Fleet(folder, 2)
    replicas = server.processes()
    try:
        yield server
        assert server.end() == 0, server.said()
        assert [each for each in server.processes() if Path(f"/proc/{each}").exists()] == [], "no orphan"
    finally:
        server.process.kill()
        for each in replicas:
            if Path(f"/proc/{each}").exists():
                os.kill(each, signal.SIGKILL)


def test_a_burst_is_answered_through_drop_and_restore(folder: Path, tmp_path: Path) -> None:
    model, said = made(folder), list[str]()
    right = expected(model, 1)
    arguments = ["--budget", "44MiB", "--page-size", "64KiB", "--host-budget", "64MiB", "--block-size", "16"]
    fleet = ReplicaFleet(2, [*arguments, "--batch-tokens", "256"], Placement("127.0.0.1", 0, hosts=True))
    timeline = tmp_path / "timeline.json"
    server = ReplicaServer(model, fleet, Address(port=free_port()), said.append, EAGER, timeline=str(timeline))
    listening = uvicorn.Server(uvicorn.Config(server.app, port=server.address.port, log_level="warning"))
    thread = threading.Thread(target=listening.run)
    thread.start()
    try:
        state = server.supervisor.state
        wait(lambda: len(state().spans) == 2 and listening.started)
        url = f"http://127.0.0.1:{server.address.port}"
        while not state().drops:
            assert burst(url, model, 1) == right
            assert state().fenced == 0, said
        assert state().moved[0] > 0, "KV of requests that ran went over"
        wait(lambda: state().restores)
        wait(lambda: sorted(state().spans.values()) == [(0, 8), (0, 8)])
        assert state().moved[1] > 0, "layers came from the other one"
        assert burst(url, model, 1, 8) == right[:8]
        check_figures(url, state())
        assert any("layers come home" in line for line in said)
        assert any("of 8 layers again" in line for line in said)
    finally:
        listening.should_exit = True
        thread.join()
        server.close()
    check_timeline(json.loads(timeline.read_text()))


def check_figures(url: str, state: State) -> None:
    """What `/metrics` says of the pipeline, of predictions, and of layers that are back."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    assert 0 < state.busy < state.open
    assert 0 < state.bubble < 1
    assert f"ballonet_pipeline_bubble {state.bubble}" in text
    assert sorted(state.errors) == [0, 1]
    assert 'ballonet_replica_cost_error{replica="1"}' in text
    assert 'ballonet_replica_resident_layers{replica="1"}' in text


def check_timeline(found: dict[str, Any]) -> None:
    """What each process did, on one clock."""
    lanes = {(process, lane) for process, lane, *_ in found["bars"]}
    expected = {"epoch", "microbatches", "next epoch", "exchange", "layers", "restore"}
    for process in ("replica 0", "replica 1"):
        assert expected <= {lane for who, lane in lanes if who == process}
        mine = sorted(bar[3:] for bar in found["bars"] if bar[:2] == [process, "microbatches"])
        assert all(end <= begin for (_, end), (begin, _) in pairwise(mine)), "a stage computes one at a time"
    assert ("server", "requests") in lanes
    assert all(-1 < begin <= end <= found["seconds"] for *_, begin, end in found["bars"])
    assert {"drop", "restore"} <= {name.partition(": ")[2] for name, _ in found["marks"]}


def test_who_does_not_know_the_secret_is_refused(fleet: Fleet) -> None:
    fleet.wait(lambda: "others join at" in fleet.said())
    where = fleet.said().partition("others join at ")[2].split()[0]
    command = [sys.executable, "-m", "ballonet", "serve", fleet.model, "--join", where, "--budget", "44MiB"]
    environment = {**os.environ, "BALLONET_DEVICE": "cpu", "BALLONET_REPLICA_SECRET": "another"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 2, found.stderr
    assert "another secret" in found.stderr
    assert fleet.figure("ballonet_replicas ") == 2


def test_a_replica_that_is_killed_takes_no_answer_with_it(fleet: Fleet) -> None:
    right = expected(fleet.model, 1)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(burst, fleet.url, fleet.model, 1, 24)
        fleet.wait(lambda: fleet.figure("ballonet_replica_requests") > 0)
        os.kill(fleet.processes()[0], signal.SIGKILL)
        assert asked.result() == right[:24]
    fleet.wait(lambda: fleet.figure("ballonet_replicas_replaced_total") == 1 and len(fleet.processes()) == 3)
    assert fleet.figure("ballonet_replicas ") == 2
    assert "SIGKILL; another one is started" in fleet.said()
