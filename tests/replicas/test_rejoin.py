"""A replica of another machine that was paused, and fenced in the meantime, resumes. A part of `make kills`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ballonet.testing.replica_faults import Fault

from .fleet import EAGER, LAYERS, NEEDS_ALL, SECRET, Fleet, Stock, answered, arguments, made, serving


@contextmanager
def joined(fleet: Fleet) -> Iterator[subprocess.Popen[bytes]]:
    """One more replica of a fleet, not started by its supervisor."""
    where = f"127.0.0.1:{fleet.server.port}"
    command = [sys.executable, "-m", "ballonet", "serve", fleet.model, "--join", where, *arguments()]
    process = subprocess.Popen(command, env={**os.environ, "BALLONET_REPLICA_SECRET": SECRET})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@NEEDS_ALL
def test_who_stood_still_while_layers_were_dropped_serves_again_with_all_of_them(tmp_path: Path) -> None:
    model = made(tmp_path)
    stock = Stock(model)
    with serving(model, tmp_path, 1, tuning=replace(EAGER, silent=8.0)) as fleet, joined(fleet) as process:
        state = fleet.server.supervisor.state
        fleet.wait(lambda: len(fleet.members) == 2)
        fleet.whole(2)
        member = max(fleet.members)
        stopped = Fault(member, "say Exchanged", 1, "stop")
        fleet.fault(stopped)
        while not fleet.happened:
            answered(fleet, stock)
        fleet.wait(lambda: state().fenced == 1)
        assert fleet.happened == [stopped]
        fleet.wait(lambda: member not in fleet.members)
        fleet.fault()
        answered(fleet, stock)
        os.kill(process.pid, signal.SIGCONT)
        fleet.wait(lambda: len(fleet.members) == 2)
        assert member not in fleet.members, "it has another number now"
        fleet.whole(2)
        fleet.wait(lambda: state().layers.get(max(fleet.members)) == LAYERS)
        drops = state().drops
        while state().drops == drops:
            answered(fleet, stock)
        fleet.whole(2)
        assert (state().fenced, state().replaced) == (1, 0), fleet.said
        assert process.poll() is None
        assert sum(f"process {process.pid} on" in line for line in fleet.said) == 2
