"""A controller that is told what replicas would say, and an account of its own of what it answered.

After each event it is checked: groups are complete, what is freed is merges x model - slots, epochs grow, one is in
preparation at most, and every accepted request is in one group in force, or held, or has ended once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from ballonet.offload.policy.replicas import protocol
from ballonet.offload.policy.replicas.controller import Controller
from ballonet.offload.policy.replicas.demand import KVSize
from ballonet.offload.policy.replicas.groups import Span, check_groups
from ballonet.offload.policy.replicas.protocol import (
    Action,
    Alone,
    Cancel,
    Commit,
    Discard,
    Dispatch,
    Fence,
    Hold,
    Prepare,
    Recompute,
    Refuse,
    StartRestore,
)
from ballonet.offload.policy.tuning import Replicas

PAGES = (25,) * 12  # of each layer: a model of 300
MEMORY = 1000  # pages of each replica
KV = KVSize(token=128, page=1024)  # 8 tokens a page; 5,600 fit beside the model
TUNING = Replicas(dwell=10.0, settle=10.0, again=5.0, silent=1.0, answer=10.0, bulk=60.0, lives=5)
A = TypeVar("A", bound=Action)
Where = tuple[int, tuple[int, ...]]  # epoch and members
PAIRS = {(0, 1), (2, 3)}
ONES = {(0,), (1,), (2,), (3,)}


@dataclass
class Cost:
    """Seconds of each token of a chunk after its first, and of a microbatch: decoding costs the same for all."""

    token: float = 1e-5
    step: float = 0.05

    def seconds(self, before: int, new: int) -> float:
        return self.step + self.token * (new - 1)

    def batch(self, chunks: Iterable[tuple[int, int]]) -> float:
        return self.step + self.token * sum(new - 1 for _, new in chunks)


class Played:
    """A controller with `members` replicas that have joined and are in their epochs."""

    def __init__(
        self, members: int = 4, tuning: Replicas = TUNING, cost: Cost | None = None, page_seconds: float = 0.0
    ) -> None:
        self.controller = Controller(PAGES, KV, cost or Cost(), tuning, page_seconds)
        self.at = 0.0
        self.progress = 0
        self.log: list[Action] = []
        self.where: dict[str, Where | None] = {}  # of accepted requests that have not ended; None: held
        self.ended: dict[str, str] = {}
        self.prepared: Prepare | None = None
        self.highest = 0
        self.names = 0
        for member in range(members):
            self.join(member)
        self.load()

    # What replicas and clients say

    def on(self, event: protocol.Event) -> list[Action]:
        if isinstance(event, protocol.Arrived):
            self.where[event.request] = None
        if isinstance(event, protocol.Finished | protocol.Left):
            self._end(event.request, "done")
        actions = self.controller.on(event)
        self.log += actions
        for action in actions:
            self._account(action)
        self._check()
        return actions

    def tell(self, kind: Callable[..., protocol.Event], *what: Any) -> list[Action]:
        """Passes an event of this kind to the controller, at the present time."""
        return self.on(kind(self.at, *what))

    def tick(self, seconds: float = 0.1) -> list[Action]:
        """Time passes in periods in which every replica moves on."""
        found = []
        until = self.at + seconds
        while self.at < until - 1e-9:
            self.at = min(until, self.at + 0.1)
            found += self.on(protocol.Tick(self.at))
        return found

    def alive(self, seconds: float, **load: int) -> list[Action]:
        """Time passes, and all replicas tell their load meanwhile."""
        found = []
        for _ in range(round(seconds / 0.1)):
            found += self.load(**load)
            found += self.tick()
        return found

    def join(self, member: int) -> list[Action]:
        actions = self.on(protocol.Joined(self.at, member, MEMORY))
        return actions + self.on(protocol.Committed(self.at, self.epoch(member), member))

    def load(
        self, used: int = 10, free: int = 690, pending: int = 0, members: Iterable[int] | None = None
    ) -> list[Action]:
        """Sends the loads of all replicas, or some, in their epochs."""
        self.progress += 1
        found = []
        for member in list(self.controller.cluster.replicas if members is None else members):
            found += self.on(protocol.Load(self.at, member, self.epoch(member), used, free, pending, self.progress))
        return found

    def arrive(self, prompt: int, new: int) -> str:
        self.names += 1
        name = f"r{self.names}"
        self.on(protocol.Arrived(self.at, name, prompt, new))
        return name

    def burst(self) -> list[Action]:
        """On each replica one request runs and two wait, and its memory is full. One tick."""
        for prompt, new, count in ((4600, 600, 1), (400, 100, 2)):
            for _ in range(count * len(self.controller.cluster.replicas)):
                self.arrive(prompt, new)
        self.load(used=600, free=5, pending=102)
        return self.tick()

    def flood(self) -> list[Action]:
        """In each pair a long request runs and one waits, which a group of four has room for. One tick."""
        self.finish_all()
        for prompt, new in ((9000, 3000), (1000, 400)):
            for group in list(self.controller.cluster.groups):
                if len(group) > 1:
                    self.arrive(prompt, new)
        self.load(used=600, free=5, pending=63)
        return self.tick()

    def finish_all(self) -> None:
        for name in list(self.where):
            self.on(protocol.Finished(self.at, name))

    def all_prepared(self) -> list[Action]:
        return self._all(protocol.Prepared)

    def all_restored(self) -> list[Action]:
        return self._all(protocol.Restored)

    def _all(self, kind: type[protocol.Prepared | protocol.Restored]) -> list[Action]:
        assert self.prepared is not None
        epoch, members = self.proposed, [m for group in self.prepared.groups for m in group.members]
        return [action for member in members for action in self.tell(kind, epoch, member)]

    def settled(self) -> None:
        """Has all replicas enter their epochs, with their KV and their layers."""
        for member in list(self.controller.cluster.replicas):
            for kind in (protocol.Committed, protocol.Exchanged, protocol.Restored):
                self.on(kind(self.at, self.epoch(member), member))

    def drop(self) -> None:
        """A burst, and the drop that follows is through."""
        self.burst()
        self.all_prepared()
        self.settled()
        self.load()

    def calm(self) -> list[Action]:
        """Ends all requests, and lets time pass until a restore is prepared."""
        self.finish_all()
        for _ in range(300):
            if actions := self.alive(0.1, used=10, free=690):
                return actions
        raise AssertionError("no restore was prepared")

    # What is known

    def epoch(self, member: int) -> int:
        return self.controller.cluster.replicas[member].epoch

    def groups(self) -> set[tuple[int, ...]]:
        return {*self.controller.cluster.groups}

    @property
    def proposed(self) -> int:
        """The number of the epoch that is in preparation."""
        assert self.prepared is not None
        return self.prepared.epoch

    def running(self, *members: int) -> set[str]:
        """Requests of the groups of these replicas."""
        return {each.name for each in self.controller.book.of(members)}

    def of(self, kind: type[A], actions: Iterable[Action] | None = None) -> list[A]:
        """Returns the actions of a kind; of the log, unless others are given."""
        return [each for each in (self.log if actions is None else actions) if isinstance(each, kind)]

    def the(self, kind: type[A], actions: Iterable[Action]) -> A:
        """The only one of a kind."""
        (found,) = self.of(kind, actions)
        return found

    def recomputed(self, actions: Iterable[Action]) -> set[str]:
        """Names of requests that these have computed anew."""
        return {name for each in self.of(Recompute, actions) for name in each.requests}

    def pulls(self, member: int, actions: Iterable[Action]) -> list[tuple[int, int | None]]:
        """Layers that these have a replica bring home, and from whom."""
        starts = self.of(StartRestore, actions)
        return [(each.layer, each.source) for start in starts for each in start.pulls if each.member == member]

    def held(self, member: int) -> Span:
        """Layers that a replica holds."""
        return self.controller.cluster.replicas[member].held

    def broke(self, actions: Iterable[Action], lost: set[str]) -> None:
        """The pair of 0 and 1 is no more: its requests are computed anew, the other pair goes on as it was."""
        assert self.recomputed(actions) == lost
        assert (2, 3) in self.groups()
        assert (0, 1) not in self.groups()

    # The account

    def _end(self, name: str, how: str) -> None:
        if name in self.where:
            del self.where[name]
            assert name not in self.ended, f"{name} ends twice"
            self.ended[name] = how

    def _account(self, action: Action) -> None:
        match action:
            case Dispatch(name, epoch, members):
                assert self.where[name] is None, f"{name} is in two groups"
                self.where[name] = epoch, members
            case Recompute(names, epoch, members):
                for name in names:
                    assert name in self.where
                    self.where[name] = epoch, members
            case Hold(name):
                assert name in self.where
                self.where[name] = None
            case Refuse(name, reason):
                assert name in self.where, f"{name} is refused, and had ended"
                self._end(name, reason.name)
            case Cancel(name):
                assert name not in self.where
            case Prepare(epoch):
                assert self.prepared is None, "two epochs are in preparation"
                assert epoch > self.highest
                self.highest = epoch
                self.prepared = action
            case Discard(epoch):
                assert self.prepared is not None
                assert self.prepared.epoch == epoch
                self.prepared = None
            case Commit(epoch):
                self._commit(action)
            case Alone(epoch):
                assert epoch >= self.highest
                self.highest = epoch
            case StartRestore(epoch, pulls):
                assert epoch <= self.highest
                assert pulls
            case Fence(member):
                assert member is not None

    def _commit(self, commit: Commit) -> None:
        """Requests of the groups that end are in those that were prepared."""
        prepared, self.prepared = self.prepared, None
        assert prepared is not None
        assert prepared.epoch == commit.epoch
        homes = dict(commit.homes)
        group_of = {member: group.members for group in prepared.groups for member in group.members}
        for name, where in self.where.items():
            if where is not None and where[1][0] in group_of:
                self.where[name] = commit.epoch, group_of[homes.get(name, where[1][0])]

    def _check(self) -> None:
        controller = self.controller
        controller.check()
        cluster = controller.cluster
        groups = [each.group for each in cluster.groups.values()]
        check_groups(groups, len(PAGES))
        assert sorted(member for group in groups for member in group.members) == sorted(cluster.replicas)
        assert controller.epoch == max(self.highest, controller.epoch)
        in_force = {(each.epoch, members) for members, each in cluster.groups.items()}
        for name, where in self.where.items():
            assert where is None or where in in_force, f"{name} is lost: {where} is not in force"
            told = [
                members for members in cluster.groups if name in {each.name for each in controller.book.of(members)}
            ]
            assert told == ([] if where is None else [where[1]])
        assert {*self.where} == {name for name in (*self.where, *self.ended) if name in controller.book}


def preparing(members: int = 4) -> Played:
    """A burst has come, and a drop is prepared."""
    played = Played(members)
    played.burst()
    return played


def exchanging(members: int = 4) -> Played:
    """The change is committed."""
    played = preparing(members)
    played.all_prepared()
    return played


def dropped(members: int = 4) -> Played:
    """The drop is through."""
    played = Played(members)
    played.drop()
    return played


def restoring(members: int = 4) -> Played:
    """The burst is over, and a restore is prepared."""
    played = dropped(members)
    played.calm()
    return played


def pulling(members: int = 4) -> Played:
    """Layers are restored."""
    played = restoring(members)
    played.all_prepared()
    return played


def homing() -> Played:
    """The restore is committed, and KV goes home."""
    played = pulling()
    played.all_restored()
    return played


PHASES = {each.__name__: each for each in (preparing, exchanging, dropped, restoring, pulling, homing)}
