"""Replicas that do not fit into memory are refused before one starts, with what would fit."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from ballonet.allocator.errors import ConfigError
from ballonet.offload.policy.replicas.processes import check_fits, share

from .. import programs

GIB = 2**30


def test_what_fits_is_accepted() -> None:
    check_fits(4, 10 * GIB, [("RAM", 40 * GIB)])
    check_fits(5, 10 * GIB, [("GPU 0", 30 * GIB), ("GPU 1", 20 * GIB)])


@pytest.mark.parametrize(
    ("replicas", "memory", "text"),
    [
        (5, [("RAM", 40 * GIB)], r"5 replicas with 10GiB each need 50GiB of RAM, which has 40GiB: --replicas 4 would"),
        (1, [("RAM", 9 * GIB)], r"which has 9GiB: give a lower --budget"),
        (6, [("GPU 0", 30 * GIB), ("GPU 1", 20 * GIB)], r"3 of 6 replicas .* 30GiB of GPU 1, .* --replicas 5 would"),
    ],
)
def test_what_does_not_fit_is_refused(replicas: int, memory: list[tuple[str, int]], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_fits(replicas, 10 * GIB, memory)


def test_who_is_not_told_shares() -> None:
    assert share(3, 10 * GIB, GIB) == 3 * GIB
    assert share(3, GIB, GIB) == GIB


def refused(tmp_path: Path, *arguments: str) -> str:
    """What `ballonet serve` says before anything is loaded: the model is an empty folder."""
    environment = {**os.environ, "BALLONET_DEVICE": "cpu"}
    found = programs.python("-m", "ballonet", "serve", str(tmp_path), *arguments, variables=environment)
    assert found.returncode == 2, found.stderr
    return found.stderr


def test_replicas_beyond_memory_do_not_start(tmp_path: Path) -> None:
    assert "2000 replicas with 1TiB each need" in refused(
        tmp_path, "--replicas", "2000", "--budget", "1TiB", "--port", "8999"
    )


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"another process listens on 127.0.0.1:{port}" in refused(
            tmp_path, "--replicas", "2", "--port", str(port)
        )
