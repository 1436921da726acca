"""The groups in force of replicas that drop layers, in virtual time: how they begin and end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...offload.policy.replicas.demand import group_tokens, kv_pages
from ...offload.policy.replicas.dispatch import Members
from ...offload.policy.replicas.events import Committed
from ...offload.policy.replicas.groups import Group
from .jobs import Job
from .pipeline import Pipeline

if TYPE_CHECKING:
    from .drop_policy import DropPolicy


class ActiveGroups:
    """The groups in force. `groups`: by their members; `epochs`: of each replica."""

    def __init__(self, policy: DropPolicy) -> None:
        self.groups: dict[Members, Group] = {}
        self.epochs: dict[int, int] = {}
        self._policy = policy
        self._run = policy.run
        self._group_of: dict[int, Members] = {}

    def pipe_of(self, member: int) -> Pipeline | None:
        """Returns the group of a replica, if it has one."""
        return self._run.pipes.get(self._group_of.get(member, ()))

    def capacity(self, group: Group) -> int:
        """Returns the tokens of KV that a group can hold."""
        fleet = self._run.fleet
        room = kv_pages(group, dict.fromkeys(group.members, fleet.pages), fleet.layer_pages)
        return group_tokens(group, room, self._policy.kv)

    def begin(self, group: Group, epoch: int, jobs: Iterable[Job]) -> Pipeline:
        """Begins a group with these requests, stalled while their KV is on the way, and returns it."""
        policy, requests = self._policy, self._policy.requests
        pipe = self._run.open(group.members, [*map(len, group.spans)], self.capacity(group), policy)
        host = policy.host(pipe)
        self.groups[group.members] = group
        for job in jobs:
            requests.assign(job, pipe)
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
            requests.assign(job, pipe)
            pipe.waiting.append(job)
        for member in group.members:
            self.epochs[member] = epoch
            self._group_of[member] = group.members

            def report(member: int = member) -> None:
                policy.tell(Committed(self._run.events.now, epoch, member))

            policy.processes.schedule(member, report)
        self._update_streamed(pipe)
        self._run.events.after(0.0, pipe.pump)
        return pipe

    def hand_over(self, pipe: Pipeline) -> list[Job]:
        """Ends the memory of a group with nothing in flight, and returns its requests."""
        assert not pipe.stalled, "no group changes before its KV is exchanged"
        return [*pipe.jobs(), *pipe.waiting, *self._policy.close(pipe).away]

    def abort(self, pipe: Pipeline) -> None:
        """Ends a group with everything in flight. Its requests are in no group until the controller assigns them."""
        pipe.stages.halt()
        host = self._policy.host(pipe)
        for member in pipe.members:
            for link in self._run.links_of(member):
                link.cancel(pipe)
        for job in {*pipe.all_jobs(), *host.away, *host.copies}:
            self._policy.requests.forget(job)
            job.reset()
        self._policy.changes.exchanging.discard(pipe)
        self._policy.close(pipe)
        del self.groups[pipe.members]
        self._run.close(pipe)

    def halt(self, member: int) -> None:
        """Stops the group of a replica until the controller ends it."""
        if (pipe := self.pipe_of(member)) is not None:
            pipe.stages.halt()

    def detach(self, member: int) -> None:
        """Ends the group, the changes and the pulls of a replica."""
        if member not in self.epochs:
            return
        policy = self._policy
        policy.changes.detach(member)
        policy.pulls.cancel(member)
        early = policy.requests.early
        for members in [group for group in early if member in group]:
            del early[members]
        if (pipe := self.pipe_of(member)) is not None:
            self.abort(pipe)

    def on_layer_pulled(self, member: int) -> None:
        """Notes that a replica has pulled a layer."""
        if (pipe := self.pipe_of(member)) is not None:
            self._update_streamed(pipe)

    def _update_streamed(self, pipe: Pipeline) -> None:
        """Sets the bytes that a lone replica reads from its backing in each microbatch: the layers that it lacks."""
        if len(pipe.members) == 1:
            pipe.stages.streamed = self._policy.pulls.missing(pipe.members[0])
