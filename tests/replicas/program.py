"""`ballonet serve` with replicas as a program of its own, asked by stock clients."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Final, TextIO

from openai import OpenAI

from .. import programs
from ..gpu.forked import Fork
from .fleet import COST, Asked, made, text_of
from .processes import ENVIRONMENT, free_port, wait

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

        def ask(each: Asked) -> str:
            found = client.completions.create(
                model=self.model, prompt=text_of(each), max_tokens=each.new, temperature=0
            )
            return found.choices[0].text

        with ThreadPoolExecutor(len(asked)) as pool:
            return list(pool.map(ask, asked))

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

    def kill(self) -> None:
        """Ends it and what it has started, whatever it does."""
        for each in (*self.children(), *self.processes(), self.process.pid):
            if Path(f"/proc/{each}").exists():
                os.kill(each, signal.SIGKILL)
        self.process.wait()


def given_costs(folder: Path) -> list[str]:
    """Arguments that leave out to measure what batches take."""
    path = folder / "costs.json"
    path.write_text(json.dumps(asdict(COST)))
    return ["--costs", str(path)]


def wait_gone(processes: Sequence[int]) -> None:
    """Returns once none of them is there any more; how long that takes is not judged."""
    wait(lambda: not any(Path(f"/proc/{each}").exists() for each in processes))
