"""Epochs of a simulation that are committed: old groups end, new ones begin, and KV goes where it belongs.

Note [Bonds]
    Replicas of one epoch, or of one that is prepared, have links to each other. Who ends, or is told to go on alone,
    closes its links, and a link can be lost while both its ends live. Whoever hears that says so of the epoch that the
    link was of. In one that is prepared it goes on as before; in one that is in force, or committed, it forgets all
    requests that it has, and computes nothing until it is told what becomes of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....offload.policy.replicas.events import Damaged, Exchanged, Suspected
from ....offload.policy.replicas.groups import Group, Span
from .epoch_preparation import EpochPreparation, members_of, pipes_of
from .jobs import Job
from .pipeline import Pipeline

if TYPE_CHECKING:
    from .drop_policy import DropPolicy


@dataclass(eq=False, slots=True)
class Change:
    """Groups of a committed epoch that change together: `olds` end and `news` begin, and then their KV is exchanged.
    `homes`: where requests go if there are several new ones; `left`: what is waited for, groups that compute or members
    that send; `switched`: the new groups are there; `broken`: a member is gone, and nothing becomes of it."""

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
        """Replicas that change."""
        return members_of(self.news)


class EpochChanges:
    """See Note [Bonds]. `drops`, `restores`: epochs of each kind that were committed; `prepared`: those that are not;
    `damaging`: replicas that get a request's KV damaged; `exchanging`: groups whose KV is on the way."""

    def __init__(self, policy: DropPolicy) -> None:
        self.drops = self.restores = 0
        self.prepared = EpochPreparation(policy, self._lose)
        self.damaging: set[int] = set()
        self.exchanging: set[Pipeline] = set()
        self._policy = policy
        self._run = policy.run
        self._committed: dict[int, int] = {}  # the last epoch that each replica was to take up
        self._changes: list[Change] = []

    # Commit

    def commit(self, epoch: int, homes: dict[str, int]) -> None:
        """At the next boundary of all groups concerned, the new ones are formed."""
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
                old.pause(lambda old=old, change=change: self._policy.settled(old, lambda: self._one_less(change)))  # type: ignore[misc]

    def turn(self) -> None:
        """Goes on with changes that waited for a replica that stood still."""
        for change in [*self._changes]:
            self._turn(change)

    def _one_less(self, change: Change) -> None:
        change.left -= 1
        self._turn(change)

    def _can_turn(self, change: Change) -> bool:
        ready = not (change.broken or change.switched or change.left or any(old.stages.halted for old in change.olds))
        return ready and self._run.silent.isdisjoint(change.members)

    def _turn(self, change: Change) -> None:
        if self._can_turn(change) and not change.switching:
            change.switching = True
            self._run.events.after(self._run.tuning.dropping, lambda: self._switch(change))

    def _switch(self, change: Change) -> None:
        """Old groups end, new ones begin, and KV goes where it belongs."""
        change.switching = False
        if not self._can_turn(change):
            return
        change.switched = True
        policy = self._policy
        jobs, sends = list[Job](), dict.fromkeys(change.members, 0)
        for old in change.olds:
            held = policy.active.groups.pop(old.members)
            mine = policy.active.hand_over(old)
            for member, span in zip(held.members, held.spans, strict=True):
                sends[member] += sum(self.leaves(job, member, span, change.news, change.homes) for job in mine)
            jobs += mine
            self._run.close(old)
        jobs.sort(key=lambda job: job.number)
        for group in change.news:
            own = [job for job in jobs if len(change.news) == 1 or (change.homes[str(job.number)],) == group.members]
            if group.is_dropped:
                for member, span in zip(group.members, group.spans, strict=True):
                    policy.pulls.held[member] = {*span.layers}
            self.exchanging.add(policy.active.form(group, change.epoch, own))
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

    def leaves(self, job: Job, member: int, span: Span, news: list[Group], homes: dict[str, int]) -> int:
        """Returns the bytes of the request's KV that a member has and must send."""
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
            damaged = self._damaged(pipe, change.epoch)
            stalled, pipe.stalled = pipe.stalled, [damaged] if damaged is not None else []
            for job in stalled:
                if job is not damaged:
                    pipe.resume(job)
            for member in group.members:

                def says(member: int = member) -> None:
                    policy.tell(Exchanged(events.now, change.epoch, member))

                policy.processes.does(member, says)
            pipe.pump()

    def _damaged(self, pipe: Pipeline, epoch: int) -> Job | None:
        """The request whose KV has come with a wrong checksum, if one has; its member says so."""
        member = next((each for each in pipe.members if each in self.damaging), None)
        if member is None or not pipe.stalled:
            return None
        self.damaging.discard(member)
        job, events = pipe.stalled[0], self._run.events
        self._policy.processes.does(
            member, lambda: self._policy.tell(Damaged(events.now, epoch, member, str(job.number)))
        )
        return job

    # What goes wrong: Note [Bonds]

    def part(self, member: int) -> None:
        """A replica closes its links: what it was part of ends, and others hear of it."""
        bonds = self._bonds(member)
        for change in [each for each in self._changes if member in each.members]:
            self._break(change)
        for epoch, other in sorted(bonds):
            self._lose(epoch, other, member)

    def lose_link(self, one: int, other: int) -> None:
        """Two replicas that live have no link any more, if they had one."""
        for epoch, each in sorted(self._bonds(one)):
            if each != other:
                continue
            for change in [change for change in self._changes if one in change.members and change.switched]:
                self._break(change)  # what was on the way is lost
            if epoch == self._policy.active.epochs[one]:
                self._policy.active.halt(one)
            self._lose(epoch, one, other)
            self._lose(epoch, other, one)

    def end(self) -> None:
        """Nothing becomes of any epoch any more."""
        for change in [*self._changes]:
            self._break(change)
        self.prepared.groups.clear()

    def _break(self, change: Change) -> None:
        self._changes.remove(change)
        change.broken = True
        for member in change.members:
            self._run.link_of(member).take_back(change)
        if not change.switched:
            for old in change.olds:
                self._policy.active.abort(old)

    def _bonds(self, member: int) -> set[tuple[int, int]]:
        """Epochs and members of the links that a replica has."""
        policy = self._policy
        pipe = policy.active.pipe_of(member)
        group = () if pipe is None else pipe.members
        found = {(policy.active.epochs[member], other) for other in group}
        for change in self._changes:
            if member in change.members:
                found |= {(change.epoch, other) for other in change.members}
        for epoch, groups in self.prepared.groups.items():
            new = next((each.members for each in groups if member in each.members), ())
            if new:
                found |= {(epoch, other) for other in (*new, *group)}
        return {(epoch, other) for epoch, other in found if other != member}

    def _lose(self, epoch: int, by: int, of: int) -> None:
        """The main loop of a replica finds that its link to another is lost."""

        def finds() -> None:
            if epoch not in self.prepared.groups:
                if epoch != max(self._policy.active.epochs.get(by, 0), self._committed.get(by, 0)):
                    return  # it is in another epoch
                self._policy.active.halt(by)
            self._policy.tell(Suspected(self._run.events.now, epoch, by, of))

        self._policy.processes.does(by, finds, self._run.tuning.noticing)
