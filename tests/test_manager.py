"""Whose layers are taken and when they come back (Oneiros): the manager with a device and models that are made up."""

from __future__ import annotations

from contextlib import suppress
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ballonet.offload.manager.client import OUTSIDE_LAYERS
from ballonet.offload.policy.kv_pages import SPARE
from ballonet.offload.policy.plan import Costs, Plan, at_interval, fewest, smallest, spread
from ballonet.offload.policy.reclaim_order import PageSource
from ballonet.offload.policy.tuning import DEFAULT
from ballonet.offload.record.record import Point

from .fake_manager import EQUAL, LINK, a_manager, keys, trace
from .oneiros import cap

PAGES = DEFAULT.pages

# -- what lies outside of layers


def test_idle_models_give_what_lies_outside_of_layers_after_their_layers() -> None:
    """Nothing is given of a model that runs, or whose SLO needs it."""
    _, manager, clock, (a, b, c) = a_manager(150, {"outside": 7}, {"outside": 3}, {"outside": 2, "ttft": 100.0})
    for model in (c, b, a):
        model.step(manager)
        clock.now += 2 * PAGES.idle
    c.step(manager)
    order = [(candidate.client, candidate.index) for candidate in manager.reclaim.candidates()]
    for client in (1, 2):
        last = max(place for place, (owner, index) in enumerate(order) if owner == client and index < 8)
        assert order.index((client, OUTSIDE_LAYERS)) > last
    clock.now += 2 * PAGES.idle
    a.step(manager)
    indices = [(candidate.client, candidate.index) for candidate in manager.reclaim.candidates()]
    assert (3, OUTSIDE_LAYERS) not in indices, "its SLO needs it"
    assert (1, OUTSIDE_LAYERS) not in indices, "it runs"


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(-9, 12)), max_size=30), st.integers(0, 50))
def test_pages_outside_of_layers_are_never_lost_nor_below_a_floor(steps: list[tuple[str, int]], floor: int) -> None:
    device, manager, clock, (a, b) = a_manager(100, {"outside": 7, "floor": floor}, {"outside": 4})
    for name, kv in steps:
        clock.now += 0.4
        model = a if name == "a" else b
        with suppress(MemoryError):
            model.step(manager, kv=max(kv, -device.kv))
        assert not model.lacking or device.free < model.lacking, "it has all before it runs, where there is room"
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
def test_layers_are_taken_only_when_they_have_to_be_and_never_a_whole_model(
    steps: list[tuple[str, Any, int]],
) -> None:
    device, manager, clock, them = a_manager(140, {}, {"priority": 1}, {"decode": 0.005, "prefill": 0.1})
    for name, phase, kv in steps:
        clock.now += 0.4
        model = them["abc".index(name)]
        kv = max(kv, -device.kv)
        free, taken, here = device.free, len(device.trace), model.device_pages
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


# -- Oneiros: which model


def test_idle_models_give_before_one_that_runs_and_important_ones_last() -> None:
    """Oneiros, which model (Figure 7): A runs, B and C wait, B has a higher priority."""
    device, manager, _, (a, b, c) = a_manager(120, {"priority": 0}, {"priority": 1}, {"priority": 0})
    a.step(manager)
    for _ in range(15):
        a.step(manager, kv=1)
    assert trace(device) == ["c"] * 3, "of what costs as much what is idle"
    while set(trace(device)) < {"a", "c", "b"}:
        a.step(manager, kv=1)
    given = trace(device)[:-1]
    assert given.count("c") == 7, "all but a slot"
    assert a.device_pages == 10, "so has the one that runs, before one of higher priority gives"
    for client in (b, c):
        client.step(manager, "prefill")
        assert client.gone == set()


def test_all_layers_but_a_slot_go_before_anything_is_refused() -> None:
    device, manager, _, (a, *_) = a_manager(120, {}, {}, {})
    for _ in range(95):
        a.step(manager, kv=1)
    left = device.free + sum(candidate.pages for candidate in manager.reclaim.candidates())
    a.step(manager, kv=left)
    with pytest.raises(MemoryError):
        a.step(manager, kv=1)
    assert len(a.plan.streamed) == 8
    device.kv -= 20
    for _ in range(30):
        a.step(manager)
    assert len(a.plan.streamed) < 8, "and come back as pages do"


def test_of_equals_the_one_used_last_gives_first() -> None:
    """Oneiros, which model: most recently used, of those that are idle."""
    device, manager, clock, them = a_manager(160, {}, {}, {}, {})
    for client in (them[2], them[0], them[1]):
        client.step(manager)
        clock.now += 2 * PAGES.idle
    them[3].step(manager, kv=10)
    assert trace(device) == ["b"] * 2, "no copy of these is waited for"
    clock.now += 2 * PAGES.idle
    them[1].step(manager, kv=10)
    assert trace(device)[2:] == ["d"] * 2, "now that one"


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


def test_layers_given_back_leave_room_for_the_next_tokens() -> None:
    device, manager, clock, (a,) = a_manager(64, {"pages": (8,) * 8, "decode": 0.004})
    a.step(manager, kv=16)
    a.step(manager)
    assert a.device_pages == 48
    device.kv = 0
    for _ in range(40):
        clock.now += 1.0
        a.step(manager)
    assert device.free >= 64 // SPARE > 0
    assert a.device_pages == 56, "whole layers"
    assert a.decisions[-1].plan == a.plan


@pytest.mark.parametrize("still_there", [False, True])
def test_an_idle_model_takes_back_what_is_still_there_once_copies_have_taken_as_long(still_there: bool) -> None:
    device, manager, _, (a, b) = a_manager(84, {}, {})
    a.step(manager, kv=24)
    given = trace(device)
    assert "b" in given
    device.kv = 0 if still_there else device.kv - device.free
    b.step(manager, "prefill")
    before = b.plan
    assert before.streamed, "at first it streams"
    for _ in range(3):
        b.step(manager, "prefill")
    assert (b.plan == Plan(EQUAL)) == still_there
    assert trace(device)[: len(given)] == given
    assert still_there or b.plan == before


# -- Oneiros: a model runs again


def test_model_that_came_streaming_takes_from_an_idle_one_once_it_has_waited_for_as_long() -> None:
    """Memory demanded that all of its layers stream, while the other one was loaded and ran."""
    came = fewest(EQUAL, 10, Fraction(4))
    device, manager, clock, (a, b) = a_manager(50, {"plan": came}, {})
    b.step(manager)
    clock.now += 2 * PAGES.idle
    decision = a.step(manager)
    assert decision.plan == came
    assert device.trace == [], "nothing moves before it has waited"
    for _ in range(100):
        a.step(manager)
    assert len(a.plan.streamed) <= 4
    assert {name for name, _ in device.trace} == {"b"}
    assert a.waited == 0, "and nothing is waited for"


def test_where_nobody_gives_it_goes_on_as_it_is() -> None:
    device, manager, _, (a, b) = a_manager(80, {"interval": None}, {})
    a.step(manager, kv=25)
    assert trace(device) == ["b"] * 5
    for _ in range(100):
        b.step(manager)
    assert b.device_pages == 15
    device.kv -= 7
    for _ in range(10):
        b.step(manager)
    assert b.plan.device_pages == 20, "with the pages there are"


@pytest.mark.parametrize("waves", [1, 40])
def test_of_two_models_that_wait_in_turns_each_pays_before_pages_move(waves: int) -> None:
    """Seconds of moves are no more than those that were waited for."""
    came = fewest(EQUAL, 10, Fraction(4))
    _, manager, clock, them = a_manager(50, {"plan": came}, {})
    waited = [0.0, 0.0]
    for turn in range(2 * 40):
        client = them[turn // waves % 2]
        before = client.waited
        client.step(manager)
        waited[turn // waves % 2] += client.waited if client.waited < before else client.waited - before
        clock.now += 2 * PAGES.idle
    moved = sum(client.loaded for client in them) * 2 * 0.001  # there and back
    assert moved <= sum(waited) + 0.2


# -- interval


def test_an_interval_that_was_given_stays_and_gives_nothing() -> None:
    pages = at_interval(EQUAL, 4)
    device, manager, _, (a, b, c) = a_manager(
        115, {"interval": 4, "plan": pages}, {"interval": None}, {"interval": 1, "plan": at_interval(EQUAL, 1)}
    )
    for phase in ("prefill", "decode"):
        assert a.step(manager, phase).plan == pages  # type: ignore[arg-type]
        assert b.step(manager, phase).plan == Plan(EQUAL)  # type: ignore[arg-type]
    assert a.decisions[-1].why == "as was asked for"
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
    sources = {candidate.source for candidate in manager.reclaim.candidates()}
    assert sources <= {PageSource.IDLE_WEIGHTS, PageSource.STALLING_WEIGHTS}
    b.step(manager, "prefill")
    assert len(b.plan.streamed) == 3
    assert "assumed" in b.decisions[-1].why
    assert trace(device) == ["b", "b"], "whatever it takes, who is idle loses less"
