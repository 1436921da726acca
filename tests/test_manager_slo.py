"""What SLOs have models stream (Select-N): the manager with a device and models that are made up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ballonet.offload.manager.clients import SIZES
from ballonet.offload.policy.coordinator import LinkClient, Refusal, Shares, share
from ballonet.offload.policy.coordinator import options as options_of
from ballonet.offload.policy.kv_pages import SPARE
from ballonet.offload.policy.plan import Costs, Plan, at_interval, fewest, meeting
from ballonet.offload.policy.tuning import DEFAULT
from ballonet.offload.record.record import PHASES, Point

from .fake_manager import EQUAL, LINK, PAGE, FakeModel, a_manager, keys
from .links import fair

PAGES = DEFAULT.pages


def both_kept(client: FakeModel, interval: int) -> bool:
    phases = (Costs(EQUAL, client.times[phase] or 0.0, 0.001).time(interval) <= client.slo(phase) for phase in PHASES)
    return all(phases)


def test_an_slo_frees_memory_at_once() -> None:
    """Select-N: the smallest interval that keeps it; the pages are for whoever wants them."""
    device, manager, _, (a,) = a_manager(60, {"tpot": 0.025})
    assert device.free == 20
    decision = a.step(manager)
    costs = Costs(EQUAL, 0.02, 0.001)
    assert decision.plan == a.plan == costs.plan(meeting(costs, 0.025) or 0)
    assert costs.of(a.plan) <= 0.025
    assert decision.refusal is None
    assert device.free == 60 - a.plan.device_pages > 20, "for whoever wants it"
    assert device.trace == []


@given(
    tpot=st.sampled_from([1.0, 1.1, 1.5, 3.0]),
    ttft=st.sampled_from([1.0, 1.1, 1.5, 3.0]),
    prefill=st.sampled_from([0.01, 0.03, 0.2]),
    came=st.sampled_from([40, 15, 10]),
)
def test_nothing_is_loaded_where_prefills_and_steps_take_turns(
    tpot: float, ttft: float, prefill: float, came: int
) -> None:
    """One plan keeps both SLOs, that with most on the host."""
    plan = fewest(EQUAL, came, Fraction(2))
    options = {"tpot": 0.02 * tpot, "ttft": prefill * ttft, "prefill": prefill, "plan": plan}
    device, manager, _, (a,) = a_manager(60, options)
    best = next(i for i in range(1, 10) if both_kept(a, i))
    for phase in ("prefill", "decode", "decode"):
        a.step(manager, phase)  # type: ignore[arg-type]
    before, changes = a.loaded, a.changes_made
    for phase in ("prefill", "decode", "decode") * 3:
        decision = a.step(manager, phase)  # type: ignore[arg-type]
        assert decision.refusal is None
        assert Costs(EQUAL, a.times[phase] or 0.0, 0.001).of(decision.plan) <= a.slo(phase)
    assert (a.loaded, a.changes_made) == (before, changes), "nothing moves at a boundary"
    assert a.plan == Costs(EQUAL, 1.0, 0.001).plan(best)
    assert device.free == 60 - a.plan.device_pages


def test_answers_and_prompts_of_several_sizes_keep_one_plan() -> None:
    """What the longest of late allow."""
    _, manager, _, (a,) = a_manager(60, {"tpot": 0.05, "ttft": 0.9})

    def seconds(point: Point) -> float:
        return {"prefill": 0.01, "decode": 0.001}[point.phase] * point.length

    a.seconds = seconds  # type: ignore[method-assign]

    def answer(prompt: int) -> None:
        a.step(manager, "prefill", length=prompt)
        for length in (prompt, 2 * prompt):
            a.step(manager, "decode", length=length)

    answer(8)
    answer(16)
    before = a.loaded
    for prompt in (8, 16, 8, 8, 16):
        answer(prompt)
    assert a.loaded == before
    for _ in range(SIZES):
        answer(8)
    assert len(a.plan.streamed) > 2, "long ago counts no more"


@pytest.mark.parametrize("ttft", [0.02, 0.025])
def test_prefill_longer_than_its_slo_does_not_cost_the_slo_of_decoding(ttft: float) -> None:
    """No plan keeps both. One SLO is missed, by as little as can be, and nothing is loaded for that at boundaries."""
    _, manager, _, (a,) = a_manager(60, {"tpot": 0.025, "ttft": ttft})
    for _ in range(3):
        prefill, decode = a.step(manager, "prefill"), a.step(manager, "decode")
        assert prefill.refusal is not None
        assert Costs(EQUAL, 0.03, 0.001).of(prefill.plan) == 0.03, "as long as with every layer resident"
        assert decode.refusal is None
        assert Costs(EQUAL, 0.02, 0.001).of(decode.plan) <= 0.025
        assert "the SLO of the other phase is not" in decode.why
    assert a.loaded == 0


def test_plan_is_not_loaded_by_an_iteration_that_has_no_time_for_it() -> None:
    """While its plan so far keeps both SLOs, another one waits for an iteration that has the time to load it."""
    _, manager, _, (a,) = a_manager(60, {"tpot": 0.0401, "ttft": 0.1, "decode": 0.02, "prefill": 0.03})
    a.plan = Costs(EQUAL, 1.0, 0.001).plan(3)
    a.tpot_slo = 0.0201
    manager.changed(a)
    kept = a.step(manager, "decode")
    assert (kept.plan.streamed, a.loaded) == ((2, 5), 0)
    assert kept.refusal is None
    a.step(manager, "prefill")
    assert a.plan.streamed == (1, 3, 5, 7)
    assert a.loaded == 5


def test_slo_of_requests_is_a_limit_and_no_aim() -> None:
    """Nothing streams because it may; what memory demands does, as long as that keeps what is asked. Layers come back
    where it does not and pages are free."""
    device, manager, _, (a,) = a_manager(60, {"tpot": 0.03, "decode": 0.005})
    a.others_wait = True
    assert a.step(manager).plan.streamed == ()
    assert device.grow(25)
    lent = a.step(manager)
    assert lent.plan.streamed
    assert 0.0052 < Costs(EQUAL, 0.005, 0.001).of(lent.plan) <= 0.03
    device.kv = 0
    assert a.step(manager).plan == lent.plan, "it keeps what is asked"
    a.tpot_slo = 0.0052
    manager.changed(a)
    assert a.step(manager).plan.streamed == (), "it does not, and pages are free"


def test_the_interval_follows_batch_and_length() -> None:
    """Select-N, record: looked up for each iteration by the next powers of two."""
    _device, manager, _, (a,) = a_manager(60, {"tpot": 0.1})
    seen: list[Point] = []

    def seconds(point: Point) -> float:
        seen.append(point)
        return 0.01 * point.batch

    a.seconds = seconds  # type: ignore[method-assign]
    plans = [a.step(manager, batch=batch, length=9).plan for batch in (1, 2, 4, 5, 8, 16)]
    as_eight = Costs(EQUAL, 0.08, 0.001)
    assert plans[3] == plans[4] == as_eight.plan(meeting(as_eight, 0.1) or 0), "five sequences count as eight"
    assert a.decisions[5].refusal is not None, "computing alone takes longer"
    assert {point for point in seen if point.phase == "decode" and point.batch > 1} == {
        Point("decode", batch, 16) for batch in (2, 4, 8, 16)
    }


def test_a_phase_without_an_slo() -> None:
    """Decoding then streams as little as it can; a prefill does as decoding does."""
    _device, manager, _, (a, b) = a_manager(120, {"ttft": 0.06}, {"tpot": 0.025})
    assert len(a.step(manager, "prefill").plan.streamed) == 8
    assert a.step(manager, "decode").plan == Plan(EQUAL)
    decoding = b.step(manager, "decode").plan
    assert decoding.streamed
    assert b.step(manager, "prefill").plan == decoding


def test_an_slo_that_cannot_be_kept_is_missed_as_little_as_can_be_and_said_once() -> None:
    _device, manager, _, (a, _b) = a_manager(90, {"tpot": 0.02}, {"interval": None})
    first = a.step(manager, "decode")
    assert (first.plan, first.refusal) == (at_interval(EQUAL, 2), None), "half of its layers hide behind the others"
    a.times["decode"] = 0.021
    manager.changed(a)
    missed = a.step(manager)
    assert missed.plan == Plan(EQUAL)
    assert isinstance(missed.refusal, Refusal)
    assert missed.refusal.slo == 0.021
    assert missed.notice is not None
    assert "20 ms" in missed.notice
    assert a.step(manager).notice is None
    again = a.step(manager, batch=2)
    assert again.refusal is not None
    assert again.notice is None
    _, other, _, (c,) = a_manager(90, {"tpot": 0.01})
    assert [c.step(other).notice is not None for _ in range(3)] == [True, False, False]
    a.times["decode"] = 0.02
    manager.changed(a)
    assert a.step(manager).refusal is None


def test_an_slo_is_kept_again_when_there_are_pages_again() -> None:
    """The model takes back what it needs as far as pages are free, and tries again when more are."""
    device, manager, _, (a,) = a_manager(40, {"tpot": 0.04, "decode": 0.02})
    a.step(manager)
    assert len(a.plan.streamed) == 8
    assert device.grow(30)
    a.tpot_slo = 0.021
    manager.changed(a)
    assert a.step(manager).refusal is not None
    assert a.device_pages == 10
    for _ in range(3):
        assert a.step(manager).refusal is not None
    device.kv = 0
    assert a.step(manager).refusal is None
    costs = Costs(EQUAL, 0.02, 0.001)
    assert a.decisions[-1].plan == costs.plan(meeting(costs, 0.021) or 0)


@st.composite
def two_on_a_link(draw: st.DrawFn) -> tuple[list[dict[str, Any]], int]:
    """Models that came with any plan, and free pages."""
    drawn = []
    for _ in range(2):
        pages = draw(st.sampled_from([EQUAL, (2, 5, 1, 4), (10,) * 4]))
        seconds = sum(pages) / 1000 * draw(st.sampled_from([0.4, 0.6, 1, 2]))
        fits = draw(st.integers(max(pages), sum(pages)))
        drawn.append(
            {
                "pages": pages,
                "plan": fewest(pages, fits, Fraction(2)),
                "decode": seconds,
                "tpot": seconds * draw(st.sampled_from([1.0, 1.2, 1.5, 2, 3])),
            }
        )
    return drawn, draw(st.integers(0, 30))


@settings(max_examples=60)
@given(two_on_a_link())
@example(
    (
        [
            {"pages": EQUAL, "plan": at_interval(EQUAL, 1), "decode": 0.02, "tpot": 0.025},
            {"pages": EQUAL, "plan": Plan(EQUAL), "decode": 0.04, "tpot": 0.06},
        ],
        0,
    )
)
def test_every_slo_is_kept_where_the_best_for_all_fits(drawn: tuple[list[dict[str, Any]], int]) -> None:
    """Select-N, coordinator: whatever both streamed before, and with whatever pages; and nobody's pages are missing."""
    options, free = drawn
    device, manager, _, them = a_manager(1000, *options)
    device.kv = device.free - free - 1000 // SPARE
    room = free + sum(client.device_pages for client in them)
    clients = [
        LinkClient(
            client.name,
            Costs(client.plan.pages, client.times["decode"], PAGE / LINK),
            PAGE,
            client.slo("decode"),
            10**6,
        )  # type: ignore[arg-type]
        for client in them
    ]
    best = share(clients, LINK)
    possible = isinstance(best, Shares) and room >= sum(
        client.plan(best.options[client.name].interval).device_pages for client in clients
    )
    for _ in range(3):
        for client in them:
            client.step(manager)
    kept = all(client.decisions[-1].refusal is None for client in them)
    assert kept or not possible
    if possible and isinstance(best, Shares):
        host = [client.plan(best.options[client.name].interval).host_pages for client in clients]
        assert [client.plan.host_pages for client in them] == host
    assert device.free >= 0


@settings(max_examples=60)
@given(
    st.sampled_from([EQUAL, (2, 5, 1, 4), (6,), (0, 0)]),
    st.sampled_from([0.001, 0.01, 0.04]),
    st.sampled_from([0.5, 1.0, 1.3, 4.0]),
    st.sampled_from([None, 0.5, 1.0, 1.3, 4.0]),
    st.sampled_from([0, 3, 10, 25, 40]),
    st.booleans(),
)
def test_admission(
    pages: Sequence[int], seconds: float, tpot: float, ttft: float | None, available: int, beside: bool
) -> None:
    """Select-N, admission: refused with the reason and what would do, never an exception; what is admitted is kept."""
    device, manager, clock, them = a_manager(200, *[{"name": "z", "tpot": 0.025}] * beside)
    for client in them:
        client.step(manager)
    device.kv = device.free - available
    clock.now += 9 * PAGES.idle  # whoever waits now may run beside it
    new = FakeModel(device, "new", pages, tpot=seconds * tpot, decode=seconds, prefill=seconds)
    new.ttft_slo = None if ttft is None else seconds * ttft
    device.models.remove(new)
    admission = manager.admit(new, available)
    if admission is None:
        device.models.append(new)
        new.plan = fewest(tuple(pages), available, Fraction(4)) or new.plan
        manager.add(new)
        for _ in range(3):
            for client in (*them, new):
                client.step(manager)
        assert all(client.decisions[-1].refusal is None for client in (*them, new))
    elif admission.slo is not None:
        new.tpot_slo = max(new.tpot_slo or 0, admission.slo)
        new.ttft_slo = new.ttft_slo and max(new.ttft_slo, admission.slo)
        assert admission.slo > min(seconds * tpot, seconds * (ttft or tpot))
        again = manager.admit(new, available)
        assert again is None or ttft is not None or beside
    if tpot < 1.0:
        assert admission is not None, "below the time that it takes resident"


def test_model_nobody_measured_is_admitted() -> None:
    device, manager, _, (a,) = a_manager(80, {"decode": None, "prefill": None, "tpot": 1e-9})
    assert manager.admit(FakeModel(device, "new", decode=None, tpot=1e-9), 40) is None
    assert "assumed" in a.step(manager).why


@settings(max_examples=30)
@given(st.data())
def test_no_slo_is_missed_that_was_promised(data: st.DataObject) -> None:
    """Select-N, coordinator: models come, wait and run in any order, others use the link as they like: as soon as each
    that runs has run again since, all that were promised their SLO get it of the link that is left."""
    draw = data.draw
    shapes = st.sampled_from([EQUAL, (2, 5, 1, 4), (3, 0, 3, 3)])
    options: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, 3))):
        pages = draw(shapes)
        seconds = sum(pages) / 1000 * draw(st.sampled_from([0.4, 1, 2]))
        slo = draw(st.sampled_from([None, 1.0, 1.2, 2.0, 4.0]))
        options.append(
            {
                "pages": pages,
                "decode": seconds,
                "prefill": 2 * seconds,
                "tpot": slo and seconds * slo,
                "ttft": draw(st.sampled_from([None, 3 * seconds])),
            }
        )
    device, manager, clock, them = a_manager(sum(sum(option["pages"]) for option in options) + 20, *options)
    for _ in range(draw(st.integers(1, 6))):
        traffic = draw(st.sampled_from([0, LINK // 3, LINK // 2, LINK]))
        manager.link.set_traffic(traffic)
        clock.now += 2 * PAGES.idle
        device.kv = draw(st.integers(0, device.free + device.kv))
        running = draw(st.lists(st.sampled_from(them), min_size=1, unique_by=id))
        phases = [draw(st.sampled_from(["prefill", "decode"])) for _ in running]
        decisions = []
        for _ in range(4):
            decisions = [client.step(manager, phase) for client, phase in zip(running, phases, strict=True)]
        clients = [
            LinkClient(
                client.name,
                Costs(client.plan.pages, client.times[phase], PAGE / LINK),
                PAGE,
                slo,
                10**6,
                fixed=client.plan,
            )
            for client, phase in zip(running, phases, strict=True)
            if (slo := client.slo(phase))
        ]
        kept = [decision.refusal is None for decision in decisions]
        asked = [
            options_of(client if ok else replace(client, slo=math.inf))
            for client, ok in zip(clients, kept, strict=True)
        ]
        assert all(asked), "alone they would keep it"
        shares = fair([option.rate for (option,) in asked], LINK - traffic)
        for client, ok, part in zip(clients, kept, shares, strict=True):
            # the share is whole bytes per second here, and was rounded before: 4e-6 of an SLO have been seen
            assert not ok or client.time(0, math.floor(part + 1e-6)) <= client.slo * (1 + 1e-5), client.name


def test_layers_offered_while_the_link_was_free_are_not_promised() -> None:
    """The other model offered layers, and cannot any more: other traffic has the link."""
    times = {"a": (0.016, 0.032), "b": (0.08, 0.16)}
    slos: dict[str, dict[str, Any]] = {"a": {"ttft": 0.048}, "b": {"tpot": 0.08}}
    models = [{"decode": decode, "prefill": prefill, **slos[name]} for name, (decode, prefill) in times.items()]
    device, manager, clock, (a, b) = a_manager(100, *models)
    manager.link.set_traffic(LINK // 3)
    clock.now += 2 * PAGES.idle
    for _ in range(4):
        a.step(manager, "prefill")
        b.step(manager)
    assert len(b.plan.streamed) == 8
    manager.link.set_traffic(LINK)
    clock.now += 2 * PAGES.idle
    device.kv = 21
    assert b.step(manager).refusal is not None, "resident it would need more pages than there are"


def test_layers_that_an_slo_forbids_are_not_taken() -> None:
    device, manager, clock, (a, b) = a_manager(200, {"tpot": 0.025, "ttft": 0.03}, {})
    manager.link.set_traffic(LINK)
    for client in (a, b):
        client.step(manager)
    assert a.plan == Plan(EQUAL), "there is nothing left of the link"
    assert {name for name, _ in keys(device)} == {"b"}
    manager.link.set_traffic(0)
    for client in (a, b):
        client.step(manager)
    assert len(a.plan.streamed) == 4
    assert {name for name, _ in keys(device)} == {"b"}, "it streams what it may already"
    clock.now += 2 * PAGES.idle
    a.tpot_slo = None
    a.ttft_slo = 0.029
    manager.changed(a)
    b.step(manager)
    assert {name for name, _ in keys(device)} == {"b"}, "a prefill takes longer than that as it is"


def test_a_model_that_waits_leaves_the_link_to_the_others() -> None:
    """Select-N §4.5, the special case: alone it is served with its smallest interval."""
    _, manager, clock, (a, b) = a_manager(80, {"tpot": 0.045}, {"tpot": 0.045})
    for _ in range(2):
        for client in (a, b):
            client.step(manager)
    assert {len(client.plan.streamed) for client in (a, b)} != {8}, "the link is too slow for both"
    less = min((a, b), key=lambda each: len(each.plan.streamed))
    clock.now += 2 * PAGES.idle
    less.step(manager)
    assert len(less.plan.streamed) == 8


def test_pages_that_an_slo_needs_are_taken_from_models_that_wait() -> None:
    device, manager, clock, (a, _) = a_manager(80, {"tpot": 0.045}, {})
    a.step(manager)
    device.kv = device.free
    a.tpot_slo = 0.025
    manager.changed(a)
    clock.now += 2 * PAGES.idle
    assert a.step(manager).refusal is None
    assert {name for name, _ in device.trace} == {"b"}
    assert len(a.plan.streamed) == 4
