"""What is away comes back once its absence has cost what that takes: never much worse than whoever knows the future."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.offload.policy.plan import fewest
from ballonet.offload.policy.price import horizon_after
from ballonet.offload.policy.rental import change, kv_returns, threshold
from ballonet.offload.policy.tuning import DEFAULT

from .fake_manager import EQUAL, a_manager


@pytest.mark.parametrize("used", range(30))
def test_alone_it_costs_at_most_twice_the_best_in_hindsight_and_one_change(used: int) -> None:
    """Each use waits for a second while it is away; to bring three pages there and back takes six seconds."""
    waited, paid, here = 0, 0.0, False
    for _ in range(used):
        if not here and waited >= threshold(3, 0, 1.0):
            paid, here = paid + change(3, 0, 1.0), True
        waited += not here
    assert waited + paid <= 2 * min(used, change(3, 0, 1.0)) + change(3, 0, 1.0)
    assert paid <= waited


@given(st.lists(st.sampled_from("ab"), max_size=400), st.integers(1, 4))
def test_in_exchange_it_costs_at_most_three_times_the_best_fixed_choice_and_one_exchange(
    uses: list[str], pages: int
) -> None:
    """Two in one place, of so many pages each: whoever is away waits for a second at each use."""
    exchange, here, waited, total, moved = change(pages, pages, 1.0), "a", 0, 0.0, 0.0
    for used in uses:
        if used == here:
            continue
        waited, total = waited + 1, total + 1
        if waited >= threshold(pages, pages, 1.0):
            here, waited, moved = used, 0, moved + exchange
    fixed = min(uses.count("b"), uses.count("a") + exchange)  # either stays, or the other one from the beginning on
    assert total + moved <= 3 * fixed + exchange
    assert moved <= total / 2


@given(st.integers(1, 60), st.integers(1, 4))
def test_on_a_square_wave_of_any_period_it_keeps_to_that(period: int, pages: int) -> None:
    wave = ["b" if at // period % 2 else "a" for at in range(40 * period)]
    exchange, here, waited, total, moved = change(pages, pages, 1.0), "a", 0, 0.0, 0.0
    for used in wave:
        if used != here:
            waited, total = waited + 1, total + 1
            if waited >= threshold(pages, pages, 1.0):
                here, waited, moved = used, 0, moved + exchange
    fixed = min(sum(used != kept for used in wave) for kept in "ab")
    assert total + moved <= 3 * fixed + exchange
    assert moved <= total / 2


@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9), st.booleans())
def test_kv_comes_back_once_it_has_cost_that_and_no_more_than_there_is_room_for(
    away: int, spare: int, idle: int, hides: bool
) -> None:
    """Each iteration reads all that is away, a second of the link for each page; `hides`: nobody waits for it."""
    read, moved = 0, 0
    for _ in range(20):
        moved = kv_returns(0.0 if hides else read, read, away, spare, idle, 1.0)
        if moved:
            break
        read += 1
    assert moved <= min(away, spare + idle)
    if hides:
        assert (moved, read) == ((away, 2) if spare >= away else (0, 20)), "all of it, to free pages, or nothing"
    elif spare >= min(away, spare + idle) > 0:
        assert read == 2, "there and back"
    elif spare + idle == 0:
        assert moved == 0
    else:
        assert change(moved, max(0, moved - spare), 1.0) <= read * moved


@given(st.lists(st.floats(0.01, 1e4), min_size=1, max_size=60))
def test_horizon_is_a_mean_of_late_within_bounds(aways: list[float]) -> None:
    tuning, horizon = DEFAULT.prices, DEFAULT.prices.horizon
    for away in aways:
        before, horizon = horizon, horizon_after(horizon, away, tuning)
        assert tuning.shortest <= horizon <= tuning.longest
        assert min(before, away, tuning.longest) <= horizon <= max(before, away, tuning.shortest)
    for _ in range(100):
        horizon = horizon_after(horizon, 5.0, tuning)
    assert horizon == pytest.approx(5.0, rel=0.01)


def test_layers_of_a_model_that_waits_come_back_in_exchange_for_those_of_an_idle_one() -> None:
    plan = fewest(EQUAL, 15, Fraction(2))
    device, manager, clock, (a, b) = a_manager(60, {"plan": plan}, {})
    clock.now = 10.0
    decision = a.step(manager)
    assert decision.plan == plan, "nothing has been waited for yet"
    assert 0 < decision.rent < math.inf
    a.waited = 0.9 * decision.rent
    manager.changed(a)
    assert a.step(manager).plan == plan
    a.waited = decision.rent
    manager.changed(a)
    assert len(a.step(manager).plan.streamed) < len(plan.streamed)
    assert b.gone
    assert device.free >= 0
    assert a.step(manager).rent > 0


def test_what_comes_back_to_free_pages_is_worth_half_of_what_it_is_in_exchange() -> None:
    """Streamed layers of 35 pages: 5 stay in the plan that fits."""
    free, taken = (
        a_manager(pages, {"plan": fewest(EQUAL, 15, Fraction(2))}, *others) for pages, others in ((60, ()), (60, ({},)))
    )
    rents = []
    for _, manager, clock, models in (free, taken):
        clock.now = 10.0
        rents.append(models[0].step(manager).rent)
    assert rents[0] == threshold(35, 0, 1e-3)
    assert rents[1] > rents[0]
