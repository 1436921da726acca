"""Failures of replicas and links: ends groups, and has their requests computed anew.

Note [Dissolve]
    A group that lost a member or a link cannot go on as a pipeline, and its KV is useless, as each member had only that
    of its layers. So the group ends at once, without a preparation: each survivor is alone in a new epoch, effective
    immediately, as dropped layers stream from their backing until it has pulled them. The group's requests are computed
    anew from the ledger, wherever there is most room. Survivors pull from groups that are in their epochs, so not from
    each other: which of their links still work is not known.

    A suspected replica gets no requests until its first message in the new epoch. If it is dead, its count of
    iterations stands still, and it is fenced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ..tuning import Replicas as Tuning
from .actions import Alone, Fence, StartRestore
from .cluster import ReplicaState
from .controller_state import ControllerState
from .dispatch import Members
from .epoch_proposal import EpochProposals
from .events import Reason
from .groups import Group, alone
from .request_book import RequestEntry
from .restore_plan import restore_plan


class Failures:
    """Ends groups and replicas. See Note [Dissolve]."""

    def __init__(self, state: ControllerState, proposals: EpochProposals, tuning: Tuning) -> None:
        self._state = state
        self._proposals = proposals
        self._tuning = tuning

    def fence(self, member: int, reason: Reason, at: float) -> None:
        """Has a replica fenced, and treats it as lost. Nothing where it is not known."""
        if member in self._state.cluster.replicas:
            self._state.actions.append(Fence(member, reason))
            self.lose(member, at)

    def lose(self, member: int, at: float) -> None:
        """Ends the group of a lost replica. Nothing where the replica is not known."""
        cluster = self._state.cluster
        placement = cluster.placement(member)
        if placement is None:
            return
        self._dissolve(placement.group, Reason.LOST, at, gone=(member,))
        self.pull_from_holders(at)

    def suspect(self, epoch: int, by: int, of: int, at: float) -> None:
        """Takes in that replica `by` lost its link to `of` in an epoch: gives up the epoch if it is only in
        preparation, else ends the group."""
        if self._proposals.concerns(epoch, by, of):
            self._proposals.discard(Reason.LINK, at)
            return
        cluster = self._state.cluster
        mine, other = cluster.placement(by), cluster.placement(of)
        if by == of or mine is None or mine.epoch != epoch:
            return
        if other is mine:
            self._dissolve(mine.group, Reason.LINK, at, suspected=(of,))
        elif mine.group.size == 1 and mine.exchanging:  # its KV was on the way home
            self._dissolve(mine.group, Reason.LINK, at)
            if other is not None and other.epoch == epoch and other.group.size == 1 and other.exchanging:
                self._dissolve(other.group, Reason.LINK, at, suspected=(of,))
        self.pull_from_holders(at)

    def reset(self, members: Members, reason: Reason, at: float) -> None:
        """Ends a group whose members are alive. KeyError."""
        self._dissolve(self._state.cluster.groups[members].group, reason, at)
        self.pull_from_holders(at)

    def count_recomputation(self, requests: Iterable[RequestEntry]) -> list[RequestEntry]:
        """Counts one more computation of each request. Refuses those that had too many, and returns the others."""
        left = []
        for request in requests:
            request.lives -= 1
            if request.lives < 0:
                self._state.refuse(request, Reason.LIVES)
            else:
                left.append(request)
        return left

    def pull_failed(self, epoch: int, member: int, reason: Reason, at: float) -> None:
        """Handles a failed pull: gives up an epoch in preparation; else retries later or from other replicas, or fences
        the member where no source is left."""
        replica = self._state.cluster.replicas.get(member)
        if replica is None:
            return
        if self._proposals.concerns(epoch, member):
            replica.backed &= reason is not Reason.FILE_CHANGED
            self._proposals.discard(reason, at)
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

    def retry_pulls(self, at: float) -> None:
        """Restarts the pulls that found no pages and are due."""
        replicas = self._state.cluster.replicas
        for member, replica in [*replicas.items()]:
            if replica.pulls and replica.pull_at is not None and at >= replica.pull_at:
                self._pull(member, replica, [], at)

    def pull_from_holders(self, at: float) -> None:
        """Restarts the pulls of replicas one of whose sources no longer holds the layer, from replicas that do."""
        replicas = self._state.cluster.replicas
        for member, replica in [*replicas.items()]:
            if member not in replicas:
                continue  # fenced in this loop
            if any(pull.source is not None and not self._holds(pull.source, pull.layer) for pull in replica.pulls):
                self._pull(member, replica, self._state.cluster.sources(), at)

    def _holds(self, member: int, layer: int) -> bool:
        replica = self._state.cluster.replicas.get(member)
        return replica is not None and layer in replica.held

    def _dissolve(
        self, group: Group, reason: Reason, at: float, gone: Collection[int] = (), suspected: Collection[int] = ()
    ) -> None:
        """Ends a group. `gone`: members that are lost; `suspected`: members that may be. See Note [Dissolve]."""
        self._proposals.discard_with(group.members, reason, at)
        state = self._state
        requests = state.end(group.members)
        for member in gone:
            del state.cluster.replicas[member]
        epoch = state.next_epoch()
        survivors = [member for member in group.members if member not in gone]
        for member in survivors:
            state.cluster.replicas[member].suspected = member in suspected
            state.form(alone(member, group.layers), epoch, at)
            state.actions.append(Alone(epoch, member))
        sources = self._state.cluster.sources()
        for member in survivors:
            replica = state.cluster.replicas[member]
            if len(replica.held) < group.layers:
                self._pull(member, replica, sources, at)
        self.count_recomputation(requests)
        state.start_held()

    def _pull(self, member: int, replica: ReplicaState, sources: Sequence[Group], at: float) -> None:
        """Has a lone replica pull the layers that it lacks; survivors of one group use different sources."""
        replica.pull_at = None
        peers = [sources[member % len(sources)]] if sources else []
        replica.pulls = restore_plan(member, replica.held, self._state.cluster.layers, peers)
        if not replica.backed and any(pull.source is None for pull in replica.pulls):
            self.fence(member, Reason.FILE_CHANGED, at)
        else:
            self._state.actions.append(StartRestore(replica.epoch, replica.pulls))
            self._state.refresh(member)
