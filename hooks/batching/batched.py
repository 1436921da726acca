"""What the generation loops of a model know of it, for as long as it is managed."""

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
from .living import Living

Require = Callable[[float | None, float | None, bool], None]
# (pages) -> what the layers would give, and what of them is copied in a step, now and with so many pages less
Lends = Callable[[int], Lendable]


class Schedule(Protocol):
    """The requests of one loop."""

    @property
    def wanted(self) -> float:
        """Until when they need the model, on the governor's clock: infinity while there are any."""

    @property
    def runs(self) -> bool:
        """Has any of them begun, and not ended?"""


@dataclass(frozen=True, slots=True)
class Batched:
    """A model whose continuous batching is elastic, on `device`; `name`: for readers. `costs`: what its steps take;
    `fast`: are batches chosen by that? `require`: is told what the requests of the next batch ask of a step that
    decodes, and of one with prompts, in seconds, and whether others wait for it, before it is computed. `lends`: what
    its own layers could give, and at which price. `living`: the cache that outlives the loops; None: each has its own.
    `slo`: of requests that ask nothing themselves. `positions`: that it has learned, beyond which no step can look;
    None: any. `schedules`: of its loops, as long as they live; `latencies`: of their requests."""

    name: str
    device: Device
    costs: StepCosts
    fast: bool
    require: Require
    lends: Lends
    living: Living | None = None
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
        """Until when requests of any loop need it; None where there is no loop."""
        return max((it.wanted for each in tuple(self.schedules) if (it := each()) is not None), default=None)
