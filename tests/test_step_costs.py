"""What steps of a batch take, as learned from those that ran: the parts are found again, and the fastest batch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.offload.policy.step_costs import Parts, Step, StepCosts, fitted
from ballonet.offload.policy.tuning import Serving

SIZES = [Step(new, new + held) for new in (1, 4, 12, 32, 200) for held in (0, 90, 800, 4000)]
QUADRATIC = Parts(0.02, 2e-3, 1e-5, 5e-7)  # sdpa on a CPU, as measured
times = st.floats(1e-4, 1e-1)


def learned(parts: Parts, assumed: tuple[float, float] = (0.0, 0.0)) -> StepCosts:
    costs = StepCosts(assumed=lambda: assumed)
    for step in SIZES * 2:
        costs.observe(step, parts.seconds(step))
    return costs


@given(times, times, times, times)
def test_the_parts_are_found_again(fixed: float, row: float, key: float, pair: float) -> None:
    parts = Parts(fixed, row / 100, key / 1000, pair / 100_000)
    fit = fitted([(step, parts.seconds(step)) for step in SIZES])
    assert fit is not None
    for step in SIZES:
        assert fit.seconds(step) == pytest.approx(parts.seconds(step), rel=1e-3)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 5000), times), min_size=4, max_size=12))
def test_no_part_is_ever_negative(seen: list[tuple[int, int, float]]) -> None:
    fit = fitted([(Step(new, new + held), seconds) for new, held, seconds in seen])
    assert fit is None or min(fit.fixed, fit.row, fit.key, fit.pair) >= 0


@pytest.mark.parametrize("length", [50, 150, 400])
def test_the_largest_batch_worth_it_is_the_fastest(length: int) -> None:
    costs, rates = learned(QUADRATIC), dict[int, float]()
    for count in range(1, 200):
        rates[count] = count / QUADRATIC.seconds(Step(count, count * (length + 1)))
    most, best = costs.largest(length), max(rates, key=rates.__getitem__)
    assert most is not None
    assert most == pytest.approx(math.sqrt(QUADRATIC.fixed / (QUADRATIC.pair * length)), abs=1)
    assert rates[most] >= 0.999 * rates[best]
    assert costs.slower(199, length) == (rates[best] > 1.1 * rates[199])
    assert not costs.slower(most, length)


def test_kernels_that_know_the_sequences_have_no_largest_batch() -> None:
    costs = learned(Parts(0.02, 2e-3, 1e-5, 0.0))
    assert costs.largest(1000) is None or costs.largest(1000) > 2000  # type: ignore[operator]
    assert not costs.slower(1000, 100)
    assert not costs.apart(Step(200, 200), Step(30, 6000))


@pytest.mark.parametrize(
    ("copied", "away", "best"), [(1e-3, 0.0, "host"), (0.0, 1e-3, "layers"), (1e-3, 1e-3, "fewer")]
)
def test_memory_comes_from_where_it_costs_least(copied: float, away: float, best: str) -> None:
    """Eight requests more need 40 pages: of layers, of which 60 are copied then, or of the host."""
    parts, costs = Parts(0.02, 2e-3, 1e-5, 0.0, copied, away), StepCosts()
    for step in SIZES * 2:
        for pages in (0, 10, 60):
            for seen in (replace(step, copied=pages), replace(step, away=pages), step):
                costs.observe(seen, parts.seconds(seen))
    ways = {"fewer": Step(8, 808), "layers": Step(16, 1616, copied=60), "host": Step(16, 1616, away=40)}
    assert all(costs.faster(ways[best], other) for name, other in ways.items() if name != best)


def test_copies_that_were_never_seen_cost_nothing() -> None:
    costs = learned(QUADRATIC)
    assert not costs.faster(Step(8, 808), Step(8, 808, copied=60))
    assert StepCosts().faster(Step(9, 9), Step(1, 1)) is False, "nobody knows"


def test_copies_that_were_never_seen_cost_what_is_assumed_and_then_what_they_took() -> None:
    costs = learned(QUADRATIC, assumed=(1e-3, 2e-3))
    keep, lend, host = Step(8, 808), Step(9, 909, copied=60), Step(9, 909, away=30)
    assert costs.faster(keep, lend)
    assert costs.faster(keep, host)
    for step in SIZES * 2:  # they hide behind the computation
        costs.observe(replace(step, copied=60), QUADRATIC.seconds(step))
    assert not costs.faster(keep, lend)
    assert costs.faster(keep, host)
    for step in SIZES * 2:
        costs.observe(replace(step, away=30), QUADRATIC.seconds(step))
    assert costs.faster(keep, host), "what kernels read over the link takes as long as that, whatever was measured"


def test_layers_that_stream_are_a_part_of_every_step() -> None:
    parts, costs = Parts(0.02, 2e-3, 1e-5, 0.0, 1e-3), StepCosts()
    for pages in (0, 60):
        for step in SIZES:
            costs.observe(replace(step, copied=pages), parts.seconds(replace(step, copied=pages)))
    assert costs.parts is not None
    assert costs.parts.fixed == pytest.approx(0.02 + 60 * 1e-3, rel=1e-3)
    assert costs.error == pytest.approx(0, abs=1e-3)


def test_prompts_are_apart_where_their_pairs_cost_more_than_a_step() -> None:
    costs = learned(QUADRATIC)
    assert costs.apart(Step(200, 200), Step(30, 6000))
    assert not costs.apart(Step(20, 20), Step(2, 100))


def test_costs_are_unknown_before_a_few_steps_and_old_sizes_are_remembered() -> None:
    costs = StepCosts(Serving(refit=4))
    assert costs.largest(100) is None
    assert not costs.apart(Step(100, 100), Step(100, 10_000))
    for step in SIZES:
        costs.observe(step, QUADRATIC.seconds(step))
    for _ in range(1000):
        costs.observe(Step(12, 812), QUADRATIC.seconds(Step(12, 812)))
    assert costs.largest(150) == pytest.approx(math.sqrt(0.02 / (5e-7 * 150)), abs=1)


def test_a_clock_that_stands_teaches_nothing() -> None:
    costs = StepCosts(Serving(refit=1))
    for step in SIZES:
        costs.observe(step, 0.0)
    assert costs.parts is None
