"""The main loop of a replica: it hears the supervisor, computes its part in a group, and changes from epoch to epoch.

Note [One thread]
    Everything that touches the model happens in this loop, one thing after the other: mail, a microbatch, a piece of
    KV, a layer that comes home. So a change of epoch happens between two microbatches, and nothing is locked. What
    waits for others counts on meanwhile (`Over`): a replica that stands still is one whose kernel, or process, does.

Note [Turning]
    A committed epoch is taken up in steps. The first stage of the old group plans nothing new; once all that was in
    flight has come back it tells everybody concerned which requests it had (handover.py). A replica turns when it has
    heard that from its own first stage: layers outside of its new span are dropped, a cache is made for those inside,
    and what it had goes over. Where an epoch fails everything of it is forgotten: the supervisor has the requests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ...allocator.errors import BallonetError, DropRefused, WeightsFileChanged
from ...offload.policy.replicas import actions, events
from ...offload.policy.replicas.demand import KVSize, prompt_pages
from ...offload.policy.replicas.events import Reason
from ...offload.policy.replicas.groups import Group, alone
from ...offload.policy.replicas.restore_plan import Pull
from ...offload.policy.tuning import DEFAULT, Replicas
from ..weights.layers import decoder_layers
from .bell import Bell
from .errors import Interrupted, LinkError
from .follower import OutOfStep
from .forming import Form, by_tokens
from .handover import Handed, HandedOver, Handover
from .held_layers import HeldLayers, Source
from .link import Link
from .local import Member
from .local_link import tensor_of, text_of
from .messages import Counted, End, Message, Start, Told, decoded, encoded
from .requests import Request
from .sending import State
from .stage import Over, Stage


class Speaks(Protocol):
    """The supervisor, as a replica sees it."""

    def take(self) -> Message | None:
        """What it says next; None where nothing is here. SupervisorLost."""

    def has(self) -> bool:
        """Is anything here?"""

    def urgent(self) -> bool:
        """Does anything here end what this replica waits for?"""

    def post(self, message: Message) -> None:
        """Tells it something."""


@dataclass(slots=True)
class _Next:
    """An epoch that is prepared, or being turned to."""

    epoch: int
    groups: tuple[Group, ...]
    mine: Group
    links: dict[int, Link]
    homes: dict[str, int] = field(default_factory=dict)
    leaders: dict[int, int] = field(default_factory=dict)  # the first stage of its old group, by member
    told: bool = False  # that it is ready
    pulls: Iterator[object] = field(default_factory=lambda: iter(()))
    committed: bool = False
    heard: list[HandedOver] = field(default_factory=list)

    def home(self, request: str) -> Group:
        """The new group of a request."""
        member = self.homes.get(request)
        if member is None:
            return self.mine
        return next(group for group in self.groups if member in group.members)


class Replica:
    """Number `me` of the replicas of a model."""

    def __init__(
        self,
        me: int,
        replica: Member,
        layers: int,
        holds: HeldLayers,
        supervisor: Speaks,
        connect: Callable[[int, int], Link],
        bell: Bell,
        clock: Callable[[], float],
        form: Form = by_tokens,
        tuning: Replicas = DEFAULT.replicas,
    ) -> None:
        """`layers`: of the model; `connect`: (epoch, peer) begins to form a link; `form`: makes microbatches."""
        self.me = me
        self.epoch = -1
        self.stage: Stage | None = None
        self._replica = replica
        self._layers = layers
        self._holds = holds
        self._supervisor = supervisor
        self._connect = connect
        self._bell = bell
        self._clock = clock
        self._form = form
        self._tuning = tuning
        self._links: dict[int, Link] = {}
        self._closing: list[Link] = []
        self._next: _Next | None = None
        self._handover: Handover | None = None
        self._old: Stage | None = None  # whose KV goes over
        self._pulls: Iterator[object] = iter(())
        self._pulling = False
        self._pull_epoch = -1
        self._early: list[Start] = []
        self._assignments: dict[str, int] = {}
        self._progress = 0
        self._beaten = -1.0
        self._ended = False
        self._preparing: Iterator[object] | None = None  # makes layers ready to be dropped
        self._ready = False  # all are, or it will be said why not when a drop is asked for
        self._counted = (0, 0)  # bytes of KV, of layers that went to others

    # -- the loop

    def run(self) -> None:
        """Until the supervisor says so, or is gone. SupervisorLost."""
        try:
            while not self._ended:
                self.step()
        finally:
            self._close()

    def step(self) -> None:
        """One turn of the loop, which waits a little where there is nothing to do."""
        self._beat()
        while not self._ended and (message := self._supervisor.take()) is not None:
            self._hear(message)
        try:
            happened = self._work()
        except Interrupted:
            happened = True  # what it waited for is over: the mail says why
        except LinkError as error:
            self._lost(error.peer)
            happened = True
        if not happened and not self._ended:
            self._bell.wait(lambda: self._has_news() or None, self._tuning.beat)

    def _work(self) -> bool:
        happened = False
        if self.stage is not None:
            try:
                happened = self.stage.step()
            except OutOfStep:
                self._lost(self.stage.group.members[self.stage.group.members.index(self.me) - 1])
        happened = self._advance() or happened
        if self._handover is not None:
            happened = self._exchange() or happened
        happened = self._pull() or happened
        self._serve_pulls()
        if not happened and not self._ready:
            happened = self._get_ready()
        return happened

    def _has_news(self) -> bool:
        if self._supervisor.has() or (self.stage is not None and self.stage.has_work()):
            return True
        links = {**self._links, **(self._next.links if self._next is not None else {})}
        tags = ("kv", "verdict", "handover", "pull", "old")
        return any(link.has(tag) for link in links.values() for tag in tags if link.error is None)

    def _beat(self) -> None:
        """Counts on, and tells the load now and then."""
        self._progress += 1
        now = self._clock()
        if now - self._beaten < min(self._tuning.beat, self._tuning.period) or self.epoch < 0:
            return
        self._beaten = now
        used, free, pending = self._memory()
        self._supervisor.post(events.Load(0.0, self.me, self.epoch, used, free, pending, self._progress))

    def _memory(self) -> tuple[int, int, int]:
        """Pages of KV on the device, those that are free, and those that are waited for: by prompts, and by KV that had
        to leave for the host. What idles in the heap between two steps is no free memory: activations have it."""
        stage = self.stage
        if stage is None:
            return 0, 0, 0
        cache = stage.cache
        page = cache.on.page_size
        cache.pool.try_to_free_sectors()  # of requests that have ended: nobody asks while nothing runs
        waiting = () if stage.leader is None else stage.leader.waiting
        size = KVSize(round(cache.token_bytes * self._layers / len(cache.layers)), page)
        away = cache.pages.client.displaced
        return cache.pages.nbytes // page - away, cache.on.available, prompt_pages(waiting, size) + away

    # -- mail

    def _hear(self, message: Message) -> None:
        match message:
            case Start():
                self._start(message)
            case actions.Cancel():
                self._cancel(message.request)
            case actions.Prepare():
                self._prepare(message)
            case actions.Commit():
                self._commit(message)
            case actions.Discard():
                self._discard(message.epoch)
            case actions.Alone():
                self._alone(message.epoch)
            case actions.StartRestore():
                self._start_restore(message)
            case End():
                self._ended = True

    def _start(self, start: Start) -> None:
        if start.epoch < self.epoch:
            return  # of a group that is no more: the supervisor gives it to another
        leader = None if self.stage is None else self.stage.leader
        if start.epoch > self.epoch or leader is None:
            self._early.append(start)
            return
        name = start.request.name
        self._assignments[name] = start.assignment
        try:
            leader.add(start.request)
        except BallonetError as error:
            self._told(start.request, error)

    def _cancel(self, request: str) -> None:
        self._early = [each for each in self._early if each.request.name != request]
        if self._handover is not None:
            self._handover.cancel(request)
        if self.stage is not None and self.stage.leader is not None:
            self.stage.leader.cancel(request)

    def _told(self, request: Request, error: Exception | None) -> None:
        """Something has become of a request that this replica leads."""
        assignment = self._assignments.get(request.name)
        if assignment is None:
            return
        before = len(request.delivered) - (error is None)
        tokens = request.delivered[before:]
        said = None if error is None else f"{type(error).__name__}: {error}"
        self._supervisor.post(Told(request.name, assignment, before, tokens, said))
        if error is not None or request.over:
            self._assignments.pop(request.name, None)

    # -- epochs

    def _alone(self, epoch: int) -> None:
        """Whatever it was part of is no more: it serves on its own, layers that it dropped come from their backing."""
        self._forget_all()
        self.epoch = epoch
        self._turn_to(alone(self.me, self._layers), {})
        self._supervisor.post(events.Committed(0.0, epoch, self.me))

    def _prepare(self, wanted: actions.Prepare) -> None:
        mine = next((group for group in wanted.groups if self.me in group.members), None)
        if mine is None:
            return
        self._discard_next()
        old = () if self.stage is None else self.stage.group.members
        peers = sorted({*mine.members, *old} - {self.me})
        links = {peer: self._connect(wanted.epoch, peer) for peer in peers}
        first = old[0] if old else self.me
        for link in links.values():
            link.send(tensor_of(str(first)), "old", urgent=True)
        self._next = _Next(wanted.epoch, wanted.groups, mine, links, leaders={self.me: first})
        self._next.pulls = self._pulled(wanted.pulls, links)

    def _commit(self, wanted: actions.Commit) -> None:
        if self._next is None or self._next.epoch != wanted.epoch:
            return
        self._next.committed = True
        self._next.homes = dict(wanted.homes)
        if self.stage is not None and self.stage.leader is not None:
            self.stage.leader.plans = False

    def _discard(self, epoch: int) -> None:
        self._pulling &= self._pull_epoch != epoch
        if self._next is not None and self._next.epoch == epoch and not self._next.committed:
            self._discard_next()

    def _discard_next(self) -> None:
        if self._next is not None:
            self._release(self._next.links.values())
            self._next = None
        if self.stage is not None and self.stage.leader is not None:
            self.stage.leader.plans = True

    def _advance(self) -> bool:
        """A step of the epoch that comes: ready, told, turned."""
        coming = self._next
        if coming is None:
            return False
        for member, link in coming.links.items():
            if member not in coming.leaders and link.has("old") and (found := link.take("old")) is not None:
                coming.leaders[member] = int(text_of(found))
        if not coming.committed:
            return self._make_ready(coming)
        stage = self.stage
        if stage is not None and stage.leader is not None and not stage.leader.plans and stage.drained:
            self._hand_over(coming, stage)
        for link in coming.links.values():
            while link.has("handover") and (found := link.take("handover")) is not None:
                told = decoded(text_of(found))
                assert isinstance(told, HandedOver)
                coming.heard.append(told)
        own = coming.leaders[self.me]
        if any(each.leader == own for each in coming.heard):
            self._turn(coming)
            return True
        return False

    def _make_ready(self, coming: _Next) -> bool:
        if coming.told:
            return False
        for each in coming.links.values():
            if each.state is State.LOST:
                self._fail_prepare(coming, Reason.LINK)
                return True
        ready = all(each.state is State.OPEN for each in coming.links.values())
        if not ready or len(coming.leaders) <= len(coming.links):
            return False
        try:
            if next(coming.pulls, None) is not None or self._prepared():
                return True
        except Interrupted:
            self._discard_next()
            raise
        except (BallonetError, torch.OutOfMemoryError) as error:
            self._fail_prepare(coming, _reason(error))
            return True
        coming.told = True
        self._supervisor.post(events.Prepared(0.0, coming.epoch, self.me))
        return True

    def _fail_prepare(self, coming: _Next, reason: Reason) -> None:
        self._supervisor.post(events.PrepareFailed(0.0, coming.epoch, self.me, reason))
        self._discard_next()

    def _hand_over(self, coming: _Next, stage: Stage) -> None:
        leader = stage.leader
        assert leader is not None
        requests = []
        for name in list(leader.requests):
            held = leader.held(name)
            request = leader.release(name)
            assignment = self._assignments.pop(name, None)
            if assignment is not None:
                requests.append(Handed(request, held, assignment))
        told = HandedOver(self.me, stage.group, tuple(requests))
        for link in coming.links.values():
            link.send(tensor_of(encoded(told)), "handover", urgent=True)
        coming.heard.append(told)

    def _turn(self, coming: _Next) -> None:
        """Takes up its place in the new epoch. What it had is kept until it has gone over."""
        self._next, self._old = None, self.stage
        before, self._links = self._links, coming.links
        self._release(before.values())
        self.epoch = coming.epoch
        self._turn_to(coming.mine, self._links)
        assert self.stage is not None
        old = None if self._old is None else self._old.cache
        leaders = frozenset(coming.leaders.values())
        self._handover = Handover(
            self.me, old, self.stage, coming.home, self._links, leaders, self._took, self._tuning.piece
        )
        for each in coming.heard:
            self._handover.hear(each)
        self._supervisor.post(events.Committed(0.0, self.epoch, self.me))

    def _turn_to(self, group: Group, links: Mapping[int, Link]) -> None:
        span = group.span(self.me)
        if group.is_dropped:
            self._holds.drop(span)
        over = {
            peer: Over(link, self._tuning.beat, self._beat, self._supervisor.urgent) for peer, link in links.items()
        }
        self.stage = Stage(self._replica, group, self.me, self.epoch, over, self._told, self._form)
        if len(span) == self._layers and not self._pulling and not group.is_dropped:
            self._holds.release()
        self._start_early()

    def _start_early(self) -> None:
        early, self._early = self._early, []
        for each in early:
            self._start(each)

    def _took(self, handed: Handed) -> None:
        self._assignments[handed.request.name] = handed.assignment

    def _exchange(self) -> bool:
        handover = self._handover
        assert handover is not None
        for link in self._links.values():
            while link.has("handover") and (found := link.take("handover")) is not None:
                told = decoded(text_of(found))
                assert isinstance(told, HandedOver)
                handover.hear(told)
        if self._early and self.stage is not None and self.stage.leader is not None:
            self._start_early()
        happened = handover.step()
        if handover.complete:
            self._counted = (self._counted[0] + handover.sent, self._counted[1])
            self._handover = self._old = None
            self._supervisor.post(events.Exchanged(0.0, self.epoch, self.me))
            self._count()
        return happened

    def _count(self) -> None:
        stage = self.stage
        layers = self._layers if stage is None else len(stage.group.span(self.me))
        self._supervisor.post(Counted(*self._counted, layers))

    # -- layers

    def _prepared(self) -> bool:
        """Makes one more layer ready to be dropped. False once all are. What HeldLayers.prepare raises."""
        if self._preparing is None:
            self._preparing = self._holds.prepare(range(self._layers))
        if next(self._preparing, None) is not None:
            return True
        self._preparing = None
        return False

    def _get_ready(self) -> bool:
        """The same while there is nothing else to do."""
        try:
            self._ready = not self._prepared()
        except (BallonetError, torch.OutOfMemoryError):
            self._preparing, self._ready = None, True
        return not self._ready

    def _start_restore(self, wanted: actions.StartRestore) -> None:
        pulls = [each for each in wanted.pulls if each.member == self.me]
        coming = self._next
        links = coming.links if coming is not None and coming.epoch == wanted.epoch else self._links
        self._pulls = self._pulled(pulls, links)
        self._pulling = True
        self._pull_epoch = wanted.epoch

    def _pulled(self, pulls: Iterable[Pull], links: Mapping[int, Link]) -> Iterator[object]:
        """Brings layers home one by one, from a peer where there is a link to it, else from their backing."""
        for each in pulls:
            if each.member != self.me:
                continue
            link = None if each.source is None else links.get(each.source)
            source = None if link is None or link.error is not None else self._from(link)
            yield from self._holds.restore((each.layer,), source)

    def _from(self, link: Link) -> Source:
        def weights(layer: int) -> dict[str, torch.Tensor]:
            link.send(tensor_of(str(layer)), "pull", urgent=True)
            names = json.loads(text_of(self._wait(link, "layer")))
            return {name: self._wait(link, "weights") for name in names}

        return weights

    def _wait(self, link: Link, tag: str) -> torch.Tensor:
        over = Over(link, self._tuning.beat, self._meanwhile, self._supervisor.urgent)
        return over.recv(tag)

    def _meanwhile(self) -> None:
        self._beat()
        self._serve_pulls()

    def _pull(self) -> bool:
        if not self._pulling:
            return False
        try:
            if next(self._pulls, None) is not None:
                return True
        except Interrupted:
            self._pulling = False
            raise
        except (BallonetError, torch.OutOfMemoryError) as error:
            self._pulling = False
            if isinstance(error, LinkError):
                self._lost(error.peer)
            else:
                self._supervisor.post(events.PullFailed(0.0, self._pull_epoch, self.me, _reason(error)))
            return True
        self._pulling = False
        if self.stage is not None and not self.stage.group.is_dropped:
            self._holds.release()
        self._supervisor.post(events.Restored(0.0, self._pull_epoch, self.me))
        self._count()
        return True

    def _serve_pulls(self) -> None:
        """Sends layers that others ask for."""
        links = [*self._links.values(), *(self._next.links.values() if self._next is not None else ())]
        for link in links:
            while link.error is None and link.has("pull") and (found := link.take("pull")) is not None:
                layer = decoder_layers(self._replica.model)[int(text_of(found))]
                tensors = {
                    name: tensor.detach() for name, tensor in (*layer.named_parameters(), *layer.named_buffers())
                }
                link.send(tensor_of(json.dumps([*tensors])), "layer", urgent=True)
                for tensor in tensors.values():
                    link.send(tensor, "weights", check=True)
                    self._counted = (self._counted[0], self._counted[1] + tensor.nbytes)

    # -- what goes wrong

    def _lost(self, peer: int) -> None:
        """A link is gone: the supervisor decides what becomes of the group."""
        coming = self._next
        epoch = self.epoch
        if coming is not None and (peer in coming.links and coming.links[peer].error is not None):
            epoch = coming.epoch
        self._supervisor.post(events.Suspected(0.0, epoch, self.me, peer))
        if coming is not None and epoch == coming.epoch and not coming.committed:
            self._discard_next()
            return
        self._forget_all()

    def _forget_all(self) -> None:
        """Ends its part in groups, with all KV and requests."""
        self._discard_next()
        self._release(self._links.values())
        self._links, self._handover, self._pulling = {}, None, False
        self._assignments.clear()
        self._old = self.stage = None

    def _release(self, links: Iterable[Link]) -> None:
        """Closes links without waiting: others may be slow."""
        for link in links:
            link.begin_close()
            self._closing.append(link)
        self._closing = [each for each in self._closing if not each.finished]

    def _close(self) -> None:
        self._forget_all()
        for link in self._closing:
            link.close()
        self._closing.clear()


def _reason(error: Exception) -> Reason:
    if isinstance(error, WeightsFileChanged):
        return Reason.FILE_CHANGED
    return Reason.HOST_MEMORY if isinstance(error, DropRefused) else Reason.PAGES
