"""The offloading interval that meets an SLO and fits the memory (Select-N §4.3-4.5): numbers in, an interval out.

An interval i streams the last of every i layers. `NONE` of n layers, n + 1, streams nothing (the paper's infinity). The
time of an iteration at an interval is that of its schedule, with the compute of the iteration spread over the layers by
their size.

Note [Errata]
    The paper's ⌊t_compute·(1 + δ) / t_trans⌋ is about a whole iteration. The interval that streams L_off of L layers is
    ⌊L / (L_off + 1)⌋ + 1: ⌊L / L_off⌋ streams too many for 22 of 32 values at L = 32.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from .plan import Plan, at_interval
from .schedule import Pass


@dataclass(frozen=True, slots=True)
class Costs:
    """`pages` of each layer; `seconds` of an iteration with all of them resident; `page_seconds` to copy a page."""

    pages: tuple[int, ...]
    seconds: float
    page_seconds: float

    @property
    def none(self) -> int:
        """The interval that streams nothing."""
        return len(self.pages) + 1

    @property
    def ratio(self) -> Fraction:
        """Time to copy the mean layer, over its time to compute; to six digits, which is finer than any measurement."""
        return round(sum(self.pages) * Fraction(self.page_seconds) / Fraction(self.seconds), 6)

    def plan(self, interval: int) -> Plan:
        """Returns the plan of an interval. ValueError for one below 1."""
        return Plan(self.pages) if interval >= self.none else at_interval(self.pages, interval)

    def time(self, interval: int) -> float:
        """Seconds of an iteration at an interval."""
        return self.of(self.plan(interval))

    def of(self, plan: Plan) -> float:
        """Seconds of an iteration under any plan for these layers, at most. See plan.py, Note [At most]."""
        return self._seconds(plan.steady(self.ratio)) if plan.streamed else self.seconds

    def expected(self, plan: Plan) -> float:
        """Seconds of an iteration under a plan as the ring really copies it. See plan.py, Note [At most]."""
        return self._seconds(plan.expected(self.ratio)) if plan.copied else self.seconds

    def _seconds(self, pass_: Pass) -> float:
        return float(pass_.time * Fraction(self.seconds) / len(self.pages)) if any(self.pages) else self.seconds


def meeting(costs: Costs, slo: float) -> int | None:
    """The smallest interval at which an iteration takes no longer than `slo` seconds; None where none does."""
    return next((interval for interval in range(1, costs.none + 1) if costs.time(interval) <= slo), None)


def fitting(costs: Costs, available: int) -> int | None:
    """The largest interval whose layers and slots fit `available` device pages; None where none does."""
    return next((i for i in range(costs.none, 0, -1) if costs.plan(i).device_pages <= available), None)
