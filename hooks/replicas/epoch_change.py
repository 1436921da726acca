"""From the epoch in force to the next one, which is prepared, then given up or taken up.

Note [Taking up an epoch]
    A committed epoch is taken up in steps. The first stage of the old group plans nothing new; once all that was in
    flight has come back it tells everybody concerned which requests it had (handover.py). A replica turns when it has
    heard that from its own first stage: layers outside of its new span are dropped, a cache is made for those inside,
    and what it had goes over. Where an epoch fails everything of it is forgotten: the supervisor has the requests. That
    is so, too, where layers cannot be dropped after all, as their file was written to behind the preparation.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...allocator.errors import BallonetError, DropRefused, PoolExhausted, WeightsFileChanged
from ...offload.policy.replicas import actions, events
from ...offload.policy.replicas.events import Reason
from .epoch_state import EpochState
from .errors import Interrupted
from .layer_moves import LayerMoves, reason_of
from .led_requests import LedRequests
from .link import Link
from .pending_epoch import PendingEpoch
from .replica_setup import ReplicaSetup


class EpochChange:
    """Used by one thread. `pending`: the next epoch, None while none is prepared."""

    def __init__(self, setup: ReplicaSetup, state: EpochState, moves: LayerMoves, requests: LedRequests) -> None:
        self.pending: PendingEpoch | None = None
        self._setup = setup
        self._state = state
        self._moves = moves
        self._requests = requests

    @property
    def links(self) -> Mapping[int, Link]:
        """The links of the next epoch, by peer."""
        return {} if self.pending is None else self.pending.links

    @property
    def epoch(self) -> int | None:
        """The number of the next epoch."""
        return None if self.pending is None else self.pending.epoch

    def has_turned(self, peer: int) -> bool:
        """Whether a peer that has closed its link of the epoch in force is in the next one: its link of that is well.
        The supervisor's word that the epoch is committed may come later than what the peer says."""
        pending = self.pending
        return pending is not None and peer in pending.links and pending.links[peer].error is None

    def prepare(self, wanted: actions.Prepare) -> None:
        """Begins to form the links of an epoch; one that was prepared before is given up."""
        me, stage = self._setup.me, self._state.stage
        mine = next((group for group in wanted.groups if me in group.members), None)
        if mine is None:
            return
        self.drop_pending()
        self._moves.prepare_anew()
        old = None if stage is None else stage.group
        peers = sorted({*mine.members, *(() if old is None else old.members)} - {me})
        links = {peer: self._setup.connect(wanted.epoch, peer) for peer in peers}
        self.pending = PendingEpoch(wanted, mine, me, old, links)
        self.pending.pulls = self._moves.pulled(wanted.pulls, links)

    def commit(self, wanted: actions.Commit) -> None:
        """The epoch is to be taken up: nothing new is planned in the one before. Nothing if another is prepared."""
        if self.pending is None or self.pending.epoch != wanted.epoch:
            return
        self.pending.commit(wanted.homes)
        if self._state.leader is not None:
            self._state.leader.plans = False

    def discard(self, epoch: int) -> None:
        """Gives up an epoch that is prepared. Nothing if it is another, or committed."""
        if self.pending is not None and self.pending.epoch == epoch and not self.pending.committed:
            self.drop_pending()

    def drop_pending(self) -> None:
        """Gives up the next epoch, committed or not; the one in force goes on."""
        if self.pending is not None:
            self._state.release(self.pending.links.values())
            self.pending = None
        if self._state.leader is not None:
            self._state.leader.plans = True

    def step(self) -> bool:
        """Does what can be done now. Did anything happen? LinkError, Interrupted, ModelInUse, DriverError."""
        pending, stage = self.pending, self._state.stage
        if pending is None:
            return False
        pending.listen()
        if not pending.committed:
            return not pending.told and self._make_ready(pending)
        if stage is not None and stage.leader is not None and not stage.leader.plans and stage.drained:
            pending.hand_over(stage, self._requests)
        if not pending.released:
            return False
        self.pending = None
        try:
            self._state.take_up(pending, self._moves)
        except (DropRefused, WeightsFileChanged, PoolExhausted, torch.OutOfMemoryError):
            self._state.leave()
            self._setup.supervisor.post(events.Suspected(0.0, pending.epoch, self._setup.me, next(iter(pending.links))))
        return True

    def _make_ready(self, pending: PendingEpoch) -> bool:
        if pending.lost:
            self._fail(pending, Reason.LINK)
            return True
        if not pending.joined:
            return False
        try:
            if next(pending.pulls, None) is not None or self._moves.prepare():
                return True
        except Interrupted:
            self.drop_pending()
            raise
        except (BallonetError, torch.OutOfMemoryError) as error:
            self._fail(pending, reason_of(error))
            return True
        pending.told = True
        self._setup.supervisor.post(events.Prepared(0.0, pending.epoch, self._setup.me))
        return True

    def _fail(self, pending: PendingEpoch, reason: Reason) -> None:
        self._setup.supervisor.post(events.PrepareFailed(0.0, pending.epoch, self._setup.me, reason))
        self.drop_pending()
