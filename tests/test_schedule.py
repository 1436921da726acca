"""What streaming costs: the simulator, the closed forms, and a schedule worked out by its definition."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ballonet.offload.policy.schedule import every, gaps, simulate

from .closed_forms import any_slot, closed_form, evenly, is_even, one_slot, two_slots

ONE = Fraction(1)
RATIOS = [Fraction(r) for r in ("1/3", "1", "3/2", "2", "3", "29/5", "8", "14", "20")]


def passes(layers: int, at: tuple[int, ...], ratio: Fraction, slots: int) -> Fraction:
    return any_slot([ONE] * layers, [ratio] * len(at), at, slots)


@pytest.mark.parametrize("layers", [1, 5, 12, 40])
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
) -> Fraction:
    """The same by its definition: every copy of `count` passes looks up what it waits for."""
    order = [(number, layer) for number in range(count) for layer in at]
    done: dict[int, Fraction] = {}
    ended: dict[tuple[int, int], Fraction] = {}

    def end(number: int, layer: int) -> Fraction:
        if number < 0:
            return Fraction(0)
        if (number, layer) not in ended:
            before = end(number, layer - 1) if layer else end(number - 1, len(compute) - 1)
            ready = copied(order.index((number, layer))) if layer in at else Fraction(0)
            ended[number, layer] = max(before, ready) + compute[layer]
        return ended[number, layer]

    def before(index: int) -> int:
        """The copy that had the slot before; below 0 where none had."""
        if isinstance(slots, int):
            return index - slots
        return next((i for i in reversed(range(index)) if slots[i % len(at)] == slots[index % len(at)]), -1)

    def copied(index: int) -> Fraction:
        if index not in done:
            free = end(*order[before(index)]) if before(index) >= 0 else Fraction(0)
            link = copied(index - 1) if index else Fraction(0)
            done[index] = max(free, link) + transfer[index % len(at)]
        return done[index]

    for number in range(count):
        end(number, len(compute) - 1)
    half, last = count // 2, len(compute) - 1
    return (ended[count - 1, last] - ended[half - 1, last]) / (count - half)


@settings(max_examples=50)
@given(st.data())
def test_any_schedule_is_the_one_worked_out_event_by_event(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 6))
    at = tuple(sorted(data.draw(st.sets(st.integers(0, layers - 1), min_size=1))))
    times = st.integers(0, 6).map(Fraction)
    compute = data.draw(st.lists(times, min_size=layers, max_size=layers))
    transfer = data.draw(st.lists(times, min_size=len(at), max_size=len(at)))
    slots = data.draw(st.integers(1, 4))
    schedule = any_slot(compute, transfer, at, slots)
    # Passes repeat after a few; 60 of them are measured, a multiple of every period that so few slots can have.
    assert schedule == worked_out(compute, transfer, at, slots, 120)
    assert schedule >= max(sum(compute), sum(transfer))
    assert any_slot(compute, transfer, at, slots + 1) <= schedule
    fixed = [j % slots for j in range(len(at))]
    given_each = simulate(compute, transfer, at, fixed)
    assert given_each == worked_out(compute, transfer, at, fixed, 120)
    assert given_each >= schedule
    if len(at) % slots == 0:
        assert given_each == schedule


def test_two_slots_have_a_closed_form_exactly_where_it_is_right() -> None:
    """Every placement with even gaps, at ratios between the gaps too."""
    for layers in range(1, 9):
        for count in range(1, layers + 1):
            near = Fraction(layers, count)
            between = {near * Fraction(percent, 100) for percent in (80, 90, 99, 100, 101, 110)}
            for at in filter(lambda at: is_even(layers, at), combinations(range(layers), count)):
                for ratio in sorted({*RATIOS, *between}):
                    measured, formula = passes(layers, at, ratio, 2), two_slots(layers, count, ratio)
                    assert closed_form(layers, at, 2, ratio) == (formula if measured == formula else None)
                    if at == evenly(layers, count) and (ratio.denominator == 1 or layers % count == 0):
                        assert measured == formula


def test_passes_that_would_repeat_after_a_million() -> None:
    """Where the link is nearly as fast as compute, what it is behind at the start it makes up over a million passes."""
    for ratio in ("7.999999", "8.000001"):
        assert passes(40, evenly(40, 5), Fraction(ratio), 2) == max(40, 5 * Fraction(ratio))


def test_uneven_placements_have_no_closed_form() -> None:
    assert gaps(40, (0, 1, 2, 31)) == (1, 1, 29, 9)
    assert closed_form(40, (0, 1, 2, 31), 2, Fraction(8)) is None
    assert gaps(5, (3,)) == (5,)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        *((partial(gaps, 9, at), "distinct") for at in ((1, 1), (2, 1), (-1, 2), (0, 9))),
        (partial(simulate, [ONE], [], (0,), [0]), "shorter"),
        (partial(simulate, [ONE], [ONE], (0,), [0, 1]), "longer"),
        *((partial(evenly, 3, streamed), "cannot be streamed") for streamed in (4, -1)),
        *((partial(every, 3, interval), "interval") for interval in (0, 4)),
    ],
)
def test_schedule_that_makes_no_sense_is_refused(what: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        what()
