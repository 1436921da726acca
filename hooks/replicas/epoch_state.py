"""The state of a replica in the present epoch: its stage, its links, and the handover from the epoch before."""

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
from .pending_epoch import PendingEpoch, receive_handovers
from .replica_setup import ReplicaSetup
from .stage import Stage, WatchedLink


class EpochState:
    """The present epoch. Used by one thread. `epoch`: -1 before the first; `stage`: None while the replica is in no
    group; `handover`: None once it is complete; `sent`: bytes of KV sent to others."""

    def __init__(self, setup: ReplicaSetup, requests: LedRequests, beat: Callable[[], object]) -> None:
        """`beat`: called while a stage waits for another."""
        self.epoch = -1
        self.stage: Stage | None = None
        self.links: dict[int, Link] = {}
        self.handover: Handover | None = None
        self.sent = 0
        self._setup = setup
        self._requests = requests
        self._beat = beat
        self._old: Stage | None = None  # whose KV is handed over
        self._closing: list[Link] = []

    @property
    def leader(self) -> Leader | None:
        """The leader of the group; None on followers, and on the first stage until all others are ready."""
        return None if self.stage is None else self.stage.leader

    def begin_stage(self, group: Group, epoch: int, links: Mapping[int, Link], moves: LayerMoves) -> None:
        """Drops layers and begins a stage of a group. torch.OutOfMemoryError, DriverError, as HeldLayers.drop."""
        setup = self._setup
        self.epoch = epoch
        moves.drop_outside_span(group)
        beat, ends = setup.tuning.beat, partial(setup.supervisor.has_kind, ENDS_GROUP)
        watched = {peer: WatchedLink(link, beat, self._beat, ends) for peer, link in links.items()}
        self.stage = Stage(setup.replica, group, setup.me, epoch, watched, self._requests.add_report, setup.split)
        moves.restore_own_layers(group, epoch)
        self._requests.start_early(epoch, self.leader)
        setup.supervisor.post(events.Committed(0.0, epoch, setup.me))

    def enter(self, pending: PendingEpoch, moves: LayerMoves) -> None:
        """Enters the next epoch. The old stage is kept until its KV is handed over."""
        setup = self._setup
        self._old = self.stage
        if setup.replica.times is not None:
            setup.replica.times.set_open_stages(0)
        before, self.links = self.links, pending.links
        self.close_links(before.values())
        self.begin_stage(pending.mine, pending.epoch, pending.links, moves)
        assert self.stage is not None
        old = None if self._old is None else self._old.cache
        took, most = self._requests.adopt, setup.tuning.piece
        self.handover = Handover(
            setup.me, old, self.stage, pending.new_group_of, self.links, pending.leaders, took, self._damaged, most
        )
        for request in pending.cancelled:
            self.handover.cancel(request)
        for each in pending.handed_over:
            self.handover.take_in(each)

    def exchange_kv(self) -> bool:
        """Takes a step of the handover. Returns whether it did anything. LinkError."""
        handover = self.handover
        assert handover is not None
        for told in receive_handovers(self.links):
            handover.take_in(told)
        happened = handover.step()
        if handover.complete:
            self.sent += handover.sent
            self.handover = self._old = None
            self._setup.supervisor.post(events.Exchanged(0.0, self.epoch, self._setup.me))
        return happened

    def _damaged(self, member: int, request: str) -> None:
        """Reports to the supervisor that a member received damaged KV of a request."""
        self._setup.supervisor.post(events.Damaged(0.0, self.epoch, member, request))

    def leave(self) -> None:
        """Leaves the group, and drops all KV and requests."""
        self.close_links(self.links.values())
        if self.handover is not None:
            self.handover.close()
        if (times := self._setup.replica.times) is not None:
            times.set_open_stages(0)
        self.links, self.handover = {}, None
        self._requests.forget()
        self._old = self.stage = None

    def close_links(self, links: Iterable[Link]) -> None:
        """Closes links, without waiting for the other ends."""
        for link in links:
            link.begin_close()
            self._closing.append(link)
        self._closing = [each for each in self._closing if not each.finished]

    def wait_closed(self) -> None:
        """Waits until the links that were closed have ended."""
        for link in self._closing:
            link.close()
        self._closing.clear()
