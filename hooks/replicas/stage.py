"""A replica's place in one group: the first stage leads, the others follow, joined by the links of an epoch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import torch

from ...offload.policy.replicas.groups import Group
from .errors import NoAnswer
from .follower import Follower
from .group_requests import Told
from .leader import Leader
from .link import Link
from .microbatch_split import SplitPolicy, split_by_tokens
from .replica_model import ReplicaModel, cache_of, most_tokens, room_of, runner_of
from .stage_link import tensor_of, text_of


class WatchedLink:
    """One end of a link as stages use it. `idle` is called every `beat` seconds while a message is waited for: who
    waits for another replica is alive. `unless`: somebody calls this one away, which raises Interrupted."""

    def __init__(self, link: Link, beat: float, idle: Callable[[], object], unless: Callable[[], bool]) -> None:
        self.link = link
        self._beat = beat
        self._idle = idle
        self._unless = unless

    def send(self, tensor: torch.Tensor, tag: str, urgent: bool) -> None:
        """See stage_link.StageLink. LinkError."""
        self.link.send(tensor, tag, urgent)

    def recv(self, tag: str) -> torch.Tensor:
        """See stage_link.StageLink. LinkError, Interrupted."""
        while True:
            try:
                return self.link.recv(tag, self._beat, self._unless)
            except NoAnswer:
                self._idle()


class Stage:
    """Used by one thread. `leader`: None on the other stages, and on the first until all others are there."""

    def __init__(
        self,
        replica: ReplicaModel,
        group: Group,
        me: int,
        epoch: int,
        over: Mapping[int, WatchedLink],
        told: Told,
        split: SplitPolicy = split_by_tokens,
    ) -> None:
        """`me`: the number of this replica; `over`: the links to the others of the group, by their numbers.
        torch.OutOfMemoryError, DriverError."""
        number = group.members.index(me)
        span = group.span(me)
        self.group = group
        self.epoch = epoch
        self.leader: Leader | None = None
        self.cache = cache_of(replica, range(span.begin, span.end))
        self._replica = replica
        self._runner = runner_of(replica, self.cache)
        self._over = over
        self._told = told
        self._split = split
        self._before = over.get(group.members[number - 1])
        self._after = over.get(group.members[(number + 1) % group.size])
        self._follower: Follower | None = None
        self._rooms: dict[int, tuple[int, int, int]] = {}  # of the others: room, most and reads of a Leader
        if number:
            assert self._before is not None
            assert self._after is not None
            cache = self.cache
            self._follower = Follower(
                epoch, number, cache, self._runner, self._before, self._after, lambda: room_of(cache)
            )
            ready = json.dumps([self._follower.room, most_tokens(cache), cache.max_tokens_read])
            over[group.members[0]].send(tensor_of(ready), "ready", True)
        elif group.size == 1:
            self._lead()

    @property
    def follower(self) -> Follower | None:
        return self._follower

    @property
    def leads(self) -> bool:
        return self._follower is None

    @property
    def drained(self) -> bool:
        """Is nothing planned, nor in flight? Of a leader."""
        return self.leader is None or not (self.leader.in_flight or self.leader.queued)

    def has_work(self) -> bool:
        """Would a step do something now, as far as can be seen?"""
        if self._follower is not None:
            return self._before is not None and self._before.link.has("plan")
        if self.leader is None:
            return any(over.link.has("ready") for over in self._over.values())
        return self._answered() or (not self.leader.idle and self.leader.in_flight < self.group.size)

    def step(self) -> bool:
        """Computes one microbatch, or takes in an answer and begins another. Did anything happen? LinkError, OutOfStep;
        Interrupted: the microbatch is lost."""
        if self._follower is not None:
            if not self.has_work():
                return False
            self._follower.run()
            return True
        if self.leader is None:
            return self._gather()
        happened = self.leader.collect() if self._answered() else False
        happened = self.leader.launch() or happened
        if (times := self._replica.times) is not None:
            times.set_open_stages(self.group.size if self.leader.in_flight else 0)
        return happened

    def _answered(self) -> bool:
        assert self.leader is not None
        return self.leader.in_flight > 0 and (self._before is None or self._before.link.has("answer"))

    def _gather(self) -> bool:
        """Takes in who is there; leads as soon as all are."""
        came = False
        for member in self.group.members[1:]:
            if member not in self._rooms and (found := self._over[member].link.take("ready")) is not None:
                room, most, reads = json.loads(text_of(found))
                self._rooms[member] = room, most, reads
                came = True
        if len(self._rooms) == self.group.size - 1:
            self._lead()
        return came

    def _lead(self) -> None:
        rooms = [self._rooms[member] for member in self.group.members[1:]]
        self.leader = Leader(
            self.epoch,
            self.cache,
            self._runner,
            self._replica.settings,
            self._told,
            after=self._after,
            last=self._before,
            rooms=tuple(room for room, _, _ in rooms),
            most=min((most for _, most, _ in rooms), default=float("inf")),
            reads=min((reads for _, _, reads in rooms), default=float("inf")),
            split=self._split,
        )
