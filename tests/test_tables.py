"""What Select-N and Oneiros claim, row by row, as far as numbers alone can show it; errata of the papers included.

Coordinator, who gives, remapping and reversion are in test_coordinator.py and test_giving.py, the record's file in
test_record.py. test_rows.py has the whole list.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.offload.policy.coordinator import LinkClient, Shares, share
from ballonet.offload.policy.plan import Costs, at_interval, fewest, meeting, spread, streaming
from ballonet.offload.policy.schedule import every, gaps

from .closed_forms import any_slot, closed_form, evenly, is_even, one_slot, two_slots

ONE = Fraction(1)
WHOLE = [Fraction(r) for r in (1, 2, 3, 5, 8, 13, 20)]


def time(layers: int, at: tuple[int, ...], ratio: Fraction, slots: int) -> Fraction:
    return any_slot([ONE] * layers, [ratio] * len(at), at, slots)


# -- Select-N


@pytest.mark.parametrize("layers", [1, 7, 12, 32])
def test_interval_streams_the_last_of_every_i_layers(layers: int) -> None:
    """Select-N, interval i: the set is {k : (k+1) mod i = 0}, it frees its layers less the slots, and where its gaps
    are even the simulator agrees with the closed form."""
    for interval in range(1, layers + 1):
        at = every(layers, interval)
        assert at == tuple(k for k in range(layers) if (k + 1) % interval == 0)
        assert len(at) == layers // interval
        plan = at_interval([5] * layers, interval)
        assert plan.device_pages == 5 * (layers - len(at) + min(2, len(at)))
        for ratio in WHOLE:
            formula = closed_form(layers, at, 2, ratio)
            assert (formula is None) == (not is_even(layers, at))
            if formula is not None:
                assert time(layers, at, ratio, 2) == formula
            if layers % interval == 0:
                assert formula == max(layers, len(at) * ratio), "the gaps are the interval"


def test_prefill_may_stream_more_than_decode() -> None:
    """Select-N, phases: i_prefill ≤ i_decode at the same quotient of SLO and time."""
    for layers in (1, 8, 31):
        for seconds in (0.01, 0.05):
            for longer in (1, 2, 10, 100):
                for quotient in (1.0, 1.05, 1.5, 4.0):
                    decode = meeting(Costs((10,) * layers, seconds, 0.0005), seconds * quotient)
                    prefill = meeting(Costs((10,) * layers, seconds * longer, 0.0005), seconds * longer * quotient)
                    assert decode is not None
                    assert prefill is not None
                    assert prefill <= decode


@given(
    st.lists(st.integers(0, 9), max_size=9).map(tuple),
    st.floats(1e-6, 1e6),
    st.floats(1e-9, 1e3),
    st.floats(0, 1e9) | st.just(math.inf),
    st.integers(-1, 99),
)
def test_no_interval_is_an_answer_and_not_an_exception(
    pages: tuple[int, ...], seconds: float, page_seconds: float, slo: float, available: int
) -> None:
    """Select-N, admission: an empty set is a refusal that says what the nearest SLO is."""
    costs = Costs(pages, seconds, page_seconds)
    outcome = share([LinkClient("a", costs, 1000, slo, available)], 1000 / page_seconds)
    if isinstance(outcome, Shares):
        assert costs.time(outcome.options["a"].interval) <= slo
    else:
        assert outcome.slo is None or outcome.slo > 0


# -- Oneiros


@pytest.mark.parametrize("layers", [*range(1, 20), 32, 40, 61])
def test_layers_are_spread_around_the_circle(layers: int) -> None:
    """Oneiros, which layers: ⌊j·n/m⌋; the smallest gap is ⌊n/m⌋, the largest ⌈n/m⌉, that across the end included."""
    for count in range(1, layers + 1):
        at = evenly(layers, count)
        assert at == tuple(j * layers // count for j in range(count)) == spread([3] * layers, count)
        between = gaps(layers, at)
        assert sum(between) == layers
        assert (min(between), max(between)) == (layers // count, -(-layers // count))


@pytest.mark.parametrize("slots", [1, 2])
def test_no_placement_is_faster_than_an_even_one(slots: int) -> None:
    """Oneiros, which layers: against brute force."""
    for layers in range(1, 9):
        for count in range(1, layers + 1):
            for ratio in WHOLE[:5]:
                best = min(time(layers, at, ratio, slots) for at in combinations(range(layers), count))
                assert time(layers, evenly(layers, count), ratio, slots) == best


def test_one_slot_or_two() -> None:
    """Oneiros, slots: by the times of one slot with as many layers as are freed and one more, and of two with two more.
    Slots for good cost no more than another layer where two do not divide m."""
    layers = 40
    for ratio in WHOLE:
        for alpha in range(1, layers - 1):
            one = one_slot(layers, evenly(layers, alpha + 1), ratio)
            two = two_slots(layers, alpha + 2, ratio)
            good = streaming([10] * layers, evenly(layers, alpha + 2), 2).steady(ratio)
            assert two <= good <= two + 1
            chosen = fewest([10] * layers, 10 * (layers - alpha), ratio)
            assert chosen is not None
            assert chosen.steady(ratio) == min(one, good)
            assert len(chosen.slot_pages) == (1 if one <= good else 2)
            assert len(chosen.streamed) == alpha + len(chosen.slot_pages)
