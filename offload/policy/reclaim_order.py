"""The reclaim order: what gives its device pages in which order, and what gets them back. Numbers in, an order out.

What is reclaimed first is what costs least per byte freed for as long as it lasts (`Level`). The native core reclaims:
it goes down the list that was published (`listed`), in the middle of any operator. In front of that list, without
entries, it does what costs nothing; behind it come waiting, pages of the host, and refusal. What needs somebody's
consent (`DUPLICATES`) is not on the list: whoever passes that level posts a wish.

Note [What it costs]
    A layer whose copy hides behind the iteration costs nothing in it; beyond that bytes over the link. A page of KV is
    read through the link in each decode step, whatever hides what else. What is idle costs nothing until it is used
    again: then a layer streams, and a page of KV is restored once.

Note [Who gives layers]
    Idle models first, of them the one with the lowest priority; of equals the one used last, which in a round of models
    is the one whose turn is farthest away. Each gives until its cap. Then those that run, by priority too, but equals
    in turns, whoever gave the smallest part of its weights: while all run, each gives (spatial sharing). So the place
    of a layer depends on what was given before it. It is found by simulating it layer by layer (remap.py), and
    layers keep that order among candidates of one level and priority that cost the same.

Note [Floors]
    A model keeps `floor` device pages for its weights and its caches together. So each candidate is passed over that
    would leave it with less once all before it are taken. The core may take some and not others (a thread leases them),
    but never more than the list has, so that what is left is never less. A model that frees its own KV may be below it.

Note [What is restored first]
    What costs most while it is away: KV that is read in place, then layers whose copies are waited for, by the seconds
    that a page of them costs in each iteration. Then layers that hide, as the link is free for others without them;
    then those of idle models. The KV of an idle cache is restored when it is used again, as nobody else may touch it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from fractions import Fraction
from typing import Final, Protocol


class Level(IntEnum):
    """The numbers order the published list (`LISTED`); those of docs/mechanisms.md. What costs nothing, 0 and 2, comes
    before that list; 7 is a request; 11 to 13 come after it."""

    TRIM = 0  # free blocks, cached ranges, reserves
    PREFIX = 1  # KV that is only kept in case that a prompt begins with it, and lies on the host as well
    IDLE_ACTIVATIONS = 2  # free pages of activations become KV, or the reverse
    LEND = 3  # KV that nobody uses, of a model that has more than its own, while another one lacks that (lending.py)
    IDLE_WEIGHTS = 4
    IDLE_KV = 5
    HIDDEN_WEIGHTS = 6  # of models that run, while the copies hide
    DUPLICATES = 7  # layers that other replicas hold as well: dropped by consent of their controller, never by the core
    STALLING_WEIGHTS = 8  # beyond that, within the model's cap
    RUNNING_KV = 9  # read in place
    LAST_WEIGHTS = 10  # beyond the model's cap, before anything waits or is refused
    WAIT = 11  # for what other threads use
    SPILL = 12  # pages of the host in the place of pages of the device
    REFUSE = 13

    @property
    def label(self) -> str:
        """As events and people call it."""
        return self.name.lower().replace("_", " ").replace("kv", "KV")


LISTED: Final = (
    Level.PREFIX,
    Level.LEND,
    Level.IDLE_WEIGHTS,
    Level.IDLE_KV,
    Level.HIDDEN_WEIGHTS,
    Level.STALLING_WEIGHTS,
    Level.RUNNING_KV,
    Level.LAST_WEIGHTS,
)
OF_LAYERS: Final = (
    Level.IDLE_WEIGHTS,
    Level.HIDDEN_WEIGHTS,
    Level.STALLING_WEIGHTS,
    Level.LAST_WEIGHTS,
)  # not of pages
BORROWED: Final = (Level.PREFIX, Level.IDLE_KV)  # what may lie in pages that are due to others, see lending.py


@dataclass(slots=True)
class Candidate:
    """What is taken at a time: `index` of the `client` with that number, so many device `pages`.

    `priority`: those with the lowest give first; `recency`: of equals the one with the highest: when what is idle was
    used, when what runs came. `seconds`: of each iteration, per page, for as long as it is away. `once`: seconds of
    taking it. `owner`: the model whose floor it counts for, 0 for none. `borrowed`: it lies in what is another's.
    `divisible`: any number of its pages may be taken, and it may be made two candidates, the second with an index
    higher by this."""

    level: Level
    client: int
    index: int
    pages: int
    priority: int = 0
    recency: float = 0.0
    seconds: float = 0.0
    once: float = 0.0
    owner: int = 0
    borrowed: bool = False
    divisible: int = 0

    def split(self, pages: int) -> tuple[Candidate, Candidate]:
        """A candidate of so many of its pages, fewer than it has, and one of the others."""
        part = pages / self.pages
        return replace(self, pages=pages, once=self.once * part), replace(
            self, index=self.index + self.divisible, pages=self.pages - pages, once=self.once * (1 - part)
        )

    @property
    def source(self) -> str:
        """As events call it."""
        return (Level.LEND if self.borrowed else self.level).label


class GivingModel(Protocol):
    """A managed model (remap.Model)."""

    @property
    def name(self) -> str: ...
    @property
    def active(self) -> bool: ...
    @property
    def priority(self) -> int: ...
    @property
    def used(self) -> float: ...
    @property
    def mru(self) -> bool: ...


def weights_order(model: GivingModel, given: Fraction) -> tuple[bool, int, Fraction, float, str]:
    """The key by which models give layers, the lowest next, when such a part of its weights is `given` already. See
    Note [Who gives layers]."""
    recency = model.used if model.mru else -model.used
    return model.active, model.priority, given if model.active else Fraction(), -recency, model.name


def ordered(candidates: Iterable[Candidate]) -> list[Candidate]:
    """In the order of taking. What a client offers of one level stays in the order in which it offers it, and equals
    stay as they come; of candidates of one priority those that are borrowed come first."""
    return sorted(
        candidates,
        key=lambda candidate: (
            candidate.level,
            candidate.priority,
            not candidate.borrowed,
            candidate.seconds,
            -candidate.recency,
        ),
    )


def claimed(candidates: Iterable[Candidate], owed: Mapping[int, int]) -> list[Candidate]:
    """In the order of taking, when owners owe so many pages: as many of their candidates of KV that nobody uses, those
    that would be taken first, are borrowed. See lending.py, Note [Due]."""
    left, claims = dict(owed), []
    for candidate in ordered(candidates):
        due = left.get(candidate.owner, 0)
        if candidate.level in BORROWED and due > 0:
            if candidate.divisible and due < candidate.pages:
                candidate, rest = candidate.split(due)
                claims.append(rest)
            left[candidate.owner] -= candidate.pages
            candidate = replace(candidate, level=min(candidate.level, Level.LEND), borrowed=True)
        claims.append(candidate)
    return ordered(claims)


def above_floors(candidates: Iterable[Candidate], spare: Mapping[int, int]) -> list[Candidate]:
    """Without those that would leave a model with less than its floor. `spare`: pages that each owner has beyond it;
    those who are not named have no floor. See Note [Floors]."""
    left, kept = dict(spare), []
    for candidate in candidates:
        if candidate.owner in left:
            if candidate.divisible and 0 < left[candidate.owner] < candidate.pages:
                candidate, _ = candidate.split(left[candidate.owner])
            if candidate.pages > left[candidate.owner]:
                continue
            left[candidate.owner] -= candidate.pages
        kept.append(candidate)
    return kept


@dataclass(frozen=True, slots=True)
class Absent:
    """`pages` of a `client` that would be on the device if there were room. `seconds`: of each iteration, per
    page, that this costs; `active`: it runs."""

    client: int
    pages: int
    seconds: float
    active: bool
    priority: int = 0
    recency: float = 0.0


def restore_order(absent: Iterable[Absent]) -> list[Absent]:
    """In the order in which they come back: the reverse of that in which they went, by what they cost now. See Note
    [What is restored first]."""
    return sorted(
        absent, key=lambda missing: (not missing.active, -missing.seconds, -missing.priority, missing.recency)
    )
