"""Groups of replicas that drop parameters, in virtual time: how they begin and end, and who is in which."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ....offload.policy.replicas.demand import group_tokens, kv_pages
from ....offload.policy.replicas.dispatch import Members
from ....offload.policy.replicas.events import Committed
from ....offload.policy.replicas.groups import Group
from .jobs import Job
from .pipeline import Pipeline

if TYPE_CHECKING:
    from .drop_policy import DropPolicy


class ActiveGroups:
    """`groups`: in force, by members; `epochs`: that each replica is in."""

    def __init__(self, policy: DropPolicy) -> None:
        self.groups: dict[Members, Group] = {}
        self.epochs: dict[int, int] = {}
        self._policy = policy
        self._run = policy.run
        self._group_of: dict[int, Members] = {}

    def pipe_of(self, member: int) -> Pipeline | None:
        """The group that a replica is in, if it is in one."""
        return self._run.pipes.get(self._group_of.get(member, ()))

    def capacity(self, group: Group) -> int:
        """Tokens of KV that a group has room for."""
        fleet = self._run.fleet
        room = kv_pages(group, dict.fromkeys(group.members, fleet.pages), fleet.layer_pages)
        return group_tokens(group, room, self._policy.kv)

    def form(self, group: Group, epoch: int, jobs: Iterable[Job]) -> Pipeline:
        """Returns a new group with requests whose KV is on the way, and others."""
        policy, requests = self._policy, self._policy.requests
        pipe = self._run.open(group.members, [*map(len, group.spans)], self.capacity(group), policy)
        host = policy.host(pipe)
        self.groups[group.members] = group
        for job in jobs:
            requests.belongs(job, pipe)
            pipe.used += job.held
            if job.held and job.kv:
                job.stalled = True
                pipe.stalled.append(job)
            elif job.held:
                pipe.resume(job)
            elif job.kv:
                host.away.append(job)
                host.room -= policy.nbytes(job)
            else:
                pipe.waiting.append(job)
        for job in requests.early.pop(group.members, ()):
            requests.belongs(job, pipe)
            pipe.waiting.append(job)
        for member in group.members:
            self.epochs[member] = epoch
            self._group_of[member] = group.members

            def says(member: int = member) -> None:
                policy.tell(Committed(self._run.events.now, epoch, member))

            policy.processes.does(member, says)
        self._refresh(pipe)
        self._run.events.after(0.0, pipe.pump)
        return pipe

    def hand_over(self, pipe: Pipeline) -> list[Job]:
        """Returns the requests of a group that ends with nothing under way."""
        assert not pipe.stalled, "no group changes before its KV is exchanged"
        return [*pipe.jobs(), *pipe.waiting, *self._policy.close(pipe).away]

    def abort(self, pipe: Pipeline) -> None:
        """A group is no more, with all that it was computing. Its requests are nowhere until the controller says."""
        pipe.stages.halt()
        host = self._policy.host(pipe)
        for member in pipe.members:
            for link in self._run.links_of(member):
                link.take_back(pipe)
        for job in {*pipe.everybody(), *host.away, *host.copies}:
            self._policy.requests.forget(job)
            job.reset()
        self._policy.changes.exchanging.discard(pipe)
        self._policy.close(pipe)
        del self.groups[pipe.members]
        self._run.close(pipe)

    def halt(self, member: int) -> None:
        """The group of a replica computes nothing until the controller says what becomes of it."""
        if (pipe := self.pipe_of(member)) is not None:
            pipe.stages.halt()

    def part(self, member: int) -> None:
        """Whatever a replica was part of is no more."""
        if member not in self.epochs:
            return
        policy = self._policy
        policy.changes.part(member)
        policy.pulls.cancel(member)
        early = policy.requests.early
        for members in [each for each in early if member in each]:
            del early[members]
        if (pipe := self.pipe_of(member)) is not None:
            self.abort(pipe)

    def layer_came(self, member: int) -> None:
        """The replica has one layer more."""
        if (pipe := self.pipe_of(member)) is not None:
            self._refresh(pipe)

    def _refresh(self, pipe: Pipeline) -> None:
        """A replica on its own reads what it lacks from its backing."""
        if len(pipe.members) == 1:
            pipe.stages.streamed = self._policy.pulls.missing(pipe.members[0])
