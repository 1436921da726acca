"""A change of the groups in two phases: an epoch is prepared, which can be given up at any time, and then committed.

Note [Two phases]
    An epoch is proposed to the members of the groups that change; all others stay in theirs. While they form links,
    make host copies ready and reserve pages, they serve as before. If one of them fails, is lost or does not answer in
    time, the epoch is discarded: nothing was dropped, and its number is never used again. For a restore, the layers are
    pulled as the second half of this phase, behind activations, so a pipeline runs until each of its members is
    complete. Once all are ready the epoch is committed, and only another epoch undoes it: a member that does not enter
    it is fenced. There is one epoch in preparation at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from ..tuning import Replicas as Tuning
from .actions import Commit, Decline, Discard, Prepare, StartRestore
from .controller_state import ControllerState
from .dispatch import Members
from .drop_plan import DropPlan
from .events import Reason
from .groups import Group, Span, alone
from .restore_plan import Pull, group_restore, homes


class Kind(Enum):
    """The purpose of an epoch."""

    DROP = "drop"
    RESTORE = "restore"


@dataclass(slots=True)
class Proposal:
    """An epoch in preparation: `groups` replace those of `old`. `waiting`: members that have not answered since the
    time `since`; `pulls`: layers that `members` need for it; `pulling`: the pulls have started."""

    epoch: int
    kind: Kind
    old: tuple[Members, ...]
    groups: tuple[Group, ...]
    waiting: set[int]
    since: float
    pulls: tuple[Pull, ...]
    members: frozenset[int]
    pulling: bool = False


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
        members = frozenset(member for group in groups for member in group.members)
        self.proposal = Proposal(epoch, kind, tuple(old), tuple(groups), {*members}, at, pulls, members)
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
