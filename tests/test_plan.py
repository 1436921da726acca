"""Which layers stream: the plans against brute force."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.offload.policy.plan import Costs, Plan, at_interval, fewest, meeting, smallest, spread, streaming

from .closed_forms import evenly, one_slot

RATIOS = [Fraction(r) for r in ("1/2", "1", "2", "4", "8", "80")]
sizes = st.lists(st.integers(0, 9), min_size=1, max_size=8)


def test_unequal_layers_are_spread_by_size() -> None:
    assert spread([1, 1, 1, 1, 4, 4], 3) == (0, 4, 5)
    assert spread([10, 1, 1], 3) == (0,), "the first layer is more than two thirds"
    assert spread([0, 5, 0, 5], 2) == (1, 3)
    assert spread([0, 0], 2) == ()


def test_plan_counts_its_pages_and_slots() -> None:
    plan = streaming([4, 6, 4, 5], (1, 2, 3), 2)
    assert plan.slots == (0, 1, 0)
    assert plan.slot_pages == (6, 4)
    assert plan.device_pages == 4 + 6 + 4
    assert plan.host_pages == 15
    assert streaming([4, 4], (), 2).device_pages == 8
    with pytest.raises(ValueError, match="need a slot"):
        streaming([4, 4], (1,), 0)


def passes(plan: Plan, ratio: Fraction, count: int) -> list[Fraction]:
    """When each of so many passes is over, as the ring does it (offload/residency/ring.py, Note [A pass]): what a slot
    holds is not copied again."""
    mean = Fraction(sum(plan.pages), len(plan.pages))
    turns = {slot: [k for k, s in zip(plan.streamed, plan.slots, strict=True) if s == slot] for slot in plan.slots}
    holds: dict[int, int] = {}
    there: dict[int, Fraction] = {}
    now = link = Fraction(0)
    ends = []

    def load(layer: int, slot: int) -> None:
        nonlocal link
        if holds.get(slot) != layer:
            link = max(link, now) + ratio * plan.pages[layer] / mean
            holds[slot], there[layer] = layer, link

    for _ in range(count):
        for slot, layers in turns.items():
            load(layers[0], slot)
        for layer, pages in enumerate(plan.pages):
            now = max(now, there.get(layer, now)) + pages / mean
            for slot, layers in turns.items():
                if layer in layers:
                    load(layers[(layers.index(layer) + 1) % len(layers)], slot)
        ends.append(now)
    return ends


@given(sizes.filter(any), st.integers(0, 8), st.integers(1, 4), st.sampled_from(RATIOS))
def test_expected_seconds_are_those_of_the_ring(pages: list[int], count: int, slots: int, ratio: Fraction) -> None:
    """Report, predicted: what has a slot to itself is copied once, however often passes are made."""
    plan = streaming(pages, spread(pages, min(count, len(pages))), slots)
    ends = passes(plan, ratio, 200)
    assert plan.expected(ratio) == pytest.approx((ends[199] - ends[139]) / 60, rel=1e-3)
    if len(plan.streamed) % slots == 0 or len({*filter(None, pages)}) == 1:
        assert plan.expected(ratio) <= plan.steady(ratio)
    assert plan.copied_pages == sum(pages[layer] for layer in plan.copied)
    if plan.copied == plan.streamed and len(plan.streamed) % slots == 0:
        assert plan.expected(ratio) == plan.steady(ratio)


def test_a_layer_with_a_slot_to_itself_is_not_copied() -> None:
    three = streaming([1] * 12, evenly(12, 3), 2)
    assert (three.slots, three.copied, three.copied_pages) == ((0, 1, 0), (0, 8), 2)
    assert three.steady(Fraction(8)) >= 24
    assert three.expected(Fraction(8)) == one_slot(12, (0, 8), Fraction(8)) == 9 + 9
    assert Costs(three.pages, 0.012, 0.008).expected(three) == pytest.approx(0.018)
    assert Costs(three.pages, 0.012, 0.008).of(three) >= 0.024, "an SLO counts all three"
    two = streaming([1] * 12, evenly(12, 2), 2)
    assert two.copied == ()
    assert Costs(two.pages, 0.012, 0.1).expected(two) == 0.012


def test_intervals() -> None:
    plan = at_interval([5] * 8, 3)
    assert (plan.streamed, plan.slots, plan.device_pages) == ((2, 5), (0, 1), 40)
    assert at_interval([5] * 8, 8).slots == (0,)
    assert at_interval([5] * 8, 1).device_pages == 10
    for interval in (0, 9):
        with pytest.raises(ValueError, match="interval"):
            at_interval([5] * 8, interval)


@given(sizes, st.integers(0, 60), st.sampled_from(RATIOS))
def test_a_plan_fits_and_no_plan_of_its_kind_streams_less(pages: list[int], available: int, ratio: Fraction) -> None:
    plan = fewest(pages, available, ratio)
    candidates = [streaming(pages, spread(pages, count), slots) for count in range(len(pages) + 1) for slots in (1, 2)]
    fitting = [candidate for candidate in candidates if candidate.device_pages <= available]
    if plan is None:
        assert not fitting
        assert available < smallest(pages)
        return
    assert available >= smallest(pages)
    assert plan in fitting
    same_slots = [other for other in fitting if len(other.slot_pages) == len(plan.slot_pages)]
    assert len(plan.streamed) == min(len(slot.streamed) for slot in same_slots)
    if sum(pages) <= available:
        assert plan.streamed == ()


@given(sizes)
def test_the_smallest_is_no_larger_than_any_placement_of_one_slot_allows(pages: list[int]) -> None:
    best = min(
        streaming(pages, at, 1).device_pages for m in range(len(pages) + 1) for at in combinations(range(len(pages)), m)
    )
    assert best <= smallest(pages) <= sum(pages)
    if len(set(pages)) == 1:
        assert smallest(pages) == best


@given(st.sampled_from([4, 6, 8, 12]), st.integers(1, 12), st.sampled_from([0, 1, 3, 10]), st.sampled_from(RATIOS))
def test_host_takes_its_time_for_each_layer_that_streams(
    layers: int, interval: int, entering: int, ratio: Fraction
) -> None:
    """T = max(n·T_c + m·h, m·T_T), equal layers a millisecond each, and the smallest interval for an SLO by that."""
    host = entering / 10_000
    costs = Costs((3,) * layers, layers / 1000, float(ratio) / 3000, host)

    def time(streamed: int) -> float:
        return max(layers / 1000 + streamed * host, streamed * float(ratio) / 1000)

    even = (layers // i for i in range(2, layers + 1) if layers % (2 * i) == 0)  # so that two slots divide them
    for count in even:
        assert costs.time(layers // count) == pytest.approx(time(count), rel=1e-5)
        assert costs.expected(costs.plan(layers // count)) <= time(count) * (1 + 1e-5)
    assert costs.time(costs.none) == layers / 1000
    slo = costs.time(min(interval, costs.none))
    assert meeting(costs, slo) == min(i for i in range(1, costs.none + 1) if costs.time(i) <= slo)
