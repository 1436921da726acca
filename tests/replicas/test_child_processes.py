"""A replica that a supervisor has started and that has not joined yet ends with it, whatever it waits for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .processes import wait

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
