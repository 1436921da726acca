"""Recorded requests on replicas of one model in virtual time: the supervisor and the main loops of `ballonet serve`.

Note [What is real]
    The supervisor, its ledger and controller, the replicas' main loops, their messages, epochs, moves of layers and
    exchange of KV are those of hooks/replicas. What they reach is simulated: processes, links (virtual_link.py), and
    the model (virtual_stage.py). A process that has ended is not started again; a fault file may add others.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ...offload.policy.replicas.pipeline import ChunkCost
from ...offload.policy.replicas.protocol import Note, Reason
from ...offload.policy.replicas.tuning import DEFAULT, ReplicaTuning
from ..replicas.channel import Members, ToSupervisor
from ..replicas.errors import SupervisorLost
from ..replicas.layer_moves import ReplicaSetup
from ..replicas.link import LinkState
from ..replicas.messages import Fingerprint, Hello, Message
from ..replicas.microbatch_plan import Request, split_by_cost
from ..replicas.recording import Notes
from ..replicas.replica import Replica
from ..replicas.replica_model import HostTimeMarks, StageTimes
from ..replicas.supervisor import Supervisor, SupervisorPorts
from ..server.arrivals import RecordedArrival
from ..server.load import Answered
from .faults import (
    ClientLeft,
    DamagedKV,
    FaultRefused,
    FileChanged,
    Hung,
    Killed,
    LinkLost,
    NewReplica,
    PlayedFault,
    Shutdown,
    SupervisorFails,
    check_faults,
)
from .fleet import VirtualFleet
from .group_queue import Job
from .memory_policies import Peers, PeerSetup
from .virtual_link import Sender, VirtualLink
from .virtual_stage import VirtualLayers, VirtualMachine, VirtualReplicaModel, VirtualStage
from .virtual_time import VirtualTime, VirtualWakeup

_PRINT = Fingerprint("", "", "", "", "")
# Seconds to take layers out of a replica's memory: paper 003, §4.1.
_DROPPING: Final = 0.005
# Seconds until the other end of a link hears that it is lost. Measured: gloo after SIGKILL, 0.02 to 0.1 s.
_NOTICING: Final = 0.05


@dataclass(eq=False, slots=True)
class RecordedClient:
    """A recorded request. `delivered`: tokens that its client has; `is_over`: it has all, got an error, or is gone."""

    number: int
    arrival: RecordedArrival
    answer: Answered
    delivered: int = 0
    is_over: bool = False

    @property
    def new(self) -> int:
        """Tokens of the answer, at least one."""
        return max(1, self.arrival.new)


class RecordedClients:
    """The clients of a run. `left`: how many wait; `news`: when one got a token."""

    def __init__(self, time: VirtualTime, arrivals: Sequence[RecordedArrival], note: Callable[[int], object]) -> None:
        """`note`: called with the number of requests that have ended."""
        self.all = [RecordedClient(number, arrival, Answered(arrival.at)) for number, arrival in enumerate(arrivals)]
        self.left = len(self.all)
        self.news = 0.0
        self._time = time
        self._note = note

    def deliver(self, client: RecordedClient, tokens: int) -> None:
        """Takes in that a client has so many tokens in all."""
        now = self.news = self._time.now()
        client.answer.times.extend([now] * (tokens - client.delivered))
        client.delivered = client.answer.tokens = tokens
        client.answer.ended = now
        if tokens == client.new:
            self.end(client)

    def end(self, client: RecordedClient, error: str = "") -> None:
        """Ends a request. `error`: why it has failed; empty: it has not."""
        assert not client.is_over, f"request {client.number} ends twice"
        client.is_over = True
        client.answer.error, client.answer.refused = error, bool(error)
        self.left -= 1
        self._note(len(self.all) - self.left)

    def run(self, submit: Callable[[RecordedClient], object]) -> list[Answered]:
        """Runs until all requests have ended, and returns their answers. `submit`: called with each when it arrives."""
        for client in self.all:
            self._time.at(client.arrival.at, lambda client=client: submit(client))  # type: ignore[misc]
        self.news = max((client.arrival.at for client in self.all), default=0.0)
        while self.left and self._time.step():
            assert self._time.now() < self.news + 3600, f"{self.left} requests wait for nothing"
        assert not self.left, f"{self.left} requests wait for nothing"
        return [client.answer for client in self.all]


class ToVirtualSupervisor(ToSupervisor):
    """A replica's end of its channel, within one process."""

    def __init__(self, fleet: FleetRun, process: VirtualProcess, timeout: float) -> None:
        super().__init__(process.sender.wakeup, timeout)
        self._fleet = fleet
        self._process = process

    def post(self, *messages: Message) -> None:
        """Sends messages to the supervisor. SupervisorLost."""
        if self._lost or not self._process.sender.is_alive:
            raise SupervisorLost("the supervisor has ended")
        self._fleet.members.hear(self._process, messages)

    def close(self) -> None:
        """Does nothing."""


class VirtualProcess:
    """The process of a replica. `member`: its number, None before it has joined; `how`: it has ended; None: it has not;
    `links`: its ends of them."""

    def __init__(self, fleet: FleetRun, rank: int) -> None:
        """Starts it."""
        self.rank = rank
        self.member: int | None = None
        self.how: str | None = None
        self.links: list[VirtualLink] = []
        self._fleet = fleet
        time = fleet.time
        self.sender = Sender(time, VirtualWakeup(time), fleet.fleet.network)
        self.machine = VirtualMachine(time, fleet.fleet, self.sender)
        self.channel = ToVirtualSupervisor(fleet, self, fleet.tuning.joining)
        self.times = StageTimes(len(fleet.fleet.shape.layers), None, time.now, HostTimeMarks(time.now))
        self.task = time.start(self._run)

    def end(self, how: str) -> None:
        """Notes that the process has ended: others hear nothing from it any more. Idempotent."""
        if self.how is None:
            self.how = how
            self.sender.is_alive = False
            for link in self.links:
                if link.error is None:
                    self._fleet.lose_link(link)

    def kill(self) -> None:
        """Ends the process at once."""
        self.end("SIGKILL")
        self.task.end()

    def _run(self) -> None:
        fleet, tuning = self._fleet, self._fleet.tuning
        try:
            requests: tuple[Request, ...] | None = ()
            while requests is not None:
                welcome = self.channel.join(_PRINT, requests)
                me = self.member = welcome.member
                fleet.machines[me] = self.machine
                self.channel.post(fleet.hello(self.rank))
                model: Any = VirtualReplicaModel(self.machine, fleet.machines, fleet.cost, self.times)
                layers: Any = VirtualLayers(self.machine, _DROPPING)
                make_stage: Any = VirtualStage
                setup = ReplicaSetup(
                    me,
                    model,
                    len(fleet.fleet.shape.layers),
                    layers,
                    self.channel,
                    self._connect,
                    fleet.time.now,
                    split_by_cost(fleet.cost),
                    tuning,
                    Notes(fleet.time.now),
                    make_stage,
                )
                requests = Replica(setup, self.sender.wakeup).run()
        except SupervisorLost:
            pass
        self.end("exit status 0")

    def _connect(self, epoch: int, peer: int) -> Any:
        assert self.member is not None
        self.links = [link for link in self.links if link.error is None]
        link = VirtualLink(epoch, peer, self.sender)
        self.links.append(link)
        self._fleet.form_link(self.member, link)
        return link


class VirtualMembers(Members[VirtualProcess]):
    """The replicas of a run. `is_over`: the supervisor has ended."""

    is_over = False

    def send(self, sender: VirtualProcess, message: Message) -> None:
        """Sends a message to a replica. Nothing where its process, or the supervisor, has ended."""
        if sender.how is None and not self.is_over:
            sender.channel.arrive([message])


class FleetRun:
    """One run of replicas that drop layers. `time`: in which all happens; `machines`: of replicas, by member;
    `processes`: by rank; `members`: those of them that have joined; `supervisor`: of them; `clients`: of the run. Call
    `close` at the end. It is the supervisor's channel.Processes."""

    def __init__(
        self,
        fleet: VirtualFleet,
        cost: ChunkCost,
        arrivals: Sequence[RecordedArrival],
        tuning: ReplicaTuning = DEFAULT,
        log: Note = lambda entry: None,
        faults: Iterable[PlayedFault] = (),
        note: Callable[[int], object] = lambda done: None,
    ) -> None:
        """`tuning`: of controller and replicas; `log`: called with each decision; `faults`: to play; `note`: called
        with the number of requests that have ended. ManageError where a fault cannot happen."""
        given = [*faults]
        check_faults(given, fleet.replicas, len(arrivals))
        self.time = VirtualTime()
        self.fleet = fleet
        self.cost = cost
        decides = replace(tuning, chunk=fleet.batch, link=fleet.network)
        block = fleet.block * fleet.shape.kv / len(fleet.shape.layers)
        self.tuning = replace(decides, piece=max(tuning.piece, int(fleet.part(cost) / block)))
        self.machines: dict[int, VirtualMachine] = {}
        self.processes: dict[int, VirtualProcess] = {}
        self.clients = RecordedClients(self.time, arrivals, note)
        self.failed: str | None = None  # why the supervisor serves no more
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._ended: list[tuple[int, str]] = []
        self._forming: dict[tuple[int, frozenset[int]], VirtualLink] = {}
        wakeup = VirtualWakeup(self.time)
        self.members = VirtualMembers("", 0, wakeup)
        newcomers = sum(isinstance(fault, NewReplica) for fault in given)
        ports = SupervisorPorts(self.members, self, wakeup, self._deliver, lambda line: None, self.time.now)
        once, ranks = replace(decides, starts=1), fleet.replicas + newcomers
        self.supervisor = Supervisor(ports, ranks, cost, decides, log, replacing=once)
        self._task = self.time.start(self.supervisor.run)
        for fault in given:
            self.time.at(fault.at, lambda fault=fault: self._happens(fault))  # type: ignore[misc]
        self.supervisor.start_replicas()

    def answers(self) -> list[Answered]:
        """Runs until all requests have ended, and returns their answers."""
        return self.clients.run(self._submit)

    def close(self) -> None:
        """Ends all tasks."""
        self.time.close()

    @property
    def bytes_moved(self) -> int:
        """Bytes of KV and of layers that went over a link, between replicas or to and from the host."""
        return sum(process.machine.moved for process in self.processes.values())

    @property
    def bubble(self) -> float:
        """Fraction of the pipeline stages' time in which they waited with a microbatch in flight; 0 without any."""
        seconds = sum(process.times.open for process in self.processes.values())
        busy = sum(process.times.busy for process in self.processes.values())
        return max(0.0, 1 - busy / seconds) if seconds else 0.0

    def hello(self, rank: int) -> Hello:
        """Returns the Hello of the replica of a rank."""
        fleet = self.fleet
        host, process = platform.node(), os.getpid()
        return Hello(process, host, fleet.pages, fleet.layer_pages, fleet.shape.kv, fleet.page, self.cost, rank)

    # -- requests

    def _submit(self, client: RecordedClient) -> None:
        why = self.failed
        if why is None:
            tokens = max(1, client.arrival.prompt)
            prompt = self._prompts.setdefault(tokens, (0,) * tokens)
            why = self.supervisor.submit(Request(str(client.number), prompt, client.new))
        if why is not None:
            self.clients.end(client, why)

    def _deliver(self, request: Request, error: str | None) -> None:
        client = self.clients.all[int(request.name)]
        if client.is_over:
            return
        if error is None:
            self.clients.deliver(client, len(request.delivered))
        else:
            self.clients.end(client, error)

    # -- processes

    def start(self, rank: int) -> None:
        """Starts the replica of a rank; those that a fault adds start later. OSError where it has ended."""
        if rank in self.processes:
            raise OSError("no process of a simulation is started again")
        if rank < self.fleet.replicas:
            self.processes[rank] = VirtualProcess(self, rank)

    def ended(self) -> list[tuple[int, str]]:
        """Returns the ranks of the processes that have ended since the last call, and how each did."""
        gone = [process for process in self.processes.values() if process.how is not None]
        new = [(process.rank, process.how or "") for process in gone if process.rank not in dict(self._ended)]
        self._ended += new
        return new

    def end(self, rank: int, for_good: bool = False) -> None:
        """Kills the process of a rank, if there is one."""
        if rank in self.processes:
            self.processes[rank].kill()

    # -- links

    def form_link(self, member: int, link: VirtualLink) -> None:
        """Forms a link, of which a member has this end, once the other end is there."""
        key = (link.epoch, frozenset((member, link.peer)))
        other = self._forming.pop(key, None)
        if other is None:
            self._forming[key] = link
            is_known = any(process.member == link.peer and process.how is None for process in self.processes.values())
            wait = self.tuning.forming if is_known else _NOTICING
            self.time.after(wait, lambda: self._give_up(key, link))
            return
        link.other, other.other = other, link
        self.time.after(self.tuning.linking, lambda: self._open(link, other))

    def lose_link(self, link: VirtualLink) -> None:
        """Has the other end of a link notice that it is lost."""
        if (other := link.other) is not None:
            self.time.after(_NOTICING, lambda: other.lose("the other end does not answer"))

    def _open(self, link: VirtualLink, other: VirtualLink) -> None:
        for end, far in ((link, other), (other, link)):
            if far.owner.is_alive and far.error is None:
                end.open()
            else:
                end.lose("the other end does not answer")

    def _give_up(self, key: tuple[int, frozenset[int]], link: VirtualLink) -> None:
        if link.state is LinkState.FORMING and link.other is None:
            self._forming.pop(key, None)
            link.lose("it could not be formed")

    # -- faults

    def _happens(self, fault: PlayedFault) -> None:
        match fault:
            case Killed():
                self.processes[fault.member].kill()
            case Hung():
                self._pause(self.processes[fault.member], fault.seconds)
            case LinkLost():
                for link in self.processes[fault.member].links:
                    if link.peer == self.processes[fault.other].member and link.error is None and link.other:
                        self.lose_link(link)
                        self.lose_link(link.other)
            case FaultRefused():
                self.processes[fault.member].machine.refusing = Reason[fault.why]
            case FileChanged():
                self.processes[fault.member].machine.changed = True
            case DamagedKV():
                self.processes[fault.member].sender.damages = True
            case ClientLeft():
                self._leave(self.clients.all[fault.request])
            case NewReplica():
                self.processes[fault.member] = VirtualProcess(self, fault.member)
            case SupervisorFails():
                self._shut("the supervisor has ended")
                self.members.is_over = True
                self._task.end()
                for process in self.processes.values():
                    process.channel.lose()
            case Shutdown():
                self.supervisor.end_requests()
                self._shut("the server shuts down")
            case _:
                raise TypeError(f"{fault!r} is no fault that can be played")

    def _pause(self, process: VirtualProcess, seconds: float | None) -> None:
        process.task.pause()
        if seconds is not None:
            self.time.after(seconds, process.task.resume)

    def _leave(self, client: RecordedClient) -> None:
        if not client.is_over and client.arrival.at <= self.time.now():
            self.supervisor.cancel(str(client.number))
            self.clients.end(client, "its client is gone")

    def _shut(self, why: str) -> None:
        """Ends all requests that have come; later ones are refused."""
        self.failed = why
        for client in self.clients.all:
            if not client.is_over and client.arrival.at <= self.time.now():
                self.clients.end(client, why)


class PeerRun:
    """One run of replicas that drop no layers, see memory_policies.py. `moved`: bytes of KV."""

    def __init__(
        self,
        fleet: VirtualFleet,
        cost: ChunkCost,
        arrivals: Sequence[RecordedArrival],
        policy: str,
        note: Callable[[int], object] = lambda done: None,
    ) -> None:
        """`policy`: of Peers; `note`: called with the number of requests that have ended."""
        self.bytes_moved = 0
        time = VirtualTime()
        self.clients = RecordedClients(time, arrivals, note)
        self.peers = Peers(PeerSetup(time, fleet, cost, policy, self._deliver, self._moved))

    def answers(self) -> list[Answered]:
        """Runs until all requests have ended, and returns their answers."""
        return self.clients.run(self._submit)

    def _submit(self, client: RecordedClient) -> None:
        job = Job(str(client.number), client.number, max(1, client.arrival.prompt), client.new)
        if (why := self.peers.submit(job)) is not None:
            self.clients.end(client, why)

    def _deliver(self, job: Job) -> None:
        self.clients.deliver(self.clients.all[job.number], job.made)

    def _moved(self, nbytes: int) -> None:
        self.bytes_moved += nbytes
