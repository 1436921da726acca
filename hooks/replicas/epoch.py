"""An epoch: one configuration of members and spans, numbered; what is fenced off by it, and when it is committed.

Note [Fencing]
    Numbers only grow, and none is used twice, whether its epoch was committed or discarded. Links belong to one epoch
    and every message carries its number. Who was stopped, or cut off, still has links and a number of the past: what it
    sends is dropped, it is told the number in force, and it joins again, as a new member that holds nothing.

Note [Two phases]
    Prepare: every member forms its links, and says so or why not; serving goes on in the epoch before. If all are ready
    the epoch is committed, at a boundary of iterations. If one fails, dies or does not answer in time it is discarded
    and nothing has changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import combinations
from typing import Self

from .errors import StaleEpoch

Layers = tuple[int, int]  # a span: from the first up to, not including, the second


@dataclass(frozen=True, slots=True)
class Epoch:
    """`groups`: members in the order of their stages; `spans`: of the same members. `beside`: pairs of members that
    have a link though they are not of one group, as KV or layers go between them. ValueError."""

    number: int
    groups: tuple[tuple[int, ...], ...]
    spans: tuple[tuple[Layers, ...], ...]
    beside: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if [len(group) for group in self.groups] != [len(spans) for spans in self.spans]:
            raise ValueError(f"epoch {self.number} has spans {self.spans} for the members {self.groups}")
        members = [member for group in self.groups for member in group]
        if len({*members}) != len(members):
            raise ValueError(f"epoch {self.number} has a member twice: {self.groups}")
        if not {member for pair in self.beside for member in pair} <= {*members}:
            raise ValueError(f"epoch {self.number} has a link to nobody: {self.beside}")

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(sorted(member for group in self.groups for member in group))

    @property
    def links(self) -> tuple[tuple[int, int], ...]:
        """Pairs that have a link, the smaller number first: all of a group, and those beside."""
        pairs = [pair for group in self.groups for pair in combinations(group, 2)]
        return tuple(sorted({(min(pair), max(pair)) for pair in (*pairs, *self.beside)}))

    def peers(self, member: int) -> tuple[int, ...]:
        """Whom a member has a link to."""
        return tuple(sorted({*(each for pair in self.links if member in pair for each in pair)} - {member}))

    def encode(self) -> str:
        """As JSON, for a message."""
        return json.dumps([self.number, self.groups, self.spans, self.beside])

    @classmethod
    def decode(cls, text: str) -> Self:
        """What `encode` was called on. ValueError."""
        number, groups, spans, beside = json.loads(text)
        return cls(
            number,
            tuple(tuple(group) for group in groups),
            tuple(tuple((begin, end) for begin, end in each) for each in spans),
            tuple((one, other) for one, other in beside),
        )


class Verdict(Enum):
    """How the epoch of a message stands to the one in force. AHEAD: it is being prepared, or was committed elsewhere
    first."""

    BEHIND = "behind"
    CURRENT = "current"
    AHEAD = "ahead"


class Fence:
    """The number in force for one process. See Note [Fencing]."""

    def __init__(self, now: int = 0) -> None:
        self.now = now

    def judge(self, epoch: int) -> Verdict:
        """What is to be thought of a message of this epoch."""
        if epoch == self.now:
            return Verdict.CURRENT
        return Verdict.BEHIND if epoch < self.now else Verdict.AHEAD

    def advance(self, epoch: int) -> None:
        """A later epoch is in force. StaleEpoch: it is not later."""
        if epoch <= self.now:
            raise StaleEpoch(epoch, self.now)
        self.now = epoch


class Phase(Enum):
    """What becomes of an epoch that is prepared."""

    WAITING = "waiting"
    COMMIT = "commit"
    DISCARD = "discard"


@dataclass(slots=True)
class Preparation:
    """The first phase, as the supervisor sees it. `until`: time by which all have to be ready. A decision is final."""

    epoch: Epoch
    until: float
    reason: str = ""  # why it is discarded
    _ready: set[int] = field(default_factory=set)
    _phase: Phase = Phase.WAITING

    def ready(self, member: int) -> None:
        """A member has formed its links."""
        self._ready.add(member)

    def failed(self, member: int, why: str) -> None:
        """A member cannot, or is dead. Nothing once it is decided, or if it is no member."""
        if self._phase is Phase.WAITING and member in self.epoch.members:
            self._phase, self.reason = Phase.DISCARD, f"replica {member}: {why}"

    def decide(self, now: float) -> Phase:
        """What is to be done at this time."""
        if self._phase is Phase.WAITING:
            if missing := _named({*self.epoch.members} - self._ready):
                if now >= self.until:
                    self._phase, self.reason = Phase.DISCARD, f"no answer in time of {missing}"
            else:
                self._phase = Phase.COMMIT
        return self._phase


def _named(members: Iterable[int]) -> str:
    """Members, for people; empty for none."""
    return ", ".join(f"replica {member}" for member in sorted(members))
