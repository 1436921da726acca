"""Processes of replicas: whether they fit, on which GPU each is, when lost ones are replaced, and that none outlives
its supervisor.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ballonet.__main__ import main
from ballonet.allocator.errors import ConfigError
from ballonet.hooks.replicas import child_processes
from ballonet.offload.policy.replicas.processes import Replacements, check_fits, share
from ballonet.offload.policy.replicas.tuning import ReplicaTuning

from .. import programs
from .fleet import wait

GIB = 2**30


def test_replicas_that_fit_are_accepted() -> None:
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
def test_replicas_that_do_not_fit_are_refused(replicas: int, memory: list[tuple[str, int]], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_fits(replicas, 10 * GIB, memory)


def test_replicas_without_a_budget_share_the_memory() -> None:
    assert share(3, 10 * GIB, GIB) == 3 * GIB
    assert share(3, GIB, GIB) == GIB


def refused(tmp_path: Path, *arguments: str) -> str:
    """What `ballonet serve` says before anything is loaded: the model is an empty folder."""
    environment = {**os.environ, "BALLONET_DEVICE": "cpu"}
    done = programs.python("-m", "ballonet", "serve", str(tmp_path), *arguments, variables=environment)
    assert done.returncode == 2, done.stderr
    return done.stderr


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


def test_gpus_are_dealt_to_replicas_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("KEPT", "1")
    assert "CUDA_VISIBLE_DEVICES" not in child_processes.placed(1, 0)
    placed = child_processes.placed(3, 2)
    assert (placed["KEPT"], placed["CUDA_VISIBLE_DEVICES"]) == ("1", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert child_processes.placed(1, 2)["CUDA_VISIBLE_DEVICES"] == "6"


@pytest.mark.parametrize(
    ("options", "environ", "why"),
    [
        (["another", "--replicas", "2"], {}, "of one model"),
        (["--replicas", "2", "--prefix-cache"], {}, "share no prefixes"),
        (["--replicas", "2"], {"BALLONET_PREFIX_DIR": "/tmp"}, "share no prefixes"),
    ],
)
def test_server_that_cannot_start_is_refused_before_anything_is_loaded(
    options: list[str],
    environ: dict[str, str],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(["serve", "/no/model", *options]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_where_ray_is_not_installed_it_is_said_how_to_install_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/no/model", "--ray", "127.0.0.1:6379"]) == 1
    assert "pip install 'ballonet[replicas]'" in capsys.readouterr().err


# Replacements


TUNING = ReplicaTuning(starts=3, steady=60.0, start_wait=0.5, longest_wait=4.0)


def test_lost_replica_is_replaced_at_once() -> None:
    ranks = Replacements(2, TUNING)
    assert ranks.due(0.0) == []  # those are started by whoever made this
    ranks.joined(1, 10.0)
    assert ranks.ended(1, 100.0) == 0.0
    assert ranks.due(100.0) == [1]
    assert ranks.due(100.0) == []


def test_replica_that_ended_while_it_joined_is_no_member() -> None:
    ranks = Replacements(2, TUNING)
    assert ranks.ended(0, 1.0) is None
    assert not ranks.joined(0, 1.1)
    assert ranks.joined(1, 1.2)
    assert not ranks.joined(1, 1.3), "it has joined"
    assert ranks.ended(1, 2.0) == 0.0
    assert not ranks.joined(1, 2.1), "its process has ended"
    assert ranks.due(2.2) == [1]
    assert ranks.joined(1, 2.3)


def test_replica_that_is_lost_soon_again_and_again_is_replaced_later_each_time() -> None:
    ranks, at, waits = Replacements(1, TUNING), 0.0, []
    for _ in range(5):
        ranks.joined(0, at)
        at += 1.0
        wait = ranks.ended(0, at)
        assert wait is not None
        waits.append(wait)
        if wait:
            assert ranks.due(at + wait - 0.01) == []
        at += wait
        assert ranks.due(at) == [0]
    assert waits == [0.0, 2.0, 4.0, 4.0, 4.0]
    ranks.joined(0, at)
    assert ranks.ended(0, at + 60.0) == 0.0  # it has served for a while
    assert ranks.due(at + 60.0) == [0]


def test_a_rank_that_never_had_a_replica_stays_empty() -> None:
    ranks = Replacements(2, TUNING)
    ranks.joined(1, 1.0)
    assert ranks.ended(0, 2.0) is None
    assert ranks.due(1000.0) == []
    assert ranks.ended(1, 3.0) == 0.0
    assert ranks.due(3.0) == [1]


def test_a_rank_that_had_one_is_tried_again_a_few_times() -> None:
    ranks, at = Replacements(1, TUNING), 0.0
    ranks.joined(0, at)
    assert ranks.ended(0, 100.0) == 0.0
    assert ranks.due(100.0) == [0]
    assert ranks.ended(0, 101.0) == 1.0
    assert (ranks.due(101.0), ranks.due(102.0), ranks.expected) == ([], [0], True)
    assert ranks.ended(0, 103.0) == 2.0
    assert ranks.due(105.0) == [0]
    assert (ranks.ended(0, 106.0), ranks.due(1000.0), ranks.expected) == (None, [], False)


def test_starts_that_failed_do_not_count_once_one_has_joined() -> None:
    ranks = Replacements(1, TUNING)
    ranks.joined(0, 0.0)
    for at in (100.0, 300.0):
        assert ranks.ended(0, at) == 0.0
        for failed in (1, 2):
            assert ranks.due(at + 20.0 * failed) == [0]
            assert ranks.ended(0, at + 20.0 * failed) == float(failed)
        assert ranks.due(at + 60.0) == [0]
        ranks.joined(0, at + 60.0)


def test_without_ranks_nothing_is_replaced() -> None:
    assert Replacements(0, TUNING).ended(3, 0.0) is None
    assert not Replacements(0, TUNING).expected


# Processes that have not joined yet


STARTING = """
import multiprocessing, os, sys, threading
from ballonet.hooks.replicas.channel import Wakeup
from ballonet.hooks.replicas.child_processes import PipeToSupervisor

def say(line):
    os.write(said, f"{line}\\n".encode())

def replica():
    mine.close()
    channel = PipeToSupervisor(its, Wakeup(), 60.0, say)
    if joined:
        channel.serving.set()
    say(os.getpid())
    channel.wakeup.wait(lambda: channel.has() or None, None)
    say("goes on")

said, joined = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND), sys.argv[2] == "joined"
context = multiprocessing.get_context("fork")
mine, its = context.Pipe()
context.Process(target=replica).start()
threading.Event().wait()
"""


@pytest.mark.parametrize("phase", ["loads", "joined"])
def test_a_replica_that_loads_ends_with_its_supervisor(phase: str, tmp_path: Path) -> None:
    said = tmp_path / "said"
    said.touch()
    supervisor = subprocess.Popen([sys.executable, "-c", STARTING, str(said), phase])
    try:
        wait(said.read_text, lambda: supervisor.poll())
    finally:
        supervisor.kill()
        supervisor.wait()
    process = int(said.read_text().split()[0])
    wait(lambda: not Path(f"/proc/{process}").exists())
    last = said.read_text().splitlines()[-1]
    assert last == ("goes on" if phase == "joined" else "a replica ends before it serves: its supervisor has gone")
