"""Where a replica is in the epoch in force: its stage, its links, and what goes over from the epoch before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from ...offload.policy.replicas import events
from ...offload.policy.replicas.groups import Group
from .handover import Handover
from .layer_moves import LayerMoves
from .leader import Leader
from .led_requests import LedRequests
from .link import Link
from .messages import ENDS_GROUP
from .pending_epoch import PendingEpoch, heard
from .replica_setup import ReplicaSetup
from .stage import Stage, WatchedLink


class EpochState:
    """Used by one thread. `epoch`: -1 before the first; `stage`: None while the replica is in no group; `handover`:
    None once all that goes over has; `sent`: bytes of KV that went to others."""

    def __init__(self, setup: ReplicaSetup, requests: LedRequests, beat: Callable[[], object]) -> None:
        """`beat`: is called while a stage waits for another."""
        self.epoch = -1
        self.stage: Stage | None = None
        self.links: dict[int, Link] = {}
        self.handover: Handover | None = None
        self.sent = 0
        self._setup = setup
        self._requests = requests
        self._beat = beat
        self._old: Stage | None = None  # whose KV goes over
        self._closing: list[Link] = []

    @property
    def leader(self) -> Leader | None:
        """None on the other stages, and on the first until all others are there."""
        return None if self.stage is None else self.stage.leader

    def take(self, group: Group, epoch: int, links: Mapping[int, Link], moves: LayerMoves) -> None:
        """Begins a stage of a group. torch.OutOfMemoryError, DriverError, what HeldLayers.drop raises."""
        setup = self._setup
        self.epoch = epoch
        moves.hold(group)
        beat, ends = setup.tuning.beat, partial(setup.supervisor.waits, ENDS_GROUP)
        over = {peer: WatchedLink(link, beat, self._beat, ends) for peer, link in links.items()}
        self.stage = Stage(setup.replica, group, setup.me, epoch, over, self._requests.told, setup.split)
        moves.go_home(group, epoch)
        self._requests.start_early(epoch, self.leader)
        setup.supervisor.post(events.Committed(0.0, epoch, setup.me))

    def take_up(self, pending: PendingEpoch, moves: LayerMoves) -> None:
        """Takes up its place in the new epoch. What it had is kept until it has gone over."""
        setup = self._setup
        self._old = self.stage
        if setup.replica.times is not None:
            setup.replica.times.set_open_stages(0)
        before, self.links = self.links, pending.links
        self.release(before.values())
        self.take(pending.mine, pending.epoch, pending.links, moves)
        assert self.stage is not None
        old = None if self._old is None else self._old.cache
        took, most = self._requests.take, setup.tuning.piece
        self.handover = Handover(
            setup.me, old, self.stage, pending.home, self.links, pending.leaders, took, self._damaged, most
        )
        for request in pending.cancelled:
            self.handover.cancel(request)
        for each in pending.heard:
            self.handover.hear(each)

    def exchange(self) -> bool:
        """Moves KV that goes over. Did anything happen? LinkError."""
        handover = self.handover
        assert handover is not None
        for told in heard(self.links):
            handover.hear(told)
        happened = handover.step()
        if handover.complete:
            self.sent += handover.sent
            self.handover = self._old = None
            self._setup.supervisor.post(events.Exchanged(0.0, self.epoch, self._setup.me))
        return happened

    def _damaged(self, member: int, request: str) -> None:
        """A member got a request's KV damaged: the supervisor says where it is computed anew."""
        self._setup.supervisor.post(events.Damaged(0.0, self.epoch, member, request))

    def leave(self) -> None:
        """Ends its part in its group, with all KV and requests."""
        self.release(self.links.values())
        if self.handover is not None:
            self.handover.close()
        if (times := self._setup.replica.times) is not None:
            times.set_open_stages(0)
        self.links, self.handover = {}, None
        self._requests.forget()
        self._old = self.stage = None

    def release(self, links: Iterable[Link]) -> None:
        """Closes links without waiting: others may be slow."""
        for link in links:
            link.begin_close()
            self._closing.append(link)
        self._closing = [each for each in self._closing if not each.finished]

    def close(self) -> None:
        """Waits for the links that were released."""
        for link in self._closing:
            link.close()
        self._closing.clear()
