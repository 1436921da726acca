"""The epochs of a replica: the present one with its stage, links and requests, and the change to the next one.

Note [Entering an epoch]
    A committed epoch is entered in steps. The first stage of the old group plans nothing new; once nothing is in flight
    it sends its requests to all replicas concerned (kv_exchange.py). A replica enters once it has that from its own
    first stage: it drops the layers outside of its new span, makes a cache for those inside, and hands over its KV.
    If that fails the replica leaves all groups: the supervisor has the requests. So, too, where layers cannot be
    dropped after all, as their file was written to after the preparation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Final

import torch

from ...allocator.errors import BallonetError, DropRefused, PoolExhausted, WeightsFileChanged
from ...offload.policy.replicas import protocol
from ...offload.policy.replicas.groups import Group
from ...offload.policy.replicas.protocol import Reason
from ..sampling.grammar import GrammarRefused
from .channel import SupervisorChannel
from .errors import Interrupted, LinkError
from .kv_exchange import Handed, HandedOver, Handover, Regrouping
from .layer_moves import LayerMoves, ReplicaSetup, reason_of
from .leader import Leader
from .link import Link, LinkState
from .messages import ENDS_GROUP, Start, Told
from .microbatch_plan import Request, record_of, tensor_of
from .stage import Stage, WatchedLink

# Seconds of copies of KV between two microbatches: less than a decoding step. Chosen.
_EXCHANGING: Final = 0.01


class LedRequests:
    """Starts requests, those that came before their epoch began here as soon as it does, and reports their tokens."""

    def __init__(self, supervisor: SupervisorChannel) -> None:
        self._supervisor = supervisor
        self._early: list[Start] = []
        self._news: list[Told] = []

    def start(self, start: Start, epoch: int, leader: Leader | None) -> None:
        """Starts a request with the leader of this epoch; None: not there yet, so the request waits."""
        if start.epoch < epoch:
            return  # its group has ended: the supervisor assigns it to another
        if start.epoch > epoch or leader is None:
            self._early.append(start)
            return
        try:
            leader.requests.add(start.request)
        except (BallonetError, GrammarRefused) as error:
            self.add_report(start.request, error)

    def start_early(self, epoch: int, leader: Leader | None) -> None:
        """Starts all requests that waited for this epoch or its leader."""
        early, self._early = self._early, []
        for start in early:
            self.start(start, epoch, leader)

    def cancel(self, request: str) -> None:
        """Forgets a request whose client has gone away, if it waits."""
        self._early = [start for start in self._early if start.request.name != request]

    def add_report(self, request: Request, error: Exception | None) -> None:
        """Queues a report: the request's new token, or why it failed."""
        before = len(request.delivered) - (error is None)
        tokens = request.delivered[before:]
        said = None if error is None else f"{type(error).__name__}: {error}"
        self._news.append(Told(request.name, request.assignment, before, tokens, said))

    def send_reports(self) -> None:
        """Sends the queued reports of all requests in one message. SupervisorLost."""
        news, self._news = self._news, []
        if news:
            self._supervisor.post(*news)


class PendingEpoch:
    """The next epoch. Used by one thread. `mine`: the new group of this replica; `pulls`: restores layers that its new
    span needs; `reported`: `Prepared` was sent; `committed`: it will be entered; `cancelled`: requests that were
    cancelled in the meantime, and may be on their way here."""

    def __init__(
        self, wanted: protocol.Prepare, mine: Group, me: int, old: Group | None, links: dict[int, Link]
    ) -> None:
        """`old`: the present group of this replica; `links`: to the peers, being formed. `leaders`: first stages of the
        old groups of this replica and its peers."""
        self.epoch = wanted.epoch
        self.mine = mine
        self.links = links
        self.pulls: Iterator[object] = iter(())
        self.reported = False
        self.committed = False
        self.cancelled: set[str] = set()
        self.handed_over: list[HandedOver] = []
        self._me = me
        self._groups = wanted.groups
        self._homes: dict[str, int] = {}
        self._leader = me if old is None else old.members[0]
        of_peers = [members[0] for members in wanted.old if not links.keys().isdisjoint(members)]
        self.leaders = frozenset((self._leader, *of_peers))

    @property
    def is_connected(self) -> bool:
        """Whether all links are open."""
        return all(link.state is LinkState.OPEN for link in self.links.values())

    @property
    def can_enter(self) -> bool:
        """Whether the first stage of this replica's old group has sent its HandedOver, so the epoch can be entered."""
        return any(told.leader == self._leader for told in self.handed_over)

    def commit(self, homes: Iterable[tuple[str, int]]) -> None:
        """Notes that the epoch is committed. `homes`: for each request, a member of its new group."""
        self.committed = True
        self._homes = dict(homes)

    def new_group_of(self, request: str) -> Group:
        """Returns the new group of a request."""
        member = self._homes.get(request)
        return self.mine if member is None else next(group for group in self._groups if member in group.members)

    def poll(self) -> None:
        """Receives the handovers of the old groups. LinkError."""
        self.handed_over += receive_handovers(self.links)

    def hand_over_requests(self, stage: Stage) -> None:
        """Sends all peers the requests of the old group, of which this replica is the first stage."""
        leader = stage.leader
        assert leader is not None
        requests = leader.requests
        held = {name: requests.held(name) for name in requests.by_name}
        handed = tuple(Handed(requests.release(name), tokens) for name, tokens in held.items())
        told = HandedOver(self._me, stage.group, handed)
        for link in self.links.values():
            link.send(tensor_of(told), "handover", urgent=True)
        self.handed_over.append(told)


def receive_handovers(links: Mapping[int, Link]) -> Iterator[HandedOver]:
    """Yields the handovers that have come over these links. LinkError."""
    for link in links.values():
        while link.has("handover") and (told := link.take("handover")) is not None:
            yield record_of(told, HandedOver)


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
        notify = self._requests.add_report
        self.stage = setup.make_stage(setup.replica, group, setup.me, epoch, watched, notify, setup.split)
        moves.restore_own_layers(group, epoch)
        self._requests.start_early(epoch, self.leader)
        setup.supervisor.post(protocol.Committed(0.0, epoch, setup.me))

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
        regrouping = Regrouping(setup.me, pending.new_group_of, self.links, pending.leaders)
        self.handover = Handover(regrouping, old, self.stage, self._damaged, setup.tuning.piece)
        for request in pending.cancelled:
            self.handover.cancel(request)
        for told in pending.handed_over:
            self.handover.take_in(told)

    def exchange_kv(self) -> bool:
        """Takes steps of the handover, for some milliseconds. Returns whether it did anything. LinkError."""
        handover, clock = self.handover, self._setup.clock
        assert handover is not None
        for told in receive_handovers(self.links):
            handover.take_in(told)
        until = clock() + _EXCHANGING
        happened = handover.step()
        while happened and not handover.complete and clock() < until and handover.step():
            self._beat()
        if handover.complete:
            self.sent += handover.sent
            self.handover = self._old = None
            self._setup.supervisor.post(protocol.Exchanged(0.0, self.epoch, self._setup.me))
        return happened

    def drop_late_kv(self) -> None:
        """Drops KV that comes after the exchange is complete: of requests that are computed anew, as another piece was
        damaged. It would end each idle wait, and keep its memory."""
        for link in self.links.values():
            for tag in ("kv header", "kv", "arrival"):
                while link.error is None and link.has(tag):
                    with suppress(LinkError):
                        link.take(tag)

    def _damaged(self, member: int, request: str) -> None:
        """Reports to the supervisor that a member received damaged KV of a request."""
        self._setup.supervisor.post(protocol.Damaged(0.0, self.epoch, member, request))

    def leave(self) -> None:
        """Leaves the group, and drops all KV and requests."""
        self.close_links(self.links.values())
        if self.handover is not None:
            self.handover.close()
        if (times := self._setup.replica.times) is not None:
            times.set_open_stages(0)
        self.links, self.handover = {}, None
        self._old = self.stage = None

    def close_links(self, links: Iterable[Link]) -> None:
        """Closes links, without waiting for the other ends."""
        for link in links:
            link.begin_close()
            self._closing.append(link)
        self._closing = [link for link in self._closing if not link.finished]

    def wait_closed(self) -> None:
        """Waits until the links that were closed have ended."""
        for link in self._closing:
            link.close()
        self._closing.clear()


class EpochChange:
    """Changes the epoch. Used by one thread. `pending`: the next epoch, None while there is none."""

    def __init__(self, setup: ReplicaSetup, state: EpochState, moves: LayerMoves) -> None:
        self.pending: PendingEpoch | None = None
        self._setup = setup
        self._state = state
        self._moves = moves

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

    def prepare(self, wanted: protocol.Prepare) -> None:
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

    def commit(self, wanted: protocol.Commit) -> None:
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
            pending.hand_over_requests(stage)
        if not pending.can_enter:
            return False
        self.pending = None
        try:
            self._state.enter(pending, self._moves)
        except (DropRefused, WeightsFileChanged, PoolExhausted, torch.OutOfMemoryError):
            self._state.leave()
            self._setup.supervisor.post(
                protocol.Suspected(0.0, pending.epoch, self._setup.me, next(iter(pending.links)))
            )
        return True

    def _prepare_step(self, pending: PendingEpoch) -> bool:
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
        self._setup.supervisor.post(protocol.Prepared(0.0, pending.epoch, self._setup.me))
        return True

    def _fail(self, pending: PendingEpoch, reason: Reason) -> None:
        self._setup.supervisor.post(protocol.PrepareFailed(0.0, pending.epoch, self._setup.me, reason))
        self.drop_pending()
