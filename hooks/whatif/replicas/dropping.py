"""Replicas that drop parameters, in virtual time: the controller decides, and this carries out what it says.

Note [What is played]
    Every period each replica tells its load, and the controller has a look. An epoch is prepared as long as its links
    take. At the commit the groups concerned finish their microbatches; then layers are dropped, and each member sends
    the KV that no longer belongs to its span, behind activations. Requests whose KV is on the way are stalled, others
    begin. For a restore the group gives up the memory that its layers need, and members pull them one after the other
    from the wires of those that have them; at the commit KV goes home. Where memory is short all the same, requests go
    to the host (`Swap`); their KV there is exchanged as that of others is, and they come back after that. Nothing is
    lost or hangs, so actions for that do not come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from ....offload.policy.replicas.actions import (
    Action,
    Alone,
    Commit,
    Decline,
    Discard,
    Dispatch,
    Hold,
    Prepare,
    Refuse,
    StartRestore,
)
from ....offload.policy.replicas.controller import Controller
from ....offload.policy.replicas.demand import KVSize, group_tokens, kv_pages, prompt_pages
from ....offload.policy.replicas.dispatch import Members
from ....offload.policy.replicas.events import (
    Arrived,
    Committed,
    Event,
    Exchanged,
    Finished,
    Joined,
    Load,
    Prepared,
    Restored,
    Tick,
)
from ....offload.policy.replicas.groups import Group, Span, alone
from ....offload.policy.replicas.restore_plan import Pull
from ....offload.policy.tuning import DEFAULT
from .jobs import Job
from .keepers import Recompute, Swap
from .pipes import Pipe

if TYPE_CHECKING:
    from .fleet_run import FleetRun


class Drop(Swap):
    """See Note [What is played]. `log`: what the `controller` decided, and when; `drops`, `restores`: epochs of each
    kind that were committed."""

    def __init__(self, run: FleetRun) -> None:
        fleet = run.fleet
        tuning = replace(DEFAULT.replicas, chunk=fleet.batch)
        self.log: list[tuple[float, Action]] = []
        self.drops = self.restores = 0
        self._kv = KVSize(fleet.shape.kv, fleet.page)
        self.controller = Controller(fleet.layer_pages, self._kv, run.cost, tuning, fleet.page / fleet.network)
        self._groups: dict[Members, Group] = {}
        self._epochs: dict[int, int] = {}  # that each replica is in
        self._prepared: dict[int, tuple[Group, ...]] = {}
        self._early: dict[Members, list[Job]] = {}  # of groups that are about to be formed
        self._pulling: int | None = None
        self._exchanging: set[Pipe] = set()
        self._looks = 0
        super().__init__(run)
        run.every(tuning.period, self._look)

    def _open(self) -> None:
        for member in range(self.run.fleet.replicas):
            self._tell(Joined(0.0, member, self.run.fleet.pages))

    def arrive(self, job: Job) -> None:
        """The controller says where it goes."""
        self._tell(Arrived(self.run.agenda.now, str(job.number), job.arrival.prompt, max(1, job.arrival.new)))

    def ended(self, pipe: Pipe, job: Job) -> None:
        """The controller is told."""
        self.run.over(job)
        self._tell(Finished(self.run.agenda.now, str(job.number)))

    def admit(self, pipe: Pipe) -> None:
        """As `Swap`, but while KV is exchanged only new requests begin."""
        if pipe in self._exchanging:
            Recompute.admit(self, pipe)
        else:
            super().admit(pipe)

    def _look(self) -> None:
        """Loads of all replicas, and then a look of the controller."""
        now, kv = self.run.agenda.now, self._kv
        self._looks += 1
        for members, group in self._groups.items():
            pipe = self.run.pipes[members]
            pending = prompt_pages((job.known for job in chain(pipe.waiting, self.host(pipe).away)), kv)
            for member, span in zip(members, group.spans, strict=True):
                part = len(span) / group.layers
                used, free = (int(each * part * kv.token / kv.page) for each in (pipe.used, max(0, pipe.free)))
                self._tell(Load(now, member, self._epochs[member], used, free, pending, self._looks))
                pending = 0  # the first one tells it for all
        self._tell(Tick(now))

    def _tell(self, event: Event) -> None:
        for action in self.controller.on(event):
            if not isinstance(action, Dispatch):
                self.log.append((self.run.agenda.now, action))
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Dispatch():
                job = self.run.jobs[int(action.request)]
                if action.members in self._early:
                    self._early[action.members].append(job)
                else:
                    self.run.pipes[action.members].add(job)
            case Refuse():
                self.run.over(self.run.jobs[int(action.request)], action.reason.value)
            case Alone():
                self._form(alone(action.member, len(self.run.fleet.shape.layers)), action.epoch, ())
            case Prepare():
                self._prepare(action)
            case StartRestore():
                self._pull(action)
            case Discard():
                self._discard(action.epoch)
            case Commit():
                self._commit(action.epoch, dict(action.homes))
            case Hold() | Decline():
                pass  # the controller keeps it, and says when it starts; and `make_room` is what else there is
            case _:
                raise AssertionError(f"nothing is lost in a simulation, and the controller says {action}")

    # Two phases

    def _prepare(self, action: Prepare) -> None:
        assert not action.pulls, "all replicas are alike, so new spans lie inside the old ones"
        self._prepared[action.epoch] = action.groups
        links = max(len(group.members) for group in action.groups)
        for member in _members(action.groups):
            self._later(links * DEFAULT.replicas.linking, Prepared, action.epoch, member)

    def _discard(self, epoch: int) -> None:
        groups = self._prepared.pop(epoch)
        if self._pulling == epoch:
            self._pulling = None
            for pipe in self._pipes(groups):
                pipe.capacity = self._capacity(self._groups[pipe.members])
                pipe.pump()

    def _pull(self, action: StartRestore) -> None:
        """The group has as much memory as its members would have on their own, and its members pull."""
        self._pulling = action.epoch
        fleet = self.run.fleet
        groups = self._prepared[action.epoch]
        room = fleet.pages - sum(fleet.layer_pages)
        for pipe in self._pipes(groups):
            pipe.capacity = group_tokens(self._groups[pipe.members], dict.fromkeys(pipe.members, room), self._kv)
        for member in _members(groups):
            self._pull_next(action.epoch, member, [pull for pull in action.pulls if pull.member == member], 0)

    def _pull_next(self, epoch: int, member: int, pulls: Sequence[Pull], done: int) -> None:
        if self._pulling != epoch:
            return
        if done == len(pulls):
            self._tell(Restored(self.run.agenda.now, epoch, member))
            return
        source = pulls[done].source
        assert source is not None, "the members of a group hold all layers"
        nbytes = self.run.fleet.shape.layers[pulls[done].layer]
        self.run.wire(source).send(nbytes, lambda: self._pull_next(epoch, member, pulls, done + 1))

    def _commit(self, epoch: int, homes: dict[str, int]) -> None:
        """At the next boundary of all groups concerned, the new ones are formed."""
        groups = self._prepared.pop(epoch)
        self._pulling = None
        if len(groups[0].members) > 1:
            self.drops += 1
        else:
            self.restores += 1
        for group in groups:
            self._early[group.members] = []
        if len(groups[0].members) > 1:
            sets = [(self._pipes([group]), [group]) for group in groups]
        else:
            sets = [
                ([old], [group for group in groups if group.members[0] in old.members]) for old in self._pipes(groups)
            ]
        for olds, news in sets:
            self._at_boundary(olds, news, epoch, homes)

    def _at_boundary(self, olds: list[Pipe], news: list[Group], epoch: int, homes: dict[str, int]) -> None:
        left = len(olds)

        def paused() -> None:
            nonlocal left
            left -= 1
            if not left:
                self.run.agenda.after(DEFAULT.replicas.dropping, lambda: self._switch(olds, news, epoch, homes))

        for old in olds:
            old.pause(lambda old=old: self.settled(old, paused))  # type: ignore[misc]

    def _switch(self, olds: list[Pipe], news: list[Group], epoch: int, homes: dict[str, int]) -> None:
        """Old groups end, new ones begin, and KV goes where it belongs."""
        jobs, sends = list[Job](), dict.fromkeys(_members(news), 0)
        for old in olds:
            held = self._groups.pop(old.members)
            mine = [*old.jobs(), *old.waiting, *self._hosts.pop(old).away]
            assert not old.stalled, "no group changes before its KV is exchanged"
            for member, span in zip(held.members, held.spans, strict=True):
                sends[member] += sum(self._leaves(job, member, span, news, homes) for job in mine)
            jobs += mine
            self.run.close(old)
        jobs.sort(key=lambda job: job.number)
        for group in news:
            own = [job for job in jobs if len(news) == 1 or (homes[str(job.number)],) == group.members]
            self._exchanging.add(self._form(group, epoch, own))
        left = sum(1 for nbytes in sends.values() if nbytes) or 1

        def sent() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._exchanged(news, epoch)

        for member, nbytes in sends.items():
            if nbytes:
                self.run.wire(member).send(nbytes, sent)
        if not any(sends.values()):
            self.run.agenda.after(0.0, sent)

    def _leaves(self, job: Job, member: int, span: Span, news: list[Group], homes: dict[str, int]) -> int:
        """Bytes of the request's KV that a member has and must send."""
        here = job.kv * self.run.fleet.shape.kv * len(span) // len(self.run.fleet.shape.layers)
        if len(news) > 1:
            return 0 if homes[str(job.number)] == member else here
        new = news[0].span(member)
        stays = max(0, min(span.end, new.end) - max(span.begin, new.begin))
        return here * (len(span) - stays) // len(span)

    def _form(self, group: Group, epoch: int, jobs: Iterable[Job]) -> Pipe:
        """A new group with requests whose KV is on the way, and others."""
        pipe = self.run.open(group.members, [*map(len, group.spans)], self._capacity(group), self)
        host = self.host(pipe)
        self._groups[group.members] = group
        for job in jobs:
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
        pipe.waiting.extend(self._early.pop(group.members, ()))
        for member in group.members:
            self._epochs[member] = epoch
            self._later(0.0, Committed, epoch, member)
        self.run.agenda.after(0.0, pipe.pump)
        return pipe

    def _exchanged(self, groups: list[Group], epoch: int) -> None:
        for group in groups:
            pipe = self.run.pipes[group.members]
            self._exchanging.discard(pipe)
            stalled, pipe.stalled = pipe.stalled, []
            for job in stalled:
                pipe.resume(job)
            for member in group.members:
                self._later(0.0, Exchanged, epoch, member)
            pipe.pump()

    def _capacity(self, group: Group) -> int:
        fleet = self.run.fleet
        room = kv_pages(group, dict.fromkeys(group.members, fleet.pages), fleet.layer_pages)
        return group_tokens(group, room, self._kv)

    def _pipes(self, groups: Iterable[Group]) -> list[Pipe]:
        """Groups in force of the members of these."""
        members = {*_members(groups)}
        return [pipe for pipe in self.run.pipes.values() if members.intersection(pipe.members)]

    def _later(self, seconds: float, kind: type[Prepared | Committed | Exchanged], epoch: int, member: int) -> None:
        """Tells the controller, so many seconds from now."""
        agenda = self.run.agenda
        agenda.after(seconds, lambda: self._tell(kind(agenda.now, epoch, member)))


def _members(groups: Iterable[Group]) -> list[int]:
    return [member for group in groups for member in group.members]
