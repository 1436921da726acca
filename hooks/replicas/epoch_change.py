"""The change from the present epoch to the next one, which is prepared, and then given up or entered.

Note [Entering an epoch]
    A committed epoch is entered in steps. The first stage of the old group plans nothing new; once nothing is in flight
    it sends its requests to all replicas concerned (handover.py). A replica enters once it has received that from its
    own first stage: it drops the layers outside of its new span, makes a cache for those inside, and hands over its KV.
    If that fails the replica leaves all groups: the supervisor has the requests. So, too, where layers cannot be
    dropped after all, as their file was written to after the preparation.
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
    """Changes the epoch. Used by one thread. `pending`: the next epoch, None while there is none."""

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

    def peer_has_entered(self, peer: int) -> bool:
        """Returns whether a peer that has closed its link of the present epoch has entered the next one: its link of
        that one has no error. The supervisor's `Commit` may come later than the peer's close."""
        pending = self.pending
        return pending is not None and peer in pending.links and pending.links[peer].error is None

    def prepare(self, wanted: actions.Prepare) -> None:
        """Starts to prepare an epoch, and to form its links; gives up an earlier one in preparation."""
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
        self.pending.pulls = self._moves.pull_all(wanted.pulls, links)

    def commit(self, wanted: actions.Commit) -> None:
        """Notes that the epoch in preparation is committed, and plans nothing new in the present one. Nothing where
        another epoch is in preparation."""
        if self.pending is None or self.pending.epoch != wanted.epoch:
            return
        self.pending.commit(wanted.homes)
        if self._state.leader is not None:
            self._state.leader.plans = False

    def discard(self, epoch: int) -> None:
        """Gives up this epoch, if it is in preparation and not committed."""
        if self.pending is not None and self.pending.epoch == epoch and not self.pending.committed:
            self.drop_pending()

    def drop_pending(self) -> None:
        """Gives up the next epoch, committed or not; the present one goes on."""
        if self.pending is not None:
            self._state.close_links(self.pending.links.values())
            self.pending = None
        if self._state.leader is not None:
            self._state.leader.plans = True

    def step(self) -> bool:
        """Takes the next step of the change, if possible now. Returns whether it did anything. LinkError, Interrupted,
        ModelInUse, DriverError."""
        pending, stage = self.pending, self._state.stage
        if pending is None:
            return False
        pending.poll()
        if not pending.committed:
            return not pending.reported and self._prepare_step(pending)
        if stage is not None and stage.leader is not None and not stage.leader.plans and stage.drained:
            pending.hand_over_requests(stage, self._requests)
        if not pending.can_enter:
            return False
        self.pending = None
        try:
            self._state.enter(pending, self._moves)
        except (DropRefused, WeightsFileChanged, PoolExhausted, torch.OutOfMemoryError):
            self._state.leave()
            self._setup.supervisor.post(events.Suspected(0.0, pending.epoch, self._setup.me, next(iter(pending.links))))
        return True

    def _prepare_step(self, pending: PendingEpoch) -> bool:
        if pending.has_lost_link:
            self._fail(pending, Reason.LINK)
            return True
        if not pending.is_connected:
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
        pending.reported = True
        self._setup.supervisor.post(events.Prepared(0.0, pending.epoch, self._setup.me))
        return True

    def _fail(self, pending: PendingEpoch, reason: Reason) -> None:
        self._setup.supervisor.post(events.PrepareFailed(0.0, pending.epoch, self._setup.me, reason))
        self.drop_pending()
