"""One slot or two by what was measured: against brute force, and as the manager asks for it.

See offload/manager/decision.py, Note [One slot or two]."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.offload.manager.decision import fastest
from ballonet.offload.manager.memory_manager import MemoryManager
from ballonet.offload.policy.plan import Costs, Plan, fewest, spread, streaming
from ballonet.offload.policy.tuning import DEFAULT
from ballonet.offload.record.record import Phase

from .fake_manager import EQUAL, LINK, PAGE, STAYING, FakeDevice, FakeModel, a_manager
from .tuned import Clock

LOOK, MARGIN = DEFAULT.weights.look, DEFAULT.weights.margin

RATIOS = [Fraction(r) for r in ("1/2", "1", "4/3", "2", "3", "4", "6", "8", "20")]


def plans(pages: Sequence[int]) -> Iterator[Plan]:
    for count in range(len(pages) + 1):
        for slots in (1, 2):
            yield streaming(pages, spread(pages, count), slots)


@cache
def layers(plan: Plan, ratio: Fraction) -> Fraction:
    """Time of a pass, which test_plan.py holds against the ring's."""
    return plan.expected(ratio)


def costs(pages: Sequence[int], ratio: Fraction, seconds: float = 1.0) -> Costs:
    return Costs(tuple(pages), seconds, float(ratio * Fraction(seconds) / max(1, sum(pages))))


@pytest.mark.parametrize("ratio", RATIOS)
def test_of_all_plans_the_fastest_if_it_saves_enough(ratio: Fraction) -> None:
    """Over every n, m and β: another plan where brute force finds one that saves the margin and a layer's time, and
    then one that is as fast but for a layer's time, as more layers are not tried where two slots do not divide them; no
    other plan where none saves the margin; never one with more pages."""
    for n in range(1, 11):
        every = list(plans([3] * n))
        for standing in every:
            plan = fastest(standing, [(1, costs([3] * n, ratio))], MARGIN)
            assert plan.device_pages <= standing.device_pages
            best = min(layers(other, ratio) for other in every if other.device_pages <= standing.device_pages)
            if best + 1 < layers(standing, ratio) * Fraction(95, 100):
                assert plan != standing
            if plan != standing:
                assert layers(plan, ratio) < layers(standing, ratio) * Fraction(95, 100)
                assert layers(plan, ratio) <= best + 1
            assert fastest(plan, [(1, costs([3] * n, ratio))], MARGIN) == plan, "and there it stays"


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any),
    st.data(),
    st.lists(st.tuples(st.integers(1, 64), st.sampled_from(RATIOS)), max_size=3),
)
def test_layers_of_any_size_and_iterations_of_several_kinds(
    pages: list[int], data: st.DataObject, kinds: list[tuple[int, Fraction]]
) -> None:
    standing = data.draw(st.sampled_from(list(plans(pages))))
    done = [(count, costs(pages, ratio, seconds=1 / ratio)) for count, ratio in kinds]
    chosen = fastest(standing, done, MARGIN)
    if chosen == standing:
        return
    assert chosen.device_pages <= standing.device_pages
    before, after = (sum(count * kind.expected(plan) for count, kind in done) for plan in (standing, chosen))
    assert after < (1 - MARGIN) * before
    assert fastest(chosen, done, MARGIN) == chosen


def test_phase_that_takes_the_time_decides() -> None:
    """At r = 2 two slots are faster, at r = 8 one is."""
    one, two = (fewest(EQUAL, 30, Fraction(ratio)) for ratio in (8, 2))
    assert one is not None
    assert two is not None
    assert (len(one.slot_pages), len(two.slot_pages)) == (1, 2)
    prefill, decode = costs(EQUAL, Fraction(2), 1.0), costs(EQUAL, Fraction(8), 0.1)
    assert fastest(one, [(1, decode), (10, prefill)], MARGIN) == two
    assert fastest(two, [(1, decode), (10, prefill)], MARGIN) == two
    assert fastest(two, [(63, decode), (1, prefill)], MARGIN) == one
    assert fastest(one, [(63, decode), (1, prefill)], MARGIN) == one
    assert fastest(two, [], MARGIN) == two, "nothing was measured"


# -- as the manager asks


ONE, TWO = (streaming(EQUAL, spread(EQUAL, 4 + slots), slots) for slots in (1, 2))  # both free four layers of eight


def model(ratio: float, plan: Plan = ONE, **options: Any) -> tuple[FakeDevice, MemoryManager, Clock, FakeModel]:
    """The model's layers take so many times as long to copy as to compute, in either phase."""
    seconds = sum(EQUAL) * PAGE / LINK / ratio
    device, manager, clock, (a,) = a_manager(
        100, {"plan": plan, "decode": seconds, "prefill": seconds, **options}, tuning=STAYING
    )
    return device, manager, clock, a


def changes(a: FakeModel, manager: MemoryManager, steps: int, phase: Phase = "decode") -> list[int]:
    """The steps before which it was arranged anew."""
    changed = []
    for step in range(steps):
        before = a.plan
        a.step(manager, phase)
        changed += [step] * (a.plan != before)
    return changed


@pytest.mark.parametrize(
    ("ratio", "plan", "then"), [(2.0, ONE, TWO), (8.0, TWO, ONE), (2.0, TWO, TWO), (4.0, ONE, ONE)]
)
def test_once_measured_it_takes_the_faster_one_and_keeps_it(ratio: float, plan: Plan, then: Plan) -> None:
    _, manager, _, a = model(ratio, plan)
    assert changes(a, manager, 2000) == ([LOOK - 1] if then != plan else [])
    assert a.plan == then
    assert a.decisions[-1].why == "memory demands it"
    if then != plan:
        assert a.decisions[LOOK - 1].why == "by what was measured this is faster in no more pages"


def test_plan_stays_where_nothing_was_measured() -> None:
    for unknown in ({"decode": None, "prefill": None}, {"bandwidth": None}):
        bandwidth = unknown.pop("bandwidth", LINK)
        _, manager, _, (a,) = a_manager(
            100, {"plan": ONE, "decode": 0.02, **unknown}, bandwidth=bandwidth, tuning=STAYING
        )
        assert changes(a, manager, 200) == []
        assert "assumed" in a.decisions[-1].why
    manager.link.bandwidth = LINK
    assert changes(a, manager, 600) == [LOOK + 2 * LOOK + 4 * LOOK - 200 - 1], "the third look"


def test_typical_seconds_decide_and_not_the_slowest() -> None:
    """Not what an SLO would be judged by, four times as long: with that two slots would be faster."""
    _, manager, _, a = model(2.0, TWO)
    a.typical = lambda point: sum(EQUAL) * PAGE / LINK / 8  # type: ignore[method-assign]
    assert changes(a, manager, 200) == [LOOK - 1]
    assert a.plan == ONE


def test_faster_plan_needs_no_free_page() -> None:
    """The cache has all but a few, and the clock goes on."""
    device, manager, clock, a = model(2.0, ONE)
    changes(a, manager, LOOK - 1)
    device.kv = device.free - 5
    for _ in range(40):
        clock.now += 0.5
        a.step(manager)
        assert a.plan.device_pages == 20, "what it came with"
    assert a.plan == TWO


def test_layer_taken_meanwhile_is_not_taken_back() -> None:
    """Found faster, but not arranged yet, when pages run out: then it needs too many."""
    device, manager, _, a = model(2.0, streaming(EQUAL, spread(EQUAL, 3), 1))
    arrange, a.arrange = a.arrange, lambda manager, plan: None  # type: ignore[method-assign]
    for _ in range(LOOK):
        a.step(manager)
    assert a.decisions[-1].why == "by what was measured this is faster in no more pages"
    device.kv += device.free
    assert device.grow(1), "a layer was taken"
    a.arrange = arrange  # type: ignore[method-assign]
    a.step(manager)
    assert a.plan.device_pages <= 25


def test_prompts_and_answers_in_turns_do_not_make_it_flap() -> None:
    """One slot is best for decoding, two are for prefill: 64 of each, and again. It changes ever more seldom."""
    _, manager, _, a = model(2.0, ONE)
    a.times["decode"] = sum(EQUAL) * PAGE / LINK / 8
    steps = []
    for turn in range(160):
        steps += [turn * LOOK + step for step in changes(a, manager, LOOK, "decode" if turn % 2 else "prefill")]
    assert steps[0] == LOOK - 1
    assert len(steps) <= 2
    assert all(after - before >= 2 * LOOK for before, after in pairwise(steps))


def test_faster_plan_is_kept_after_an_idle_while() -> None:
    """Idle for a while and asked to decode again it keeps the plan, though more layers stream than it came with."""
    _, manager, clock, a = model(2.0, ONE)
    changes(a, manager, LOOK)
    assert a.plan == TWO
    clock.now += 5
    assert changes(a, manager, 3) == []
    assert a.decisions[-1].why == "memory demands it"


@pytest.mark.parametrize("options", [{"tpot": 1.0}, {"ttft": 1.0}, {"interval": 2}, {"interval": None}])
def test_plan_that_was_asked_for_or_given_by_an_slo_stays(options: dict[str, Any]) -> None:
    """Only a model that is free to choose does."""
    _, manager, _, a = model(2.0, ONE, **options)
    assert not any("faster" in decision.why for decision in (a.step(manager) for _ in range(200)))


def test_plan_that_cannot_be_arranged_is_tried_at_looks_only() -> None:
    """A plan that could not be arranged is offered again at the next look, not at every iteration."""
    _, manager, _, a = model(2.0, ONE)
    arranged = []

    def cannot(manager: MemoryManager, plan: Plan) -> None:
        arranged.append(len(a.decisions))
        with suppress(MemoryError), manager.changing(a):
            raise MemoryError

    a.arrange = cannot  # type: ignore[method-assign]
    for _ in range(LOOK + 2 * LOOK + 4 * LOOK):
        a.step(manager)
    assert arranged == [LOOK - 1, 3 * LOOK - 1, 7 * LOOK - 1]
    assert a.plan == ONE
