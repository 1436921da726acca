"""The facts of a managed model that its generation loops use."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ...allocator._native import Device
from ...offload.governor.situation import Lendable
from ...offload.policy.request_slo import NOTHING, RequestSLO
from ...offload.policy.step_costs import StepCosts
from ..measure.histogram import Latencies
from .loop_caches import LoopCaches

Require = Callable[[float | None, float | None, bool], None]
# (pages) -> (pages that the layers would give, pages copied in a step now, pages copied in a step with so many less)
Lends = Callable[[int], Lendable]


class Schedule(Protocol):
    """The requests of one loop."""

    @property
    def wanted(self) -> float:
        """The time until which requests need the model, on the governor's clock: infinity while there are any."""

    @property
    def runs(self) -> bool:
        """Has any request begun, and not ended?"""


@dataclass(frozen=True, slots=True)
class Batched:
    """A model whose continuous batching is elastic, on `device`; `name`: for logs. `costs`: times of its steps. `fast`:
    are batches chosen by them? `require(tpot, ttft, others)` is called before each batch with the seconds that its
    requests allow for a decode step and for one with prompts, and whether other requests wait for its end. `lends`:
    pages that its own layers could give, and their price. `loop_caches`: the cache that outlives the loops; None: each
    loop has its own. `slo`: of requests without one of their own. `positions`: the longest sequence that it supports;
    None: any. `schedules`: of its live loops; `latencies`: of their requests."""

    name: str
    device: Device
    costs: StepCosts
    fast: bool
    require: Require
    lends: Lends
    loop_caches: LoopCaches | None = None
    slo: RequestSLO = NOTHING
    positions: int | None = None
    schedules: list[weakref.ref[Schedule]] = field(default_factory=list)
    latencies: Latencies = field(default_factory=Latencies)

    def scheduled_by(self, schedule: Schedule) -> None:
        """Notes the schedule of one more loop."""
        self.schedules[:] = [each for each in self.schedules if each() is not None]
        self.schedules.append(weakref.ref(schedule))

    @property
    def runs(self) -> bool:
        """Have requests of any loop begun, and not ended?"""
        return any(it.runs for each in tuple(self.schedules) if (it := each()) is not None)

    @property
    def wanted(self) -> float | None:
        """The time until which requests of any loop need the model; None where there is no loop."""
        return max((it.wanted for each in tuple(self.schedules) if (it := each()) is not None), default=None)
