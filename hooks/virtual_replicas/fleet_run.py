"""Recorded requests on replicas of one model, under a virtual clock.

Note [What is simulated]
    Nothing is computed, and there are no pages: a batch takes the seconds of a `ChunkCost`, a copy its bytes divided by
    the bandwidth, and each answer has as many tokens as were recorded, which dispatcher and controller know in advance.
    Decisions are those of policy/replicas/. Two runs take the same ones: nothing reads a clock, and actions of one time
    are performed in the order in which they were scheduled. A step of the simulation costs O(requests of its batch), a
    request O(log replicas), a tick of the controller O(replicas).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...offload.policy.replicas.chunk_cost import ChunkCost
from ...offload.policy.replicas.decisions import Note
from ...offload.policy.replicas.dispatch import Members
from ...offload.policy.tuning import DEFAULT, Replicas
from ..server.load import Answered, RecordedArrival
from .event_queue import EventQueue
from .fleet import VirtualFleet
from .jobs import Job
from .pipeline import MemoryPolicy, Pipeline
from .virtual_link import VirtualLink


class FleetRun:
    """One run. `pipes`: the groups that compute, by their members; `links`: all of replicas and hosts; `silent`:
    replicas that compute nothing, as they have ended or are paused."""

    def __init__(
        self,
        fleet: VirtualFleet,
        cost: ChunkCost,
        arrivals: Sequence[RecordedArrival],
        tuning: Replicas = DEFAULT.replicas,
        log: Note = lambda entry: None,
    ) -> None:
        """`tuning`: of the controller; `log`: called with each of its decisions."""
        self.fleet = fleet
        self.cost = cost
        self.tuning = tuning
        self.log = log
        self.silent: set[int] = set()
        self.events = EventQueue()
        self.jobs = [Job(number, arrival) for number, arrival in enumerate(arrivals)]
        self.links: list[VirtualLink] = []
        self.pipes: dict[Members, Pipeline] = {}
        self._left = len(self.jobs)
        self._sent: dict[int, VirtualLink] = {}
        self._hosts: dict[tuple[int, bool], VirtualLink] = {}
        self._busy = self._open = 0.0

    @property
    def has_open_requests(self) -> bool:
        """Whether any request has not ended."""
        return self._left > 0

    def link_of(self, member: int) -> VirtualLink:
        """Returns the link over which a replica sends to others."""
        if member not in self._sent:
            self._sent[member] = VirtualLink(self.events, self.fleet.network, self.fleet.part(self.cost))
            self.links.append(self._sent[member])
        return self._sent[member]

    def host_link(self, member: int, *, back: bool) -> VirtualLink:
        """Returns the link of a replica to its host, or `back`."""
        if (member, back) not in self._hosts:
            self._hosts[member, back] = VirtualLink(self.events, self.fleet.link, self.fleet.budget)
            self.links.append(self._hosts[member, back])
        return self._hosts[member, back]

    def links_of(self, member: int) -> list[VirtualLink]:
        """Returns all links of a replica."""
        return [self.link_of(member), self.host_link(member, back=False), self.host_link(member, back=True)]

    def every(self, period: float, act: Callable[[], None]) -> None:
        """Schedules `act` once a period, in seconds, until all requests have ended."""

        def again() -> None:
            if self.has_open_requests:
                act()
                self.events.after(period, again)

        self.events.at(0.0, again)

    def open(self, members: Members, spans: Sequence[int], capacity: int, policy: MemoryPolicy) -> Pipeline:
        """Begins a group and returns it. `spans`: number of layers of each member; `capacity`: tokens of KV."""
        links = [self.link_of(member) for member in members]
        pipe = Pipeline(self.events, self.fleet, self.cost, policy, members, spans, links, capacity, self.silent)
        self.pipes[members] = pipe
        return pipe

    def close(self, pipe: Pipeline) -> None:
        """Ends a group, and adds up the times of its stages."""
        del self.pipes[pipe.members]
        if len(pipe.members) > 1:
            self._busy += pipe.stages.busy
            self._open += pipe.open

    @property
    def bubble(self) -> float:
        """Fraction of the pipeline stages' time in which they waited with a microbatch in flight; 0 without any."""
        pipes = [pipe for pipe in self.pipes.values() if len(pipe.members) > 1]
        seconds = self._open + sum(pipe.open for pipe in pipes)
        return 1 - (self._busy + sum(pipe.stages.busy for pipe in pipes)) / seconds if seconds else 0.0

    @property
    def bytes_moved(self) -> int:
        """Bytes of KV and of weights that went over a link, between replicas or to and from the host."""
        return sum(link.moved for link in self.links)

    def finish(self, job: Job, error: str = "") -> None:
        """Ends a request. `error`: why it has failed; empty: it has not."""
        assert not job.over, f"request {job.number} ends twice"
        job.over = True
        self._left -= 1
        job.answer.error, job.answer.refused = error, bool(error)

    def answers(self, arrive: Callable[[Job], None], note: Callable[[int], None]) -> list[Answered]:
        """Runs until all requests have ended, and returns their answers. `arrive`: called with each request when it
        arrives; `note`: called with the number of requests that have ended."""
        for job in self.jobs:
            self.events.at(job.arrival.at, lambda job=job: arrive(job))  # type: ignore[misc]
        ended = 0
        while self.has_open_requests and self.events.step():
            if len(self.jobs) - self._left != ended:
                ended = len(self.jobs) - self._left
                note(ended)
        assert not self.has_open_requests, f"{self._left} requests wait for nothing"
        return [job.answer for job in self.jobs]
