"""What becomes of groups whose members or links fail.

Note [Dissolve]
    A group that lost a member or a link cannot go on as a pipeline. Its KV is lost with it, as each member had only its
    layers' part. So the group ends at once, without a preparation: each survivor is on its own in a new epoch, valid
    immediately, as layers that it dropped stream from their backing, and it pulls them meanwhile. Its requests are
    computed anew from the ledger, wherever there is most room. Survivors pull from groups that are in their epochs, so
    not from each other: which of their links still work is not known.

    Somebody who is suspected gets no requests until it has spoken in its new epoch. If it is dead, its count of
    iterations stands still, and it is fenced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ..tuning import Replicas as Tuning
from .actions import Alone, Fence, StartRestore
from .changes import Changes
from .cluster import Replica
from .dispatch import Members
from .events import Reason
from .groups import Group, alone
from .requests import Request
from .restore_plan import restore_plan
from .state import State


class Failures:
    """Ends groups and replicas. See Note [Dissolve]."""

    def __init__(self, state: State, changes: Changes, tuning: Tuning) -> None:
        self._state = state
        self._changes = changes
        self._tuning = tuning

    def fence(self, member: int, reason: Reason, at: float) -> None:
        """Ends a replica that does not answer, or not as it should."""
        if member in self._state.cluster.replicas:
            self._state.actions.append(Fence(member, reason))
            self.lose(member, at)

    def lose(self, member: int, at: float) -> None:
        """A replica is gone. Nothing happens where it is not known."""
        cluster = self._state.cluster
        placement = cluster.placement(member)
        if placement is None:
            return
        self._dissolve(placement.group, Reason.LOST, at, gone=(member,))
        self.source_again(at)

    def suspect(self, epoch: int, by: int, of: int, at: float) -> None:
        """The link of two replicas failed in an epoch."""
        if self._changes.concerns(epoch, by, of):
            self._changes.discard(Reason.LINK, at)
            return
        cluster = self._state.cluster
        mine, other = cluster.placement(by), cluster.placement(of)
        if by == of or mine is None or mine.epoch != epoch:
            return
        if other is mine:
            self._dissolve(mine.group, Reason.LINK, at, doubted=(of,))
        elif mine.group.size == 1 and mine.exchanging:  # its KV was on the way home
            self._dissolve(mine.group, Reason.LINK, at)
            if other is not None and other.epoch == epoch and other.group.size == 1 and other.exchanging:
                self._dissolve(other.group, Reason.LINK, at, doubted=(of,))
        self.source_again(at)

    def reset(self, members: Members, reason: Reason, at: float) -> None:
        """Ends a group whose members are alive. KeyError."""
        self._dissolve(self._state.cluster.groups[members].group, reason, at)
        self.source_again(at)

    def spend_life(self, requests: Iterable[Request]) -> list[Request]:
        """Counts one more computation of each; those that had too many are refused, the others returned."""
        left = []
        for each in requests:
            each.lives -= 1
            if each.lives < 0:
                self._state.refuse(each, Reason.LIVES)
            else:
                left.append(each)
        return left

    def pull_failed(self, epoch: int, member: int, reason: Reason, at: float) -> None:
        """A member could not pull layers: from elsewhere then, or later, or nothing becomes of it."""
        replica = self._state.cluster.replicas.get(member)
        if replica is None:
            return
        if self._changes.concerns(epoch, member):
            replica.backed &= reason is not Reason.FILE_CHANGED
            self._changes.discard(reason, at)
        elif replica.epoch == epoch and replica.pulls:
            had_backing = replica.backed
            replica.backed &= reason is not Reason.FILE_CHANGED
            if not had_backing:
                self.fence(member, reason, at)
            elif reason is Reason.PAGES:
                replica.pull_at = at + self._tuning.again
            else:
                self._pull(member, replica, [] if replica.backed else self._state.cluster.sources(), at)
                self._state.start_held()

    def pull_again(self, at: float) -> None:
        """Has those pull that had no pages for it, once it is time."""
        replicas = self._state.cluster.replicas
        for member, replica in [*replicas.items()]:
            if replica.pulls and replica.pull_at is not None and at >= replica.pull_at:
                self._pull(member, replica, [], at)

    def source_again(self, at: float) -> None:
        """Has layers that survivors pull come from others, where those that they came from no longer hold them."""
        replicas = self._state.cluster.replicas
        for member, replica in [*replicas.items()]:
            if member not in replicas:
                continue  # fenced meanwhile
            if any(each.source is not None and not self._holds(each.source, each.layer) for each in replica.pulls):
                self._pull(member, replica, self._state.cluster.sources(), at)

    def _holds(self, member: int, layer: int) -> bool:
        replica = self._state.cluster.replicas.get(member)
        return replica is not None and layer in replica.held

    def _dissolve(
        self, group: Group, reason: Reason, at: float, gone: Collection[int] = (), doubted: Collection[int] = ()
    ) -> None:
        """Ends a group; those who are `gone` are no members any more. See Note [Dissolve]."""
        self._changes.discard_with(group.members, reason, at)
        state = self._state
        requests = state.end(group.members)
        for member in gone:
            del state.cluster.replicas[member]
        epoch = state.next_epoch()
        survivors = [member for member in group.members if member not in gone]
        for member in survivors:
            state.cluster.replicas[member].doubted = member in doubted
            state.form(alone(member, group.layers), epoch, at)
            state.actions.append(Alone(epoch, member))
        sources = self._state.cluster.sources()
        for member in survivors:
            replica = state.cluster.replicas[member]
            if len(replica.held) < group.layers:
                self._pull(member, replica, sources, at)
        self.spend_life(requests)
        state.start_held()

    def _pull(self, member: int, replica: Replica, sources: Sequence[Group], at: float) -> None:
        """Has a replica that is on its own pull what it lacks; survivors of one group ask different ones."""
        replica.pull_at = None
        peers = [sources[member % len(sources)]] if sources else []
        replica.pulls = restore_plan(member, replica.held, self._state.cluster.layers, peers)
        if not replica.backed and any(each.source is None for each in replica.pulls):
            self.fence(member, Reason.FILE_CHANGED, at)
        else:
            self._state.actions.append(StartRestore(replica.epoch, replica.pulls))
            self._state.refresh(member)
