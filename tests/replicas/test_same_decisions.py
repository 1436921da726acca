"""A live run of two replicas, its log, and the same script in simulation: the decisions are the same ones."""

from __future__ import annotations

import math
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import uvicorn
from openai import OpenAI

from ballonet.hooks.replicas.decision_file import read_decisions
from ballonet.hooks.replicas.placement import Placement
from ballonet.hooks.replicas.serving import Fleet as ReplicaFleet
from ballonet.hooks.replicas.serving import ReplicaServer
from ballonet.hooks.server.application import Address
from ballonet.hooks.whatif.replicas.dropping import Drop
from ballonet.hooks.whatif.replicas.failing import play_faults
from ballonet.hooks.whatif.replicas.fleet import Fleet, Shape
from ballonet.hooks.whatif.replicas.fleet_run import FleetRun
from ballonet.offload.policy.replicas.actions import Commit, Prepare
from ballonet.offload.policy.replicas.decisions import Decision, Entry, Setup, replayed
from ballonet.offload.policy.replicas.events import Arrived, Joined
from ballonet.offload.policy.tuning import DEFAULT

from .same import outline, script
from .test_serve_replicas import BURST, TOKENS, burst, free_port, made, wait

# As in test_serve_replicas: a drop whatever it is predicted to gain, and nobody is dead on a loaded machine. One drop
# only until the restore, which comes when all has been quiet for some seconds. `chunk`: --batch-tokens, as in a fleet.
TUNING = replace(
    DEFAULT.replicas,
    gain=-math.inf,
    full=0.3,
    dwell=3.0,
    settle=1e9,
    again=1.0,
    silent=300.0,
    answer=300.0,
    bulk=900.0,
    chunk=256,
)
LATER = 300.0  # seconds by which what follows the restore comes later in simulation, however long that took live


def live(folder: Path) -> list[Entry]:
    """The log of a burst, the drop and the restore; a request then; and another one after a replica was
    killed and replaced."""
    model, said, log = made(folder), list[str](), folder / "log"
    sizes = ["--budget", "44MiB", "--page-size", "64KiB", "--host-budget", "64MiB", "--block-size", "16"]
    fleet = ReplicaFleet(2, [*sizes, "--batch-tokens", "256"], Placement("127.0.0.1", 0, hosts=True))
    server = ReplicaServer(model, fleet, Address(port=free_port()), said.append, TUNING, log)
    listening = uvicorn.Server(uvicorn.Config(server.app, port=server.address.port, log_level="warning"))
    thread = threading.Thread(target=listening.run)
    thread.start()
    try:
        state = server.supervisor.state
        wait(lambda: len(state().spans) == 2 and listening.started)
        url = f"http://127.0.0.1:{server.address.port}"
        burst(url, model, 1)
        assert state().drops == 1, said
        wait(lambda: state().restores)
        wait(lambda: sorted(state().spans.values()) == [(0, 8), (0, 8)])
        ask(url, model)
        os.kill(server._children.processes[0], signal.SIGKILL)
        wait(lambda: state().replaced and len(state().spans) == 2)
        ask(url, model)
    finally:
        listening.should_exit = True
        thread.join()
        server.close()
    return read_decisions(log)


def ask(url: str, model: str) -> None:
    """One request, to its end."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=1800)
    client.completions.create(model=model, prompt="w7 w9", max_tokens=TOKENS, temperature=0)


def simulated(log: list[Entry]) -> list[Entry]:
    """The log of a simulation of what happened in another, on replicas of the same sizes, with the same costs."""
    setup = log[0]
    assert isinstance(setup, Setup)
    joined = next(each.event for each in log if isinstance(each, Decision) and isinstance(each.event, Joined))
    page, layers = setup.kv.page, len(setup.pages)
    shape = Shape(tuple(pages * page for pages in setup.pages), 0, setup.kv.token, setup.kv.token // layers)
    memory = joined.pages * page
    link = setup.tuning.link
    fleet = Fleet(shape, 0, memory, page, 2**26, link, link, batch=setup.tuning.chunk, block=16)
    arrivals, faults = script(log)
    restored = [
        each for each in log if isinstance(each, Decision) and any(isinstance(it, Commit) for it in each.actions)
    ][-1]
    begin = next(each.event.at for each in log if isinstance(each, Decision))
    after = restored.event.at - begin
    arrivals = [replace(each, at=each.at + LATER * (each.at > after)) for each in arrivals]
    faults = [replace(each, at=each.at + LATER * (each.at > after)) for each in faults]
    found: list[Entry] = []
    run = FleetRun(fleet, setup.cost, arrivals, setup.tuning, found.append)
    keeper = Drop(run)
    play_faults(keeper, faults)
    run.answers(keeper.arrive, lambda done: None)
    return found


def test_a_live_run_and_its_simulation_take_the_same_decisions(tmp_path: Path) -> None:
    """First, a controller of the live one's setup, told the live one's events at their times, answers exactly what that
    answered, request by request and to the last bit of a verdict. Second, the simulation of what came from outside,
    with times of its own, takes the same decisions (same.py)."""
    there = live(tmp_path)
    again = [*replayed(there)]
    assert [one for one, other in again if one != other] == []
    assert sum(isinstance(one.event, Arrived) for one, _ in again) == BURST + 2
    here = simulated(there)
    assert here[0] == there[0], "the same setup"
    wanted, found = outline(there), outline(here)
    assert found.changes == wanted.changes
    assert found.said == wanted.said
    assert found.requests == wanted.requests
    spans = [each for each in wanted.changes if each[0] == Prepare.__name__]
    assert [len(each[2]) for each in spans] == [1, 2], "a drop of both to a pair, and a restore to two"  # type: ignore[arg-type]
