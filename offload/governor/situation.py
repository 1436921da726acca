"""A snapshot of a device's models at the moment of a decision, and its views for coordinator.py and remap.py.

Note [Whose pages]
    A model that takes weights back counts with the free pages, but for those that the next tokens need, and with what
    idle models have in the reclaim list: the core takes that when the free ones are not enough.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ..policy.coordinator import FIXED, LinkClient, LinkOption, RunningShares
from ..policy.interval import Costs, fitting, meeting
from ..policy.plan import Plan
from ..policy.remap import Model
from ..record.record import Phase, Point
from .client_state import ModelState


@dataclass(frozen=True, slots=True)
class Lendable:
    """Memory that the layers of a model could give: `offered` device pages, as published. Pages copied in each
    iteration: `copied` now, and `then`, with as many pages fewer as was asked."""

    offered: int
    copied: int
    then: int


@dataclass(slots=True)
class Situation:
    """`states`: in the order in which they came; `active`: numbers of those that run; `free`: pages, of which `mark`
    are for the next tokens; `offered`: pages in the reclaim list by state number; `bandwidth`: of the link, and others'
    `traffic` on it, bytes per second; `settled`: the shares of the link's models, None once anything has changed;
    `floors`: device pages that the weights of a model keep for its floor, by state number; `peer_seconds`: to copy a
    page to the peer; `peer_room`: has the peer free pages?"""

    states: Sequence[ModelState]
    active: frozenset[int]
    free: int
    mark: int
    offered: Mapping[int, int]
    page_size: int
    bandwidth: float | None
    traffic: float
    settled: RunningShares | None = None
    floors: Mapping[int, int] = field(default_factory=dict)
    peer_seconds: float | None = None
    peer_room: bool = False
    short: bool = False  # did a model get fewer pages than it would take?

    @property
    def page_seconds(self) -> float | None:
        """Seconds to copy a page."""
        return None if self.bandwidth is None else self.page_size / self.bandwidth

    @property
    def leaving_seconds(self) -> float | None:
        """Seconds to copy a page of KV to where it would go now."""
        return self.peer_seconds if self.peer_room and self.peer_seconds is not None else self.page_seconds

    @property
    def spare(self) -> int:
        """Free pages that weights may take."""
        return max(0, self.free - self.mark)

    def costs(self, state: ModelState, point: Point) -> tuple[Costs, bool]:
        """Returns (costs of such an iteration, are they measured)."""
        return state.costs_at(point, self.page_seconds)

    def expected(self, state: ModelState, point: Point) -> Costs | None:
        """Returns the usual costs of such an iteration; None where it was not measured."""
        return state.expected(point, self.page_seconds)

    def standing(self, state: ModelState) -> Plan:
        """Returns ModelState.standing for the iteration that the model does, or will do when it has work again."""
        point = state.point if state.number in self.active else None
        return state.standing(point or state.last["prefill"], self.page_seconds)

    def room(self, state: ModelState) -> int:
        """Pages with which the model may take weights back. See Note [Whose pages]."""
        idle = (other.number for other in self.states if other is not state and other.number not in self.active)
        return self.spare + sum(self.offered.get(number, 0) for number in idle)

    def model(self, state: ModelState) -> Model:
        """The model as remap.py takes it."""
        active = state.number in self.active
        (decode, _), (prefill, _) = (self.costs(state, state.last[phase]) for phase in ("decode", "prefill"))
        return Model(
            state.name,
            self.standing(state),
            decode,
            prefill,
            active,
            state.model.priority,
            0.0 if active else state.used,
            base=state.base,
            least=max(self._least(state, "decode" if active else "prefill"), self.floors.get(state.number, 0)),
            slots=state.tuning.slots,
            mru=state.tuning.mru,
            capped=state.tuning.capped,
        )

    def planned(self, state: ModelState, point: Point, option: LinkOption) -> Plan:
        """Returns the plan that an option of `client` stands for."""
        return self.standing(state) if option.interval == FIXED else self.costs(state, point)[0].plan(option.interval)

    def client(self, state: ModelState, point: Point, room: int) -> LinkClient:
        """Returns the model as coordinator.py takes it, with so many pages beside those that it has."""
        costs, _ = self.costs(state, point)
        plan = self.standing(state)
        slo, available = state.slo(point.phase), plan.device_pages + room
        idle = state.number not in self.active
        free = state.auto and slo < math.inf and fitting(costs, available) is not None
        fixed = None if free else plan
        least = 0 if fixed else _kept(costs, state.model.floor, available)
        return LinkClient(
            state.name,
            costs,
            self.page_size,
            slo,
            available,
            idle,
            fixed=fixed,
            least=least,
            parts=state.tuning.link_parts,
        )

    def _least(self, state: ModelState, phase: Phase) -> int:
        """Device pages that the model's SLO needs: those of the plan that it was given, or would be given alone."""
        slo = state.slo(phase)
        if slo == math.inf:
            return 0
        if state.lent is not None and state.point == state.last[phase]:
            return state.lent.device_pages
        costs, _ = self.costs(state, state.last[phase])
        interval = _meeting(costs, slo)
        return costs.plan(costs.none if interval is None else interval).device_pages


@lru_cache(maxsize=256)
def _kept(costs: Costs, floor: int, available: int) -> int:
    """Device pages that layers keep of a floor, as far as an interval that fits allows."""
    every = (costs.plan(interval).device_pages for interval in range(1, costs.none + 1)) if floor else ()
    return min(floor, max((pages for pages in every if pages <= available), default=0))


_meeting = lru_cache(maxsize=256)(meeting)
