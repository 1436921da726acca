"""Small fleets, traces and costs for tests of replicas in virtual time, and what has to hold whatever goes wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from ballonet.hooks.server.arrivals import RecordedArrival
from ballonet.hooks.virtual_replicas.faults import PlayedFault
from ballonet.hooks.virtual_replicas.fleet import Shape, VirtualFleet
from ballonet.hooks.virtual_replicas.fleet_run import FleetRun, RecordedClient
from ballonet.offload.policy.replicas.controller import Controller
from ballonet.offload.policy.replicas.pipeline import ChunkCost
from ballonet.offload.policy.replicas.protocol import Action, Decision, Dispatch, Entry, Event, Setup
from ballonet.offload.policy.replicas.tuning import ReplicaTuning

PAGE = 2**16
KV = 2**12  # bytes of a token, so a page has 16
SHAPE = Shape((16 * PAGE,) * 8, 2 * PAGE, KV, 256)
# a step of 1 ms, and 20 us of each new token; a request of 300 tokens then decodes for a second
COST = ChunkCost(1e-9, 2e-5, 1e-3, decode=ChunkCost(0.0, 2e-5, 1e-3, prefix=1e-8))
SLOW = ChunkCost(1e-9, 2e-5, 2e-2, decode=ChunkCost(0.0, 2e-5, 2e-2, prefix=1e-8))  # weights are what takes time
SLOWLY = 4e6  # bytes per second between two: a layer takes a quarter of a second
TUNING = ReplicaTuning(linking=0.1)  # an epoch of two is prepared for 0.1 s
A = TypeVar("A", bound=Action)
E = TypeVar("E", bound=Event)


def fleet(replicas: int, tokens: int, shape: Shape = SHAPE, host: int = 2**30, network: float = 1e9) -> VirtualFleet:
    """Replicas that have room for about so many tokens of KV beside all layers."""
    weights = sum(shape.layers) + shape.rest
    return VirtualFleet(shape, replicas, weights + tokens * shape.kv, PAGE, host, 1e9, network, batch=256)


def burst(count: int, every: float, prompt: int, new: int, seed: int = 0, begin: float = 0.0) -> list[RecordedArrival]:
    """Requests at random times, `every` seconds on average; lengths are up to twice as long as their mean."""
    random, at, arrivals = Random(seed), begin, list[RecordedArrival]()
    for _ in range(count):
        at += random.expovariate(1 / every)
        arrivals.append(RecordedArrival(at, random.randrange(1, 2 * prompt), random.randrange(1, 2 * new)))
    return arrivals


BURST = burst(240, 0.1, 60, 150) + burst(4, 6.0, 20, 20, begin=45.0)


def replayed(log: Sequence[Entry]) -> Iterator[tuple[Decision, Decision]]:
    """Yields each decision of a log that begins with a setup, and what a new controller of that setup decides for the
    same event at the same time."""
    setup = log[0]
    assert isinstance(setup, Setup)
    controller = Controller(setup.pages, setup.kv, setup.cost, setup.tuning, setup.page_seconds)
    for decision in log[1:]:
        assert isinstance(decision, Decision)
        actions = tuple(controller.on(decision.event))
        yield decision, Decision(controller.epoch, decision.event, actions)


def decided(log: Iterable[Entry]) -> list[tuple[float, Action]]:
    """What a controller decided, and when, but for where requests go."""
    return [
        (entry.event.at, action)
        for entry in log
        if isinstance(entry, Decision)
        for action in entry.actions
        if not isinstance(action, Dispatch)
    ]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run to its end, and all that its controller was told and answered."""

    run: FleetRun
    log: list[Entry]

    @property
    def decisions(self) -> list[Decision]:
        """The decisions of the log."""
        return [entry for entry in self.log if isinstance(entry, Decision)]

    def actions(self, kind: type[A]) -> list[tuple[float, A]]:
        """Actions of a kind, and when they were decided."""
        return [(it.event.at, action) for it in self.decisions for action in it.actions if isinstance(action, kind)]

    def events(self, kind: type[E]) -> list[E]:
        """Events of a kind."""
        return [decision.event for decision in self.decisions if isinstance(decision.event, kind)]

    def answer(self, event: Event) -> tuple[Action, ...]:
        """The actions that an event was answered with."""
        return next(decision.actions for decision in self.decisions if decision.event == event)

    @property
    def clients(self) -> list[RecordedClient]:
        """All clients, by their numbers."""
        return self.run.clients.all

    @property
    def errors(self) -> dict[int, str]:
        """Why requests ended, by their numbers; those that were answered are not in it."""
        return {client.number: client.answer.error for client in self.clients if client.answer.error}

    @property
    def controller(self) -> Controller:
        """The controller, after the first replica has joined."""
        assert self.run.supervisor._controller is not None
        return self.run.supervisor._controller

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The members of the groups in force."""
        return sorted(self.controller.cluster.groups)


def outcome(
    faults: Sequence[PlayedFault] = (),
    arrivals: list[RecordedArrival] = BURST,
    at: VirtualFleet | None = None,
    cost: ChunkCost = SLOW,
) -> Outcome:
    """Plays faults, to the end of the last request and until all is settled, and checks what has to hold."""
    log: list[Entry] = []
    run = FleetRun(at or fleet(2, 1600, network=SLOWLY), cost, arrivals, TUNING, log.append, faults)
    try:
        run.answers()
        settled, time = run.time.now() + 15, run.time
        while time.now() < settled and time.step():
            pass
        played = Outcome(run, log)
        check(played)
    finally:
        run.close()
    assert all(task.is_over for task in run.time.tasks)
    return played


def check(played: Outcome) -> None:
    """Every request was answered or told why not, once; memory is what it was; and the controller would say the same
    again."""
    run = played.run
    for client in played.clients:
        assert client.is_over
        assert client.answer.times == sorted(client.answer.times)
        assert len(client.answer.times) == client.delivered <= client.new
        assert bool(client.answer.error) != (client.delivered == client.new), client
    assert all(one == other for one, other in replayed(played.log))
    alive = {process.member: process for process in run.processes.values() if process.how is None}
    if run.failed is not None:
        assert alive == {}
        return
    played.controller.check()
    assert [*played.controller.book.held] == []
    assert run.supervisor.state().requests == 0
    assert sorted(member for members in played.groups for member in members) == sorted(alive)
    for members in played.groups:
        for member in members:
            machine = alive[member].machine
            (stage,) = machine.stages
            assert (stage.group.members, stage.cache.tokens, stage.cache.on_host) == (members, 0, set())
            if stage.leader is not None:
                queue, swap = stage.leader.queue, stage.leader._swap
                assert (queue.used, [*queue.waiting], [*queue.running], [*swap.away]) == (0, [], [], [])
                assert (swap.copies, stage.leader.by_name, stage.leader.in_flight) == (set(), {}, 0)
            assert stage.group.is_dropped or machine.missing == 0, "all layers are home"
