"""A replica's stage in one group: leader or follower, connected by the links of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ...offload.policy.replicas.demand import KVSize, prompt_pages
from ...offload.policy.replicas.groups import Group
from .errors import NoAnswer
from .follower import Follower
from .leader import Leader, Notify
from .link import Link
from .microbatch_plan import FollowerSize, SplitPolicy, record_of, split_by_tokens, tensor_of
from .replica_model import ReplicaModel, SpanCache, StageParts, cache_of, most_tokens, runner_of


class WatchedLink:
    """One end of a link as stages use it. `idle`: called every `beat` seconds of a wait, to report that this replica is
    alive; `unless`: returns whether a control message has to interrupt the wait."""

    def __init__(self, link: Link, beat: float, idle: Callable[[], object], unless: Callable[[], bool]) -> None:
        self.link = link
        self._beat = beat
        self._idle = idle
        self._unless = unless

    def send(self, tensor: torch.Tensor, tag: str, urgent: bool) -> None:
        """Sends a tensor, see stage_link.StageLink. LinkError."""
        self.link.send(tensor, tag, urgent)

    def recv(self, tag: str) -> torch.Tensor:
        """Waits for the next tensor of this tag, and returns it. LinkError, Interrupted."""
        while True:
            try:
                return self.link.recv(tag, self._beat, self._unless)
            except NoAnswer:
                self._idle()


class Stage:
    """A stage. Used by one thread. `leader`: None on followers, and on the first stage until all others are ready. In
    virtual time its cache, leader and follower are others (virtual_replicas/virtual_stage.py)."""

    def __init__(
        self,
        replica: ReplicaModel,
        group: Group,
        me: int,
        epoch: int,
        links: Mapping[int, WatchedLink],
        notify: Notify,
        split: SplitPolicy = split_by_tokens,
    ) -> None:
        """`me`: the number of this replica; `links`: to the other members of the group, by their numbers; `notify`:
        called on the leader with each request that got a token, or failed. torch.OutOfMemoryError, DriverError."""
        number = group.members.index(me)
        span = group.span(me)
        self.group = group
        self.epoch = epoch
        self.leader: Leader | None = None
        self.cache = self._new_cache(replica, span.layers)
        self._replica = replica
        self._links = links
        self._notify = notify
        self.split = split
        self._before = links.get(group.members[number - 1])
        self._after = links.get(group.members[(number + 1) % group.size])
        self._follower: Follower | None = None
        self._ready: dict[int, FollowerSize] = {}  # by follower
        if number:
            self._follower = self._new_follower(number)
            links[group.members[0]].send(tensor_of(self._follower_size()), "ready", True)
        elif group.size == 1:
            self.leader = self._new_leader([])

    def _new_cache(self, replica: ReplicaModel, layers: range) -> SpanCache:
        self._runner = runner_of(replica, cache := cache_of(replica, layers))
        return cache

    @property
    def _parts(self) -> StageParts:
        return StageParts(self.epoch, self.cache, self._runner, self._replica.grammars, self._before, self._after)

    def _new_follower(self, number: int) -> Follower:
        return Follower(number, self._parts)

    def _follower_size(self) -> FollowerSize:
        assert self._follower is not None
        return FollowerSize(self._follower.room, most_tokens(self.cache), self.cache.max_tokens_read)

    def _new_leader(self, followers: Sequence[FollowerSize]) -> Leader:
        return Leader(self._parts, self._replica.settings, self._notify, followers, self.split)

    @property
    def follower(self) -> Follower | None:
        return self._follower

    @property
    def drained(self) -> bool:
        """Whether this leader has nothing planned, nor in flight."""
        return self.leader is None or not (self.leader.in_flight or self.leader.queued)

    def count_pages(self, layers: int) -> tuple[int, int, int]:
        """Returns pages: (of KV on the device, free, pending). Pending are those for prompts that wait, and for KV
        that had to move to the host. Idle memory of the heap between two steps belongs to activations, and does not
        count as free. `layers`: of the model; pending prompts count with all of them."""
        cache = self.cache
        page = cache.on.page_size
        cache.pool.try_to_free_sectors()  # of ended requests: otherwise freed only when the next request needs some
        waiting = () if self.leader is None else self.leader.requests.waiting
        size = KVSize(round(cache.token_bytes * layers / len(cache.layers)), page)
        away = cache.pages.client.displaced
        return cache.pages.nbytes // page - away, cache.on.available, prompt_pages(waiting, size) + away

    def has_work(self) -> bool:
        """Returns whether `step` can do something now."""
        if self._follower is not None:
            return self._before is not None and self._before.link.has("plan")
        if self.leader is None:
            return any(link.link.has("ready") for link in self._links.values())
        return self._answered() or (not self.leader.idle and self.leader.in_flight < self.group.size)

    def step(self) -> bool:
        """Computes one microbatch, or takes in an answer and begins another. Returns whether it did anything.
        LinkError, OutOfStep; Interrupted: the microbatch is lost."""
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
        """Takes in followers that are ready; becomes the leader once all are."""
        came = False
        for member in self.group.members[1:]:
            if member not in self._ready and (ready := self._links[member].link.take("ready")) is not None:
                self._ready[member] = record_of(ready, FollowerSize)
                came = True
        if len(self._ready) == self.group.size - 1:
            self.leader = self._new_leader([self._ready[member] for member in self.group.members[1:]])
        return came
