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
from .coming import Coming
from .errors import Interrupted
from .layer_moves import LayerMoves, reason_of
from .led_requests import LedRequests
from .link import Link
from .place import Place
from .setup import Setup


class EpochChange:
    """Used by one thread. `coming`: the next epoch, None while none is prepared."""

    def __init__(self, setup: Setup, place: Place, moves: LayerMoves, requests: LedRequests) -> None:
        self.coming: Coming | None = None
        self._setup = setup
        self._place = place
        self._moves = moves
        self._requests = requests

    @property
    def links(self) -> Mapping[int, Link]:
        """The links of the next epoch, by peer."""
        return {} if self.coming is None else self.coming.links

    @property
    def epoch(self) -> int | None:
        """The number of the next epoch."""
        return None if self.coming is None else self.coming.epoch

    def has_turned(self, peer: int) -> bool:
        """Whether a peer that has closed its link of the epoch in force is in the next one: its link of that is well.
        The supervisor's word that the epoch is committed may come later than what the peer says."""
        coming = self.coming
        return coming is not None and peer in coming.links and coming.links[peer].error is None

    def prepare(self, wanted: actions.Prepare) -> None:
        """Begins to form the links of an epoch; one that was prepared before is given up."""
        me, stage = self._setup.me, self._place.stage
        mine = next((group for group in wanted.groups if me in group.members), None)
        if mine is None:
            return
        self.drop_coming()
        self._moves.prepare_anew()
        old = None if stage is None else stage.group
        peers = sorted({*mine.members, *(() if old is None else old.members)} - {me})
        links = {peer: self._setup.connect(wanted.epoch, peer) for peer in peers}
        self.coming = Coming(wanted, mine, me, old, links)
        self.coming.pulls = self._moves.pulled(wanted.pulls, links)

    def commit(self, wanted: actions.Commit) -> None:
        """The epoch is to be taken up: nothing new is planned in the one before. Nothing if another is prepared."""
        if self.coming is None or self.coming.epoch != wanted.epoch:
            return
        self.coming.commit(wanted.homes)
        if self._place.leader is not None:
            self._place.leader.plans = False

    def discard(self, epoch: int) -> None:
        """Gives up an epoch that is prepared. Nothing if it is another, or committed."""
        if self.coming is not None and self.coming.epoch == epoch and not self.coming.committed:
            self.drop_coming()

    def drop_coming(self) -> None:
        """Gives up the next epoch, committed or not; the one in force goes on."""
        if self.coming is not None:
            self._place.release(self.coming.links.values())
            self.coming = None
        if self._place.leader is not None:
            self._place.leader.plans = True

    def step(self) -> bool:
        """Does what can be done now. Did anything happen? LinkError, Interrupted, ModelInUse, DriverError."""
        coming, stage = self.coming, self._place.stage
        if coming is None:
            return False
        coming.listen()
        if not coming.committed:
            return not coming.told and self._make_ready(coming)
        if stage is not None and stage.leader is not None and not stage.leader.plans and stage.drained:
            coming.hand_over(stage, self._requests)
        if not coming.released:
            return False
        self.coming = None
        try:
            self._place.take_up(coming, self._moves)
        except (DropRefused, WeightsFileChanged, PoolExhausted, torch.OutOfMemoryError):
            self._place.leave()
            self._setup.supervisor.post(events.Suspected(0.0, coming.epoch, self._setup.me, next(iter(coming.links))))
        return True

    def _make_ready(self, coming: Coming) -> bool:
        if coming.lost:
            self._fail(coming, Reason.LINK)
            return True
        if not coming.joined:
            return False
        try:
            if next(coming.pulls, None) is not None or self._moves.prepare():
                return True
        except Interrupted:
            self.drop_coming()
            raise
        except (BallonetError, torch.OutOfMemoryError) as error:
            self._fail(coming, reason_of(error))
            return True
        coming.told = True
        self._setup.supervisor.post(events.Prepared(0.0, coming.epoch, self._setup.me))
        return True

    def _fail(self, coming: Coming, reason: Reason) -> None:
        self._setup.supervisor.post(events.PrepareFailed(0.0, coming.epoch, self._setup.me, reason))
        self.drop_coming()
