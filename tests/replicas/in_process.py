"""Groups whose stages are all in one process and one thread: what happens in which order is the test's choice."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any

import torch

from ballonet.hooks.replicas.follower import Follower
from ballonet.hooks.replicas.kv_exchange import Handed, HandedOver, Handover, Regrouping
from ballonet.hooks.replicas.leader import Leader, Notify
from ballonet.hooks.replicas.link import LinkState
from ballonet.hooks.replicas.microbatch_plan import Request, SplitPolicy, split_by_tokens
from ballonet.hooks.replicas.replica_model import ReplicaModel, SpanCache
from ballonet.hooks.replicas.stage import Stage, WatchedLink
from ballonet.offload.policy.replicas.groups import Group, Span

Inbox = defaultdict[str, deque[torch.Tensor]]


class MemoryLink:
    """One end of a link within a thread, in the place of link.Link: what was sent is there at once."""

    error = None
    state = LinkState.OPEN
    finished = True

    def __init__(self, sent: Inbox, came: Inbox) -> None:
        self._sent, self._came = sent, came

    @classmethod
    def pair(cls) -> tuple[MemoryLink, MemoryLink]:
        there: Inbox = defaultdict(deque)
        back: Inbox = defaultdict(deque)
        return cls(there, back), cls(back, there)

    def send(self, tensor: torch.Tensor, tag: str, urgent: bool = False, check: bool = False) -> None:
        """Sends a copy, as another process would get one."""
        self._sent[tag].append(tensor.detach().clone())

    def has(self, tag: str) -> bool:
        return bool(self._came[tag])

    def take(self, tag: str) -> torch.Tensor | None:
        return self._came[tag].popleft() if self.has(tag) else None

    def recv(self, tag: str, timeout: float, unless: Callable[[], bool]) -> torch.Tensor:
        """LookupError: nothing was sent, and the sender cannot run, in this thread."""
        if not self.has(tag):
            raise LookupError(f"nothing was sent as {tag}")
        return self._came[tag].popleft()

    def begin_close(self) -> None:
        """Nothing is to be told."""


def all_linked(members: Iterable[int]) -> dict[int, dict[int, Any]]:
    """Both ends of a link between any two: by its own number, and its peer's."""
    numbers = [*members]
    ends: dict[int, dict[int, Any]] = {number: {} for number in numbers}
    for one, other in combinations(numbers, 2):
        ends[one][other], ends[other][one] = MemoryLink.pair()
    return ends


class InProcess:
    """The stages of one group."""

    def __init__(
        self,
        epoch: int,
        members: Sequence[ReplicaModel],
        spans: Sequence[range],
        told: Notify,
        split: SplitPolicy = split_by_tokens,
    ) -> None:
        """`spans`: of layers, by member. A member that is there again and again is a replica of its own each time."""
        named = [int(member.name[1:]) for member in members]
        numbers = named if len({*named}) == len(named) else [*range(len(members))]
        self.group = Group(tuple(numbers), tuple(Span(each.start, each.stop) for each in spans))
        ends = all_linked(numbers)
        self.stages = []
        for number, member in zip(numbers, members, strict=True):
            over = {peer: WatchedLink(end, 0.0, bool, bool) for peer, end in ends[number].items()}
            self.stages.append(Stage(member, self.group, number, epoch, over, told, split))
        while self.stages[0].leader is None:
            assert self.stages[0].step()

    @property
    def leader(self) -> Leader:
        leader = self.stages[0].leader
        assert leader is not None
        return leader

    @property
    def followers(self) -> list[Follower]:
        return [stage.follower for stage in self.stages if stage.follower is not None]

    @property
    def caches(self) -> list[SpanCache]:
        return [stage.cache for stage in self.stages]

    def add(self, request: Request) -> None:
        self.leader.requests.add(request)

    def step(self) -> bool:
        """Each stage does what it can, the last one first. Did anything happen?"""
        return sum(stage.step() for stage in reversed(self.stages)) > 0

    def run(self, steps: int = 10_000) -> None:
        """Until nothing is left to do."""
        for _ in range(steps):
            if not self.step() and self.leader.idle:
                return
        raise AssertionError(f"after {steps} steps there are requests yet: {sorted(self.leader.requests.by_name)}")

    def drain(self) -> None:
        """Brings what is in flight to its end; nothing new is planned from now on."""
        self.leader.plans = False
        while not self.stages[0].drained:
            self.step()

    def hand_over(self) -> HandedOver:
        """Drains, and lets all requests go."""
        self.drain()
        leader = self.leader
        held = {name: leader.requests.held(name) for name in leader.requests.by_name}
        handed = tuple(Handed(leader.requests.release(name), tokens) for name, tokens in held.items())
        return HandedOver(self.group.members[0], self.group, handed)


class Regroup:
    """Requests of old groups go on in new ones, which serve others meanwhile. A replica may be in both."""

    def __init__(
        self, old: Sequence[InProcess], new: Sequence[InProcess], home: Callable[[Request], int], most: int
    ) -> None:
        """`home`: which of the new groups a request goes to; `most`: blocks of a piece."""
        self.damaged = list[tuple[int, str]]()
        lost = self.damaged  # not of this object: it would refer to itself, and go later than its last reference
        told = [group.hand_over() for group in old]
        homes = {each.request.name: new[home(each.request)].group for one in told for each in one.requests}
        self._handed, self._taken = {*homes}, set[str]()
        had = {n: stage.cache for each in old for n, stage in zip(each.group.members, each.stages, strict=True)}
        gets = {n: stage for each in new for n, stage in zip(each.group.members, each.stages, strict=True)}
        ends = all_linked({**had, **gets})
        leaders = frozenset(each.leader for each in told)
        self._leaders = [stage.leader for stage in gets.values() if stage.leader is not None]

        def damaged(member: int, name: str) -> None:
            """Computes a damaged request anew where it is, as the supervisor would."""
            lost.append((member, name))
            leader = gets[homes[name].members[0]].leader
            assert leader is not None
            leader.requests.add(
                next(each.request for one in told for each in one.requests if each.request.name == name)
            )

        self.parts = {
            n: Handover(Regrouping(n, homes.__getitem__, ends[n], leaders), had.get(n), stage, damaged, most)
            for n, stage in gets.items()
        }
        for part in self.parts.values():
            for one in told:
                part.take_in(one)

    @property
    def left(self) -> int:
        """Requests that have not gone over."""
        return len(self._handed - self._taken)

    def step(self) -> bool:
        """Each replica sends a piece and takes in what has come. False once all is done."""
        happened = sum(part.step() for part in self.parts.values()) > 0
        self._taken.update(name for leader in self._leaders for name in leader.requests.by_name)
        return happened

    def run(self) -> None:
        while self.step():
            pass
        assert all(part.complete for part in self.parts.values())

    def cancel(self, request: str) -> None:
        for part in self.parts.values():
            part.cancel(request)
