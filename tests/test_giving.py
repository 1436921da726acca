"""Which layers a model gives, at which price, and how those that are left are arranged (Oneiros §5)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ballonet.offload.policy.giving import Model, candidates, layers_given, nested, standing
from ballonet.offload.policy.plan import Costs, Plan, fewest, smallest
from ballonet.offload.policy.price import until_used
from ballonet.offload.policy.reclaim_order import PageSource, ordered
from ballonet.offload.policy.schedule import gaps

from .oneiros import cap

EQUAL = (5,) * 8
HORIZON = 10.0


def model(name: str, pages: tuple[int, ...] = EQUAL, seconds: float = 0.02, **more: object) -> Model:
    """Eight layers of five pages, a millisecond to copy each: four layers stream behind an iteration."""
    return Model(name, Plan(pages), Costs(pages, seconds, 0.001), **more)  # type: ignore[arg-type]


@st.composite
def models(draw: st.DrawFn) -> Model:
    pages = draw(st.one_of(st.just(EQUAL), st.lists(st.integers(0, 6), min_size=1, max_size=8).map(tuple)))
    least = draw(st.integers(0, 30))
    made = model("a", pages, draw(st.sampled_from([0.001, 0.005, 0.02, 0.1])), active=draw(st.booleans()), least=least)
    plan = fewest(pages, sum(pages) - draw(st.integers(0, 20)), made.costs.ratio)
    return made if plan is None else replace(made, plan=plan)


# -- which layers


def test_layers_are_taken_around_the_circle() -> None:
    """Oneiros, which layers: those taken so far are spread at any moment, the gap across the end included."""
    assert nested((5,) * 8) == (0, 4, 2, 6, 1, 3, 5, 7), "the order of van der Corput"
    assert nested((5,) * 8, (3,)) == (7, 1, 5, 0, 2, 4, 6)
    assert nested((1, 1, 0, 8, 1, 1)) == (0, 3, 1, 4, 5), "far by what there is to compute between"
    for layers in (7, 12, 32, 40):
        order = nested((5,) * layers)
        assert sorted(order) == list(range(layers))
        for count in range(1, layers):
            assert min(gaps(layers, sorted(order[:count]))) >= max(1, layers // count // 2)


@settings(max_examples=60)
@given(models())
def test_layers_that_are_left_have_a_plan_whatever_part_of_the_list_is_taken(giver: Model) -> None:
    """Oneiros, how many: never a whole model, and what an SLO needs stays."""
    order = list(layers_given(giver, giver.plan.streamed))
    assert not {*order} & {*giver.plan.streamed}
    assert len({*order}) == len(order)
    left = giver.plan.device_pages
    for count, layer in enumerate(order, 1):
        left -= giver.plan.pages[layer]
        assert left >= max(giver.least, smallest(giver.plan.pages))
        rest = standing(giver.plan, order[:count], giver.costs, giver.slots)
        assert rest.device_pages <= left
    if giver.plan.pages == EQUAL and len({*giver.plan.streamed, *order}) < len(EQUAL):
        assert left - max(giver.least, smallest(EQUAL)) < 5, "as much as can be arranged"


# -- the price


@given(st.integers(4, 12), st.integers(1, 12))
def test_a_layer_costs_more_than_its_way_there_and_back_once_copies_do_not_hide(layers: int, ratio: int) -> None:
    """Oneiros, how many: T_T·N ≤ T_compute is where the price leaves that of the copy (§5.3). Slots that do not divide
    the layers make the link wait for one."""
    costs = Costs((1,) * layers, layers / ratio, 1.0)
    offered = candidates(Model("a", Plan(costs.pages), costs, active=True), 1, (), 3.0, 0.0)
    most = cap(costs)
    for gone, candidate in enumerate(offered, 1):
        if gone % 2 == 0 and gone + 2 <= most:
            assert candidate.price.rate == 0
            assert candidate.source is PageSource.HIDDEN_WEIGHTS
        if gone + 1 > most:
            assert candidate.price.rate > 0
            assert candidate.source is PageSource.STALLING_WEIGHTS
        assert candidate.price.once == 1.0


def reloads(rounds: int, count: int, usual: float | None) -> int:
    """Layers that are copied back because a model runs whose layers were taken: models run in turns, each for a second,
    and the KV of the one that runs takes a layer of one that waits. `usual`: seconds that models are known to wait."""
    gone: dict[int, set[int]] = {number: set() for number in range(count)}
    used = {number: -float(count - number) for number in range(count)}
    copied = 0
    for turn in range(rounds):
        now, runs = float(turn), turn % count
        copied += len(gone[runs])
        gone[runs].clear()
        if not any(gone.values()):
            waiting = [
                candidates(
                    model(str(number), seconds=0.001, used=used[number]),
                    number,
                    (),
                    1 / until_used(now - used[number], usual, 0.5, 1.0),
                    0.0,
                )
                for number in range(count)
                if number != runs
            ]
            first = ordered(waiting, HORIZON)[0]
            gone[first.client].add(first.index)
        used[runs] = now + 0.9
    return copied


def test_models_in_a_round_give_most_recently_used_first_once_their_turns_are_known() -> None:
    """Oneiros, which model: of four models in turns the one just used is needed last, one reload in three turns against
    one in each."""
    known, unknown = reloads(120, 4, 3.1), reloads(120, 4, None)
    assert unknown >= 110, "whoever waits longest gives, and is next"
    assert known <= unknown / 2.9
    assert reloads(120, 2, 1.1) == reloads(120, 2, None), "with two there is no choice"


def test_slots_are_a_value() -> None:
    for count in (1, 2):
        giver = model("a", slots=(count,))
        taken = list(layers_given(giver, ()))[:2]
        assert len(standing(giver.plan, taken, giver.costs, giver.slots).slot_pages) == count


# -- the oracle


def test_a_cap_is_what_hides_behind_an_iteration() -> None:
    assert cap(Costs(EQUAL, 0.02, 0.001)) == 4
    assert cap(Costs(EQUAL, 0.0199, 0.001)) == 3
    assert cap(Costs(EQUAL, 9.0, 0.001)) == 7, "never a whole model"
    assert cap(Costs((0, 5, 0), 9.0, 0.001)) == 0
    assert cap(Costs((0,), 9.0, 0.001)) == 0


@given(st.integers(2, 12), st.integers(1, 40), st.integers(0, 8))
def test_cap_counts_what_the_host_takes_for_the_layers_that_stream(layers: int, seconds: int, entering: int) -> None:
    """The largest m, below all, with m·T_T ≤ n·T_c + m·h; a layer is copied in 5 ms."""
    costs = Costs((5,) * layers, (seconds + 0.5) / 1000, 0.001, entering / 1000)
    hidden = [m for m in range(layers) if 5 * m <= seconds + 0.5 + entering * m]
    assert cap(costs) == max(hidden)


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=9).map(tuple),
    st.floats(0.001, 1),
    st.floats(0.0001, 0.1),
    st.data(),
)
def test_a_cap_grows_with_bandwidth_and_compute(
    pages: tuple[int, ...], seconds: float, page_seconds: float, data: st.DataObject
) -> None:
    count = cap(Costs(pages, seconds, page_seconds))
    assert cap(Costs(pages, seconds * data.draw(st.floats(1, 9)), page_seconds)) >= count
    assert cap(Costs(pages, seconds, page_seconds / data.draw(st.floats(1, 9)))) >= count
    if len(set(pages)) == 1 and pages[0]:
        hidden = seconds / (page_seconds * pages[0])
        assert count == min(len(pages) - 1, math.floor(hidden)) or math.isclose(hidden, round(hidden), rel_tol=1e-4)


@pytest.mark.parametrize("active", [False, True])
def test_model_may_give_all_of_its_layers_but_a_slot(active: bool) -> None:
    offered = candidates(model("a", active=active), 1, (), 1.0, 0.0)
    assert sum(candidate.pages for candidate in offered) == sum(EQUAL) - smallest(EQUAL)
