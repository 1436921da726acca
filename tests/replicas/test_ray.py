"""The example that places replicas as actors of Ray, with a Ray that starts processes on this machine."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .fleet import Stock, drawn
from .processes import ENVIRONMENT, free_port
from .program import PATIENT, SIZES, Program, given_costs, wait_gone

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples/serve_on_ray.py")


class Placed(Program):
    """The server and its replicas as the example starts them."""

    def start(self, folder: Path, replicas: int, port: int) -> subprocess.Popen[bytes]:
        ports = ["--port", str(port), "--join-port", str(free_port())]
        own = ["--replicas", str(replicas), "--gpus", "0", *PATIENT, *ports]
        command = [sys.executable, EXAMPLE, self.model, *own, "--", *SIZES, *given_costs(folder)]
        return self.popen(command, PYTHONPATH=paths("tests/replicas/fake"))


def paths(*more: str) -> str:
    """PYTHONPATH."""
    return os.pathsep.join(str(ROOT / each) for each in ("src", *more))


@pytest.fixture
def placed(tmp_path: Path) -> Iterator[Placed]:
    server = Placed(tmp_path, 2)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.kill()


def test_actors_of_ray_are_replicas(placed: Placed) -> None:
    asked = drawn(4)
    assert placed.burst(asked) == Stock(placed.model).answers(asked)
    assert placed.figure("ballonet_replicas ") == 2
    children = placed.children()
    assert len(children) >= 3, "a server without weights, and an actor for each replica"
    placed.process.send_signal(signal.SIGTERM)
    assert placed.process.wait() == 0, placed.said()
    assert "the replicas ended with [0, 0]" in placed.said()
    wait_gone(children)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_it_says_what_it_lacks() -> None:
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": paths()}
    command = [sys.executable, EXAMPLE, "/no/model"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install ray" in done.stderr
