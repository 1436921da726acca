"""Who gives pages of its weights, who gets them back, and that nothing flaps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ballonet.offload.policy.plan import Costs, Plan, fewest, spread, streaming
from ballonet.offload.policy.reclaim_order import weights_order
from ballonet.offload.policy.remap import (
    CalmClock,
    Model,
    Remapping,
    activate,
    cap,
    observe,
    reclaimable,
    remap,
    restore,
)

EQUAL = (5,) * 8


def model(
    name: str, pages: tuple[int, ...] = EQUAL, decode: float = 0.02, prefill: float = 0.03, **more: object
) -> Model:
    """Eight layers of five pages, a millisecond to copy each: four layers stream behind a decode step, six behind a
    prefill."""
    return Model(name, Plan(pages), Costs(pages, decode, 0.001), Costs(pages, prefill, 0.001), **more)  # type: ignore[arg-type]


def giving(them: Sequence[Model]) -> list[Model]:
    """In the order in which they give."""
    return sorted(them, key=lambda each: weights_order(each, each.given))


@st.composite
def models(draw: st.DrawFn) -> list[Model]:
    drawn = []
    for name in "abcd"[: draw(st.integers(1, 4))]:
        pages = draw(st.one_of(st.just(EQUAL), st.lists(st.integers(0, 6), min_size=1, max_size=8).map(tuple)))
        decode = draw(st.sampled_from([0.001, 0.005, 0.02, 0.1]))
        made = model(
            name,
            pages,
            decode,
            decode * draw(st.sampled_from([1, 2, 10])),
            active=draw(st.booleans()),
            priority=draw(st.integers(0, 2)),
            used=draw(st.integers(0, 3)),
            most=draw(st.none() | st.integers(0, 8)),
            base=draw(st.sampled_from([0, 0, 3])),
        )
        most = fewest(pages, sum(pages) - draw(st.integers(0, 20)), made.costs.ratio, made.cap)
        drawn.append(made if most is None else replace(made, plan=most))
    return drawn


def applied(them: Sequence[Model], change: Remapping) -> list[Model]:
    return [replace(client, plan=change.plans.get(client.name, client.plan)) for client in them]


def freed(them: Sequence[Model]) -> int:
    return sum(step.freed for step in them)


@settings(max_examples=60)
@given(models(), st.integers(0, 120), st.integers(0, 40))
def test_remapping_frees_what_is_wanted_or_all_that_the_caps_allow(them: list[Model], wanted: int, free: int) -> None:
    """Oneiros, when: nothing while pages are free. How many: up to the caps."""
    change = remap(them, wanted, free)
    after = applied(them, change)
    assert change.freed == freed(after) - freed(them)
    assert change.short == max(0, wanted - free - change.freed)
    for before, now in zip(them, after, strict=True):
        assert now.freed >= before.freed
        if now.plan != before.plan:
            assert len(now.plan.streamed) <= now.cap
            assert now.plan.streamed == spread(now.plan.pages, len(now.plan.streamed)) or len(set(now.plan.pages)) > 1
    if change.short:
        assert remap(after, 1, 0).freed == 0, "all are at their caps"
    if wanted <= free:
        assert change == Remapping({}, 0, 0)


@given(models())
def test_the_list_to_take_from_ends_where_all_are_at_their_caps(them: list[Model]) -> None:
    steps = list(reclaimable(them))
    assert all(step.freed > 0 for step in steps)
    everything = remap(them, 10**6, 0)
    assert everything.freed == sum(step.freed for step in steps)
    for client in them:
        plans = [step.plan for step in steps if step.model == client.name]
        assert plans[-1:] == [everything.plans[client.name]] if plans else client.name not in everything.plans
        smallest = [
            streaming(client.plan.pages, spread(client.plan.pages, count), 1).device_pages
            for count in range(client.cap + 1)
        ]
        assert min(client.plan.device_pages, *smallest) == (plans[-1] if plans else client.plan).device_pages


@given(models(), st.integers(1, 60))
def test_models_give_once_those_before_them_are_at_their_caps(them: list[Model], wanted: int) -> None:
    change = remap(them, wanted, 0)
    after = {client.name: client for client in applied(them, change)}
    order = [after[client.name] for client in giving(them)]
    for position, client in enumerate(order):
        if client.name in change.plans:
            for earlier in order[:position]:
                if not earlier.active or earlier.priority < client.priority:
                    assert remap([earlier], 1, 0).freed == 0, (earlier.name, "could still give")


@settings(max_examples=60)
@given(models(), st.integers(0, 60))
def test_layers_given_back_fit_and_cost_no_time(them: list[Model], spare: int) -> None:
    for client in them:
        now = replace(client, plan=restore(client, spare) or client.plan)
        assert now.plan.device_pages <= client.plan.device_pages + spare
        assert now.stall <= client.stall + 1e-12
        everything = restore(client, sum(client.plan.pages)) or client.plan
        assert not everything.streamed, "after the load all is resident"


def test_order() -> None:
    """Oneiros, which model: idle before active; the lowest priority; then the one used last."""
    them = [
        model("running", active=True, priority=-1),
        model("important", priority=5, used=9),
        model("old", priority=1, used=1),
        model("new", priority=1, used=2),
    ]
    assert [client.name for client in giving(them)] == ["new", "old", "important", "running"]


def test_order_by_use_is_a_value() -> None:
    older, newer = model("older", used=1.0), model("newer", used=2.0)
    assert [client.name for client in giving([older, newer])] == ["newer", "older"]
    assert [client.name for client in giving([replace(other, mru=False) for other in (older, newer)])] == [
        "older",
        "newer",
    ]


def test_caps_and_slots_are_values() -> None:
    """Without a cap all layers but one may go, and a plan has as many slots as are tried."""
    assert model("a", capped=False, active=True).cap == len(EQUAL) - 1 > model("a", active=True).cap
    for count in (1, 2):
        change = remap([model("a", slots=(count,))], 20, 10)
        assert len(change.plans["a"].slot_pages) == count


def test_a_cap_is_what_hides_behind_an_iteration() -> None:
    assert cap(Costs(EQUAL, 0.02, 0.001)) == 4
    assert cap(Costs(EQUAL, 0.0199, 0.001)) == 3
    assert cap(Costs(EQUAL, 9.0, 0.001)) == 7, "never a whole model"
    assert cap(Costs((0, 5, 0), 9.0, 0.001)) == 0
    assert cap(Costs((0,), 9.0, 0.001)) == 0
    assert model("a", most=1).cap == 1


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


def test_a_model_that_runs_again_drops_to_its_decode_cap() -> None:
    idle, other = model("a"), model("b", used=5)
    idle = replace(idle, plan=streaming(EQUAL, spread(EQUAL, 6), 1))
    assert len(idle.plan.streamed) <= idle.cap
    change = activate([idle, other], "a", free=3)
    assert len(change.plans["a"].streamed) == replace(idle, active=True).cap == 4
    assert freed([idle]) - freed(applied([idle], change)) == 10
    assert freed(applied([other], change)) == 10, "7 pages are wanted, layers have 5"
    assert (change.freed, change.short) == (0, 0)
    assert activate([idle, other], "a", free=10).plans.keys() == {"a"}
    assert activate([idle, replace(other, most=0)], "a", free=3).short == 7
    assert activate([idle, other], "b", free=0) == Remapping({}, 0, 0)
    with pytest.raises(KeyError):
        activate([idle], "z", free=0)


def test_model_that_came_streaming_streams_no_more_than_hides_once_it_runs_again() -> None:
    came = replace(model("a", base=7), plan=streaming(EQUAL, spread(EQUAL, 7), 1))
    change = activate([came, model("b", used=1.0)], "a", free=0)
    assert len(change.plans["a"].streamed) == 4
    assert change.freed == 0, "the pages are those of the model that is idle"
    assert change.short == 0


@given(models(), st.integers(0, 20))
def test_activation_leaves_the_model_within_its_decode_cap(them: list[Model], free: int) -> None:
    them = [replace(client, active=False) for client in them]
    change = activate(them, them[0].name, free)
    first, *others = applied(them, change)
    assert len(first.plan.streamed) <= max(replace(first, active=True, base=0).cap, 0)
    assert change.freed == freed([first, *others]) - freed(them)
    if not change.short:
        assert free + change.freed >= 0


def reloads(rounds: int, count: int, used: Callable[[int], float]) -> int:
    """Pages that are copied back because a model runs whose weights had been taken: models run in turns, and the one
    that runs has KV that takes a model's worth of pages from those that wait. `used`: of a time, what the controller is
    told."""
    them = [model(str(n), most=7, prefill=1.0, used=used(n)) for n in range(count)]
    copied = 0
    for turn in range(rounds):
        index = turn % count
        them = [replace(client, active=False) for client in them]
        running = replace(them[index], active=True, most=0, used=used(turn + count))
        back = activate([*them[:index], replace(running, active=False), *them[index + 1 :]], running.name, free=0)
        copied += them[index].freed
        them = applied(them, back)
        them[index] = replace(running, plan=them[index].plan)
        assert freed([them[index]]) == 0
        them = applied(them, remap(them, 15 - freed(them), 0))
        them[index] = replace(them[index], most=7)
    return copied


def test_most_recently_used_reloads_less_than_least_recently_used_in_a_round() -> None:
    """Oneiros, which model: of four models in turns the one just used is needed last, one reload in three turns against
    one in each."""
    mru, lru = reloads(40, 4, lambda time: time), reloads(40, 4, lambda time: -time)
    assert lru == 15 * 39
    assert mru <= lru / 2.9
    assert reloads(40, 2, lambda time: time) == reloads(40, 2, lambda time: -time), "with two there is no choice"


MARK, DWELL = 4, 10.0  # pages, seconds


def test_calm() -> None:
    assert observe(None, 0.0, 9, False, MARK, DWELL) == (CalmClock(0.0, 9, 9), 0)
    assert observe(CalmClock(0.0, 9, 9), 5.0, 7, False, MARK, DWELL) == (CalmClock(0.0, 7, 9), 0)
    assert observe(CalmClock(0.0, 7, 9), 10.0, 30, False, MARK, DWELL) == (None, 3), "as many as were free all the time"
    assert observe(CalmClock(0.0, 7, 20), 10.0, 15, False, MARK, DWELL) == (None, 0), "five went, and may go again"
    assert observe(CalmClock(0.0, 12, 20), 10.0, 15, False, MARK, DWELL) == (None, 3)
    assert observe(CalmClock(0.0, 7, 9), 9.0, 30, True, MARK, DWELL) == (None, 0)
    assert observe(CalmClock(0.0, 7, 9), 9.0, 3, False, MARK, DWELL) == (None, 0)
