"""Committed epochs of a simulation: old groups end, new ones begin, and KV is exchanged.

Note [Links]
    Replicas of one epoch, or of one in preparation, have links to each other. A replica that ends, or is told to run
    alone, closes its links, and a link can be lost while both its ends live. A replica that notices this reports it,
    with the epoch of the link. If that epoch is in preparation it goes on as before; if it is in force, or committed,
    it drops all requests, and computes nothing until the controller's next action for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ...offload.policy.replicas.events import Damaged, Exchanged, Suspected
from ...offload.policy.replicas.groups import Group, Span
from .epoch_preparation import EpochPreparation, members_of, pipes_of
from .jobs import Job
from .pipeline import Pipeline

if TYPE_CHECKING:
    from .drop_policy import DropPolicy


@dataclass(eq=False, slots=True)
class Change:
    """Groups of a committed epoch that change together: `olds` end, `news` begin, and then their KV is exchanged.
    `homes`: the new member for each request, if there are several new groups; `left`: number of groups that still
    compute, then of members that still send; `switched`: the new groups exist; `broken`: given up, as a member is gone.
    """

    epoch: int
    olds: list[Pipeline]
    news: list[Group]
    homes: dict[str, int]
    left: int
    switching: bool = False
    switched: bool = False
    broken: bool = False

    @property
    def members(self) -> list[int]:
        """The replicas concerned."""
        return members_of(self.news)


class EpochChanges:
    """Changes of committed epochs. `drops`, `restores`: number of epochs committed; `prepared`: epochs in preparation;
    `damaging`: replicas that will receive damaged KV; `exchanging`: groups whose KV is on the way. See Note [Links]."""

    def __init__(self, policy: DropPolicy) -> None:
        self.drops = self.restores = 0
        self.prepared = EpochPreparation(policy, self._lose)
        self.damaging: set[int] = set()
        self.exchanging: set[Pipeline] = set()
        self._policy = policy
        self._run = policy.run
        self._committed: dict[int, int] = {}  # the latest committed epoch of each replica
        self._changes: list[Change] = []

    # Commit

    def commit(self, epoch: int, homes: dict[str, int]) -> None:
        """Commits an epoch: its groups begin once the old ones have finished their microbatches."""
        groups = self.prepared.take(epoch)
        drops = len(groups[0].members) > 1
        if drops:
            self.drops += 1
        else:
            self.restores += 1
        for group in groups:
            self._policy.requests.early[group.members] = []
            self._committed.update(dict.fromkeys(group.members, epoch))
        if drops:
            sets = [(pipes_of(self._run, [group]), [group]) for group in groups]
        else:
            sets = [
                ([old], [group for group in groups if group.members[0] in old.members])
                for old in pipes_of(self._run, groups)
            ]
        for olds, news in sets:
            change = Change(epoch, olds, news, homes, len(olds))
            self._changes.append(change)
            for old in olds:
                settled = partial(self._policy.call_when_settled, old, partial(self._count_down, change))
                old.pause(settled)

    def retry_switches(self) -> None:
        """Goes on with changes that waited for a paused replica."""
        for change in [*self._changes]:
            self._try_switch(change)

    def _count_down(self, change: Change) -> None:
        change.left -= 1
        self._try_switch(change)

    def _can_switch(self, change: Change) -> bool:
        ready = not (change.broken or change.switched or change.left or any(old.stages.halted for old in change.olds))
        return ready and self._run.silent.isdisjoint(change.members)

    def _try_switch(self, change: Change) -> None:
        if self._can_switch(change) and not change.switching:
            change.switching = True
            self._run.events.after(self._run.tuning.dropping, lambda: self._switch(change))

    def _switch(self, change: Change) -> None:
        """Ends the old groups, begins the new ones, and sends KV."""
        change.switching = False
        if not self._can_switch(change):
            return
        change.switched = True
        policy = self._policy
        jobs, sends = list[Job](), dict.fromkeys(change.members, 0)
        for old in change.olds:
            held = policy.active.groups.pop(old.members)
            mine = policy.active.hand_over(old)
            for member, span in zip(held.members, held.spans, strict=True):
                sends[member] += sum(self.bytes_to_send(job, member, span, change.news, change.homes) for job in mine)
            jobs += mine
            self._run.close(old)
        jobs.sort(key=lambda job: job.number)
        for group in change.news:
            own = [job for job in jobs if len(change.news) == 1 or (change.homes[str(job.number)],) == group.members]
            if group.is_dropped:
                for member, span in zip(group.members, group.spans, strict=True):
                    policy.pulls.held[member] = {*span.layers}
            self.exchanging.add(policy.active.begin(group, change.epoch, own))
        self._send(change, sends)

    def _send(self, change: Change, sends: dict[int, int]) -> None:
        change.left = sum(1 for nbytes in sends.values() if nbytes) or 1

        def sent() -> None:
            change.left -= 1
            if not change.left and not change.broken:
                self._exchanged(change)

        for member, nbytes in sends.items():
            if nbytes:
                self._run.link_of(member).send(nbytes, sent, owner=change)
        if not any(sends.values()):
            self._run.events.after(0.0, sent)

    def bytes_to_send(self, job: Job, member: int, span: Span, news: list[Group], homes: dict[str, int]) -> int:
        """Returns the bytes of a request's KV that a member has and must send. `span`: its old one."""
        here = job.kv * self._run.fleet.shape.kv * len(span) // len(self._run.fleet.shape.layers)
        if len(news) > 1:
            return 0 if homes[str(job.number)] == member else here
        new = news[0].span(member)
        stays = max(0, min(span.end, new.end) - max(span.begin, new.begin))
        return here * (len(span) - stays) // len(span)

    def _exchanged(self, change: Change) -> None:
        self._changes.remove(change)
        events, policy = self._run.events, self._policy
        for group in change.news:
            pipe = self._run.pipes[group.members]
            self.exchanging.discard(pipe)
            damaged = self._take_damaged(pipe, change.epoch)
            stalled, pipe.stalled = pipe.stalled, [damaged] if damaged is not None else []
            for job in stalled:
                if job is not damaged:
                    pipe.resume(job)
            for member in group.members:

                def report(member: int = member) -> None:
                    policy.tell(Exchanged(events.now, change.epoch, member))

                policy.processes.schedule(member, report)
            pipe.pump()

    def _take_damaged(self, pipe: Pipeline, epoch: int) -> Job | None:
        """Returns the request whose KV has come damaged, if any; its member reports that."""
        member = next((other for other in pipe.members if other in self.damaging), None)
        if member is None or not pipe.stalled:
            return None
        self.damaging.discard(member)
        job, events = pipe.stalled[0], self._run.events
        self._policy.processes.schedule(
            member, lambda: self._policy.tell(Damaged(events.now, epoch, member, str(job.number)))
        )
        return job

    # What goes wrong: Note [Links]

    def detach(self, member: int) -> None:
        """Closes the links of a replica: its changes are given up, and its peers notice."""
        linked = self._links_of(member)
        for change in [running for running in self._changes if member in running.members]:
            self._break(change)
        for epoch, other in sorted(linked):
            self._lose(epoch, other, member)

    def lose_link(self, one: int, other: int) -> None:
        """Cuts the links between two live replicas, if they have any."""
        for epoch, peer in sorted(self._links_of(one)):
            if peer != other:
                continue
            for change in [change for change in self._changes if one in change.members and change.switched]:
                self._break(change)  # what was on the way is lost
            if epoch == self._policy.active.epochs[one]:
                self._policy.active.halt(one)
            self._lose(epoch, one, other)
            self._lose(epoch, other, one)

    def end(self) -> None:
        """Gives up all epochs."""
        for change in [*self._changes]:
            self._break(change)
        self.prepared.groups.clear()

    def _break(self, change: Change) -> None:
        self._changes.remove(change)
        change.broken = True
        for member in change.members:
            self._run.link_of(member).cancel(change)
        if not change.switched:
            for old in change.olds:
                self._policy.active.abort(old)

    def _links_of(self, member: int) -> set[tuple[int, int]]:
        """Returns (epoch, other member) of the links of a replica."""
        policy = self._policy
        pipe = policy.active.pipe_of(member)
        group = () if pipe is None else pipe.members
        links = {(policy.active.epochs[member], other) for other in group}
        for change in self._changes:
            if member in change.members:
                links |= {(change.epoch, other) for other in change.members}
        for epoch, groups in self.prepared.groups.items():
            new = next((formed.members for formed in groups if member in formed.members), ())
            if new:
                links |= {(epoch, other) for other in (*new, *group)}
        return {(epoch, other) for epoch, other in links if other != member}

    def _lose(self, epoch: int, by: int, of: int) -> None:
        """Has replica `by` notice that its link to `of` is lost."""

        def finds() -> None:
            if epoch not in self.prepared.groups:
                if epoch != max(self._policy.active.epochs.get(by, 0), self._committed.get(by, 0)):
                    return  # it is in another epoch
                self._policy.active.halt(by)
            self._policy.tell(Suspected(self._run.events.now, epoch, by, of))

        self._policy.processes.schedule(by, finds, self._run.tuning.noticing)
