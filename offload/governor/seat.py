"""What the governor knows of one managed model or one KV cache: how it looks from there, what it did last, and what was
taken of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from ..policy.interval import Costs
from ..policy.plan import Plan, fewest, smallest
from ..policy.remap import cap
from ..policy.tuning import DEFAULT, WeightPlans
from ..record.record import Phase, Point
from .kv_read_plan import Streamed

FIRST: Final[dict[Phase, Point]] = {"prefill": Point("prefill", 1, 1), "decode": Point("decode", 1, 1)}
LAYERS: Final = 2**20  # a key of the reclaim list is a seat's number times this, and a layer
SPLIT: Final = 2**16  # indices of offers are below; each further candidate made of one has an index higher by this


class Governed(Protocol):
    """A managed model. All that is read here is answered at once: the governor holds its lock. `entry` is called
    without it, and may be called on any thread that runs a model."""

    @property
    def name(self) -> str: ...
    @property
    def plan(self) -> Plan:
        """What streams, as it was arranged last; `pages` of what may stream of each layer, 0 where it cannot. Layers
        that the core took since count as resident."""

    @property
    def interval(self) -> int | Literal["auto"] | None: ...
    @property
    def tpot_slo(self) -> float | None:
        """Seconds that a decode step may take."""

    @property
    def ttft_slo(self) -> float | None:
        """Seconds that a prefill may take."""

    @property
    def priority(self) -> int:
        """The priority of the model: those with the lowest give first."""

    @property
    def floor(self) -> int:
        """Device pages that its weights and caches keep."""

    @property
    def running(self) -> bool:
        """Does a forward of it run now, on any thread?"""

    def seconds(self, point: Point) -> float | None:
        """Returns the seconds of such an iteration with every layer resident, at most; None where nobody knows."""

    def typical(self, point: Point) -> float | None:
        """As `seconds`, as a rule."""

    def entry(self, layer: int) -> tuple[Any, list[Any]] | None:
        """(group, parts) of a resident layer for `Device.publish`; None where it cannot be taken, or not yet."""

    def give_up(self, pages: int) -> int:
        """Up to so many device pages of prefixes that are kept for its prompts and that nobody uses go back, or a few
        more, after their keys; how many. Called without the governor's lock, on any thread. DriverError."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Full pages of a cache that may be taken together. `index`: its number in the cache, below `SPLIT`; `pages`: of
    the device, that it frees; `clean`: the host has its bytes, so that nothing is copied when it is taken; `readers`:
    layers that read each of its pages; `divisible`: any number of them may be taken."""

    index: int
    pages: int
    clean: bool
    readers: int = 1
    divisible: bool = False


class Cache(Protocol):
    """A KV cache, or the part of one that lies in a range. All that is read here is answered at once: the governor
    holds its lock, and none may be held on the way in that is held while the governor is called. `entry` and
    `write_behind` are called without it, on any thread. The governor refers to it weakly."""

    @property
    def name(self) -> str: ...
    @property
    def running(self) -> bool:
        """Does any thread lease its group?"""

    @property
    def used(self) -> float:
        """When tokens were appended last, by the governor's clock."""

    @property
    def displaced(self) -> int:
        """Pages that lie on the peer or the host and would be on the device if there were room."""

    @property
    def near(self) -> int:
        """The pages of these that lie on the peer."""

    @property
    def on_peer(self) -> int:
        """Pages of the peer that could go to the host."""

    @property
    def leaving(self) -> int:
        """The pages that are on their way there."""

    @property
    def held(self) -> int:
        """Pages under its tokens, wherever they are, and those that it is about to have beside them."""

    @property
    def here(self) -> int:
        """The device pages that it has."""

    @property
    def block(self) -> int:
        """Pages that it grows by: one for each of its ranges."""

    @property
    def kept(self) -> bool:
        """Is it only there in case that a prompt begins with its tokens?"""

    @property
    def streamed(self) -> Streamed:
        """How what is displaced is read."""

    def offers(self) -> Sequence[Offer]:
        """What may be taken, in the order of taking. A few: the list is made anew whenever one of them changes."""

    def entry(self, index: int) -> tuple[Any, list[Any]] | None:
        """(group, parts) of an offer for `Device.publish`; None where there is no such offer any more."""

    def give_slots(self) -> None:
        """Nobody has used it for a while, and pages are short: slots that it is read through go back. Does nothing
        while anyone leases it. Returns at once; may be called on any thread."""

    def write_behind(self, pages: int) -> None:
        """Starts to copy up to so many pages that are offered and not clean, in their order, to the host, and looks
        what has become of those before. Returns at once; `Governor.cache_changed` when they are clean. While pages are
        short it is called in each iteration of any model, also with 0."""

    def demote(self, pages: int) -> None:
        """Starts to copy up to so many pages from the peer to the host, the coldest first. Returns at once."""


def rounded(point: Point) -> Point:
    """The next powers of two, as in the record (Select-N §4.4)."""
    return Point(point.phase, 1 << (point.batch - 1).bit_length(), 1 << (point.length - 1).bit_length())


@dataclass(slots=True)
class Seat:
    """`number`: never used again. `base`: layers that stream because its memory demands it. `taken`: layers that the
    core took since `model.plan`. `held`: nothing of it may be taken. `grant`: a plan with more resident layers, for
    which there are pages to spare; `faster`: one that takes less time and no more pages. `lent`: the plan that an SLO
    gave it last. `used`: when it last began or ended an iteration; `waking`: it was idle since it decoded last.
    `passes`: its iterations since its plan was looked at, by phase, and at how many of them it will be: `due`.
    """

    number: int
    name: str
    model: Governed
    base: int
    tuning: WeightPlans = DEFAULT.weights
    used: float = -math.inf
    point: Point | None = None
    last: dict[Phase, Point] = field(default_factory=lambda: dict(FIRST))
    taken: set[int] = field(default_factory=set)
    waking: bool = True
    held: set[object] = field(default_factory=set)
    grant: Plan | None = None
    faster: Plan | None = None
    lent: Plan | None = None
    noticed: set[Phase] = field(default_factory=set)
    costs: dict[Point, tuple[Costs, bool]] = field(default_factory=dict)
    passes: Counter[Phase] = field(default_factory=Counter)
    due: int = 0

    def __post_init__(self) -> None:
        self.due = self.tuning.look

    @property
    def has_slo(self) -> bool:
        return self.model.tpot_slo is not None or self.model.ttft_slo is not None

    @property
    def auto(self) -> bool:
        """May its layers come and go?"""
        return self.model.interval == "auto"

    def slo(self, phase: Phase) -> float:
        """Seconds; infinite where nobody said."""
        found = self.model.tpot_slo if phase == "decode" else self.model.ttft_slo
        return math.inf if found is None else found

    def key(self, layer: int) -> int:
        """In the reclaim list."""
        return self.number * LAYERS + layer

    def keys(self) -> list[int]:
        """The keys of all its layers."""
        return [self.key(layer) for layer in range(len(self.model.plan.pages))]

    def entry(self, layer: int) -> tuple[Any, list[Any]] | None:
        """See Governed.entry."""
        return self.model.entry(layer)

    def at(self, point: Point, page_seconds: float | None) -> tuple[Costs, bool]:
        """Returns (costs of such an iteration, are they measured)."""
        found = self.costs.get(point)
        if found is None:
            found = self.costs[point] = self._costs(point, page_seconds)
        return found

    def expected(self, point: Point, page_seconds: float | None) -> Costs | None:
        """Returns the usual seconds of such an iteration; None where it was not measured."""
        seconds = self.model.typical(point)
        return None if seconds is None or page_seconds is None else Costs(self.model.plan.pages, seconds, page_seconds)

    def standing(self, point: Point, page_seconds: float | None) -> Plan:
        """What it has to stream now: the fastest plan for the pages that are left to it. Beyond its cap with one slot:
        pages are so short that the next layer may have to go, and a slot cannot."""
        plan = self.model.plan
        if not self.taken:
            return plan
        costs, _ = self.at(point, page_seconds)
        left = plan.device_pages - sum(plan.pages[layer] for layer in self.taken)
        most = max(cap(costs), self.base)
        found = fewest(plan.pages, left, costs.ratio, most) or fewest(plan.pages, left, costs.ratio, slots=(1,))
        if found is not None:
            return found
        found = fewest(plan.pages, smallest(plan.pages), costs.ratio)
        assert found is not None
        return found

    def arranged(self, before: Plan, promised: Plan | None) -> None:
        """Notes that its plan was `before`; `promised`: what was `faster` then."""
        after = self.model.plan
        if after == before:
            return
        if after != promised:
            self.due = self.tuning.look
        elif len(before.streamed) == self.base:
            self.base = len(after.streamed)  # it is as much what memory demands

    def _costs(self, point: Point, page_seconds: float | None) -> tuple[Costs, bool]:
        pages, ratio = self.model.plan.pages, float(self.tuning.assumed_ratio)
        seconds = self.model.seconds(point)
        measured = seconds is not None and page_seconds is not None
        if seconds is None:
            seconds = max(1, sum(pages)) * (page_seconds or 1.0) / ratio
        if page_seconds is None:
            page_seconds = seconds * ratio / max(1, sum(pages))
        return Costs(pages, seconds, page_seconds), measured
