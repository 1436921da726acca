"""Which layers of a model stream, and through which slots: numbers in, a frozen plan out. `Costs` has the interval that
meets an SLO and fits the memory (Select-N §4.3-4.5).

Layers are given by their pages, so that layers of different sizes (MoE, hybrid) are spread by size and not by count.
Times are in layers: the mean layer computes in 1 and is copied in `ratio`; each layer's own follow its pages. Each that
streams takes the host `entering` beside that, whatever its size: with two slots a pass of n layers, m of which stream,
takes T = max(n·T_c + m·h, m·T_T).

An interval i streams the last of every i layers. `NONE` of n layers, n + 1, streams nothing (the paper's infinity). The
time of an iteration at an interval is that of its schedule, with the compute of the iteration spread over the layers by
their size.

Note [At most]
    The papers' formulas, and `Plan.steady` with them, count each streamed layer in each pass, in order: what a plan
    takes at most, which is what an SLO is judged by. `Plan.expected` is what is really copied, and when (schedule.py,
    Note [As submitted]): it chooses the fastest plan, and is what a report predicts. They differ where three layers
    have two slots, no more layers stream than there are slots, or slots do not divide them. In the last case, of layers
    of several sizes, the ring may take a copy's time more.

Note [Errata]
    The paper's ⌊t_compute·(1 + δ) / t_trans⌋ is about a whole iteration. The interval that streams L_off of L layers is
    ⌊L / (L_off + 1)⌋ + 1: ⌊L / L_off⌋ streams too many for 22 of 32 values at L = 32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Final

from .schedule import Time, as_submitted, every, simulate
from .tuning import DEFAULT

# Times that a layer takes longer to copy than to compute, until it was measured: it decides between one slot and two
# and nothing else. Measured: one sequence decoded eagerly, PCIe 5.
ASSUMED_RATIO: Final = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """The streamed layers, ascending, and the slot of each; `pages`: of every layer of the model."""

    pages: tuple[int, ...]
    streamed: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()

    @property
    def slot_pages(self) -> tuple[int, ...]:
        """Pages of each slot: as many as the largest of its layers."""
        sizes = [0] * (max(self.slots, default=-1) + 1)
        for layer, slot in zip(self.streamed, self.slots, strict=True):
            sizes[slot] = max(sizes[slot], self.pages[layer])
        return tuple(sizes)

    @property
    def resident_pages(self) -> int:
        """Pages of the layers that stay on the device."""
        return sum(self.pages) - self.host_pages

    @property
    def device_pages(self) -> int:
        """Pages of the device that the layers take: those that stay, and the slots."""
        return self.resident_pages + sum(self.slot_pages)

    @property
    def host_pages(self) -> int:
        """Pages of the backings of the streamed layers."""
        return sum(self.pages[layer] for layer in self.streamed)

    @property
    def copied(self) -> tuple[int, ...]:
        """The layers that come over in each pass, ascending. See Note [At most]."""
        turns = zip(self.streamed, self.slots, strict=True)
        return tuple(layer for layer, slot in turns if self.slots.count(slot) > 1)

    @property
    def copied_pages(self) -> int:
        """Pages of these layers."""
        return sum(self.pages[layer] for layer in self.copied)

    def steady(self, ratio: Fraction, entering: Fraction = Fraction(0)) -> Time:
        """What a pass over the layers takes at most, in layers; `ratio` as in schedule.py. See Note [At most]."""
        compute, copies = self._times(ratio, entering)
        return simulate(compute, copies, self.streamed, self.slots)

    def expected(self, ratio: Fraction, entering: Fraction = Fraction(0)) -> Time:
        """What a pass takes as the ring really copies, in layers. See Note [At most]."""
        compute, copies = self._times(ratio, entering)
        return as_submitted(compute, copies, self.streamed, self.slots)

    def _times(self, ratio: Fraction, entering: Fraction) -> tuple[list[Fraction], list[Fraction]]:
        """Returns what each layer takes to run, and each that streams to be copied, in layers."""
        total = sum(self.pages)
        compute = [Fraction(pages * len(self.pages), max(1, total)) for pages in self.pages]
        copies = [ratio * compute[layer] for layer in self.streamed]
        for layer in self.streamed:
            compute[layer] += entering
        return compute, copies


def streaming(pages: Sequence[int], streamed: Sequence[int], slots: int) -> Plan:
    """Returns the plan in which the `streamed` layers that have pages share so many slots, or as many as there are of
    them. ValueError for no slot."""
    streamed = [layer for layer in streamed if pages[layer]]
    if streamed and slots < 1:
        raise ValueError(f"{len(streamed)} streamed layers need a slot")
    return Plan(tuple(pages), tuple(streamed), tuple(j % slots for j in range(len(streamed))))


def at_interval(pages: Sequence[int], interval: int) -> Plan:
    """The last layer of every `interval` streams, double-buffered (Select-N §4.3). ValueError for an interval below 1
    or above the number of layers."""
    return streaming(pages, every(len(pages), interval), 2)


def spread(pages: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` layers around the circle so that each is preceded by as much to compute: ⌊j·n/m⌋ for equal layers
    (Oneiros §5.2). Fewer where a layer is larger than its share. Layers without pages are not among them."""
    total = sum(pages)
    ends = list(accumulate(pages))
    layers = (next(k for k, end in enumerate(ends) if end * count > j * total) for j in range(count))
    return tuple(dict.fromkeys(layers)) if total else ()


def fewest(
    pages: Sequence[int],
    available: int,
    ratio: Fraction,
    slots: tuple[int, ...] = DEFAULT.weights.slots,
) -> Plan | None:
    """Returns the fastest plan that fits `available` device pages: for each number of `slots` the one that streams the
    fewest layers counts. None where nothing fits."""
    return _fewest(tuple(pages), available, ratio, slots)


@lru_cache(maxsize=1024)
def _fewest(pages: tuple[int, ...], available: int, ratio: Fraction, slots: tuple[int, ...]) -> Plan | None:
    plans = (_least(pages, available, count) for count in slots)
    fitting = [plan for plan in plans if plan is not None]
    return min(fitting, key=lambda plan: (plan.expected(ratio), plan.host_pages), default=None)


def _least(pages: Sequence[int], available: int, slots: int) -> Plan | None:
    """Returns, of the plans that fit, the one that streams the fewest layers."""
    fitting = _fitting(pages, available, slots)
    if len(set(pages)) == 1:
        return next(fitting, None)
    return min(fitting, key=lambda plan: len(plan.streamed), default=None)  # `spread` may find fewer for a larger count


def smallest(pages: Sequence[int]) -> int:
    """Device pages that the layers need at least, however many of them stream."""
    return min(streaming(pages, spread(pages, count), 1).device_pages for count in range(len(pages) + 1))


def _fitting(pages: Sequence[int], available: int, slots: int) -> Iterator[Plan]:
    for count in range(len(pages) + 1):
        plan = streaming(pages, spread(pages, count), slots)
        if plan.device_pages <= available:
            yield plan


@dataclass(frozen=True, slots=True)
class Fewest:
    """The default: as few layers stream as the memory demands."""

    ratio: Fraction = Fraction(ASSUMED_RATIO)
    slots: tuple[int, ...] = DEFAULT.weights.slots

    def choose(self, pages: Sequence[int], available: int) -> Plan | None:
        """Returns a plan that fits `available` device pages, None where none does."""
        return fewest(pages, available, self.ratio, slots=self.slots) or fewest(pages, available, self.ratio)

    def smallest(self, pages: Sequence[int]) -> int:
        """Device pages without which no plan fits."""
        return smallest(pages)


@dataclass(frozen=True, slots=True)
class Interval:
    """The last layer of every `interval` streams, with None no layer."""

    interval: int | None

    def choose(self, pages: Sequence[int], available: int) -> Plan | None:
        """Chooses as `Fewest.choose`. ValueError for an interval that the layers do not have."""
        plan = Plan(tuple(pages)) if self.interval is None else at_interval(pages, self.interval)
        return plan if plan.device_pages <= available else None

    def smallest(self, pages: Sequence[int]) -> int:
        """Device pages without which no plan fits."""
        return (Plan(tuple(pages)) if self.interval is None else at_interval(pages, self.interval)).device_pages


@dataclass(frozen=True, slots=True)
class Same:
    """The layers that stream already, for new tensors in them, and `further` ones as far as the memory demands."""

    streamed: frozenset[int]
    further: bool = False

    def choose(self, pages: Sequence[int], available: int) -> Plan | None:
        """Chooses as `Fewest.choose`. New pages of a streamed layer go to the host, whatever is available."""
        plans = [self._with(pages, count) for count in range(1 + self.further * len(pages))]
        return next((plan for plan in plans if plan.device_pages <= available), plans[0])

    def smallest(self, pages: Sequence[int]) -> int:
        """Device pages without which no plan fits."""
        return min(self._with(pages, count).resident_pages for count in range(1 + self.further * len(pages)))

    def _with(self, pages: Sequence[int], count: int) -> Plan:
        """Returns the plan in which so many layers stream beside those that do already."""
        streamed = {*self.streamed, *spread(pages, count)} if count else self.streamed
        return Plan(tuple(pages), at := tuple(k for k in sorted(streamed) if k < len(pages)), (0,) * len(at))


Rule = Fewest | Interval | Same


@dataclass(frozen=True, slots=True)
class Costs:
    """`pages` of each layer; `seconds` of an iteration with all of them resident; `page_seconds` to copy a page;
    `entering`: seconds that the host takes for each layer that streams, 0 where not measured."""

    pages: tuple[int, ...]
    seconds: float
    page_seconds: float
    entering: float = 0.0

    @property
    def none(self) -> int:
        """The interval that streams nothing."""
        return len(self.pages) + 1

    @property
    def ratio(self) -> Fraction:
        """Time to copy the mean layer, over its time to compute; to six digits, which is finer than any measurement."""
        return round(sum(self.pages) * Fraction(self.page_seconds) / Fraction(self.seconds), 6)

    @property
    def host(self) -> Fraction:
        """What the host takes for each layer that streams, in layers, to six digits."""
        return round(Fraction(self.entering) * len(self.pages) / Fraction(self.seconds), 6)

    def plan(self, interval: int) -> Plan:
        """Returns the plan of an interval. ValueError for one below 1."""
        return Plan(self.pages) if interval >= self.none else at_interval(self.pages, interval)

    def time(self, interval: int) -> float:
        """Seconds of an iteration at an interval."""
        return self.of(self.plan(interval))

    def of(self, plan: Plan) -> float:
        """Seconds of an iteration under any plan for these layers, at most. See plan.py, Note [At most]."""
        return self._seconds(plan.steady(self.ratio, self.host)) if plan.streamed else self.seconds

    def expected(self, plan: Plan) -> float:
        """Seconds of an iteration under a plan as the ring really copies it. See plan.py, Note [At most]."""
        return self._seconds(plan.expected(self.ratio, self.host)) if plan.streamed else self.seconds

    def _seconds(self, time: Time) -> float:
        return float(time * Fraction(self.seconds) / len(self.pages)) if any(self.pages) else self.seconds


def loaded(before: Plan, after: Plan) -> int:
    """Pages that come over the link for layers that stream in the plan `before` and not in the one `after`."""
    return sum(before.pages[layer] for layer in {*before.streamed}.difference(after.streamed))


def meeting(costs: Costs, slo: float) -> int | None:
    """The smallest interval at which an iteration takes no longer than `slo` seconds; None where none does."""
    return next((interval for interval in range(1, costs.none + 1) if costs.time(interval) <= slo), None)


def fitting(costs: Costs, available: int) -> int | None:
    """The largest interval whose layers and slots fit `available` device pages; None where none does."""
    return next((i for i in range(costs.none, 0, -1) if costs.plan(i).device_pages <= available), None)
