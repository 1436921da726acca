"""What streaming costs: the simulator, the closed forms, and a schedule worked out by its definition."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.offload.policy.schedule import (
    Pass,
    closed_form,
    evenly,
    every,
    gaps,
    is_even,
    one_slot,
    simulate,
    two_slots,
)

ONE = Fraction(1)
RATIOS = [Fraction(r) for r in ("1/3", "1", "3/2", "2", "3", "29/5", "8", "14", "20")]


def passes(layers: int, at: tuple[int, ...], ratio: Fraction, slots: int) -> Fraction:
    return simulate([ONE] * layers, [ratio] * len(at), at, slots).time


@pytest.mark.parametrize("layers", [1, 2, 5, 12, 40])
def test_the_simulator_agrees_with_the_closed_forms(layers: int) -> None:
    for streamed in range(layers + 1):
        at = evenly(layers, streamed)
        for ratio in RATIOS:
            for slots in (1, 2, 3):
                assert passes(layers, at, ratio, slots) == closed_form(layers, at, slots, ratio), (at, ratio, slots)


@given(st.data())
def test_one_slot_has_a_closed_form_for_any_placement(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 20))
    at = tuple(sorted(data.draw(st.sets(st.integers(0, layers - 1)))))
    ratio = data.draw(st.sampled_from(RATIOS))
    assert passes(layers, at, ratio, 1) == one_slot(layers, at, ratio)


def worked_out(
    compute: list[Fraction], transfer: list[Fraction], at: tuple[int, ...], slots: int | list[int], count: int
) -> Pass:
    """The same by its definition: every copy of `count` passes looks up what it waits for."""
    order = [(number, layer) for number in range(count) for layer in at]
    begun: dict[tuple[int, int], Fraction] = {}
    done: dict[tuple[int, int], Fraction] = {}
    ended: dict[tuple[int, int], Fraction] = {}

    def end(number: int, layer: int) -> Fraction:
        if number < 0:
            return Fraction(0)
        if (number, layer) not in ended:
            before = end(number, layer - 1) if layer else end(number - 1, len(compute) - 1)
            ready = copied(order.index((number, layer))) if layer in at else Fraction(0)
            ended[number, layer] = max(before, ready) + compute[layer]
        return ended[number, layer]

    def copied(index: int) -> Fraction:
        key = order[index]
        if key not in done:
            if isinstance(slots, int):
                before = index - slots
            else:
                same = [i for i in range(index) if slots[i % len(at)] == slots[index % len(at)]]
                before = same[-1] if same else -1
            free = end(*order[before]) if before >= 0 else Fraction(0)
            link = copied(index - 1) if index else Fraction(0)
            begun[key] = max(free, link)
            done[key] = begun[key] + transfer[at.index(key[1])]
        return done[key]

    last = len(compute) - 1
    half = count // 2
    for number in range(count):
        end(number, last)
    rate = (ended[count - 1, last] - ended[half - 1, last]) / (count - half)
    return Pass(rate, sum(compute, Fraction(0)), sum(transfer, Fraction(0)))


@given(st.data())
def test_any_schedule_is_the_one_worked_out_event_by_event(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 6))
    at = tuple(sorted(data.draw(st.sets(st.integers(0, layers - 1), min_size=1))))
    times = st.integers(0, 6).map(Fraction)
    compute = data.draw(st.lists(times, min_size=layers, max_size=layers))
    transfer = data.draw(st.lists(times, min_size=len(at), max_size=len(at)))
    slots = data.draw(st.integers(1, 4))
    found = simulate(compute, transfer, at, slots)
    # Passes repeat after a few; 60 of them are measured, a multiple of every period that so few slots can have.
    assert found == worked_out(compute, transfer, at, slots, 120)
    assert found.time >= max(found.compute, found.link)
    assert found.stall == found.time - found.compute
    assert simulate(compute, transfer, at, slots + 1).time <= found.time
    fixed = [j % slots for j in range(len(at))]
    given_each = simulate(compute, transfer, at, fixed)
    assert given_each == worked_out(compute, transfer, at, fixed, 120)
    assert given_each.time >= found.time
    if len(at) % slots == 0:
        assert given_each == found


def test_two_slots_have_a_closed_form_exactly_where_it_is_right() -> None:
    """Of every placement with even gaps, at ratios between the gaps too."""
    for layers in range(1, 9):
        for count in range(1, layers + 1):
            near = Fraction(layers, count)
            between = {near * Fraction(percent, 100) for percent in (80, 90, 99, 100, 101, 110)}
            for at in filter(lambda at: is_even(layers, at), combinations(range(layers), count)):
                for ratio in sorted({*RATIOS, *between}):
                    found, formula = passes(layers, at, ratio, 2), two_slots(layers, count, ratio)
                    assert closed_form(layers, at, 2, ratio) == (formula if found == formula else None)
                    if at == evenly(layers, count) and (ratio.denominator == 1 or layers % count == 0):
                        assert found == formula


@pytest.mark.parametrize("ratio", ["7.999999", "8", "8.000001"])
def test_passes_that_would_repeat_after_a_million(ratio: str) -> None:
    """Where the link is nearly as fast as compute, what it is behind at the start it makes up over a million passes."""
    assert passes(40, evenly(40, 5), Fraction(ratio), 2) == max(40, 5 * Fraction(ratio))


def test_uneven_placements_have_no_closed_form() -> None:
    assert gaps(40, (0, 1, 2, 31)) == (1, 1, 29, 9)
    assert closed_form(40, (0, 1, 2, 31), 2, Fraction(8)) is None
    assert gaps(5, (3,)) == (5,)


@pytest.mark.parametrize("at", [(1, 1), (2, 1), (-1, 2), (0, 9)])
def test_placements_that_make_no_sense(at: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="distinct"):
        simulate([ONE] * 9, [ONE, ONE], at, 1)


def test_arguments_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="need a slot"):
        simulate([ONE], [ONE], (0,), 0)
    with pytest.raises(ValueError, match="transfer times"):
        simulate([ONE], [], (0,), 1)
    with pytest.raises(ValueError, match="slots given"):
        simulate([ONE], [ONE], (0,), [0, 1])
    for layers, streamed in ((3, 4), (3, -1)):
        with pytest.raises(ValueError, match="cannot be streamed"):
            evenly(layers, streamed)
    for interval in (0, 4):
        with pytest.raises(ValueError, match="interval"):
            every(3, interval)
