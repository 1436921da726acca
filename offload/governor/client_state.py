"""The governor's record of each client: its activity, its last iteration, and what was taken."""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from ..policy.interval import Costs
from ..policy.plan import Plan
from ..policy.remap import standing
from ..policy.tuning import DEFAULT, WeightPlans
from ..record.record import Phase, Point
from .activity import Activity
from .client import INDICES_PER_SPLIT, KEYS_PER_CLIENT, Client, ModelClient, Offer, PageClient

FIRST: Final[dict[Phase, Point]] = {"prefill": Point("prefill", 1, 1), "decode": Point("decode", 1, 1)}


@dataclass(slots=True, eq=False)
class ClientState(ABC):
    """`number`: never used again. `activity`: of its iterations. `taken`: layers or offers that the core took, and the
    client does not know of yet. `used`: when it was in use last, as known at the last query; `waking`: it was idle
    until its present iteration, a model until it decodes."""

    number: int
    name: str
    activity: Activity
    taken: set[int] = field(default_factory=set, kw_only=True)
    used: float = field(default=-math.inf, kw_only=True)
    waking: bool = field(default=True, kw_only=True)

    def key(self, index: int) -> int:
        """The key of the client's layer or offer in the reclaim list."""
        return self.number * KEYS_PER_CLIENT + index

    def last_use(self, now: float) -> float:
        """Returns when the client was in use last, by its iterations."""
        return self.activity.last(now)

    @property
    def wanted(self) -> float | None:
        """Until when requests need the client; see ModelClient.wanted_until."""
        return None

    @abstractmethod
    def client(self) -> Client | None:
        """The client; None where it was collected."""

    def entry(self, index: int) -> tuple[Any, list[Any]] | None:
        """Returns the client's entry for `Device.publish`; see Client.entry."""
        client = self.client()
        return None if client is None else client.entry(index)


@dataclass(slots=True, eq=False)
class ModelState(ClientState):
    """State of a ModelClient. `base`: layers that stream because its memory demands it. `taken`: since `model.plan`.
    `held`: while not empty, nothing of it may be taken. `grant`: a plan with more resident layers, for which there are
    pages to spare; `faster`: one that takes less time and no more pages. `lent`: the plan that an SLO gave it last.
    `passes`: its iterations since its plan was compared last, by phase; `due`: after how many the next comparison is;
    `streams`: did it stream at its last decision?"""

    model: ModelClient
    base: int
    tuning: WeightPlans = DEFAULT.weights
    point: Point | None = None
    last: dict[Phase, Point] = field(default_factory=lambda: dict(FIRST))
    held: set[object] = field(default_factory=set)
    grant: Plan | None = None
    faster: Plan | None = None
    lent: Plan | None = None
    noticed: set[Phase] = field(default_factory=set)
    costs: dict[Point, tuple[Costs, bool]] = field(default_factory=dict)
    passes: Counter[Phase] = field(default_factory=Counter)
    due: int = 0
    streams: bool = False

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
        """The SLO of that phase in seconds; infinite where none was given."""
        slo = self.model.tpot_slo if phase == "decode" else self.model.ttft_slo
        return math.inf if slo is None else slo

    @property
    def wanted(self) -> float | None:
        return self.model.wanted_until()

    def client(self) -> ModelClient:
        return self.model

    def keys(self) -> list[int]:
        """The keys of all its layers."""
        return [self.key(layer) for layer in range(len(self.model.plan.pages))]

    def costs_at(self, point: Point, page_seconds: float | None) -> tuple[Costs, bool]:
        """Returns (costs of such an iteration, are they measured)."""
        costs = self.costs.get(point)
        if costs is None:
            costs = self.costs[point] = self._costs(point, page_seconds)
        return costs

    def expected(self, point: Point, page_seconds: float | None) -> Costs | None:
        """Returns the usual seconds of such an iteration; None where it was not measured."""
        seconds = self.model.timings.typical(point)
        return None if seconds is None or page_seconds is None else Costs(self.model.plan.pages, seconds, page_seconds)

    def standing(self, point: Point, page_seconds: float | None) -> Plan:
        """Returns the plan that memory demands now; see remap.standing."""
        if not self.taken:
            return self.model.plan
        costs, _ = self.costs_at(point, page_seconds)
        return standing(self.model.plan, self.taken, costs, self.base, self.tuning.slots, self.tuning.capped)

    def passed(self, phase: Phase) -> bool:
        """Counts an iteration; False, uncounted, where its plan is to be compared instead."""
        if sum(self.passes.values()) + 1 >= self.due:
            return False
        self.passes[phase] += 1
        return True

    def arranged(self, before: Plan, promised: Plan | None) -> None:
        """Notes that its plan was arranged anew. `before`: the plan until then; `promised`: `faster` at that time."""
        after = self.model.plan
        if after == before:
            return
        if after != promised:
            self.due = self.tuning.look
        elif len(before.streamed) == self.base:
            self.base = len(after.streamed)  # it is as much what memory demands

    def _costs(self, point: Point, page_seconds: float | None) -> tuple[Costs, bool]:
        pages, ratio = self.model.plan.pages, float(self.tuning.assumed_ratio)
        seconds = self.model.timings.seconds(point)
        measured = seconds is not None and page_seconds is not None
        if seconds is None:
            seconds = max(1, sum(pages)) * (page_seconds or 1.0) / ratio
        if page_seconds is None:
            page_seconds = seconds * ratio / max(1, sum(pages))
        return Costs(pages, seconds, page_seconds), measured


@dataclass(slots=True, eq=False)
class PageState(ClientState):
    """State of a PageClient. `model`: the number of the model whose client it is, 0 of none; `restorable`: pages that
    it may restore."""

    paged: weakref.ref[PageClient] = field(kw_only=True)
    model: int = field(default=0, kw_only=True)
    restorable: int = field(default=0, kw_only=True)

    def client(self) -> PageClient | None:
        return self.paged()

    def last_use(self, now: float) -> float:
        client = self.paged()
        known = self.activity.last(now)
        return known if client is None else max(client.used, known)

    def entry(self, index: int) -> tuple[Any, list[Any]] | None:
        client = self.paged()
        return None if client is None else client.entry(index % INDICES_PER_SPLIT)

    def offers(self) -> list[Offer]:
        """Returns the client's offers, without those that were taken and it does not know of yet."""
        client = self.paged()
        if client is None:
            return []
        return [offer for offer in client.offers() if offer.divisible or offer.index not in self.taken]
