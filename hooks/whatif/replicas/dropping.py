"""Replicas that drop parameters, in virtual time: the controller decides, and this carries out what it says.

Note [What is played]
    Every period each replica tells its load, and the controller has a look. An epoch is prepared as long as its links
    take. At the commit the groups concerned finish their microbatches; then layers are dropped, and each member sends
    the KV that no longer belongs to its span, behind activations. Requests whose KV is on the way are stalled, others
    begin. For a restore the group gives up the memory that its layers need, and members pull them one after the other
    from the wires of those that have them; at the commit KV goes home (epochs.py). Where memory is short all the same,
    requests go to the host (`Swap`); their KV there is exchanged as that of others is, and they come back after that.
    What goes wrong is played as well, where it is given (faults.py): a replica that has lost its group is on its own at
    once, and reads the layers that it lacks from its backing in each microbatch, which takes as long as the copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from ....offload.policy.replicas import actions
from ....offload.policy.replicas.actions import Action
from ....offload.policy.replicas.decisions import Setup, decide
from ....offload.policy.replicas.demand import KVSize, group_tokens, kv_pages, prompt_pages
from ....offload.policy.replicas.dispatch import Members
from ....offload.policy.replicas.events import Arrived, Committed, Event, Finished, Left, Load, Tick
from ....offload.policy.replicas.groups import Group, alone
from .crew import Crew
from .epochs import Epochs
from .jobs import Job
from .keepers import RecomputePolicy, Swap
from .pipes import Pipe
from .presence import Presence
from .pulling import Pulls

if TYPE_CHECKING:
    from .fleet_run import FleetRun


class Drop(Swap):
    """See Note [What is played]. `groups`: in force, by members; `epochs`: that each replica is in; `early`: requests
    of groups that are about to be formed; `replicas`: that come and go; `looks`: that the
    controller has had."""

    def __init__(self, run: FleetRun) -> None:
        fleet = run.fleet
        self.kv = KVSize(fleet.shape.kv, fleet.page)
        setup = Setup(
            fleet.layer_pages, self.kv, run.cost, replace(run.tuning, chunk=fleet.batch), fleet.page / fleet.network
        )
        run.log(setup)
        self.controller = setup.controller()
        self.run = run
        self.groups: dict[Members, Group] = {}
        self.epochs: dict[int, int] = {}
        self.early: dict[Members, list[Job]] = {}
        self.crew = Crew(run)
        self.pulls = Pulls(run, self.crew, self._layer_came)
        self.changes = Epochs(self)
        self.replicas = Presence(self)
        self._group_of: dict[int, Members] = {}
        self._in: dict[Job, Pipe] = {}  # the group that has a request
        self._asked: dict[str, Job] = {}  # that have not ended
        self.looks = 0
        super().__init__(run)
        run.every(run.tuning.period, self._look)

    def _open(self) -> None:
        for member in range(self.run.fleet.replicas):
            self.replicas.join(member)

    # Requests

    def arrive(self, job: Job) -> None:
        """The controller says where it goes."""
        if self.replicas.failed is not None:
            self.run.over(job, self.replicas.failed)
            return
        self._asked[str(job.number)] = job
        self.tell(Arrived(self.run.agenda.now, str(job.number), job.arrival.prompt, max(1, job.arrival.new)))

    def ended(self, pipe: Pipe, job: Job) -> None:
        """The controller is told, unless the client was gone."""
        self._in.pop(job)
        if not job.over:
            self._over(job)
            self.tell(Finished(self.run.agenda.now, str(job.number)))

    def leave(self, job: Job, why: str) -> None:
        """The client of a request is gone, or was told why nothing comes. Nothing happens where it has ended."""
        if self._asked.get(str(job.number)) is job:
            self._over(job, why)
            self.tell(Left(self.run.agenda.now, str(job.number)))

    def leave_all(self, why: str) -> None:
        """The same with all requests."""
        for job in [*self._asked.values()]:
            self.leave(job, why)

    def end_all(self, why: str) -> None:
        """Ends all requests; nobody tells the controller."""
        for job in [*self._asked.values()]:
            self._over(job, why)

    def _over(self, job: Job, error: str = "") -> None:
        del self._asked[str(job.number)]
        self.run.over(job, error)

    def admit(self, pipe: Pipe) -> None:
        """As `Swap`, but while KV is exchanged only new requests begin."""
        if pipe in self.changes.exchanging:
            RecomputePolicy.admit(self, pipe)
        else:
            super().admit(pipe)

    def landed(self, pipe: Pipe, job: Job) -> None:
        """A request that was cancelled is in no microbatch now."""
        self._take_out(pipe, job)

    def _give(self, job: Job, members: Members) -> None:
        if members in self.early:
            self.early[members].append(job)
        else:
            self._in[job] = pipe = self.run.pipes[members]
            pipe.add(job)

    def _again(self, job: Job, members: Members) -> None:
        """The request starts anew, from the tokens that its client has."""
        if (pipe := self._in.get(job)) is not None:
            self._take_out(pipe, job)
        job.reset()
        self._give(job, members)

    def _cancel(self, job: Job) -> None:
        pipe = self._in.get(job)
        if pipe is None:
            for waiting in self.early.values():
                if job in waiting:
                    waiting.remove(job)
        elif job.flying or job in self.host(pipe).copies:
            job.leaving = True
        else:
            self._take_out(pipe, job)

    def _take_out(self, pipe: Pipe, job: Job) -> None:
        """The request, which is in no microbatch, is in no group any more."""
        host = self.host(pipe)
        if job in host.away:
            host.away.remove(job)
            host.room += self._bytes(job)
        else:
            pipe.remove(job)
            pipe.release(job)
        del self._in[job]
        job.reset()
        pipe.pump()

    def _went(self, pipe: Pipe, job: Job) -> None:
        super()._went(pipe, job)
        self._leaves(pipe, job)

    def _came(self, pipe: Pipe, job: Job) -> None:
        super()._came(pipe, job)
        self._leaves(pipe, job)

    def _leaves(self, pipe: Pipe, job: Job) -> None:
        """A request that was cancelled while it was copied goes."""
        if job.leaving and not job.flying and job not in self.host(pipe).copies:
            self._take_out(pipe, job)

    # The controller

    def tell(self, event: Event) -> None:
        """Tells the controller an event, and does what it answers. Nothing once there is none."""
        if not self.replicas.are_shut:
            for action in decide(self.controller, event, self.run.log):
                self._do(action)

    def _look(self) -> None:
        """Loads of all replicas that run, and then a look of the controller."""
        now, kv = self.run.agenda.now, self.kv
        self.looks += 1
        for members, group in self.groups.items():
            pipe = self.run.pipes[members]
            queued = prompt_pages((job.known for job in chain(pipe.waiting, self.host(pipe).away)), kv)
            for stage, (member, span) in enumerate(zip(members, group.spans, strict=True)):
                if member in self.run.silent:
                    continue
                part = len(span) / group.layers
                used, free = (int(each * part * kv.token / kv.page) for each in (pipe.used, max(0, pipe.free)))
                if pipe.stages.halted:
                    used = free = queued = 0  # it has forgotten all
                pending = 0 if stage else queued  # the first one tells it for all
                self.tell(Load(now, member, self.epochs[member], used, free, pending, self.looks))
        self.tell(Tick(now))

    def _do(self, action: Action) -> None:
        match action:
            case actions.Dispatch():
                self._give(self._asked[action.request], action.members)
            case actions.Recompute():
                for name in action.requests:
                    self._again(self._asked[name], action.members)
            case actions.Refuse():
                self._over(self._asked[action.request], action.reason.value)
            case actions.Cancel():
                self._cancel(self.run.jobs[int(action.request)])
            case actions.Alone():
                self.part(action.member)
                self.form(alone(action.member, len(self.run.fleet.shape.layers)), action.epoch, ())
            case actions.Prepare():
                self.changes.prepared.prepare(action)
            case actions.StartRestore():
                self.changes.prepared.start_restore(action)
            case actions.Discard():
                self.changes.prepared.discard(action.epoch)
            case actions.Commit():
                self.changes.commit(action.epoch, dict(action.homes))
            case actions.Fence():
                self.replicas.fence(action.member)
            case actions.Rejoin():
                self.replicas.rejoin(action.member)
            case actions.Hold() | actions.Decline():
                pass  # the controller keeps it, and says when it starts; and `make_room` is what else there is

    # Groups

    def form(self, group: Group, epoch: int, jobs: Iterable[Job]) -> Pipe:
        """Returns a new group with requests whose KV is on the way, and others."""
        pipe = self.run.open(group.members, [*map(len, group.spans)], self.capacity(group), self)
        host = self.host(pipe)
        self.groups[group.members] = group
        for job in jobs:
            self._in[job] = pipe
            pipe.used += job.held
            if job.held and job.kv:
                job.stalled = True
                pipe.stalled.append(job)
            elif job.held:
                pipe.resume(job)
            elif job.kv:
                host.away.append(job)
                host.room -= self._bytes(job)
            else:
                pipe.waiting.append(job)
        for job in self.early.pop(group.members, ()):
            self._in[job] = pipe
            pipe.waiting.append(job)
        for member in group.members:
            self.epochs[member] = epoch
            self._group_of[member] = group.members

            def says(member: int = member) -> None:
                self.tell(Committed(self.run.agenda.now, epoch, member))

            self.crew.does(member, says)
        self._refresh(pipe)
        self.run.agenda.after(0.0, pipe.pump)
        return pipe

    def hand_over(self, pipe: Pipe) -> list[Job]:
        """Returns the requests of a group that ends with nothing under way."""
        assert not pipe.stalled, "no group changes before its KV is exchanged"
        return [*pipe.jobs(), *pipe.waiting, *self._hosts.pop(pipe).away]

    def abort(self, pipe: Pipe) -> None:
        """A group is no more, with all that it was computing. Its requests are nowhere until the controller says."""
        pipe.stages.halt()
        host = self.host(pipe)
        for member in pipe.members:
            for wire in self.run.wires_of(member):
                wire.take_back(pipe)
        for job in {*pipe.everybody(), *host.away, *host.copies}:
            del self._in[job]
            job.reset()
        self._settling.pop(pipe, None)
        self.changes.exchanging.discard(pipe)
        del self._hosts[pipe], self.groups[pipe.members]
        self.run.close(pipe)

    def halt(self, member: int) -> None:
        """The group of a replica computes nothing until the controller says what becomes of it."""
        if (pipe := self.pipe_of(member)) is not None:
            pipe.stages.halt()

    def pipe_of(self, member: int) -> Pipe | None:
        """The group that a replica is in, if it is in one."""
        return self.run.pipes.get(self._group_of.get(member, ()))

    def capacity(self, group: Group) -> int:
        """Tokens of KV that a group has room for."""
        fleet = self.run.fleet
        room = kv_pages(group, dict.fromkeys(group.members, fleet.pages), fleet.layer_pages)
        return group_tokens(group, room, self.kv)

    def part(self, member: int) -> None:
        """Whatever a replica was part of is no more."""
        if member not in self.epochs:
            return
        self.changes.part(member)
        self.pulls.cancel(member)
        for members in [each for each in self.early if member in each]:
            del self.early[members]
        if (pipe := self.pipe_of(member)) is not None:
            self.abort(pipe)

    def _layer_came(self, member: int) -> None:
        if (pipe := self.pipe_of(member)) is not None:
            self._refresh(pipe)

    def _refresh(self, pipe: Pipe) -> None:
        """A replica on its own reads what it lacks from its backing."""
        if len(pipe.members) == 1:
            pipe.stages.streamed = self.pulls.missing(pipe.members[0])
