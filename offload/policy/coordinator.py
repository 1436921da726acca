"""The coordinator (Select-N §4.5): the intervals at which models stream over one link, so that each meets its SLO and
most host memory is used. Numbers in, a choice or a refusal out.

Words
    rate   bytes per second that a model takes of a link that it has to itself: bytes of an iteration over its time
    need   bytes per second without which its iterations miss their SLO

Note [Fair shares]
    A link that is asked for more than it has serves all alike: a model that asks for no more than an equal share gets
    that, and the others get equal shares of the rest. So with s the largest need, all get what they need exactly where
    Σ min(rate, s) is no more than what the link has: a model that asks for more than s gets s or more. That is so
    whenever Σ rate is below the bandwidth, the paper's condition (Figure 8, is_valid). And it is so for a model alone
    at any interval that meets its SLO, the paper's special case: while the others are idle it gets its smallest. Rates
    are averages, as in the paper. Copies of several models that meet halve each other's speed, and slots hold no more
    than the next layers: an SLO without any slack can still be missed, by a few percent, where a model needs more than
    an equal part of the link. With a need no larger than that none is missed.

Note [Figure 8]
    Read here: ⌊L/i⌋ layers stream, not L/i; an iteration takes what it takes at that interval, not the same at all of
    them; no interval at all (the paper's ∞) is L + 1; where no combination is valid there is none to take the best of.
    With fewer bytes per second than were measured a copy may end late though bytes over time still fit, as a slot is
    busy while its layer computes: hence need beside rate. With layers of several sizes the intervals that fit are not
    all those below one of them: each is tried.

Note [Phases in turn]
    In the paper an instance prefills or decodes (§5.1). Where one process does both in turn a plan for each phase would
    be loaded at each boundary, and the bytes of that would belong to the time of the first token, or of the first step.
    So with an SLO for both there is one plan, whose need and rate are the larger ones of the two: nothing moves while
    they take turns, neither its layers nor the shares of others. A longer interval is slower in no phase, unless layers
    differ in size, so a plan for each would keep no SLO that one plan breaks; it would free more during prefills.
    Where no interval keeps both (an iteration is longer than its SLO even resident, or memory or the link are short),
    of those that fit that is taken at which the fewest are missed, then by the least of what they allow, then for which
    the least has to be loaded. It has no promised part of the link.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Final, Literal, NamedTuple

from ...allocator.units import format_time
from .plan import Costs, Plan, loaded

FIXED: Final = 0  # in the place of an interval

Reason = Literal["memory", "slo", "link"]
LINK_PARTS: Final = 1024  # of the link, by which needs are told apart: a thousandth. Chosen


class PhaseDemand(NamedTuple):
    """What an iteration takes, with the link to itself, and the seconds that it may take."""

    costs: Costs
    slo: float


@dataclass(frozen=True, slots=True)
class LinkClient:
    """A model that streams over the link. `costs` with the link to itself; `slo`: seconds that an iteration may take,
    infinite where none was given; `available`: device pages for its layers and slots, of which it keeps `least`;
    `only`: the interval that the user set; `fixed`: a plan that it keeps, which is no interval (FIXED); `parts`: of the
    link, how finely needs are told apart; `beside`: iterations that take turns with those of `costs` and `slo`, see
    Note [Phases in turn]; `standing`: its plan so far."""

    name: str
    costs: Costs
    page_bytes: int
    slo: float
    available: int
    idle: bool = False
    only: int | None = None
    fixed: Plan | None = None
    least: int = 0
    parts: int = LINK_PARTS
    beside: tuple[PhaseDemand, ...] = ()
    standing: Plan | None = None

    @property
    def demands(self) -> tuple[PhaseDemand, ...]:
        """What its plan has to keep."""
        return PhaseDemand(self.costs, self.slo), *self.beside

    def plan(self, interval: int) -> Plan:
        """Returns the plan of an interval. ValueError for one below 1 that is not FIXED."""
        return self.costs.plan(interval) if self.fixed is None else self.fixed

    def bandwidth(self, part: int) -> int:
        """Bytes per second of so many parts of the link that `costs` was measured on."""
        return math.ceil(self.page_bytes / self.costs.page_seconds * part / self.parts)

    def time(self, interval: int, bandwidth: int, costs: Costs | None = None) -> float:
        """Seconds of an iteration with so many bytes per second, and no more than were measured. `costs`: of another
        iteration than its own."""
        costs = self.costs if costs is None else costs
        if bandwidth < 1:
            return math.inf if self.plan(interval).streamed else costs.seconds
        page_seconds = max(costs.page_seconds, self.page_bytes / bandwidth)
        return replace(costs, page_seconds=page_seconds).of(self.plan(interval))

    def excess(self, interval: int, bandwidth: int) -> tuple[float, ...]:
        """What each iteration of `demands` takes longer than it may, as a part of that; 0 where its SLO is kept, and
        infinite where that is 0 and is not."""
        return tuple(_excess(self.time(interval, bandwidth, demand.costs), demand.slo) for demand in self.demands)

    def keeps(self, interval: int, bandwidth: int) -> bool:
        """Does the interval keep every SLO with so many bytes per second?"""
        return all(self.time(interval, bandwidth, demand.costs) <= demand.slo for demand in self.demands)

    def loaded(self, interval: int) -> int:
        """Pages that come over the link before the model has the plan of an interval."""
        return 0 if self.standing is None else loaded(self.standing, self.plan(interval))


@dataclass(frozen=True, slots=True)
class LinkOption:
    """An interval of one model. `host`: bytes that it keeps on the host and copies in each iteration; `rate`, `need`:
    bytes per second."""

    interval: int
    host: int
    rate: int
    need: int


@dataclass(frozen=True, slots=True)
class Shares:
    """The options of the models that are not idle, by name. `level`: the bytes per second that each gets if it asks."""

    options: dict[str, LinkOption]
    level: int

    @property
    def host(self) -> int:
        """Bytes kept on the host."""
        return sum(option.host for option in self.options.values())


@dataclass(frozen=True, slots=True)
class Refusal:
    """No interval of `model` is possible beside the models before it. Each of the others is what alone would make one
    possible, None where nothing of its kind does: `slo` in seconds, `pages` of the device for its layers, `bandwidth`
    of the link in bytes per second."""

    model: str
    reason: Reason
    slo: float | None
    pages: int | None
    bandwidth: int | None

    @property
    def why(self) -> str:
        """The reason in words."""
        return {
            "memory": "its layers do not fit, even if all of them stream",
            "slo": "no interval that fits the memory meets its SLO",
            "link": "the link has too little left for any interval that fits the memory and meets its SLO",
        }[self.reason]

    def __str__(self) -> str:
        ways = []
        if self.slo is not None:
            ways.append(f"an SLO of {format_time(self.slo)}")
        if self.pages is not None:
            ways.append(f"{self.pages} device pages for its layers")
        if self.bandwidth is not None:
            ways.append(f"{self.bandwidth / 1e9:.1f} GB/s of the link")
        return f"{self.model}: {self.why}." + (f" What would do: {', or '.join(ways)}." if ways else "")


@dataclass(frozen=True, slots=True)
class RunningShares:
    """Shares between iterations. `missed`: models of which an SLO was given up, and why; `kept`: those of them whose
    next iteration keeps its own all the same."""

    shares: Shares
    missed: dict[str, Refusal]
    kept: frozenset[str] = frozenset()


_Sum = tuple[
    int, int, tuple[int, ...], tuple[LinkOption, ...]
]  # -bytes on the host, bytes per second, intervals, of what


def options(client: LinkClient) -> tuple[LinkOption, ...]:
    """Returns the intervals that fit the memory and meet the SLO on a link of the client's own; without an SLO the one
    that streams least, as there is nothing to trade memory for."""
    valid = _valid(client)
    return (
        valid if client.slo < math.inf else tuple(sorted(valid, key=lambda option: (option.host, option.interval))[:1])
    )


def possible(clients: Sequence[LinkClient], bandwidth: float, traffic: float = 0.0) -> Shares | None:
    """Returns the intervals with which every SLO is met and most host memory is used; of several those with the
    smallest largest need, then with the fewest bytes per second, then with the smallest intervals in the order of
    `clients`. None where no intervals meet every SLO. `bandwidth` of the link and other `traffic` on it in bytes per
    second."""
    active = [client for client in clients if not client.idle]
    best = _best([options(client) for client in active], _left(bandwidth, traffic))
    if best is None:
        return None
    chosen, level = best
    return Shares({client.name: option for client, option in zip(active, chosen, strict=True)}, level)


def share(clients: Sequence[LinkClient], bandwidth: float, traffic: float = 0.0) -> Shares | Refusal:
    """Returns what `possible` does, or where no intervals meet every SLO a refusal: of the first of `clients`, in the
    order of their admission, that does not go with those before it. Finding what would do takes many times as long as
    the shares."""
    shares = possible(clients, bandwidth, traffic)
    if shares is not None:
        return shares
    left = _left(bandwidth, traffic)
    active = [client for client in clients if not client.idle]
    tables = [options(client) for client in active]
    count = next(n for n in range(1, len(active) + 1) if not _possible(tables[:n], left))
    return _refusal(active[count - 1], tables[: count - 1], left)


def _left(bandwidth: float, traffic: float) -> int:
    """Bytes per second of the link beside other traffic."""
    return max(0, math.floor(bandwidth - traffic))


def share_running(clients: Sequence[LinkClient], bandwidth: float, traffic: float = 0.0) -> RunningShares:
    """Returns the shares between iterations, when no model can be refused any more: where the link got slower the
    newest that does not go with those before it keeps streaming what its memory demands, and its SLO is given up.
    ValueError for layers that do not fit."""
    missed: dict[str, Refusal] = {}
    kept = set[str]()
    while isinstance(shares := share(clients, bandwidth, traffic), Refusal):
        if shares.reason == "memory":
            raise ValueError(str(shares))
        names = [client.name for client in clients]
        before = clients[: names.index(shares.model) + 1]
        newest = next(client.name for client in reversed(before) if not client.idle and client.slo < math.inf)
        missed[newest] = shares
        others = [options(client) for client in before if not client.idle and client.name != newest]
        harmed = next(client for client in before if client.name == newest)
        least, is_kept = _least_harm(harmed, others, _left(bandwidth, traffic))
        kept |= {newest} if is_kept else set()
        clients = [least if client is harmed else client for client in clients]
    return RunningShares(shares, missed, frozenset(kept))


def _least_harm(client: LinkClient, others: Sequence[Sequence[LinkOption]], left: int) -> tuple[LinkClient, bool]:
    """Returns the model of which no interval keeps every SLO beside the `others`, without its SLOs and at an interval
    that does least harm, and whether its next iteration keeps its own all the same. One with a single SLO streams as
    little as memory allows. See Note [Phases in turn]."""
    free = replace(client, slo=math.inf, beside=())
    beside = [i for i in _fitting(client) if _possible([*others, (_option(free, i, 0),)], left)]
    if not client.beside or not beside:
        return free, False
    bandwidth = max(0, left - (_needed(others) or 0))

    def harm(interval: int) -> tuple[int, float, int, int]:
        excess = client.excess(interval, bandwidth)
        return sum(map(bool, excess)), sum(excess), client.loaded(interval), client.plan(interval).host_pages

    least = min(beside, key=harm)
    return replace(free, only=least), not client.excess(least, bandwidth)[0]


def _fitting(client: LinkClient) -> Iterator[int]:
    every = range(1, client.costs.none + 1) if client.only is None else (client.only,)
    every = every if client.fixed is None else (FIXED,)
    return (i for i in every if client.least <= client.plan(i).device_pages <= client.available)


def _valid(client: LinkClient) -> tuple[LinkOption, ...]:
    alike = replace(client, name="", available=2 * sum(client.costs.pages), idle=False, standing=None)
    anywhere = _valid_anywhere(alike)
    return tuple(option for option in anywhere if client.plan(option.interval).device_pages <= client.available)


@lru_cache(maxsize=256)
def _valid_anywhere(client: LinkClient) -> tuple[LinkOption, ...]:
    needs = ((interval, _need(client, interval)) for interval in _fitting(client))
    return tuple(_option(client, interval, need) for interval, need in needs if need is not None)


def _option(client: LinkClient, interval: int, need: int) -> LinkOption:
    plan = client.plan(interval)
    host = plan.host_pages * client.page_bytes
    rates = (math.ceil(host / demand.costs.of(plan)) for demand in client.demands)
    return LinkOption(interval, host, max(need, *rates), need)


def _need(client: LinkClient, interval: int) -> int | None:
    """Returns the need at an interval; None where the whole link is not enough."""

    def enough(part: int) -> bool:
        return client.keeps(interval, client.bandwidth(part))

    if not enough(client.parts):
        return None
    if enough(0):
        return 0
    part, step = _least_part(client, interval), 1  # not enough, or just so: from there on in growing steps
    while part + step < client.parts and not enough(part + step):
        part, step = part + step, 2 * step
    parts = range(max(0, part - 1), min(part + step, client.parts) + 1)
    return client.bandwidth(parts[bisect_left(parts, True, key=enough)])


def _least_part(client: LinkClient, interval: int) -> int:
    """The largest part of the link over which the bytes of an iteration take at least as long as the SLO."""
    pages = client.plan(interval).host_pages
    parts = client.parts
    return min(parts - 1, math.floor(pages * client.costs.page_seconds / client.slo * parts)) if pages else 0


def _levels(tables: Sequence[Sequence[LinkOption]]) -> list[int]:
    """Returns the values that the largest need may have."""
    return sorted({0, *(option.need for table in tables for option in table)})


def _best(tables: Sequence[Sequence[LinkOption]], left: int) -> tuple[tuple[LinkOption, ...], int] | None:
    """Returns the best option of each table, and the largest need, by a knapsack for each possible largest need: of the
    sums so far those are kept that no other beats in both bytes on the host and bytes per second."""
    best: tuple[tuple[LinkOption, ...], int] | None = None
    most = -1
    for level in _levels(tables):
        sums: list[_Sum] = [(0, 0, (), ())]
        for table in tables:
            sums = _undominated(
                (host - option.host, rate + min(option.rate, level), (*intervals, option.interval), (*chosen, option))
                for host, rate, intervals, chosen in sums
                for option in table
                if option.need <= level and rate + min(option.rate, level) <= left
            )
        if sums and -sums[0][0] > most:
            most, best = -sums[0][0], (sums[0][3], level)
    return best


def _undominated(sums: Iterable[_Sum]) -> list[_Sum]:
    """Returns the choices with the most bytes on the host first; each next one with fewer bytes per second than all
    before it."""
    kept: list[_Sum] = []
    for choice in sorted(sums, key=lambda it: it[:3]):
        if not kept or choice[1] < kept[-1][1]:
            kept.append(choice)
    return kept


def _possible(tables: Sequence[Sequence[LinkOption]], left: int) -> bool:
    needed = _needed(tables)
    return needed is not None and needed <= left


def _needed(tables: Sequence[Sequence[LinkOption]]) -> int | None:
    """Returns the least bytes per second with which one option of each table can be had together."""
    sums = []
    for level in _levels(tables):
        least = [min((min(o.rate, level) for o in table if o.need <= level), default=None) for table in tables]
        if None not in least:
            sums.append(sum(rate for rate in least if rate is not None))
    return min(sums, default=None)


def _refusal(client: LinkClient, before: Sequence[Sequence[LinkOption]], left: int) -> Refusal:
    reason: Reason = "link" if options(client) else "slo" if next(_fitting(client), None) is not None else "memory"
    anywhere = _valid(replace(client, available=sum(client.costs.pages)))
    enough = [option.interval for option in anywhere if _possible([*before, (option,)], left)]
    pages = min((client.plan(interval).device_pages for interval in enough), default=None)
    needed = _needed([*before, options(client)])
    return Refusal(client.name, reason, _nearest(client, before, left), pages, needed)


def _excess(seconds: float, slo: float) -> float:
    return 0.0 if seconds <= slo else seconds / slo - 1 if slo else math.inf


def _nearest(client: LinkClient, before: Sequence[Sequence[LinkOption]], left: int) -> float | None:
    """Returns the smallest SLO that can be met beside the others, by the most of the link that each interval can
    get."""

    times = []
    for interval in _fitting(client):
        demands = [client.bandwidth(part) for part in range(client.parts + 1)]
        count = bisect_left(
            demands, True, key=partial(_beyond, client=client, interval=interval, before=before, left=left)
        )
        if count and not any(client.excess(interval, demands[count - 1])[1:]):
            times.append(client.time(interval, demands[count - 1]))
    return min((time for time in times if time < math.inf), default=None)


def _beyond(need: int, client: LinkClient, interval: int, before: Sequence[Sequence[LinkOption]], left: int) -> bool:
    return not _possible([*before, (_option(client, interval, need),)], left)
