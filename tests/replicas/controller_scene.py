"""A controller that is told events, one by one, and what has to hold after each whatever they are.

Nothing is performed: a scene says what replicas and clients would say. After each event groups are complete, and every
request that has arrived and not ended is in one group in force, or held; the actions say where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from ballonet.offload.policy.replicas import protocol
from ballonet.offload.policy.replicas.controller import Controller
from ballonet.offload.policy.replicas.demand import KVSize
from ballonet.offload.policy.replicas.groups import Members, Span
from ballonet.offload.policy.replicas.protocol import Action, Commit, Prepare
from ballonet.offload.policy.replicas.tuning import ReplicaTuning

PAGES = (25,) * 12  # of each layer: a model of 300
MEMORY = 1000  # pages of each replica
KV = KVSize(token=128, page=1024)  # 8 tokens a page; 5,600 fit beside the model
TUNING = ReplicaTuning(dwell=10.0, settle=10.0, again=5.0, silent=1.0, answer=10.0, bulk=60.0, lives=5)
ONES = {(0,), (1,), (2,), (3,)}
PAIRS = {(0, 1), (2, 3)}
FULL = {"used": 600, "free": 5, "pending": 102}  # a load that asks for a drop
A = TypeVar("A", bound=Action)
Where = tuple[int, Members] | None  # epoch and members; None: held


@dataclass
class Cost:
    """Seconds of each token of a chunk after its first, and of a microbatch: decoding costs the same for all."""

    token: float = 1e-5
    step: float = 0.05

    def seconds(self, before: int, new: int) -> float:
        return self.step + self.token * (new - 1)

    def batch(self, chunks: Iterable[tuple[int, int]]) -> float:
        return self.step + self.token * sum(new - 1 for _, new in chunks)


class ControllerScene:
    """A controller with `members` replicas that have joined and are in their epochs. `is_checked`: after each event."""

    def __init__(
        self, members: int = 4, cost: Cost | None = None, page_seconds: float = 0.0, is_checked: bool = True
    ) -> None:
        self.controller = Controller(PAGES, KV, cost or Cost(), TUNING, page_seconds)
        self.is_checked = is_checked
        self.at = 0.0
        self.progress = 0
        self.log: list[Action] = []
        self.arrived: list[str] = []
        self.prepared: Prepare | None = None  # the epoch in preparation
        self._where: dict[str, Where] = {}
        self._epoch = 0
        for member in range(members):
            self.join(member)
        self.load()

    # What replicas and clients say

    def tell(self, kind: Callable[..., protocol.Event], *fields: Any) -> list[Action]:
        """Passes an event of this kind to the controller, at the present time."""
        event = kind(self.at, *fields)
        if isinstance(event, protocol.Arrived):
            self._where[event.request] = None
        if isinstance(event, protocol.Finished | protocol.Left):
            self._where.pop(event.request, None)
        actions = self.controller.on(event)
        self.log += actions
        for action in actions:
            self._follow(action)
        if self.is_checked:
            self.controller.check()
            assert self.where == self._where
        return actions

    def tick(self, seconds: float = 0.1) -> list[Action]:
        """Time passes, in periods."""
        actions, until = [], self.at + seconds
        while self.at < until - 1e-9:
            self.at = min(until, self.at + 0.1)
            actions += self.tell(protocol.Tick)
        return actions

    def alive(self, seconds: float, **load: int) -> list[Action]:
        """Time passes, and all replicas tell their load meanwhile."""
        return [action for _ in range(round(seconds / 0.1)) for action in (*self.load(**load), *self.tick())]

    def join(self, member: int) -> list[Action]:
        actions = self.tell(protocol.Joined, member, MEMORY)
        return actions + self.tell(protocol.Committed, self.epoch(member), member)

    def load(
        self, used: int = 10, free: int = 690, pending: int = 0, members: Iterable[int] | None = None
    ) -> list[Action]:
        """Sends the loads of all replicas, or some, in their epochs."""
        self.progress += 1
        return [
            action
            for member in [*(self.controller.cluster.replicas if members is None else members)]
            for action in self.tell(protocol.Load, member, self.epoch(member), used, free, pending, self.progress)
        ]

    def arrive(self, prompt: int, new: int) -> str:
        name = f"r{len(self.arrived) + 1}"
        self.arrived.append(name)
        self.tell(protocol.Arrived, name, prompt, new)
        return name

    def finish_all(self) -> None:
        for name in self.where:
            self.tell(protocol.Finished, name)

    def answer(self, kind: type[protocol.Prepared | protocol.Restored]) -> list[Action]:
        """Has all members of the epoch in preparation say this."""
        assert self.prepared is not None
        epoch, members = self.prepared.epoch, [member for group in self.prepared.groups for member in group.members]
        return [action for member in members for action in self.tell(kind, epoch, member)]

    def settle(self) -> None:
        """Has all replicas enter their epochs, with their KV and their layers."""
        for member in [*self.controller.cluster.replicas]:
            for kind in (protocol.Committed, protocol.Exchanged, protocol.Restored):
                self.tell(kind, self.epoch(member), member)

    # Loads that make it change groups

    def burst(self) -> list[Action]:
        """On each replica one request runs and two wait, and its memory is full. One tick."""
        for prompt, new, count in ((4600, 600, 1), (400, 100, 2)):
            for _ in range(count * len(self.controller.cluster.replicas)):
                self.arrive(prompt, new)
        self.load(**FULL)
        return self.tick()

    def flood(self) -> list[Action]:
        """In each pair a long request runs and one waits, which a group of four has room for. One tick."""
        self.finish_all()
        for prompt, new in ((9000, 3000), (1000, 400)):
            for members in [*self.groups]:
                if len(members) > 1:
                    self.arrive(prompt, new)
        self.load(used=600, free=5, pending=63)
        return self.tick()

    def calm(self) -> list[Action]:
        """Ends all requests, and lets time pass until a restore is prepared."""
        self.finish_all()
        for _ in range(300):
            if actions := self.alive(0.1):
                return actions
        raise AssertionError("no restore was prepared")

    # What is known

    def epoch(self, member: int) -> int:
        return self.controller.cluster.replicas[member].epoch

    @property
    def groups(self) -> set[Members]:
        return {*self.controller.cluster.groups}

    @property
    def proposed(self) -> int:
        """The number of the epoch that is in preparation."""
        assert self.prepared is not None
        return self.prepared.epoch

    @property
    def where(self) -> dict[str, Where]:
        """Where each request is, by the controller's book."""
        book, groups = self.controller.book, self.controller.cluster.groups
        places: dict[str, Where] = {request.name: None for request in book.held}
        for members, active in groups.items():
            places |= {request.name: (active.epoch, members) for request in book.of(members)}
        return places

    def running(self, *members: int) -> set[str]:
        """Requests of the group of these replicas."""
        return {request.name for request in self.controller.book.of(members)}

    def held(self, member: int) -> Span:
        """Layers that a replica holds."""
        return self.controller.cluster.replicas[member].held

    # What is told of requests, which the book has to agree with

    def _follow(self, action: Action) -> None:
        match action:
            case protocol.Dispatch(name, epoch, members):
                assert self._where[name] is None, f"{name} is in two groups"
                self._where[name] = epoch, members
            case protocol.Recompute(names, epoch, members):
                assert {*names} <= self._where.keys()
                self._where |= dict.fromkeys(names, (epoch, members))
            case protocol.Hold(name):
                assert name in self._where
                self._where[name] = None
            case protocol.Refuse(name):
                del self._where[name]
            case protocol.Cancel(name):
                assert name not in self._where
            case protocol.Prepare(epoch):
                assert self.prepared is None, "two epochs are in preparation"
                assert epoch > self._epoch
                self._epoch, self.prepared = epoch, action
            case protocol.Alone(epoch):
                assert epoch >= self._epoch
                self._epoch = epoch
            case protocol.Discard(epoch):
                assert epoch == self.proposed
                self.prepared = None
            case protocol.Commit(epoch):
                assert epoch == self.proposed
                self._move(action)
                self.prepared = None

    def _move(self, commit: Commit) -> None:
        """Requests of the groups that end are in those that were prepared."""
        assert self.prepared is not None
        homes = dict(commit.homes)
        group_of = {member: group.members for group in self.prepared.groups for member in group.members}
        for name, place in self._where.items():
            if place is not None and place[1][0] in group_of:
                self._where[name] = commit.epoch, group_of[homes.get(name, place[1][0])]


def of_kind(kind: type[A], actions: Iterable[Action]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def the_only(kind: type[A], actions: Iterable[Action]) -> A:
    """The only action of a kind."""
    (action,) = of_kind(kind, actions)
    return action


def recomputed(actions: Iterable[Action]) -> set[str]:
    """Names of the requests that are computed anew."""
    return {name for action in of_kind(protocol.Recompute, actions) for name in action.requests}


def pulls(member: int, actions: Iterable[Action]) -> list[tuple[int, int | None]]:
    """Layers that a replica is told to pull, and from whom."""
    starts = of_kind(protocol.StartRestore, actions)
    return [(pull.layer, pull.source) for start in starts for pull in start.pulls if pull.member == member]


def preparing(members: int = 4) -> ControllerScene:
    """A burst has come, and a drop is prepared."""
    scene = ControllerScene(members)
    scene.burst()
    return scene


def exchanging() -> ControllerScene:
    """The drop is committed."""
    scene = preparing()
    scene.answer(protocol.Prepared)
    return scene


def dropped(members: int = 4) -> ControllerScene:
    """The drop is through."""
    scene = preparing(members)
    scene.answer(protocol.Prepared)
    scene.settle()
    scene.load()
    return scene


def restoring() -> ControllerScene:
    """The burst is over, and a restore is prepared."""
    scene = dropped()
    scene.calm()
    return scene


def pulling() -> ControllerScene:
    """Layers are restored."""
    scene = restoring()
    scene.answer(protocol.Prepared)
    return scene
