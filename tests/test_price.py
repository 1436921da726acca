"""The price of what is taken: against brute force, between equals, and how seldom it is made."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ballonet.offload.policy.giving import nested
from ballonet.offload.policy.plan import Costs, Plan, fewest
from ballonet.offload.policy.price import Price, of_layers, stepped
from ballonet.offload.policy.reclaim_order import Candidate, PageSource, claimed, ordered

HORIZON = 10.0


def least_seconds(costs: Costs, left: int) -> float:
    """Seconds of the fastest of all plans with one or two slots that fit so many device pages."""
    layers = range(len(costs.pages))
    plans = (
        Plan(costs.pages, streamed, tuple(j % slots for j in range(count)))
        for count in range(len(costs.pages) + 1)
        for streamed in itertools.combinations(layers, count)
        for slots in (1, 2)
    )
    return min(costs.expected(plan) for plan in plans if plan.device_pages <= left)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.integers(1, 3), st.sampled_from([0.2, 0.5, 1.0, 2.0, 7.5]), st.integers(0, 3))
def test_layer_costs_what_the_fastest_pass_takes_longer_without_it_and_those_before(
    layers: int, pages: int, ratio: float, gone: int
) -> None:
    costs = Costs((pages,) * layers, 0.001 * layers * pages / ratio, 0.001)
    plan = fewest(costs.pages, pages * max(2, layers - gone), costs.ratio) or Plan(costs.pages)
    order = nested(costs.pages, plan.streamed)
    uses, left, lost = 3.0, plan.device_pages, [costs.expected(plan)]
    prices = of_layers(plan, costs, uses, order, (1, 2))
    for _ in prices:
        left -= pages
        lost.append(max(lost[-1], least_seconds(costs, left)))
    assert len(prices) == min(len(order), plan.device_pages // pages - 1), "a slot stays"
    assert [layer for layer, _, _ in prices] == list(order[: len(prices)])
    for number, (_, price, _) in enumerate(prices):
        slope = max(  # of the highest curve below that never bends down
            min((lost[end] - lost[begin]) / (end - begin) for end in range(number + 1, len(lost)))
            for begin in range(number + 1)
        )
        assert price.rate == pytest.approx(slope * uses / pages, abs=1e-9)
        assert price.once == costs.page_seconds


def a_layer(client: int, index: int, price: Price, **more: Any) -> Candidate:
    return Candidate(PageSource.HIDDEN_WEIGHTS, client, index, 1, price, **more)


@settings(max_examples=60)
@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=4), min_size=1, max_size=2), st.integers(1, 8))
def test_pages_taken_are_the_cheapest_choice_of_all(rates: list[list[float]], taken: int) -> None:
    """Where what a client offers next never costs less, no choice of beginnings of the sequences costs less."""
    sequences = [
        [a_layer(client, index, Price(round(rate, 3), 0.0)) for index, rate in enumerate(sorted(its))]
        for client, its in enumerate(rates)
    ]
    taken = min(taken, sum(map(len, sequences)))
    lost = sum(candidate.price.rate for candidate in ordered(sequences, HORIZON)[:taken])
    choices = [
        counts for counts in itertools.product(*(range(len(its) + 1) for its in sequences)) if sum(counts) == taken
    ]
    assert lost == pytest.approx(
        min(
            sum(candidate.price.rate for its, count in zip(sequences, counts, strict=True) for candidate in its[:count])
            for counts in choices
        )
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 8), st.integers(1, 4), st.sampled_from([0.3, 1.0, 4.0, 29.0]))
def test_of_two_models_with_equal_requests_neither_ends_with_all_pages(layers: int, pages: int, ratio: float) -> None:
    costs = Costs((pages,) * layers, 0.001 * layers * pages / ratio, 0.001)
    prices = of_layers(Plan(costs.pages), costs, 5.0, nested(costs.pages), (1, 2))
    order = ordered([[a_layer(client, layer, price) for layer, price, _ in prices] for client in (1, 2)], HORIZON)
    given = {1: 0, 2: 0}
    for candidate in order:
        given[candidate.client] += 1
        assert abs(given[1] - given[2]) <= 1


def test_equals_give_by_lower_priority_then_latest_use_then_as_offered() -> None:
    price = Price(0.0, 0.001)
    one, two, three, four = (
        [a_layer(client, index, price, priority=priority, recency=used) for index in range(2)]
        for client, priority, used in ((1, 1, 9.0), (2, 0, 5.0), (3, 0, 7.0), (4, 0, 5.0))
    )
    order = [(candidate.client, candidate.index) for candidate in ordered([one, two, three, four], HORIZON)]
    assert order == [(3, 0), (3, 1), (2, 0), (4, 0), (2, 1), (4, 1), (1, 0), (1, 1)]


def test_what_is_due_to_others_goes_before_what_costs_less() -> None:
    kept = replace(a_layer(1, 0, Price(1.0, 1.0), owner=1), source=PageSource.IDLE_KV)
    cheap = a_layer(2, 0, Price(0.0, 0.0))
    assert claimed([cheap, kept], {1: 1}) == [replace(kept, borrowed=True), cheap]


@given(st.integers(1, 10**4), st.sampled_from([0.0, 0.05, 0.1, 0.5]))
def test_stepped_ratio_is_within_half_a_step(hundredths: int, step: float) -> None:
    ratio = Fraction(hundredths, 100)
    off = float(stepped(ratio, step) / ratio)
    assert (1 + step) ** -0.5 - 1e-3 <= off <= (1 + step) ** 0.5 + 1e-3
    assert stepped(stepped(ratio, step), step) == stepped(ratio, step)
