"""How groups end and others form: in two phases, or at once where a replica or a link fails.

Note [Two phases]
    An epoch is proposed to the members of the groups that change; all others stay in theirs. While they form links,
    make host copies ready and reserve pages, they serve as before. If one of them fails, is lost or does not answer in
    time, the epoch is discarded: nothing was dropped, and its number is never used again. For a restore, the layers are
    pulled as the second half of this phase, behind activations, so a pipeline runs until each of its members is
    complete. Once all are ready the epoch is committed, and only another epoch undoes it: a member that does not enter
    it is fenced. There is one epoch in preparation at a time.

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
from dataclasses import dataclass, field
from enum import Enum

from .cluster import ActiveGroup, Cluster, ReplicaState
from .demand import KVSize
from .drops import DropPlan, Pull, group_restore, homes, restore_plan
from .groups import Group, Members, Span, alone
from .protocol import (
    Action,
    Alone,
    Cancel,
    Commit,
    Decline,
    Discard,
    Dispatch,
    Fence,
    Hold,
    Prepare,
    Reason,
    Recompute,
    Refuse,
    StartRestore,
)
from .requests import RequestBook, RequestEntry
from .tuning import ReplicaTuning as Tuning


class ControllerState:
    """Groups and their requests, which change together: groups are formed and ended only here."""

    def __init__(self, pages: Sequence[int], kv: KVSize, tuning: Tuning, full: float = 0.0) -> None:
        """`full`: predicted seconds of a full batch, see Heartbeat."""
        self.cluster = Cluster(pages, kv, tuning, full)
        self.book = RequestBook()
        self.epoch = 0
        self.actions: list[Action] = []

    def next_epoch(self) -> int:
        """Returns a new epoch number, larger than all before."""
        self.epoch += 1
        return self.epoch

    def form(self, group: Group, epoch: int, at: float, exchanging: Iterable[int] = ()) -> None:
        """Puts a group in force. `exchanging`: members that have to exchange KV first."""
        self.cluster.place(ActiveGroup(group, epoch, at, {*exchanging}))
        self.book.add(group.members, self.cluster.tokens(group))
        self._open_or_close(group)

    def end(self, members: Members) -> tuple[RequestEntry, ...]:
        """Ends a group; its requests are held, and returned. KeyError."""
        self.cluster.displace(members)
        return self.book.remove(members)

    def refresh(self, member: int) -> None:
        """Opens or closes the group of a replica whose state has changed. Starts no held requests."""
        placement = self.cluster.placement(member)
        if placement is not None:
            self._open_or_close(placement.group)

    def start(self, requests: Iterable[RequestEntry]) -> None:
        """Starts held requests, new ones and those that are computed anew, in the groups with most room."""
        again: dict[Members, list[str]] = {}
        for request in requests:
            started = request.started
            group = self.book.choose(request)
            if group is None:
                self._hold_or_refuse(request)
                continue
            self.book.put(request, group)
            if started:
                again.setdefault(group, []).append(request.name)
            else:
                self.actions.append(Dispatch(request.name, self.cluster.groups[group].epoch, group))
        for group, names in again.items():
            self.actions.append(Recompute(tuple(names), self.cluster.groups[group].epoch, group))

    def start_held(self) -> None:
        """Starts all held requests that fit somewhere."""
        self.start(self.book.held)

    def refuse(self, request: RequestEntry, reason: Reason) -> None:
        """Ends a request with an error, and its computation where a group has it."""
        group = self.book.end(request.name)
        self.actions.append(Refuse(request.name, reason))
        if group is not None:
            self.actions.append(Cancel(request.name, self.cluster.groups[group].epoch, group))

    def _hold_or_refuse(self, request: RequestEntry) -> None:
        """Handles a request that fits no open group: refuses it if all groups are open, else holds it."""
        if self.book.all_open():
            self.refuse(request, Reason.TOO_LONG)
        elif not request.told:
            request.told = True
            self.actions.append(Hold(request.name))

    def _open_or_close(self, group: Group) -> None:
        if self.cluster.takes_requests(group):
            self.book.open(group.members)
        else:
            self.book.close(group.members)


class Kind(Enum):
    """The purpose of an epoch."""

    DROP = "drop"
    RESTORE = "restore"


@dataclass(slots=True)
class Proposal:
    """An epoch in preparation: `groups` replace those of `old`. `pulls`: layers that its `members` need for it;
    `pulling`: the pulls have started; `waiting`: members that have not answered since the time `since`."""

    epoch: int
    kind: Kind
    old: tuple[Members, ...]
    groups: tuple[Group, ...]
    pulls: tuple[Pull, ...]
    since: float
    members: frozenset[int] = field(init=False)
    waiting: set[int] = field(init=False)
    pulling: bool = False

    def __post_init__(self) -> None:
        self.members = frozenset(member for group in self.groups for member in group.members)
        self.waiting = {*self.members}


class EpochProposals:
    """The epoch in preparation, if any. `drop_after`, `restore_after`: times before which none is proposed. See
    Note [Two phases]."""

    def __init__(self, state: ControllerState, tuning: Tuning) -> None:
        self._state = state
        self._tuning = tuning
        self.proposal: Proposal | None = None
        self.drop_after = self.restore_after = 0.0

    def propose_drop(self, plan: DropPlan, at: float) -> None:
        """Starts preparing the groups of a plan."""
        cluster = self._state.cluster
        pulls: list[Pull] = []
        olds: list[Members] = []
        for group in plan.formed:
            old = {
                placement.group.members: placement.group
                for member in group.members
                if (placement := cluster.placement(member))
            }
            olds.extend(old)
            for member in group.members:
                for layer in plan.pulls.get(member, ()):
                    holders = (source.holder(layer) for source in old.values())
                    pulls.append(Pull(member, layer, next(holder for holder in holders if holder != member)))
        self._propose(Kind.DROP, olds, plan.formed, tuple(pulls), at)

    def propose_restore(self, groups: Iterable[Group], at: float) -> None:
        """Starts preparing the end of groups, those whose requests all find room with one of the members."""
        old = [group for group in groups if self._homes(group) is not None]
        if not old:
            self.restore_after = at + self._tuning.again
            return
        formed = tuple(alone(member, group.layers) for group in old for member in group.members)
        pulls = tuple(pull for group in old for its in group_restore(group).values() for pull in its)
        self._propose(Kind.RESTORE, [group.members for group in old], formed, pulls, at)

    def prepared(self, epoch: int, member: int, at: float) -> bool:
        """Notes that a member is ready. Returns whether a drop was committed, as this was the last one."""
        proposal = self.proposal
        if proposal is None or proposal.epoch != epoch or proposal.pulling:
            return False
        proposal.waiting.discard(member)
        if proposal.waiting:
            return False
        if proposal.kind is Kind.DROP:
            self._commit_drop(proposal, at)
            return True
        proposal.pulling, proposal.waiting, proposal.since = True, {*proposal.members}, at
        self._state.actions.append(StartRestore(epoch, proposal.pulls))
        return False

    def restored(self, epoch: int, member: int, at: float) -> None:
        """Notes that a member holds all layers; commits the restore once all do."""
        proposal = self.proposal
        if proposal is None or proposal.epoch != epoch or not proposal.pulling:
            return
        proposal.waiting.discard(member)
        if not proposal.waiting:
            self._commit_restore(proposal, at)

    def concerns(self, epoch: int, *members: int) -> bool:
        """Returns whether that epoch is in preparation, with these members."""
        return self.proposal is not None and self.proposal.epoch == epoch and self.proposal.members.issuperset(members)

    def discard_with(self, members: Iterable[int], reason: Reason, at: float) -> None:
        """Gives up the epoch in preparation if one of these members is in it."""
        if self.proposal is not None and not self.proposal.members.isdisjoint(members):
            self.discard(reason, at)

    def discard(self, reason: Reason, at: float) -> None:
        """Gives up the epoch in preparation, if any. Giving up a restore does not delay the next drop."""
        proposal, self.proposal = self.proposal, None
        if proposal is None:
            return
        self._state.actions.append(Discard(proposal.epoch, reason))
        if proposal.kind is Kind.DROP:
            self.decline(Decline(reason), at)
        else:
            self.restore_after = at + self._tuning.again

    def decline(self, decline: Decline, at: float) -> None:
        """Declines a drop, and puts off the next one."""
        self.drop_after = at + self._tuning.again
        self._state.actions.append(decline)

    def expire(self, at: float) -> None:
        """Gives up an epoch whose preparation takes too long."""
        proposal = self.proposal
        if proposal is None:
            return
        most = (
            self._tuning.bulk
            if proposal.pulling or (proposal.kind is Kind.DROP and proposal.pulls)
            else self._tuning.answer
        )
        if at - proposal.since > most:
            self.discard(Reason.TIMEOUT, at)

    def _propose(
        self, kind: Kind, old: Iterable[Members], groups: Sequence[Group], pulls: tuple[Pull, ...], at: float
    ) -> None:
        assert self.proposal is None
        epoch = self._state.next_epoch()
        self.proposal = Proposal(epoch, kind, tuple(old), tuple(groups), pulls, at)
        sent = pulls if kind is Kind.DROP else ()
        self._state.actions.append(Prepare(epoch, tuple(groups), sent, self.proposal.old))

    def _homes(self, group: Group) -> dict[str, int] | None:
        """Returns the member that each request of a group goes to when the group ends; None where one does not fit."""
        cluster = self._state.cluster
        room = {member: cluster.tokens(alone(member, group.layers)) for member in group.members}
        return homes({request.name: request.demand for request in self._state.book.of(group.members)}, room)

    def _commit_drop(self, proposal: Proposal, at: float) -> None:
        self.proposal = None
        state = self._state
        group_of = {member: group for group in proposal.groups for member in group.members}
        requests = [(request, group_of[old[0]]) for old in proposal.old for request in state.end(old)]
        for group in proposal.groups:
            for member, span in zip(group.members, group.spans, strict=True):
                state.cluster.replicas[member].held = span
            state.form(group, proposal.epoch, at, exchanging=group.members)
        for request, group in requests:
            state.book.put(request, group.members)
        self.drop_after = at + self._tuning.settle
        state.actions.append(Commit(proposal.epoch))
        state.start_held()

    def _commit_restore(self, proposal: Proposal, at: float) -> None:
        state, layers = self._state, Span(0, self._state.cluster.layers)
        targets: dict[str, int] = {}
        for old in proposal.old:
            placed = self._homes(state.cluster.groups[old].group)
            if placed is None:
                self.discard(Reason.NO_ROOM, at)
                return
            targets.update(placed)
        self.proposal = None
        self.drop_after = at  # a new burst
        requests = [request for old in proposal.old for request in state.end(old)]
        for group in proposal.groups:
            state.cluster.replicas[group.members[0]].held = layers
            state.form(group, proposal.epoch, at, exchanging=group.members)
        for request in requests:
            state.book.put(request, (targets[request.name],))
        state.actions.append(Commit(proposal.epoch, tuple((entry.name, targets[entry.name]) for entry in requests)))
        state.start_held()


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
