"""A live run of two replicas through a drop, a restore and a loss: what clients get, what is to be seen of it, and its
log, which has the decisions of the simulation of the same script.

Note [What is compared]
    Times of the two logs differ, and with them which requests run or wait in a moment. What does not depend on them has
    to be equal:

    - every decision that changes replicas, in order, with its epoch: who is on its own, which replicas are prepared to
      form which groups with which spans, what is committed, which layers each stage pulls from which, what is
      discarded, fenced, told to rejoin, and why;
    - what replicas said of each epoch: who had prepared it, taken it up, all its KV, all its layers;
    - of each request, in the order of their arrival: its lengths, how often it was given to a group, was computed anew,
      was held, and how it ended.

    What is left out, as it follows the clock: loads and ticks; `Decline`, which is said again and again; which group a
    request goes to, and which member of a new group has more waiting and so is its first stage (replicas are named by
    their stage in what they pull); where requests that still run go at a restore (`Commit.homes`).
"""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from msgspec import structs

from ballonet.hooks.replicas.recording import read_decisions
from ballonet.hooks.replicas.supervisor import FleetState
from ballonet.hooks.server.arrivals import RecordedArrival
from ballonet.hooks.virtual_replicas.faults import Killed, NewReplica, PlayedFault
from ballonet.hooks.virtual_replicas.fleet import Shape, VirtualFleet
from ballonet.hooks.virtual_replicas.fleet_run import FleetRun
from ballonet.offload.policy.replicas import protocol
from ballonet.offload.policy.replicas.groups import Group
from ballonet.offload.policy.replicas.protocol import Action, Arrived, Commit, Decision, Entry, Joined, Prepare, Setup

from .fleet import EAGER, Answer, Asked, Stock, drawn, made, serving
from .virtual import replayed

_SAID = (protocol.Prepared, protocol.Committed, protocol.Exchanged, protocol.Restored)
_FAILED = (protocol.PrepareFailed, protocol.PullFailed, protocol.Lost, protocol.Damaged)


@dataclass(slots=True)
class Outline:
    """The comparable part of a log. `requests`: of each by its place, what happened to it, and how often."""

    changes: list[tuple[object, ...]] = field(default_factory=list)
    said: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    requests: list[Counter[str]] = field(default_factory=list)


def outline(log: Iterable[Entry]) -> Outline:
    """The outline of a log."""
    outlined = Outline()
    names: dict[str, int] = {}
    stages: dict[int, int] = {}  # of the members of the last groups that were prepared to drop
    for entry in log:
        if not isinstance(entry, Decision):
            continue
        event = entry.event
        if isinstance(event, protocol.Arrived):
            names[event.request] = len(names)
            outlined.requests.append(Counter({f"{event.prompt} and {event.new} tokens": 1}))
        elif isinstance(event, protocol.Finished | protocol.Left):
            outlined.requests[names[event.request]][type(event).__name__] += 1
        elif isinstance(event, _SAID):
            outlined.said[type(event).__name__, event.epoch, event.member] += 1
        elif isinstance(event, _FAILED):
            outlined.changes.append((type(event).__name__, event.member))
        for action in entry.actions:
            _note(action, outlined, names, stages)
    return outlined


def _note(action: Action, outlined: Outline, names: dict[str, int], stages: dict[int, int]) -> None:
    kind = type(action).__name__
    match action:
        case protocol.Dispatch() | protocol.Hold() | protocol.Cancel():
            outlined.requests[names[action.request]][kind] += 1
        case protocol.Recompute():
            for name in action.requests:
                outlined.requests[names[name]][kind] += 1
        case protocol.Refuse():
            outlined.requests[names[action.request]][f"{kind}: {action.reason.value}"] += 1
        case protocol.Prepare():
            for group in action.groups:
                if group.is_dropped:
                    stages.update({member: stage for stage, member in enumerate(group.members)})
            outlined.changes.append((kind, action.epoch, _groups(action.groups), len(action.pulls)))
        case protocol.Commit():
            outlined.changes.append((kind, action.epoch))
        case protocol.StartRestore():
            pulls: dict[int, list[tuple[int, int | None]]] = {}
            for pull in action.pulls:
                source = None if pull.source is None else stages[pull.source]
                pulls.setdefault(stages[pull.member], []).append((pull.layer, source))
            outlined.changes.append((kind, action.epoch, sorted(pulls.items())))
        case protocol.Decline():
            pass
        case _:
            outlined.changes.append((kind, action))


def _groups(groups: Iterable[Group]) -> list[tuple[object, ...]]:
    return sorted((sorted(group.members), group.spans) for group in groups)


def script(log: Iterable[Entry]) -> tuple[list[RecordedArrival], list[PlayedFault]]:
    """What happened to a controller from outside, by its log, at seconds after the first event: requests that came, and
    replicas that joined and ended."""
    decisions = [entry for entry in log if isinstance(entry, Decision)]
    first = decisions[0].event.at
    arrivals, faults = list[RecordedArrival](), list[PlayedFault]()
    for decision in decisions:
        event, at = decision.event, decision.event.at - first
        match event:
            case protocol.Arrived():
                arrivals.append(RecordedArrival(at, event.prompt, event.new))
            case protocol.Joined():
                faults.append(NewReplica(at, event.member))
            case protocol.Lost():
                faults.append(Killed(at, event.member))
    return arrivals, faults


TOKENS = 48
BURST = 40  # which is about twice what two replicas have KV for
# One drop only until the restore, which comes when all has been quiet for some seconds. `chunk`: --batch-tokens, as of
# the replicas.
TUNING = replace(EAGER, dwell=3.0, settle=1e9, again=1.0, chunk=128)
LATER = 300.0  # seconds by which what follows the restore comes later in simulation, however long that took live


@dataclass(frozen=True)
class Lived:
    """The logs of the run."""

    model: str
    asked: list[Asked]
    answers: list[Answer]
    after: list[Answer]  # to the first request again: after the restore, and after the loss
    figures: str  # what `/metrics` said after the restore
    state: FleetState  # of that time
    said: list[str]
    log: list[Entry]
    timeline: dict[str, Any]


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Lived:
    """Two replicas, asked for more than they have KV for: a drop, and the restore. Then a request, and another one
    after a replica was killed and replaced."""
    folder = tmp_path_factory.mktemp("lived")
    model, asked, log, timeline = made(folder), drawn(BURST, 50, 110, TOKENS), folder / "log", folder / "timeline.json"
    with serving(model, folder, 2, "44MiB", TUNING, log=log, timeline=timeline) as fleet:
        state = fleet.supervisor.state
        answers = fleet.burst(asked)
        fleet.wait(lambda: state().restores)
        fleet.whole(2)
        with urllib.request.urlopen(f"http://127.0.0.1:{fleet.server.address.port}/metrics") as answer:
            figures = answer.read().decode()
        seen, after = state(), [fleet.ask(asked[0])]
        os.kill(fleet.processes[0], signal.SIGKILL)
        fleet.wait(lambda: state().replaced and len(state().spans) == 2)
        after.append(fleet.ask(asked[0]))
    said, drawing = fleet.said, json.loads(timeline.read_text())
    return Lived(model, asked, answers, after, figures, seen, said, read_decisions(log), drawing)


def simulated(log: list[Entry]) -> list[Entry]:
    """The log of a simulation of what happened in another, on replicas of the same sizes, with the same costs."""
    setup = log[0]
    assert isinstance(setup, Setup)
    joined = next(entry.event for entry in log if isinstance(entry, Decision) and isinstance(entry.event, Joined))
    page, layers = setup.kv.page, len(setup.pages)
    shape = Shape(tuple(pages * page for pages in setup.pages), 0, setup.kv.token, setup.kv.token // layers)
    memory = joined.pages * page
    link = setup.tuning.link
    fleet = VirtualFleet(shape, 0, memory, page, 2**26, link, link, batch=setup.tuning.chunk, block=16)
    arrivals, faults = script(log)
    restored = [
        entry for entry in log if isinstance(entry, Decision) and any(isinstance(it, Commit) for it in entry.actions)
    ][-1]
    begin = next(entry.event.at for entry in log if isinstance(entry, Decision))
    after = restored.event.at - begin
    # The burst comes at once, however long a loaded machine took to send it.
    arrivals = [
        replace(arrival, at=arrival.at + LATER if arrival.at > after else arrivals[0].at) for arrival in arrivals
    ]
    faults = [structs.replace(fault, at=fault.at + LATER * (fault.at > after)) for fault in faults]
    simulation: list[Entry] = []
    run = FleetRun(fleet, setup.cost, arrivals, setup.tuning, simulation.append, faults)
    run.answers()
    run.close()
    return simulation


def test_every_answer_is_stocks(lived: Lived) -> None:
    right = Stock(lived.model).answers(lived.asked)
    assert [(answer.text, answer.error, answer.ends) for answer in lived.answers] == [(text, None, 1) for text in right]
    assert [answer.text for answer in lived.after] == [right[0]] * 2


def test_the_drop_and_the_restore_are_seen(lived: Lived) -> None:
    """In the state, in `/metrics`, and in what is said to people."""
    state, said = lived.state, lived.said
    assert (state.drops, state.restores, state.fenced) == (1, 1, 0), said
    assert state.moved[0] > 0, "KV of requests that ran went over"
    assert state.moved[1] > 0, "layers came from the other one"
    assert 0 < state.busy < state.open
    assert 0 < state.bubble < 1
    assert f"ballonet_pipeline_bubble {state.bubble}" in lived.figures
    assert sorted(state.errors) == [0, 1]
    assert 'ballonet_replica_cost_error{replica="1"}' in lived.figures
    assert 'ballonet_replica_resident_layers{replica="1"}' in lived.figures
    assert any("layers come home" in line for line in said)
    assert any("of 8 layers again" in line for line in said)


def test_the_timeline_has_all_processes_on_one_clock(lived: Lived) -> None:
    events = lived.timeline["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    slices = [event for event in events if event["ph"] in "Xb"]
    lanes = {(names[event["pid"]], event["cat"]) for event in slices}
    expected = {"epoch", "microbatches", "next epoch", "exchange", "layers", "restore"}
    for process in ("replica 0", "replica 1"):
        assert expected <= {lane for who, lane in lanes if who == process}
        bars = [event for event in slices if (names[event["pid"]], event["cat"]) == (process, "microbatches")]
        mine = sorted((bar["ts"], bar["ts"] + bar["dur"]) for bar in bars)
        assert all(end <= begin + 1 for (_, end), (begin, _) in pairwise(mine)), "a stage computes one at a time"
    assert ("server", "requests") in lanes
    assert all(event["ts"] > -1e6 and event.get("dur", 0) >= 0 for event in slices)
    assert {"drop", "restore"} <= {event["name"].partition(": ")[2] for event in events if event["ph"] == "i"}


def test_a_live_run_and_its_simulation_take_the_same_decisions(lived: Lived) -> None:
    """First, a controller of the live one's setup, told the live one's events at their times, answers exactly what that
    answered, request by request and to the last bit of a verdict. Second, the simulation of what came from outside,
    with times of its own, takes the same decisions. See Note [What is compared]."""
    there = lived.log
    again = [*replayed(there)]
    assert [one for one, other in again if one != other] == []
    assert sum(isinstance(one.event, Arrived) for one, _ in again) == BURST + 2
    here = simulated(there)
    assert here[0] == there[0], "the same setup"
    wanted, played = outline(there), outline(here)
    assert played.changes == wanted.changes
    assert played.said == wanted.said
    assert played.requests == wanted.requests
    spans = [change for change in wanted.changes if change[0] == Prepare.__name__]
    assert [len(change[2]) for change in spans] == [1, 2], "a drop of both to a pair, and a restore to two"  # type: ignore[arg-type]
