"""Whose layers are taken and when they come back (Oneiros): the manager with a device and models that are made up."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ballonet.offload.manager.client import OUTSIDE_LAYERS
from ballonet.offload.policy.plan import Costs, Plan, at_interval, fewest, smallest, spread, streaming
from ballonet.offload.policy.reclaim_order import Level
from ballonet.offload.policy.remap import Model, cap, listing, nested, reclaimable
from ballonet.offload.policy.schedule import gaps
from ballonet.offload.policy.tuning import DEFAULT
from ballonet.offload.record.record import Point

from .fake_manager import EQUAL, LINK, a_manager, keys, trace
from .test_remap import models

PAGES = DEFAULT.pages

# -- the list to take from


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


@given(models())
def test_whatever_part_of_the_list_is_taken_there_is_a_plan_for_the_rest(them: list[Model]) -> None:
    """Oneiros, how many: whatever is arranged stays under the cap; in the order of `reclaimable`, and as much. Beyond
    the cap as much as any plan frees, but for what an SLO needs."""
    order, beyond = listing(them, {client.name: client.plan.streamed for client in them})
    assert len({*order, *beyond}) == len(order) + len(beyond)
    steps = list(reclaimable(them))
    assert list(dict.fromkeys(name for name, _ in order)) == [
        name for name in dict.fromkeys(step.model for step in steps) if name in {name for name, _ in order}
    ]
    for client in them:
        mine = [layer for name, layer in order if name == client.name]
        assert not set(mine) & set(client.plan.streamed)
        left = client.plan.device_pages
        for layer in mine:
            left -= client.plan.pages[layer]
            assert fewest(client.plan.pages, left, client.costs.ratio, client.cap) is not None
        if client.plan.pages == EQUAL:
            assert client.plan.device_pages - left == sum(step.freed for step in steps if step.model == client.name)
        rest = [layer for name, layer in beyond if name == client.name]
        for layer in rest:
            left -= client.plan.pages[layer]
            assert fewest(client.plan.pages, left, client.costs.ratio) is not None
        if client.plan.pages == EQUAL and len({*client.plan.streamed, *mine, *rest}) < len(EQUAL):
            assert left == max(smallest(EQUAL), client.least)


# -- what lies outside of layers


def test_idle_models_give_what_lies_outside_of_layers_after_all_layers_within_their_caps() -> None:
    """By kind: the one used last first, as with layers; and nothing of a model that runs."""
    _, manager, clock, (a, b, c) = a_manager(150, {"outside": 7}, {"outside": 3}, {"outside": 2, "ttft": 100.0})
    for model in (c, b, a):
        model.step(manager)
        clock.now += 2 * PAGES.idle
    c.step(manager)
    order = [(found.client, found.index, found.level) for found in manager.reclaim.candidates()]
    outside = [(client, level) for client, index, level in order if index == OUTSIDE_LAYERS]
    assert outside == [(1, Level.IDLE_WEIGHTS), (2, Level.IDLE_WEIGHTS)]
    idle_layers = [n for n, (_, index, level) in enumerate(order) if level is Level.IDLE_WEIGHTS and index < 8]
    assert max(idle_layers) < order.index((1, OUTSIDE_LAYERS, Level.IDLE_WEIGHTS))
    clock.now += 2 * PAGES.idle
    a.step(manager)
    indices = [(found.client, found.index) for found in manager.reclaim.candidates()]
    assert (3, OUTSIDE_LAYERS) not in indices, "its SLO needs it"
    assert (1, OUTSIDE_LAYERS) not in indices, "it runs"


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(-9, 12)), max_size=30), st.integers(0, 50))
def test_pages_outside_of_layers_are_never_lost_nor_below_a_floor(steps: list[tuple[str, int]], floor: int) -> None:
    for by_price in (False, True):
        tuning = replace(DEFAULT, prices=replace(DEFAULT.prices, on=by_price))
        device, manager, clock, (a, b) = a_manager(100, {"outside": 7, "floor": floor}, {"outside": 4}, tuning=tuning)
        for name, kv in steps:
            clock.now += 0.4
            model = a if name == "a" else b
            with suppress(MemoryError):
                model.step(manager, kv=max(kv, -device.kv))
            assert not model.lacking, "it has all before it runs"
            assert a.rest + a.lacking == 7
            assert b.rest + b.lacking == 4
            assert a.device_pages >= min(floor, 7 + smallest(EQUAL))
            assert device.free >= 0


# -- Oneiros: when


def test_no_layer_is_taken_while_pages_are_free() -> None:
    """Oneiros, when: on exhaustion, not before."""
    device, manager, _, (a, b) = a_manager(120, {}, {})
    for _ in range(4):
        assert a.step(manager, kv=10).plan == Plan(EQUAL)
    assert (device.free, device.trace) == (0, [])
    a.step(manager, kv=1)
    assert device.trace == [("b", 0)], "the idle model, one layer"
    assert a.plan == Plan(EQUAL)
    assert b.plan == Plan(EQUAL), "it learns of it when it runs"
    assert device.page_request == 0


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["prefill", "decode"]), st.integers(-9, 9)), max_size=40)
)
def test_taken_only_when_it_had_to_be_and_beyond_the_caps_when_all_were_at_theirs(
    steps: list[tuple[str, Any, int]],
) -> None:
    device, manager, clock, them = a_manager(140, {}, {"priority": 1}, {"decode": 0.005, "prefill": 0.1})
    most = 0  # pages of KV that there were at any time, or that somebody asked for
    for name, phase, kv in steps:
        clock.now += 0.4
        model = them["abc".index(name)]
        kv = max(kv, -device.kv)
        free, taken, here = device.free, len(device.trace), model.device_pages
        most = max(most, device.kv + kv)
        try:
            decision = model.step(manager, phase, kv=kv)
        except MemoryError:
            assert device.free < kv
            assert device.free + sum(client.plan.pages[layer] for _, client, ((_, layer, *_),) in device.listed) < kv
            continue
        assert decision.plan == model.plan
        if len(device.trace) > taken:
            assert free < max(0, kv) + max(0, model.plan.device_pages - here)  # it frees after it is arranged
        for client in them:
            assert len(client.gone) < len(EQUAL), "never a whole model"
            assert client.plan.device_pages >= smallest(EQUAL), "never without a slot"
        bounds = [
            [smallest(EQUAL, cap(Costs(EQUAL, time, 0.001))) for time in client.times.values()] for client in them
        ]
        if 140 - most >= sum(map(max, bounds)):  # all at their caps have room, in whatever phase each is
            for client, pages in zip(them, map(min, bounds), strict=True):
                assert client.plan.device_pages >= pages, "with one slot or two"


# -- Oneiros: which model


def test_idle_models_give_first_each_until_its_cap_then_the_one_that_runs() -> None:
    """Oneiros, which model (Figure 7): A runs, B and C wait, C has the lowest priority."""
    device, manager, _, (a, b, c) = a_manager(120, {"priority": 0}, {"priority": 1}, {"priority": 0})
    a.step(manager)
    for _ in range(65):
        a.step(manager, kv=1)
    assert trace(device) == ["c"] * 5 + ["b"] * 5 + ["a"] * 3, "one less than the cap of six, or four: the slot"
    a.step(manager)
    assert len(a.plan.streamed) == 4 == cap(Costs(EQUAL, 0.02, 0.001))
    for client in (b, c):
        client.step(manager, "prefill")
        assert client.plan == streaming(EQUAL, spread(EQUAL, 6), 1), "uniform, and through one slot"
        assert client.gone == set()


def test_beyond_the_caps_layers_go_before_anything_is_refused() -> None:
    """Layers of idle models go first, of one priority; and layers come back as pages do, one by one."""
    device, manager, clock, (a, *_) = a_manager(120, {"priority": 0}, {"priority": 1}, {"priority": 0})
    for _ in range(105):
        a.step(manager, kv=1)
    assert trace(device)[13:] == ["c"] * 2 + ["a"] * 4 + ["b"] * 2
    with pytest.raises(MemoryError):
        a.step(manager, kv=1)
    a.step(manager)
    assert a.plan == streaming(EQUAL, range(8), 1)
    device.kv -= 20
    for _ in range(30):
        clock.now += 1.0
        a.step(manager)
    assert 4 < len(a.plan.streamed) < 8, "not as few as its cap says, but fewer"


def test_of_equals_the_one_used_last_gives_first() -> None:
    """Oneiros, which model: most recently used, of those that are idle."""
    device, manager, clock, them = a_manager(160, {}, {}, {}, {})
    for client in (them[2], them[0], them[1]):
        client.step(manager)
        clock.now += 2 * PAGES.idle
    them[3].step(manager, kv=11)
    assert trace(device) == ["b"] * 3
    clock.now += 2 * PAGES.idle
    them[1].step(manager, kv=1)
    them[1].step(manager, kv=15)
    assert trace(device)[3:] == ["d"] * 3, "now that one"


def test_used_last_is_what_ended_last() -> None:
    """An iteration may take long."""
    device, manager, clock, (a, b, c) = a_manager(120, {}, {}, {})
    a.running = True
    manager.before(a, Point("prefill", 1, 8))
    clock.now += PAGES.idle
    b.step(manager)
    clock.now += PAGES.idle
    assert c.step(manager).plan == Plan(EQUAL)
    assert keys(device)[0][0] == "b", "the other runs"
    manager.after(a)
    a.running = False
    clock.now += 2 * PAGES.idle
    c.step(manager, kv=1)
    assert trace(device) == ["a"]


def test_models_that_all_run_give_in_turns() -> None:
    """Oneiros, which model: in spatial sharing each gives."""
    device, manager, _, them = a_manager(80, {}, {})
    for kv in (0, 3, 3, 3, 3):
        for client in them:
            client.step(manager, kv=kv)
    assert trace(device) == ["a", "b", "a", "b", "a"]
    assert [client.device_pages for client in them] == [25, 30]


# -- Oneiros: which layers, slots


def test_layers_taken_are_arranged_before_the_next_iteration() -> None:
    """Oneiros, which layers: ⌊j·n/m⌋ again, whatever the core took; and no page beside those."""
    _device, manager, _, (a,) = a_manager(40, {"pages": (1,) * 32, "decode": 0.004})
    for _ in range(8):
        a.step(manager, kv=1)
    before = a.device_pages
    a.step(manager, kv=3)
    a.step(manager)
    assert a.device_pages == before - 3 == a.plan.device_pages
    assert a.plan == fewest((1,) * 32, 29, Fraction(8))
    assert a.plan.streamed == spread((1,) * 32, len(a.plan.streamed))
    assert len(a.plan.streamed) == 3 + len(a.plan.slot_pages)


# -- Oneiros: back


def test_pages_that_were_short_in_between_are_not_to_spare() -> None:
    """However many are free whenever it is looked: layers would come back to be taken again."""
    device, manager, clock, (a, b) = a_manager(120, {}, {})
    for more in range(5):
        clock.now += 0.6 * PAGES.dwell
        b.step(manager, "prefill")
        assert b.device_pages == 40 - 5 * more
        clock.now += PAGES.idle
        a.step(manager, kv=45 + 5 * more)
        device.kv = 0
    assert trace(device) == ["b"] * 5
    clock.now += 0.6 * PAGES.dwell
    b.step(manager, "prefill")
    assert b.device_pages == 15
    for _ in range(2):
        clock.now += 1.2 * PAGES.dwell
        b.step(manager, "prefill")
    assert b.device_pages > 15


def test_layers_given_back_leave_room_for_the_next_tokens() -> None:
    device, manager, clock, (a,) = a_manager(64, {"pages": (8,) * 8, "decode": 1.0})
    a.step(manager, kv=16)
    a.step(manager)
    assert a.device_pages == 48
    device.kv = 0
    for _ in range(40):
        clock.now += 1.0
        a.step(manager)
    assert device.free >= 64 // PAGES.spare > 0
    assert a.device_pages == 56, "whole layers"
    assert a.decisions[-1].plan == a.plan


def test_an_idle_model_takes_back_what_is_still_there_when_it_runs() -> None:
    """The model's plan is kept for it, but not its pages."""
    for still_there in (True, False):
        device, manager, clock, (a, b) = a_manager(80, {}, {})
        a.step(manager, kv=20)
        assert trace(device) == ["b"] * 4
        device.kv = 0
        for _ in range(30):
            clock.now += 1.0
            a.step(manager)
        device.kv = 0 if still_there else 18
        b.step(manager, "prefill")
        assert (b.plan.device_pages > 20) == still_there
        assert len(device.trace) == 4, "nobody else gave for that"


# -- Oneiros: a model runs again


def test_model_that_came_streaming_takes_from_an_idle_one_what_does_not_hide() -> None:
    """Memory demanded seven layers of it, while the other one was loaded and ran."""
    came = fewest(EQUAL, 10, Fraction(4))
    device, manager, clock, (a, b) = a_manager(50, {"plan": came}, {})
    b.step(manager)
    clock.now += 2 * PAGES.idle
    a.step(manager, "prefill")
    decision = a.step(manager)
    assert len(a.plan.streamed) <= 4 < len(decision.plan.pages), decision.why
    assert {name for name, _ in device.trace} == {"b"}


def test_a_model_that_runs_again_drops_to_its_decode_cap_before_it_decodes() -> None:
    """Oneiros, how many: under the prefill cap while it waits and prefills, under that of decoding from then on. Others
    give what that takes."""
    device, manager, clock, (a, b, _c) = a_manager(120, {}, {"priority": -1}, {"priority": 1})
    a.step(manager, kv=25)
    clock.now += 2 * PAGES.idle
    assert trace(device) == ["b"] * 5
    assert b.step(manager, "prefill").plan == streaming(EQUAL, spread(EQUAL, 6), 1)
    loaded = b.loaded
    again = b.step(manager, "decode")
    assert len(again.plan.streamed) == 4
    assert "decodes" in again.why
    assert b.loaded > loaded
    assert set(trace(device)[5:]) == {"a"}, "it was used last of those that are idle and not as important as c"
    assert b.step(manager, "decode").plan == again.plan
    assert "decodes" not in b.decisions[-1].why


def test_where_nobody_gives_it_streams_more_than_hides_and_says_so() -> None:
    device, manager, clock, (a, b) = a_manager(80, {"interval": None}, {})
    a.step(manager, kv=25)
    assert trace(device) == ["b"] * 5
    b.step(manager, "prefill")
    assert len(b.plan.streamed) == 6
    before, late = b.plan, b.step(manager, "decode")
    costs = Costs(EQUAL, 0.02, 0.001)
    assert late.plan.device_pages <= before.device_pages
    assert costs.of(late.plan) < costs.of(before), "the best for the pages that it has"
    assert "missing" in late.why
    device.kv -= 7
    clock.now += 2 * PAGES.idle
    b.step(manager, "prefill")
    assert b.step(manager, "decode").plan.device_pages == 20, "with the pages there are"


def test_a_cap_that_falls_while_a_model_runs_takes_nothing_back_at_once() -> None:
    """Or batches of many sequences and of one, in turns, would flap."""
    _device, manager, clock, (a,) = a_manager(40, {})
    a.times["decode"] = 0.03
    a.step(manager, batch=8, kv=25)
    a.step(manager, batch=8)
    assert len(a.plan.streamed) == 6
    a.times["decode"] = 0.01
    for turn in range(6):
        clock.now += 0.1
        assert a.step(manager, batch=1 + turn % 2).plan == a.plan
    assert a.loaded == 0


# -- interval


def test_an_interval_that_was_given_stays_and_gives_nothing() -> None:
    pages = at_interval(EQUAL, 4)
    device, manager, _, (a, b, c) = a_manager(
        115, {"interval": 4, "plan": pages}, {"interval": None}, {"interval": 1, "plan": at_interval(EQUAL, 1)}
    )
    for phase in ("prefill", "decode"):
        assert a.step(manager, phase).plan == pages  # type: ignore[arg-type]
        assert b.step(manager, phase).plan == Plan(EQUAL)  # type: ignore[arg-type]
    assert a.decisions[-1].interval == 4
    assert device.listed == []
    with pytest.raises(MemoryError):
        c.step(manager, kv=device.free + 1)
    assert device.trace == []


def test_without_an_slo_it_streams_what_memory_demands() -> None:
    """More than hides, and it is not asked for more than that; what it came with it may stream again."""
    plan = fewest(EQUAL, 10, Fraction(2))
    assert plan is not None
    device, manager, clock, (a,) = a_manager(20, {"plan": plan})
    assert len(plan.streamed) == 8 > cap(Costs(EQUAL, 0.02, 0.001)) == 4
    decision = a.step(manager, kv=10)
    assert (decision.plan, decision.why) == (plan, "memory demands it")
    with pytest.raises(MemoryError):
        a.step(manager, kv=1)
    device.kv = 0
    for _ in range(30):
        clock.now += 1.0
        a.step(manager)
    assert a.device_pages == 15, "there was room for one layer more"
    a.step(manager, kv=10)
    assert a.step(manager).plan == plan


@pytest.mark.parametrize(("seconds", "bandwidth"), [(None, LINK), (0.02, None), (None, None)])
def test_where_nothing_was_measured_it_assumes_and_says_so(seconds: float | None, bandwidth: float | None) -> None:
    device, manager, _, (a, b) = a_manager(
        80, {"decode": seconds, "prefill": seconds}, {"decode": seconds, "prefill": seconds}, bandwidth=bandwidth
    )
    a.step(manager, kv=5)
    a.step(manager, kv=5)
    assert {candidate.level for candidate in manager.reclaim.candidates()} == {Level.LAST_WEIGHTS}
    b.step(manager, "prefill")
    a.step(manager)
    for client in (a, b):
        assert len(client.plan.streamed) == 2
        assert client.decisions[-1].seconds is None
        assert "assumed" in client.decisions[-1].why
    assert trace(device) == ["b", "a"], "two of eight layers hide where copying takes four times as long as computing"
