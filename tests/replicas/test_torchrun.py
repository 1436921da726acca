"""Ranks of torchrun, each of which is a replica of one server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .fleet import Stock, drawn
from .program import PATIENT, SIZES, Program, given_costs, wait_gone

RANKS = 2


class Launched(Program):
    """The server in ranks that torchrun has started."""

    def start(self, folder: Path, replicas: int, port: int) -> subprocess.Popen[bytes]:
        """`replicas`: ranks."""
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(replicas)]
        command = ["-m", "ballonet", "serve", self.model, "--replicas", str(replicas), "--port", str(port), *SIZES]
        options = (*PATIENT, *given_costs(folder))
        return self.popen([sys.executable, *launcher, *command, *options], BALLONET_REPLICA_SECRET="s")


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    server = Launched(tmp_path, RANKS)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.kill()


def test_ranks_of_torchrun_serve_until_their_server_ends(launched: Launched) -> None:
    """torchrun sends SIGTERM to all ranks at once: a replica computes on until the supervisor ends it."""
    ranks, asked = launched.children(), drawn(4)
    assert len(ranks) == RANKS
    os.kill(ranks[1], signal.SIGTERM)
    assert launched.burst(asked) == Stock(launched.model).answers(asked)
    assert launched.figure("ballonet_replicas ") == RANKS
    os.kill(ranks[0], signal.SIGTERM)
    assert launched.process.wait() == 0, launched.said()
    wait_gone(ranks)
    assert "WORLD_SIZE" not in launched.said(), "transformers takes a replica for a rank of its own"
