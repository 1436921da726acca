"""Runs of a simulation in which something goes wrong, and what has to hold whatever that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ballonet.hooks.server.load import RecordedArrival
from ballonet.hooks.virtual_replicas.drop_policy import DropPolicy
from ballonet.hooks.virtual_replicas.fault_player import play_faults
from ballonet.hooks.virtual_replicas.faults import PlayedFault
from ballonet.hooks.virtual_replicas.fleet import VirtualFleet
from ballonet.hooks.virtual_replicas.fleet_run import FleetRun
from ballonet.offload.policy.replicas.actions import Action
from ballonet.offload.policy.replicas.chunk_cost import ChunkCost
from ballonet.offload.policy.replicas.decisions import Decision, Entry, replayed
from ballonet.offload.policy.replicas.events import Event
from ballonet.offload.policy.tuning import DEFAULT

from .fleets import SLOW, burst, fleet

SLOWLY = 4e6  # bytes per second between two: a layer takes a quarter of a second
BURST = burst(240, 0.1, 60, 150) + burst(12, 6.0, 20, 20, begin=60.0)
TUNING = replace(DEFAULT.replicas, linking=0.1)  # an epoch of two is prepared for 0.2 s
A = TypeVar("A", bound=Action)
E = TypeVar("E", bound=Event)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run to its end, and all that its controller was told and answered."""

    run: FleetRun
    keeper: DropPolicy
    log: list[Entry]

    @property
    def decisions(self) -> list[Decision]:
        """Returns the decisions of a log, without its setup."""
        return [each for each in self.log if isinstance(each, Decision)]

    def actions(self, kind: type[A]) -> list[tuple[float, A]]:
        """Actions of a kind, and when they were decided."""
        return [(each.event.at, it) for each in self.decisions for it in each.actions if isinstance(it, kind)]

    def events(self, kind: type[E]) -> list[E]:
        """Events of a kind."""
        return [each.event for each in self.decisions if isinstance(each.event, kind)]

    def answer(self, event: Event) -> tuple[Action, ...]:
        """Returns the actions of a decision."""
        return next(each.actions for each in self.decisions if each.event == event)

    @property
    def errors(self) -> dict[int, str]:
        """Why requests ended, by their numbers; those that were answered are not in it."""
        return {job.number: job.answer.error for job in self.run.jobs if job.answer.error}


def outcome(
    faults: Sequence[PlayedFault] = (),
    arrivals: list[RecordedArrival] = BURST,
    at: VirtualFleet | None = None,
    cost: ChunkCost = SLOW,
) -> Outcome:
    """Plays faults, to the end of the last request and of all that is under way then, and checks what has to hold."""
    log: list[Entry] = []
    run = FleetRun(at or fleet(2, 1600, network=SLOWLY), cost, arrivals, TUNING, log.append)
    keeper = DropPolicy(run)
    play_faults(keeper, faults)

    def hurries() -> None:
        assert run.events.now < 1000, f"requests {[*keeper.requests.by_name]} wait for nothing"
        keeper.controller.check()

    run.every(1.0, hurries)
    run.answers(keeper.arrive, lambda done: None)
    while run.events.step():
        pass
    found = Outcome(run, keeper, log)
    check(found)
    return found


def check(found: Outcome) -> None:
    """Every request was answered or told why not, once; memory is what it was; and the controller would say the same
    again."""
    keeper, fleet = found.keeper, found.run.fleet
    for job in found.run.jobs:
        assert job.over
        assert job.answer.times == sorted(job.answer.times)
        assert len(job.answer.times) == job.made <= job.arrival.new
        assert bool(job.answer.error) != (job.made == job.arrival.new), job
        assert (job.kv if job.answer.error else 0, job.held, job.in_flight, job.stalled, job.leaving) == (0,) * 5, job
    _is_empty(keeper)
    assert all(one == other for one, other in replayed(found.log))
    if keeper.replicas.is_shut_down:
        return
    keeper.controller.check()
    assert [*keeper.controller.book.held] == []
    assert keeper.requests.by_name == {}
    placed = [member for members in keeper.controller.cluster.groups for member in members]
    assert sorted(placed) == sorted(member for members in found.run.pipes for member in members)
    assert {*keeper.controller.cluster.groups} == {*keeper.active.groups}
    for members, group in keeper.active.groups.items():
        pipe = found.run.pipes[members]
        assert pipe.stages.streamed == 0
        assert pipe.capacity == (keeper.active.capacity(group) if group.is_dropped else fleet.tokens)
        for member, span in zip(members, group.spans, strict=True):
            assert keeper.pulls.held[member] >= {*span.layers}, "nobody computes layers that it does not have"


def _is_empty(keeper: DropPolicy) -> None:
    """No memory of a device or a host is in use, and nothing is on its way."""
    for pipe in keeper.run.pipes.values():
        assert (pipe.used, pipe.in_flight, pipe.all_jobs(), pipe.stages.halted) == (0, 0, set(), False), pipe.members
        host = keeper.host(pipe)
        assert (host.room, host.away, host.copies) == (len(pipe.members) * keeper.run.fleet.host_budget, [], [])
    assert {*keeper._hosts} <= {*keeper.run.pipes.values()}
    assert keeper.requests.pipes == {}
    assert keeper.changes._changes == []
    assert keeper.changes.prepared.groups == {}
    assert keeper.changes.exchanging == set()
    assert keeper.requests.early == {}
    assert keeper.pulls._chains == {}
    assert [each._messages for each in keeper.run.links if each._messages] == []
