"""Models that share a link: what they stream against brute force, and that no SLO is missed whatever the link does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ballonet.offload.policy.coordinator import (
    LinkClient,
    LinkOption,
    PhaseDemand,
    Refusal,
    Shares,
    options,
    share,
    share_running,
)
from ballonet.offload.policy.plan import Costs, Plan, loaded, meeting

from .links import fair

PAGE = 1000  # bytes
LINK = 10**6  # bytes per second: a page in a millisecond


def client(
    name: str,
    pages: tuple[int, ...] = (10,) * 8,
    seconds: float = 0.08,
    slo: float = 0.1,
    available: int = 80,
    idle: bool = False,
) -> LinkClient:
    return LinkClient(name, Costs(pages, seconds, PAGE / LINK), PAGE, slo, available, idle)


SHAPES = [(4,) * 6, (1,) * 5, (5, 5), (2, 5, 1, 4), (3, 0, 3, 3), (6,), (0, 0)]


@st.composite
def clients(draw: st.DrawFn, counts: Sequence[int] = (1, 2, 2, 3, 3)) -> list[LinkClient]:
    """Models with much or little to hide copies behind. Drawn from lists, as what is drawn from a range is mostly at
    its ends, where nobody streams or nobody can."""
    drawn = []
    for name in "abc"[: draw(st.sampled_from(counts))]:
        pages = draw(st.sampled_from(SHAPES))
        total = sum(pages)
        seconds = max(1, total) * PAGE / LINK * draw(st.sampled_from([0.4, 1, 2, 3]))
        slo = seconds * draw(st.sampled_from([1.1, 1.5, 3.0, 4.0, math.inf, 1.0] * 3 + [0.9]))
        available = total - draw(st.sampled_from([0, total // 8, total // 4, total // 3] * 6 + [total // 2, total]))
        drawn.append(client(name, pages, seconds, slo, available, draw(st.sampled_from([False] * 6 + [True]))))
    return drawn


bandwidths = st.sampled_from([0, 999, *range(LINK // 10, 2 * LINK, LINK // 20)])
traffics = st.sampled_from([0, LINK // 10, LINK // 3, LINK])


def works(chosen: tuple[LinkOption, ...], left: int) -> bool:
    level = max((option.need for option in chosen), default=0)
    return sum(min(option.rate, level) for option in chosen) <= left


def best_of_all(tables: list[tuple[LinkOption, ...]], left: int) -> tuple[LinkOption, ...] | None:
    def key(chosen: tuple[LinkOption, ...]) -> tuple[int, int, int, tuple[int, ...]]:
        level = max((option.need for option in chosen), default=0)
        rate = sum(min(option.rate, level) for option in chosen)
        return -sum(option.host for option in chosen), level, rate, tuple(option.interval for option in chosen)

    return min((chosen for chosen in product(*tables) if works(chosen, left)), key=key, default=None)


def meets(it: LinkClient, interval: int, bandwidth: float) -> bool:
    return it.time(interval, math.floor(bandwidth + 1e-6)) <= it.slo


@settings(max_examples=120)
@given(clients(), bandwidths, traffics)
def test_the_choice_is_the_best_of_all_combinations(them: list[LinkClient], bandwidth: int, traffic: int) -> None:
    """Select-N, coordinator: equals brute force."""
    outcome = share(them, bandwidth, traffic)
    active = [sharer for sharer in them if not sharer.idle]
    best = best_of_all([options(sharer) for sharer in active], max(0, bandwidth - traffic))
    if best is None:
        assert isinstance(outcome, Refusal)
    else:
        assert isinstance(outcome, Shares)
        assert outcome.options == {sharer.name: option for sharer, option in zip(active, best, strict=True)}
        takes = sum(min(option.rate, outcome.level) for option in outcome.options.values())
        assert takes <= max(0, bandwidth - traffic)
        assert outcome.host == sum(option.host for option in best)
        assert outcome.level == max((option.need for option in best), default=0)


@settings(max_examples=50)
@given(clients(counts=(1,)))
def test_options_are_the_intervals_that_fit_and_meet_the_slo(them: list[LinkClient]) -> None:
    (it,) = them
    every = range(1, it.costs.none + 1)
    fits = [i for i in every if it.costs.plan(i).device_pages <= it.available]
    valid = [i for i in fits if it.costs.time(i) <= it.slo]
    if it.slo == math.inf:
        valid = sorted(fits, key=lambda i: (it.costs.plan(i).host_pages, i))[:1]
    assert [option.interval for option in options(it)] == valid
    for option in options(it):
        assert option.host == it.costs.plan(option.interval).host_pages * PAGE
        assert option.rate >= option.host / it.costs.time(option.interval) - 1
        assert it.time(option.interval, option.need) <= it.slo, "what it needs is enough"
        finest = LINK // 1024
        assert option.need <= finest or it.time(option.interval, option.need - finest - 2) > it.slo, "and no more"


@settings(max_examples=80)
@given(clients(), bandwidths)
def test_whoever_shares_the_link_meets_its_slo(them: list[LinkClient], bandwidth: int) -> None:
    """Every model asks for all that it could take, and the link serves all alike."""
    outcome = share(them, bandwidth)
    assume(isinstance(outcome, Shares))
    assert isinstance(outcome, Shares)
    sharing = [sharer for sharer in them if sharer.name in outcome.options]
    got = fair([outcome.options[sharer.name].rate for sharer in sharing], bandwidth)
    for sharer, bytes_per_second in zip(sharing, got, strict=True):
        assert meets(sharer, outcome.options[sharer.name].interval, bytes_per_second), sharer.name


@settings(max_examples=40)
@given(clients(), st.lists(st.tuples(bandwidths, traffics), min_size=1, max_size=6))
def test_intervals_follow_the_link_and_no_slo_is_missed_that_was_not_given_up(
    them: list[LinkClient], moments: list[tuple[int, int]]
) -> None:
    """Select-N, coordinator: no violation under random bandwidth."""
    assume(all(sharer.idle or options(replace(sharer, slo=math.inf)) for sharer in them))
    for bandwidth, traffic in moments:
        settled = share_running(them, bandwidth, traffic)
        sharing = [sharer for sharer in them if not sharer.idle]
        assert list(settled.shares.options) == [sharer.name for sharer in sharing]
        got = fair([settled.shares.options[sharer.name].rate for sharer in sharing], max(0, bandwidth - traffic))
        for sharer, bytes_per_second in zip(sharing, got, strict=True):
            option = settled.shares.options[sharer.name]
            assert sharer.costs.plan(option.interval).device_pages <= sharer.available
            assert sharer.name in settled.missed or meets(sharer, option.interval, bytes_per_second)
        for name in settled.missed:
            assert isinstance(share([member for member in them if not member.idle], bandwidth, traffic), Refusal), name


@settings(max_examples=50)
@given(clients(), bandwidths)
def test_a_refusal_says_what_would_work(them: list[LinkClient], bandwidth: int) -> None:
    refusal = share(them, bandwidth)
    assume(isinstance(refusal, Refusal))
    assert isinstance(refusal, Refusal)
    names = [sharer.name for sharer in them]
    index = names.index(refusal.model)
    before, refused = them[:index], them[index]
    assert isinstance(share(before, bandwidth), Shares), "those before it go together"
    assert refusal.model in str(refusal)

    def accepted(bandwidth: int = bandwidth, **changes: object) -> bool:
        return isinstance(share([*before, replace(refused, **changes)], bandwidth), Shares)  # type: ignore[arg-type]

    assert not accepted()
    if refusal.slo is not None:
        assert refusal.slo > refused.slo
        assert accepted(slo=refusal.slo), "the nearest SLO"
        assert not accepted(slo=refusal.slo * 0.9999)
    if refusal.pages is not None and refused.slo < math.inf:
        assert accepted(available=refusal.pages), "the nearest memory"
        assert refusal.pages == 0 or not accepted(available=refusal.pages - 1)
    if refusal.bandwidth is not None:
        assert accepted(refusal.bandwidth), "the nearest bandwidth"
        assert not accepted(refusal.bandwidth - 1)
    assert (refusal.reason == "memory") == (not options(replace(refused, slo=math.inf)))


def test_alone_it_gets_the_smallest_interval_that_meets_its_slo() -> None:
    """The special case of §4.5."""
    it = client("a")
    assert it.time(2, 10 * LINK) == it.costs.time(2), "no faster than it was measured"
    alone = share([it, client("b", idle=True)], LINK)
    assert isinstance(alone, Shares)
    assert {name: option.interval for name, option in alone.options.items()} == {"a": meeting(it.costs, it.slo)}
    asked = share([replace(it, only=3)], LINK)
    assert isinstance(asked, Shares)
    assert asked.options["a"].interval == 3
    beside = share([client("b", available=60), it], LINK)
    assert isinstance(beside, Shares)
    assert beside.options["a"].interval > alone.options["a"].interval


def test_models_larger_than_their_memory_share_a_link_that_neither_could_leave_to_the_other() -> None:
    """Each would take all of the link that it gets, so that their rates add up to twice the bandwidth; but either has
    time to spare, and half the link is enough."""
    them = [client(name, slo=0.2, available=20) for name in "ab"]
    shares = share(them, LINK)
    assert isinstance(shares, Shares)
    assert all(option.host == 80_000 for option in shares.options.values())
    assert sum(option.rate for option in shares.options.values()) > LINK
    tighter = share([replace(sharer, slo=0.15) for sharer in them], LINK)
    assert isinstance(tighter, Refusal)
    assert (tighter.model, tighter.reason) == ("b", "link")
    assert tighter.slo is None, "at any SLO it would take half the link, and the other needs more than that"
    assert tighter.bandwidth == 2 * options(client("a", slo=0.15))[0].need


def test_refusals_in_words() -> None:
    def words(it: LinkClient) -> str:
        refusal = share([it], LINK)
        assert isinstance(refusal, Refusal)
        return str(refusal)

    assert words(client("a", available=5)) == (
        "a: its layers do not fit, even if all of them stream. What would do: 20 device pages for its layers."
    )
    assert words(client("a", seconds=0.01, slo=0.02, available=40)) == (
        "a: no interval that fits the memory meets its SLO. What would do: an SLO of 80 ms, or 80 device pages for "
        "its layers."
    )
    assert words(client("a", slo=0.07)) == (
        "a: no interval that fits the memory meets its SLO. What would do: an SLO of 80 ms."
    )


def test_an_slo_that_cannot_be_kept_any_more_is_given_up_by_the_newest() -> None:
    old, new = client("a", slo=0.1), client("b", slo=0.1, available=60)
    assert share_running([old, new], LINK).missed == {}
    slower = share_running([old, new], LINK * 0.4)
    assert list(slower.missed) == ["b"]
    assert slower.shares.options["b"].interval == 2, "its memory demands that much"
    with pytest.raises(ValueError, match="do not fit"):
        share_running([client("a", available=1)], LINK)


@st.composite
def in_turn(draw: st.DrawFn) -> LinkClient:
    """A model that prefills and decodes in turn, with an SLO for each."""
    pages = draw(st.sampled_from(SHAPES))
    total = max(1, sum(pages)) * PAGE / LINK
    seconds = [total * draw(st.sampled_from([0.2, 0.5, 1, 2, 5])) for _ in "pd"]
    slos = [one * draw(st.sampled_from([0.5, 0.9, 1.0, 1.2, 2.0, 5.0])) for one in seconds]
    it = client("a", pages, seconds[0], slos[0], draw(st.integers(max(pages), 2 * sum(pages) + 1)))
    before = draw(st.sampled_from([Plan(pages), *map(it.costs.plan, range(1, it.costs.none))]))
    return replace(it, beside=(PhaseDemand(Costs(pages, seconds[1], PAGE / LINK), slos[1]),), standing=before)


@settings(max_examples=200)
@given(in_turn(), st.sampled_from([LINK // 4, LINK // 2, LINK, 2 * LINK]))
def test_plan_for_two_phases_keeps_both_slos_or_does_the_least_harm(it: LinkClient, bandwidth: int) -> None:
    """Equals brute force over the intervals that fit."""
    fits = [i for i in range(1, it.costs.none + 1) if it.costs.plan(i).device_pages <= it.available]
    assume(fits)
    before, speed = it.standing, min(bandwidth, LINK)
    assert before is not None

    def late(interval: int) -> list[float]:
        plan = it.costs.plan(interval)
        demands = [(it.costs, it.slo), *it.beside]
        times = [(replace(costs, page_seconds=PAGE / speed).of(plan), slo) for costs, slo in demands]
        return [time / slo - 1 for time, slo in times if time > slo]

    def host(interval: int) -> int:
        return it.costs.plan(interval).host_pages

    running = share_running([it], bandwidth)
    chosen = running.shares.options["a"].interval
    if any(not late(i) for i in fits):
        assert not running.missed
        assert host(chosen) == max(host(i) for i in fits if not late(i))
        return
    harm = {i: (len(late(i)), sum(late(i)), loaded(before, it.costs.plan(i)), host(i)) for i in fits}
    assert harm[chosen] == pytest.approx(min(harm.values()))
    time = replace(it.costs, page_seconds=PAGE / speed).of(it.costs.plan(chosen))
    assert (running.missed.keys(), running.kept) == ({"a"}, {"a"} if time <= it.slo else set())
