"""The known replicas and the groups in force: each replica's group, epoch, memory and heartbeat.

Note [Progress, not presence]
    A heartbeat thread goes on when the main loop hangs in a kernel or in a wait for another process. So the count of
    iterations of the main loop is watched. It may stand still for a second, or for five times the longest recent
    iteration, whichever is more: a long prefill must not look like a death. Nor must the first long one, after only
    short iterations: the predicted time of a batch full of prompt tokens counts as an iteration.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from .demand import KVSize, Usage, group_tokens, kv_pages
from .drops import Pull
from .groups import Group, Members, Span, check_groups
from .protocol import Load
from .tuning import DEFAULT
from .tuning import ReplicaTuning as Tuning


class Heartbeat:
    """The progress of one replica, from `at` on. `full`: seconds that a full batch is predicted to take."""

    def __init__(self, at: float, tuning: Tuning = DEFAULT, full: float = 0.0) -> None:
        self._tuning = tuning
        self._full = full
        self._moved = at
        self._progress: int | None = None
        self._iterations: deque[float] = deque(maxlen=tuning.remembered)

    def beat(self, at: float, progress: int) -> None:
        """Takes in a reported count of iterations."""
        if progress == self._progress:
            return
        if self._progress is not None and progress > self._progress:
            self._iterations.append((at - self._moved) / (progress - self._progress))
        self._progress, self._moved = progress, at

    def discount(self, seconds: float) -> None:
        """Leaves so many seconds out of account, in which no report could be received."""
        self._moved += seconds

    @property
    def patience(self) -> float:
        """Seconds that the count may stand still."""
        return max(self._tuning.silent, self._tuning.iterations * max([self._full, *self._iterations]))

    def is_dead(self, at: float) -> bool:
        return at - self._moved > self.patience


@dataclass(slots=True)
class ReplicaState:
    """One replica. `pages`: for layers and KV; `held`: its layers; `since`: when its epoch was sent to it, None once it
    has entered that. `suspected`: a peer reported it, and nothing has come from it since. `backed`: it can read
    layers from a host copy or file. `pulls`: layers that it pulls while alone, to hold all again; `pull_at`: when to
    retry a pull that found no pages; None: it is under way."""

    pages: int
    held: Span
    heartbeat: Heartbeat
    epoch: int
    since: float | None
    load: Load | None = None
    suspected: bool = False
    backed: bool = True
    pulls: tuple[Pull, ...] = ()
    pull_at: float | None = None

    @property
    def takes_requests(self) -> bool:
        """Whether the replica answers, and can read every layer from somewhere."""
        return not self.suspected and (self.backed or not self.pulls)

    @property
    def is_steady(self) -> bool:
        """Whether the replica may become part of another group."""
        return self.since is None and not self.suspected and not self.pulls


@dataclass(slots=True)
class ActiveGroup:
    """A group in force, since the time `since`. `exchanging`: members that do not have all KV of their span yet."""

    group: Group
    epoch: int
    since: float
    exchanging: set[int] = field(default_factory=set)


class Cluster:
    """Replicas by number, and groups by their members. `pages`: of each layer."""

    def __init__(self, pages: Sequence[int], kv: KVSize, tuning: Tuning, full: float = 0.0) -> None:
        """`full`: predicted seconds of a full batch, see Heartbeat."""
        self.pages = tuple(pages)
        self.kv = kv
        self.replicas: dict[int, ReplicaState] = {}
        self.groups: dict[Members, ActiveGroup] = {}
        self._group_of: dict[int, Members] = {}
        self._tuning = tuning
        self._full = full

    @property
    def layers(self) -> int:
        return len(self.pages)

    def join(self, member: int, pages: int, epoch: int, at: float) -> None:
        """Adds a replica that holds all layers. It is in no group yet."""
        heartbeat = Heartbeat(at, self._tuning, self._full)
        self.replicas[member] = ReplicaState(pages, Span(0, self.layers), heartbeat, epoch, at)

    def place(self, placement: ActiveGroup) -> None:
        """Puts a group in force; its members are in none."""
        for member in placement.group.members:
            replica = self.replicas[member]
            replica.epoch, replica.since, replica.load = placement.epoch, placement.since, None
            self._group_of[member] = placement.group.members
        self.groups[placement.group.members] = placement

    def displace(self, members: Members) -> ActiveGroup:
        """Ends a group. KeyError."""
        active = self.groups.pop(members)
        for member in members:
            del self._group_of[member]
        return active

    def placement(self, member: int) -> ActiveGroup | None:
        """Returns the group of a replica; None where it has none."""
        members = self._group_of.get(member)
        return None if members is None else self.groups[members]

    def tokens(self, group: Group) -> int:
        """Returns the tokens of KV that a group can hold."""
        capacity = {member: self.replicas[member].pages for member in group.members}
        return group_tokens(group, kv_pages(group, capacity, self.pages), self.kv)

    def takes_requests(self, group: Group) -> bool:
        return all(self.replicas[member].takes_requests for member in group.members)

    def steady(self) -> list[ActiveGroup]:
        """Returns the groups that may change: all members are in their epoch, hold their span and have their KV."""
        return [
            group
            for group in self.groups.values()
            if not group.exchanging and all(self.replicas[member].is_steady for member in group.group.members)
        ]

    def usage(self, held: int) -> Usage | None:
        """Returns the pages of all replicas together; `held`: pages of requests that are in no group. None as long as a
        replica has not reported its load in its epoch."""
        used = free = undropped = 0
        pending, model = held, sum(self.pages)
        for replica in self.replicas.values():
            if replica.load is None:
                return None
            used, free, pending = used + replica.load.used, free + replica.load.free, pending + replica.load.pending
            undropped += max(0, replica.pages - model)
        return Usage(used, free, pending, undropped)

    def sources(self) -> list[Group]:
        """Returns the groups that layers can be pulled from: all members are in their epochs and hold their spans;
        only undropped groups where there are any."""
        groups = [
            active.group
            for active in self.groups.values()
            if all(self.replicas[member].is_steady for member in active.group.members)
        ]
        return [group for group in groups if not group.is_dropped] or groups

    def check(self) -> None:
        """Raises ValueError unless every replica is in one group, and every group has a complete copy."""
        check_groups((group.group for group in self.groups.values()), self.layers)
        placed = {member: members for members, entry in self.groups.items() for member in entry.group.members}
        if placed != self._group_of or {*placed} != {*self.replicas}:
            raise ValueError("a replica is in no group, or the index of groups is wrong")
        for members, active in self.groups.items():
            for member, span in zip(members, active.group.spans, strict=True):
                replica = self.replicas[member]
                if replica.epoch != active.epoch:
                    raise ValueError(f"replica {member} is in epoch {replica.epoch}, its group in {active.epoch}")
                if not replica.pulls and not replica.held.covers(span):
                    raise ValueError(f"replica {member} lacks layers of {span} and pulls none")
