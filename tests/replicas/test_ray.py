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

from .test_serve_replicas import Fleet, burst, expected, free_port, wait

ROOT = Path(__file__).parents[2]
EXAMPLE = "examples/serve_on_ray.py"
SIZES = ("--budget", "44MiB", "--page-size", "64KiB", "--host-budget", "64MiB", "--block-size", "16")
FEW = 4


class Placed(Fleet):
    """The server and its replicas as the example starts them."""

    def start(self, folder: Path, replicas: int, port: int) -> subprocess.Popen[bytes]:
        ports = ["--port", str(port), "--join-port", str(free_port())]
        command = [
            sys.executable,
            EXAMPLE,
            self.model,
            "--replicas",
            str(replicas),
            "--gpus",
            "0",
            *ports,
            "--",
            *SIZES,
        ]
        return subprocess.Popen(command, stderr=self._said, env=environment("tests/replicas/fake"), cwd=ROOT)


def environment(*paths: str) -> dict[str, str]:
    found = {**os.environ, "BALLONET_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    return found | {"PYTHONPATH": os.pathsep.join(str(ROOT / each) for each in ("src", *paths))}


@pytest.fixture
def placed(tmp_path: Path) -> Iterator[Placed]:
    server = Placed(tmp_path, 2)
    children = server.children()
    try:
        yield server
    finally:
        for each in (server.process.pid, *children):
            if Path(f"/proc/{each}").exists():
                os.kill(each, signal.SIGKILL)


def test_actors_of_ray_are_replicas(placed: Placed) -> None:
    assert burst(placed.url, placed.model, 1, FEW) == expected(placed.model, 1, FEW)
    assert placed.figure("ballonet_replicas ") == 2
    children = placed.children()
    assert len(children) >= 3, "a server without weights, and an actor for each replica"
    placed.process.send_signal(signal.SIGTERM)
    assert placed.process.wait() == 0, placed.said()
    assert "the replicas ended with [0, 0]" in placed.said()
    wait(lambda: not any(Path(f"/proc/{each}").exists() for each in children))


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_it_says_what_it_lacks() -> None:
    command = [sys.executable, EXAMPLE, "/no/model"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install ray" in done.stderr
