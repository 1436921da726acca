"""Ranks of torchrun, each of which is a replica of one server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .test_serve_replicas import Fleet, burst, expected, wait

RANKS, FEW = 2, 4
SIZES = ("--budget", "44MiB", "--page-size", "64KiB", "--host-budget", "64MiB", "--block-size", "16")


class Launched(Fleet):
    """The server in ranks that torchrun has started."""

    def start(self, folder: Path, replicas: int, port: int) -> subprocess.Popen[bytes]:
        """`replicas`: ranks."""
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(replicas)]
        command = ["-m", "ballonet", "serve", self.model, "--replicas", str(replicas), "--port", str(port), *SIZES]
        environment = {**os.environ, "BALLONET_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "BALLONET_REPLICA_SECRET": "s"}
        return subprocess.Popen([sys.executable, *launcher, *command], stderr=self._said, env=environment)


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    server = Launched(tmp_path, RANKS)
    ranks = server.children()
    try:
        yield server
    finally:
        for each in (server.process.pid, *ranks):
            if Path(f"/proc/{each}").exists():
                os.kill(each, signal.SIGKILL)


def test_ranks_of_torchrun_serve_until_their_server_ends(launched: Launched) -> None:
    """torchrun sends SIGTERM to all ranks at once: a replica computes on until the supervisor ends it."""
    ranks = launched.children()
    assert len(ranks) == RANKS
    os.kill(ranks[1], signal.SIGTERM)
    assert burst(launched.url, launched.model, 1, FEW) == expected(launched.model, 1, FEW)
    assert launched.figure("ballonet_replicas ") == RANKS
    os.kill(ranks[0], signal.SIGTERM)
    assert launched.process.wait() == 0, launched.said()
    wait(lambda: not any(Path(f"/proc/{each}").exists() for each in ranks))
    assert "WORLD_SIZE" not in launched.said(), "transformers takes a replica for a rank of its own"
