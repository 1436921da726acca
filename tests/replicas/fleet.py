"""Servers whose replicas are processes: with the supervisor in the test, watched from outside, or `ballonet serve` as a
program, asked by stock clients.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TextIO

import pytest
import torch
import uvicorn
from openai import OpenAI
from transformers import AutoModelForCausalLM

from ballonet.allocator.control import look
from ballonet.cli.serve_replicas import faults_of
from ballonet.hooks.replicas.process import ReplicaOptions
from ballonet.hooks.replicas.replica_server import LocalFleet, ReplicaServer
from ballonet.hooks.replicas.supervisor import Fleet as ReplicaFleet
from ballonet.hooks.server.application import Address
from ballonet.offload.policy.replicas.pipeline import ChunkCost
from ballonet.offload.policy.replicas.tuning import ReplicaTuning
from ballonet.testing import replica_faults
from ballonet.testing.replica_faults import Fault

from .. import programs
from ..gpu.forked import Fork
from ..models import build
from ..outside import memfd_bytes
from ..serving.test_server import saved

ENVIRONMENT: Final = {"BALLONET_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    """Returns a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait(until: Callable[[], object], failed: Callable[[], object] = lambda: None) -> None:
    """Returns once that is so; how long that takes is not judged. `failed`: what is said where it will not come; None
    while it may."""
    while not until():
        why = failed()
        assert why is None, why
        time.sleep(0.01)


LAYERS = 8
BURST = 18  # requests that replicas of `arguments` have no memory for, all at once
PATIENCE = 120.0  # s, that a replica has to say how many pages it has
LOOKS = 200  # at host pages that are nobody's: after so many they are not about to be free, but kept
# `make kills`: all of it, which takes a quarter of an hour; else what a suite can afford
ALL = "BALLONET_KILLS" in os.environ
NEEDS_ALL = pytest.mark.skipif(not ALL, reason="make kills")
# the smallest whose layers can stream
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
COST = ChunkCost(1e-7, 1e-4, 1e-2)  # nothing is measured, so that decisions are the same each time
# Else layers hide behind the compute of a loaded machine, give their pages to KV, and nobody has to drop any.
SLOW = "100MB/s"
# Every drop that frees memory is made, whatever it is predicted to gain; a loaded machine makes nobody dead; whoever is
# lost is replaced at once, and its requests are computed as often as it takes.
EAGER = replace(
    ReplicaTuning(),
    gain=-math.inf,
    full=0.3,
    dwell=0.3,
    looks=4,
    settle=0.3,
    again=0.3,
    silent=300.0,
    answer=300.0,
    bulk=900.0,
    steady=0.0,
    lives=1000,
)


def made(folder: Path) -> str:
    """A model that can stream, with a tokenizer."""
    name = saved(folder, LAYERS)
    build("llama", num_hidden_layers=LAYERS, max_position_embeddings=2048, **SHAPE).save_pretrained(folder)
    return name


def semaphores(process: int) -> list[str]:
    """Semaphores that have a name, or had: glibc maps them by another, deleted one. A kill leaves the name behind."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return [line for line in lines if "/dev/shm/sem." in line]


def beside_weights(seen: Mapping[str, Any]) -> int:
    """Host pages in use that do not hold weights, in a look at a process."""
    weights = sum(model["host_pages"] for model in seen["models"])
    return int(seen["host_pages"] - seen["host_free"] - weights)


@dataclass(frozen=True)
class Asked:
    """A prompt, as numbers of words, and how many words are wanted."""

    prompt: tuple[int, ...]
    new: int


@dataclass
class Answer:
    """What a client got, piece by piece, and an error that ended it. `ends`: how often it was told that it has all."""

    pieces: list[str] = field(default_factory=list)
    error: str | None = None
    ends: int = 0

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def drawn(count: int, least: int = 40, most: int = 160, new: int = 16) -> list[Asked]:
    """Requests, the same each time."""
    draw = random.Random(count)
    return [
        Asked(tuple(draw.randrange(2, 190) for _ in range(draw.randint(least, most))), draw.randint(new // 2, new))
        for _ in range(count)
    ]


class Stock:
    """The answers of transformers alone, each computed once."""

    def __init__(self, folder: str) -> None:
        from transformers import PreTrainedTokenizerFast

        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder)
        self._known: dict[Asked, str] = {}

    def answer(self, asked: Asked) -> str:
        if asked not in self._known:
            self._known[asked] = self._computed(asked)
        return self._known[asked]

    @torch.no_grad()
    def _computed(self, asked: Asked) -> str:
        ids = torch.tensor([self._tokenizer(text_of(asked))["input_ids"]])
        tokens = self._model.generate(ids, do_sample=False, max_new_tokens=asked.new)
        return str(self._tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True))

    @torch.no_grad()
    def scores(self, asked: Asked) -> list[float]:
        """Logprobs of the tokens of a prompt, without the first."""
        ids = torch.tensor([self._tokenizer(text_of(asked))["input_ids"]])
        logprobs = self._model(ids).logits[0, :-1].log_softmax(-1)
        return [float(one) for one in logprobs.gather(-1, ids[0, 1:, None])[:, 0]]

    def answers(self, asked: Sequence[Asked]) -> list[str]:
        return [self.answer(request) for request in asked]


def text_of(asked: Asked) -> str:
    """The prompt."""
    return " ".join(f"w{number}" for number in asked.prompt)


def post(url: str, model: str, asked: Asked) -> Any:
    """One request, streamed: what urlopen returns."""
    body = {"model": model, "prompt": text_of(asked), "max_tokens": asked.new, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    return urllib.request.urlopen(request)


class Fleet:
    """A server of a model on so many replicas. `faults`: see `fault`."""

    def __init__(self, server: ReplicaServer, local: LocalFleet, said: list[str], model: str, file: Path) -> None:
        self.server = server
        self.supervisor = local.supervisor
        self._local = local
        self.said = said
        self.model = model
        self._file = file
        self._kv = 0
        config = uvicorn.Config(server.app, port=server.address.port, log_level="warning")
        self._listening = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._listening.run)
        self._thread.start()
        self.wait(lambda: self._listening.started)

    def wait(self, until: Callable[[], object]) -> None:
        """Returns once that is so; how long that takes is not judged."""
        wait(until, lambda: self.supervisor.failed and self.said)

    @property
    def members(self) -> list[int]:
        """The replicas that serve, by their numbers."""
        return sorted(self.supervisor.state().spans)

    @property
    def processes(self) -> tuple[int, ...]:
        return self._local.processes

    def whole(self, replicas: int) -> None:
        """Waits until so many replicas serve, each with all layers, and nothing of requests is left."""
        state = self.supervisor.state
        self.wait(lambda: [*state().spans.values()] == [(0, LAYERS)] * replicas and not state().requests)

    def at_rest(self) -> list[dict[str, Any]]:
        """Waits until no replica has KV of a request, and returns a look at each. What the kernel holds for them is
        what they count. On the host weights alone are left, and pages that are free: KV that was there may be again.
        `pages` has what retires of the device only: pages of the host that still do so count as used, and are waited
        for, but not for ever."""
        views: list[dict[str, Any]] = []
        held: list[tuple[int, int]] = []
        more = 0  # looks at pages of the host that are nobody's

        def rests() -> bool:
            nonlocal more
            held[:] = self._held()
            views[:] = [look(process, patience=PATIENCE) for process in self.processes]
            if held != self._held():
                return False  # pages are created, or go back to the driver
            kv = {view["pages"]["kv"] for view in views}
            self._kv = self._kv or max(kv)  # pages of a cache without requests: its guard
            if kv != {self._kv} or any(view["pages"]["pending_free"] for view in views):
                return False
            more += 1
            return more > LOOKS or all(beside_weights(view) in (0, 1) for view in views)

        self.wait(rests)
        for view, (device, host) in zip(views, held, strict=True):
            page = view["page_size"]
            assert device == sum(view["pages"].values()) * page <= view["budget"], (device, view)
            assert host == view["host_pages"] * page, (host, view)
            # hooks/weights/ranges.py: `_blank`, one of each model
            assert beside_weights(view) in (0, 1), (beside_weights(view), view["models"])
        return views

    def _held(self) -> list[tuple[int, int]]:
        """Bytes that the kernel holds for each replica, on the device and on the host."""
        return [(memfd_bytes(process, "device"), memfd_bytes(process, "host")) for process in self.processes]

    def fault(self, *wanted: Fault) -> None:
        """From now on."""
        replica_faults.write(self._file, wanted)

    @property
    def happened(self) -> list[Fault]:
        """The faults that have, since."""
        path = replica_faults.done(self._file)
        if not path.exists():
            return []
        rows = [line.split("\t") for line in path.read_text().splitlines()]
        return [Fault(int(member), point, int(count), how) for member, point, count, how in rows]

    def happened_at(self) -> float:
        """When the last of them did, by the supervisor's clock."""
        return time.monotonic() - (time.time() - replica_faults.done(self._file).stat().st_mtime)

    def opened(self, asked: Asked) -> Any:
        """One request over HTTP, streamed: what urlopen returns."""
        return post(f"http://127.0.0.1:{self.server.address.port}", self.model, asked)

    def ask(self, asked: Asked) -> Answer:
        """One request, and all of its answer."""
        reply = Answer()
        with self.opened(asked) as answer:
            for line in answer:
                text = line.decode().strip()
                if not text.startswith("data: ") or text == "data: [DONE]":
                    continue
                part = json.loads(text.removeprefix("data: "))
                if "error" in part:
                    reply.error = str(part["error"])
                else:
                    reply.pieces += [choice["text"] for choice in part["choices"]]
                    reply.ends += sum(choice.get("finish_reason") is not None for choice in part["choices"])
        return reply

    def burst(self, asked: Sequence[Asked]) -> list[Answer]:
        """Sends all requests at once."""
        with ThreadPoolExecutor(len(asked)) as pool:
            return list(pool.map(self.ask, asked))

    def close(self) -> None:
        self._listening.should_exit = True
        self._thread.join()
        self.server.close()


def answered(fleet: Fleet, stock: Stock) -> None:
    """A burst, all of which get the answers of stock, once."""
    asked = drawn(BURST)
    answers = fleet.burst(asked)
    assert [(answer.error, answer.ends) for answer in answers] == [(None, 1)] * BURST, fleet.said
    assert [answer.text for answer in answers] == stock.answers(asked)


@contextmanager
def serving(
    model: str,
    folder: Path,
    replicas: int,
    budget: str = "37MiB",
    tuning: ReplicaTuning = EAGER,
    log: Path | None = None,
    timeline: Path | None = None,
    **more: str,
) -> Iterator[Fleet]:
    """A fleet; at its end no process of it is left. `log`, `timeline`: as of its Fleet; `more`: environment."""
    file, said = folder / "faults", list[str]()
    replica_faults.write(file, ())
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {
            **ENVIRONMENT,
            "BALLONET_REPLICA_FAULTS": str(file),
            "BALLONET_LINK": SLOW,
            **more,
        }.items():
            environment.setenv(name, value)
        options = ReplicaOptions(
            model=model,
            budget=budget,
            page_size="64KiB",
            host_budget="64MiB",
            batching={"page_size": 16, "max_batch_tokens": 128},
            attach=faults_of,
            tuning=tuning,
        )
        drawing = None if timeline is None else str(timeline)
        local = LocalFleet(ReplicaFleet(replicas, options, cost=COST, log=log, timeline=drawing), said.append)
        server = ReplicaServer(model, local, Address(port=free_port()), said.append)
        fleet = Fleet(server, local, said, model, file)
        seen = {*fleet.processes}
        try:
            fleet.wait(lambda: len(fleet.members) == replicas)
            fleet.at_rest()
            assert [semaphores(process) for process in fleet.processes] == [[]] * replicas
            yield fleet
        finally:
            seen |= {*fleet.processes}
            fleet.close()
            left = [process for process in seen if Path(f"/proc/{process}").exists()]
        assert left == [], "no orphan"


PATIENT: Final = ("--silent", "300s")  # a loaded machine makes nobody dead
SIZES: Final = ("--budget", "44MiB", "--page-size", "64KiB", "--host-budget", "64MiB", "--block-size", "16")


class Running:
    """A server in a `process`, which listens at `url` and writes its lines to a file, `_said`."""

    process: subprocess.Popen[bytes] | Fork
    url: str
    _said: TextIO

    def said(self) -> str:
        """Returns the program's output so far."""
        return Path(self._said.name).read_text(errors="replace")

    def wait(self, until: Callable[[], object]) -> None:
        """Returns once that is so; how long that takes is not judged."""
        wait(until, lambda: None if self.process.poll() is None else self.said())

    def figure(self, name: str) -> float:
        """The sum of what `/metrics` has by a name."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


class Program(Running):
    """The server of a model of 8 layers (`made`) on so many replicas, which have joined. `folder`: of the model; `RAY`:
    arguments that say where replicas are."""

    RAY: tuple[str, ...] = ("--ray", "off")
    sizes = SIZES + PATIENT

    def __init__(self, folder: Path, replicas: int) -> None:
        self.model = made(folder)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._said = (folder / "said").open("w+")
        self.process = self.start(folder, replicas, port)
        self.wait(lambda: self.said().count("has joined") == replicas)

    def start(self, folder: Path, replicas: int, port: int) -> subprocess.Popen[bytes] | Fork:
        """Starts it."""
        command = ["-m", "ballonet", "serve", self.model, "--replicas", str(replicas), "--port", str(port), *self.sizes]
        command += self.RAY
        log = Path(self._said.name)
        return programs.begun([*command, *self.options(folder)], {**os.environ, **ENVIRONMENT}, log)

    def options(self, folder: Path) -> list[str]:
        """More arguments of `ballonet serve`."""
        return ["--batch-tokens", "256"]

    def popen(self, command: Sequence[str], **more: str) -> subprocess.Popen[bytes]:
        """Starts a process whose lines are `said`. `more`: environment."""
        return subprocess.Popen(command, stderr=self._said, env={**os.environ, **ENVIRONMENT, **more})

    def burst(self, asked: Sequence[Asked]) -> list[str]:
        """The answers to requests, all asked at once."""
        client = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=1800)

        def ask(request: Asked) -> str:
            reply = client.completions.create(
                model=self.model, prompt=text_of(request), max_tokens=request.new, temperature=0
            )
            return reply.choices[0].text

        with ThreadPoolExecutor(len(asked)) as pool:
            return list(pool.map(ask, asked))

    def processes(self) -> list[int]:
        """The processes of replicas that have joined so far, in that order."""
        return [int(process) for process in re.findall(r"has joined, process (\d+)", self.said())]

    def children(self) -> list[int]:
        """The processes that it has started: of its replicas, or where they come from."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(process) for process in path.read_text().split()]

    def end(self) -> int:
        """SIGTERM, and what it ends with."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)

    def kill(self) -> None:
        """Ends it and what it has started, whatever it does."""
        for process in (*self.children(), *self.processes(), self.process.pid):
            if Path(f"/proc/{process}").exists():
                os.kill(process, signal.SIGKILL)
        self.process.wait()


def given_costs(folder: Path) -> list[str]:
    """Arguments that leave out to measure what batches take."""
    path = folder / "costs.json"
    path.write_text(json.dumps(asdict(COST)))
    return ["--costs", str(path)]


def wait_gone(processes: Sequence[int]) -> None:
    """Returns once none of them is there any more; how long that takes is not judged."""
    wait(lambda: not any(Path(f"/proc/{process}").exists() for process in processes))
