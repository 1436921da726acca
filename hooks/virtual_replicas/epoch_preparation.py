"""Epochs in preparation in a simulation: links are formed and layers pulled; an epoch can be given up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ...offload.policy.replicas.actions import Prepare, StartRestore
from ...offload.policy.replicas.demand import group_tokens
from ...offload.policy.replicas.events import Prepared, PrepareFailed, PullFailed, Reason, Restored
from ...offload.policy.replicas.groups import Group
from .pipeline import Pipeline

if TYPE_CHECKING:
    from .drop_policy import DropPolicy
    from .fleet_run import FleetRun


class EpochPreparation:
    """Epochs in preparation. `groups`: by epoch; `refusing`: why a replica cannot prepare its next epoch."""

    def __init__(self, policy: DropPolicy, lose: Callable[[int, int, int], object]) -> None:
        """`lose(epoch, by, of)`: has replica `by` notice that its link to `of` is lost."""
        self.groups: dict[int, tuple[Group, ...]] = {}
        self.refusing: dict[int, Reason] = {}
        self._policy = policy
        self._run = policy.run
        self._lose = lose
        self._pulling: int | None = None  # the epoch for which layers are restored

    def prepare(self, action: Prepare) -> None:
        """Begins to prepare an epoch: members form links, pull layers that new spans need, and report."""
        self.groups[action.epoch] = action.groups
        links = max(len(group.members) for group in action.groups)
        policy = self._policy
        drops = any(group.is_dropped for group in action.groups)
        for member in members_of(action.groups):

            def ready(member: int = member) -> None:
                if action.epoch not in self.groups:
                    return
                why = self.refusing.pop(member, None)
                if why is None and drops and member in policy.pulls.changed:
                    why = Reason.FILE_CHANGED
                if why is not None:
                    policy.tell(PrepareFailed(self._run.events.now, action.epoch, member, why))
                    return
                mine = [pull for pull in action.pulls if pull.member == member]
                policy.pulls.begin(
                    member,
                    mine,
                    lambda: policy.tell(Prepared(self._run.events.now, action.epoch, member)),
                    lambda why: policy.tell(PrepareFailed(self._run.events.now, action.epoch, member, why)),
                )

            policy.processes.schedule(member, ready, links * self._run.tuning.linking)
            for other in policy.processes.ended.intersection(members_of(action.groups)):
                self._lose(action.epoch, member, other)

    def discard(self, epoch: int) -> None:
        """Gives up an epoch: cancels its pulls, and gives KV the memory back that was reserved for layers."""
        groups = self.groups.pop(epoch)
        for member in members_of(groups):
            self._policy.pulls.cancel(member)
        if self._pulling == epoch:
            self._pulling = None
            for pipe in pipes_of(self._run, groups):
                pipe.capacity = self._policy.active.capacity(self._policy.active.groups[pipe.members])
                pipe.pump()

    def start_restore(self, action: StartRestore) -> None:
        """Begins pulls: of the members of groups that end, or of a replica that has lost its group."""
        groups = self.groups.get(action.epoch)
        if groups is not None:
            self._pulling = action.epoch
            fleet = self._run.fleet
            room = fleet.pages - sum(fleet.layer_pages)
            for pipe in pipes_of(self._run, groups):  # its KV memory shrinks to what its members have beside all layers
                held = self._policy.active.groups[pipe.members]
                pipe.capacity = group_tokens(held, dict.fromkeys(pipe.members, room), self._policy.kv)
        for member in {pull.member for pull in action.pulls}:
            self._pull(action, member)

    def take(self, epoch: int) -> tuple[Group, ...]:
        """Removes an epoch that is committed, and returns its groups."""
        self._pulling = None
        return self.groups.pop(epoch)

    def _pull(self, action: StartRestore, member: int) -> None:
        policy, events = self._policy, self._run.events
        policy.pulls.begin(
            member,
            [pull for pull in action.pulls if pull.member == member],
            lambda: policy.tell(Restored(events.now, action.epoch, member)),
            lambda why: policy.tell(PullFailed(events.now, action.epoch, member, why)),
        )


def pipes_of(run: FleetRun, groups: Iterable[Group]) -> list[Pipeline]:
    """Returns the present groups of these groups' members."""
    members = {*members_of(groups)}
    return [pipe for pipe in run.pipes.values() if members.intersection(pipe.members)]


def members_of(groups: Iterable[Group]) -> list[int]:
    """Returns the members of groups, in order."""
    return [member for group in groups for member in group.members]
