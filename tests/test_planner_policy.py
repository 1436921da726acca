"""What a run will take, worked out before it: memory, seconds, what binds and what would help."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ballonet.offload.policy.plan import Costs, Plan
from ballonet.offload.policy.planner.answer import (
    BITS,
    Forecast,
    Limit,
    PlanAnswer,
    PlanChange,
    Planning,
    Question,
    What,
    answered,
    nearest,
)
from ballonet.offload.policy.planner.hardware import DEVICES, ForwardWork, by_device, interpolated, named
from ballonet.offload.policy.planner.memory import (
    Judged,
    Moment,
    Needs,
    Placed,
    PlanBudget,
    binding,
    everything,
    least,
    placed,
)
from ballonet.offload.policy.tuning import DEFAULT

PAGE, SECONDS = 2**21, 1e-4  # bytes, seconds to copy a page


def needs(
    layers: int = 8,
    pages: int = 10,
    *,
    kv: int = 2,
    beside: int = 5,
    activations: int = 3,
    decode: float | None = 0.02,
    crowd: int = 0,
    name: str = "it",
) -> Needs:
    """A model of equal layers, each with a range of `kv` pages of which the last is not full. `crowd`: pages that the
    prompt needs beyond what the last token does."""
    at = Moment((kv,) * layers, layers * max(0, kv - 1), activations)
    prefill = None if decode is None else 10 * decode
    first = replace(at, activations=activations + crowd)
    return Needs(name, (pages,) * layers, beside, 4, first, at, 100, prefill, decode)


def fits(model: Needs, budget: PlanBudget) -> Placed:
    """Where the model's pages go, alone."""
    (placement,) = placed([model], budget) or [None]
    assert placement is not None
    return placement


@st.composite
def drawn(draw: st.DrawFn, counts: Sequence[int] = (1, 2, 3)) -> list[Needs]:
    return [
        needs(
            draw(st.integers(1, 8)),
            draw(st.integers(1, 12)),
            kv=draw(st.integers(1, 9)),
            beside=draw(st.integers(0, 9)),
            activations=draw(st.integers(5, 20)),
            crowd=draw(st.integers(-5, 30)),
            decode=draw(st.sampled_from([None, 1e-4, 0.02, 1.0])),
            name=name,
        )
        for name in "abc"[: draw(st.sampled_from(counts))]
    ]


def test_kv_that_left_for_the_prompt_does_not_leave_again() -> None:
    """Two pages of each range may leave; all that may has left when the last token lacks some."""
    model = needs(kv=3, decode=1e-4, crowd=-2)
    movable = model.last.movable
    pages = model.weights + model.last.pages - movable - 2
    placement = fits(model, PlanBudget(pages, PAGE, SECONDS))
    assert placement.early == placement.away == movable
    assert placement.plan.streamed


@given(drawn(), st.integers(0, 400))
def test_placed_pages_fit_and_none_is_lost(models: list[Needs], pages: int) -> None:
    placements = placed(models, PlanBudget(pages, PAGE, SECONDS))
    if placements is None:
        return
    used = sum(at.weights + model.last.pages - at.away for model, at in zip(models, placements, strict=True))
    assert used <= pages
    for model, at in zip(models, placements, strict=True):
        assert at.plan.pages == model.layers
        assert at.weights == model.beside + at.plan.device_pages
        assert 0 <= at.early <= at.away <= model.last.movable


@settings(max_examples=50)
@given(drawn())
def test_the_least_budget_fits_and_one_page_less_does_not(models: list[Needs]) -> None:
    budget = PlanBudget(0, PAGE, SECONDS)
    pages = least(models, budget)
    assert placed(models, replace(budget, pages=pages)) is not None
    assert placed(models, replace(budget, pages=pages - 1)) is None


@settings(max_examples=50)
@given(drawn())
def test_what_binds_needs_the_least_budget_at_once(models: list[Needs]) -> None:
    budget = PlanBudget(0, PAGE, SECONDS)
    fewest = replace(budget, pages=least(models, budget))
    short = binding(models, fewest)
    assert short.weights + short.kv + short.activations >= fewest.pages
    assert not short.on_host
    assert short.what in ("weights", "kv", "activations")


@given(drawn())
def test_with_everything_nothing_streams_and_nothing_leaves(models: list[Needs]) -> None:
    placements = placed(models, PlanBudget(everything(models), PAGE, SECONDS))
    assert placements is not None
    assert all(at.settled and not at.plan.streamed and not at.away for at in placements)


@settings(max_examples=50)
@given(drawn(counts=(2, 3)))
def test_models_that_come_later_find_room_in_those_that_are_idle(models: list[Needs]) -> None:
    """One after the other they need no more than the smallest of all but what the last keeps free: its KV leaves only
    where pages are short (policy/kv_pages.py)."""
    together = least(models, PlanBudget(0, PAGE, SECONDS))
    apart = sum(least([model], PlanBudget(0, PAGE, SECONDS)) for model in models)
    assert together - apart <= max(8, together // DEFAULT.pages.short)


def test_weights_that_hide_leave_before_kv_and_others_after_it() -> None:
    """A layer takes 1 ms to copy and 2.5 ms to compute in a decode step: all but one hide."""
    model = needs(kv=10, decode=0.02)
    whole = everything([model])
    a_little = fits(model, PlanBudget(whole - 20, PAGE, SECONDS))
    assert (a_little.away, a_little.settled) == (0, True)
    assert len(a_little.plan.streamed) >= 3
    slow = replace(model, decode=1e-4, prefill=1e-4)  # nothing hides
    kv = fits(slow, PlanBudget(whole - 20, PAGE, SECONDS))
    assert (kv.away, kv.plan.streamed) == (20, ())
    most = model.last.movable
    both = fits(slow, PlanBudget(whole - most - 10, PAGE, SECONDS))
    assert both.away == most
    assert both.plan.streamed


def test_as_many_layers_stream_as_an_slo_allows() -> None:
    model = needs(decode=0.02)  # a layer is copied in 1 ms
    # in 4 ms: two of eight fit 20 ms, as one waits for none
    roomy = PlanBudget(everything([model]) + 50, PAGE, 0.004 / 10)
    tight, loose = (fits(model, replace(roomy, slo=slo)).plan for slo in (0.02, 0.0325))
    costs = Costs(model.layers, 0.02, 0.0004)
    assert 0 < len(tight.streamed) < len(loose.streamed) == 8
    assert costs.of(tight) <= 0.02
    assert costs.of(loose) <= 0.0325


@given(drawn(), st.integers(1, 400), st.sampled_from((1e-4, 0.02, 1.0)))
def test_a_run_decides_by_the_times_it_was_measured_to_take(models: list[Needs], pages: int, decode: float) -> None:
    budget = PlanBudget(pages, PAGE, SECONDS)
    known = [replace(model, decode=decode, prefill=10 * decode) for model in models]
    other = [replace(model, decode=7.0, prefill=8.0, judged=Judged(decode, 10 * decode, decode)) for model in models]
    assert placed(known, budget) == placed(other, budget)


# -- seconds


def test_measured_times_hold_and_parts_grow_apart_beyond() -> None:
    def law(batch: int, length: int) -> float:
        return 0.01 + 2e-5 * batch * length + 1e-8 * batch * length * length

    measured = {(b, n): law(b, n) for b in (1, 2, 4) for n in (64, 128, 256, 512)}
    for (batch, length), seconds in measured.items():
        assert interpolated("prefill", measured, batch, length) == pytest.approx(seconds)
    del measured[4, 512]  # it did not fit in memory
    for batch, length in [(8, 8192), (1, 8), (8, 128), (3, 400)]:
        assert interpolated("prefill", measured, batch, length) == pytest.approx(law(batch, length), rel=1e-3)
    assert interpolated("prefill", {}, 1, 1) is None
    assert interpolated("prefill", {(2, 64): 0.5}, 2, 64) == pytest.approx(0.5)


@given(st.lists(st.floats(1e-4, 1.0), min_size=9, max_size=9), st.sampled_from((1, 2, 4)), st.sampled_from((64, 256)))
def test_the_nearest_that_were_measured_count(times: list[float], batch: int, length: int) -> None:
    """Between them no time is beyond theirs. Beyond them one token or sequence more takes no less, and at most as much
    more as there are more pairs of tokens."""
    measured = dict(zip(product((1, 2, 4), (64, 128, 256)), times, strict=True))
    corners = [measured[size] for size in product((2, 4), (64, 128))]
    assert min(corners) - 1e-9 <= (interpolated("prefill", measured, 3, 100) or 0) <= max(corners) + 1e-9
    beyond = {64: 63, 256: 257}[length]
    for size, edge in [((batch, beyond), (batch, length)), ((5, length), (4, length))]:
        pairs = size[0] * size[1] ** 2 / (edge[0] * edge[1] ** 2)
        share = (interpolated("prefill", measured, *size) or 0) / measured[edge]
        assert min(1, pairs) - 1e-9 <= share <= max(1, pairs) + 1e-9


def test_a_device_takes_the_longest_of_three() -> None:
    device = DEVICES["h100"]
    compute, memory, calls = (
        by_device(work, device)
        for work in (ForwardWork(1e15, 1, 1, 2), ForwardWork(1, 1e12, 1, 2), ForwardWork(1, 1, 10**6, 2))
    )
    assert compute == pytest.approx(1e15 / (989e12 * 0.6))
    assert memory == pytest.approx(1e12 / (3.35e12 * 0.8))
    assert calls == pytest.approx(8.0)
    assert [ForwardWork(1, 10, 1, 2).reading(less).read for less in (4, 12)] == [6, 0]
    assert by_device(ForwardWork(1e15, 1, 1, 4), device) > 10 * compute  # float32
    assert by_device(ForwardWork(1e15, 1, 1, 1), device) == compute  # no figure for bytes: the next wider one


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("a100_40", "a100-40"),
        ("Radeon", None),
    ],
)
def test_devices_are_known_by_what_their_driver_calls_them(said: str, key: str | None) -> None:
    assert named(said) == (None if key is None else DEVICES[key])


# -- what binds


def test_the_limit_is_what_binds() -> None:
    model = needs(kv=3, decode=0.02)
    whole = everything([model])
    assert answered([model], PlanBudget(whole, PAGE, SECONDS)).limit == "compute"
    hidden = answered([model], PlanBudget(whole - 20, PAGE, SECONDS))
    assert (hidden.limit, bool(hidden.slowest.plan and hidden.slowest.plan.streamed)) == ("compute", True)
    slow = answered([model], PlanBudget(whole - 20, PAGE, 100 * SECONDS))
    assert slow.limit == "link"
    assert slow.slowest.waits > 0
    none = answered([model], PlanBudget(10, PAGE, SECONDS))
    assert (none.fits, none.limit) == (False, "memory")
    assert none.least == least([model], PlanBudget(0, PAGE, SECONDS))
    unknown = answered([replace(model, decode=None, prefill=None)], PlanBudget(whole, PAGE, None))
    assert (unknown.fits, unknown.limit, unknown.slowest.tpot) == (True, None, None)


def test_an_answer_counts_idle_pages_copies_and_what_is_aside() -> None:
    """Half of a copy is lost to computing; the heap keeps idle pages that the prompt needed."""
    model = replace(needs(kv=1, decode=0.02, crowd=30), aside=(0.5, 0.25))
    whole = everything([model])
    resident = answered([model], PlanBudget(whole, PAGE, SECONDS)).slowest
    assert (resident.ttft, resident.tpot, resident.waits) == pytest.approx((0.2 + 0.5, 0.02 + 0.25, 0))
    assert resident.weights + resident.kv + resident.activations == whole
    assert resident.activations == model.last.activations + 30
    hidden = answered([model], PlanBudget(whole - 20, PAGE, SECONDS, copying=0.5)).slowest
    assert hidden.plan is not None
    assert hidden.plan.copied_pages > 0
    assert hidden.waits == pytest.approx(hidden.plan.copied_pages * SECONDS / 2)
    assert hidden.tpot == pytest.approx(0.02 + hidden.waits + 0.25)


@pytest.mark.parametrize(
    ("decode", "copy", "host", "kv", "waits", "first"),
    [
        (0.1, 1e-4, 8 * 4, 80 - 8 * 4 + 2 * 4, 4.1e-4, 4.1e-4),  # the first of eight copies of 4 pages is waited for
        (0.01, 1e-4, 8 * 4, 80 - 8 * 4 + 2 * 4, 4.1e-4, 4.1e-4),
        (1e-4, 1e-4, 20, 60, 24e-4 / 0.9, 8 * 4.1e-4 - 7 / 8 * 1e-3),  # no copy hides
        (None, None, 8 * 4, 80 - 8 * 4 + 2 * 4, 0, 0),
    ],
)
def test_kv_that_is_away_is_read_in_the_fastest_way(
    decode: float | None, copy: float | None, host: int, kv: int, waits: float, first: float
) -> None:
    """20 of 80 pages are away: 3 of each layer's are read in place, or 4 go through two slots."""
    answer = answered([needs(pages=0, kv=10, decode=decode)], PlanBudget(68, PAGE, copy))
    (said,) = answer.models
    assert (said.host, said.kv) == (host, kv)
    if decode is not None:
        assert said.waits == pytest.approx(waits)
        assert answer.limit == ("link" if decode < 0.1 else "compute")
        assert (said.tpot, said.ttft) == pytest.approx((decode + waits, 10 * decode + first))


def test_models_that_stream_share_the_link() -> None:
    one, other = (replace(needs(decode=0.02, kv=1), name=name) for name in "ab")
    alone = answered([one], PlanBudget(60, PAGE, 10 * SECONDS))
    both = answered([one, other], PlanBudget(115, PAGE, 10 * SECONDS))
    assert alone.models[0].plan is not None
    assert both.models[0].plan is not None
    assert all(model.plan is not None and model.plan.copied for model in both.models)
    assert (both.slowest.tpot or 0) > 1.5 * (alone.slowest.tpot or 0)


def test_layers_that_had_to_stream_while_the_model_was_loaded_are_back_in_long_answers() -> None:
    model = replace(needs(kv=1, decode=1e-3), working=40)
    budget = PlanBudget(everything([model]) - 10, PAGE, SECONDS)
    short, long = (answered([model], budget, tokens) for tokens in (2, 10**6))
    assert short.models[0].plan is not None
    assert long.models[0].plan is not None
    assert short.models[0].plan.streamed != () == long.models[0].plan.streamed


# -- what would help

TRIED = Planning(saved=0.5, rounded=4)


@st.composite
def worlds(draw: st.DrawFn) -> Callable[[Question], PlanAnswer]:
    """A planner in which more pages never hurt: of what lacks a part may be away, and is copied."""
    wide, kept, second, link = (draw(st.integers(*ends)) for ends in ((0, 6), (0, 9), (1, 9), (0, 3)))

    def ask(asked: Question) -> PlanAnswer:
        assert 1 <= asked.prompt <= asked.context
        pages = (asked.bits or 16) * wide + asked.context * asked.batch + asked.prompt + kept
        least, lack = pages // 2, max(0, pages - asked.pages)
        limit: Limit | None = "link" if lack else "compute"
        if asked.pages < least or (asked.host is not None and lack > asked.host):
            limit = "memory" if asked.pages < least else "host"
        fits = limit in ("link", "compute")
        tpot = float(second * (pages - kept) + link * lack) if fits and (link or not lack) else None
        plan = Plan((1, 1), *((0,), (0,)) * (lack > kept)) if fits else None
        forecast = Forecast(needs(), plan, 0, 0, 0, tpot=tpot)
        known = asked.slo is not None and (tpot is not None or not fits)
        met = tpot is not None and tpot <= asked.slo if asked.slo is not None and known else None
        beside = replace(forecast, plan=Plan((1,)) if fits else None)
        return PlanAnswer(
            fits, [forecast, beside], least, pages, None if fits and tpot is None else limit, asked.slo, met
        )

    return ask


def lifted(before: PlanAnswer, after: PlanAnswer) -> bool:
    """The table of what counts as no longer binding."""
    old, new = before.slowest.tpot, after.slowest.tpot
    saves = old is not None and new is not None and new <= old / 2
    better = after.met if before.met is False else after.limit == "compute" if before.limit == "link" else saves
    return after.fits and (not before.fits or better is True)


@settings(max_examples=300)
@given(
    worlds(),
    st.builds(
        Question,
        *(st.integers(*ends) for ends in ((0, 120), (1, 16), (1, 16), (1, 5))),
        slo=st.none() | st.integers(1, 300),
        host=st.none() | st.integers(0, 60),
    ),
    st.integers(0, 6),
)
def test_the_nearest_changes_are_those_of_all_that_are_tried(
    ask: Callable[[Question], PlanAnswer], asked: Question, most: int
) -> None:
    """By brute force: of each kind the first, from the nearest on, with which the limit no longer binds."""
    asked = replace(asked, prompt=min(asked.prompt, asked.context))
    before = ask(asked)
    unit = min(TRIED.rounded, max(1, asked.context // 2))
    tried: dict[What, Iterable[int]] = {
        "budget": range(asked.pages + 1, before.all + 1),
        "host": range((asked.host or 0) + 1, before.all + 1) if before.limit == "host" else (),
        "context": [length for length in range(asked.context - 1, 0, -1) if length % unit == 0],
        "batch": range(asked.batch - 1, 0, -1),
        "weights": BITS,
    }
    names = {"budget": "pages", "weights": "bits"}
    expected = []
    for what, values in tried.items():
        was = 16 if what == "weights" else max(1, getattr(asked, names.get(what, what)) or 0)
        for to in values:
            prompt = min(asked.prompt, to) if what == "context" else asked.prompt
            after = ask(replace(asked, prompt=prompt, **{names.get(what, what): to}))
            resident = not any(model.plan and model.plan.streamed for model in after.models)
            if lifted(before, after) and (what != "weights" or resident):
                expected.append(PlanChange(what, to, max(to / was, was / to), after))
                break
    if asked.slo and before.met is False and (tpot := before.slowest.tpot):
        expected.append(PlanChange("slo", tpot, tpot / asked.slo, replace(before, slo=tpot, met=True)))
    expected.sort(key=lambda each: (each.factor, each.what))
    assert nearest(asked, before, ask, replace(TRIED, changes=most)) == expected[:most]


# -- a prompt, stage by stage


def staged(*, decode: float | None, activations: int = 3, fewest: int | None = None) -> Needs:
    """A model whose operators have as many pages in each stage, while layer after layer appends 3 pages of KV, of which
    the last is not full."""
    model = needs(kv=3, decode=decode, activations=activations)
    stages = tuple(
        Moment((3,) * count, 2 * max(0, count), activations, fewest) for count in range(len(model.layers) + 1)
    )
    return replace(model, stages=stages, prompt=stages[-1], last=replace(stages[-1], fewest=fewest))


def test_before_any_kv_is_full_only_layers_can_leave() -> None:
    """Nothing hides, so that KV would leave before layers; but the first stage has none."""
    slow, page = staged(decode=1e-4, activations=40), 10
    first = replace(slow, stages=(replace(slow.stages[0], activations=80), *slow.stages[1:]))
    placement = fits(first, PlanBudget(slow.weights + 80 - page, PAGE, SECONDS))
    assert (placement.away, bool(placement.plan.streamed)) == (0, True)
    late = fits(slow, PlanBudget(slow.weights + slow.last.pages - page, PAGE, SECONDS))
    assert (late.away, late.plan.streamed) == (page, ())
    last = replace(slow.last, activations=40 + page)
    grown = replace(slow, growth=(replace(last, movable=0), last), last=last)
    placement = fits(grown, PlanBudget(slow.weights + slow.last.pages, PAGE, SECONDS))
    assert (placement.away, bool(placement.plan.streamed)) == (0, True)


def test_where_kernels_may_have_more_it_is_said_that_it_hangs_on_that() -> None:
    """By the most ten pages of KV leave, by the least none."""
    model = staged(decode=1e-4, activations=13, fewest=3)
    budget = PlanBudget(model.weights + sum(model.last.kv) + 3, PAGE, SECONDS)
    placement = fits(model, budget)
    assert (placement.away, placement.settled) == (0, False)
    assert placed([model], replace(budget, pages=least([model], budget) - 1)) is None
    assert fits(model, replace(budget, pages=budget.pages + 10)).settled


def test_without_a_record_it_is_said_that_the_order_hangs_on_times() -> None:
    """Whether layers or KV leave first does."""
    model = staged(decode=None)
    short = PlanBudget(model.weights + model.last.pages - 20, PAGE, None)
    assert fits(model, short)
    assert fits(staged(decode=1e-4), replace(short, page_seconds=SECONDS)).settled
    answer = Moment(model.last.kv, model.last.movable, model.last.activations)
    grown = replace(model, growth=(answer, replace(answer, kv=(5,) * 8, movable=24)), last=replace(answer, kv=(5,) * 8))
    assert not fits(grown, PlanBudget(model.weights + model.last.pages + 2, PAGE, None)).settled


def test_pages_that_leave_need_room_on_the_host() -> None:
    model = needs(kv=10, decode=1e-4)
    budget = PlanBudget(everything([model]) - 20, PAGE, SECONDS)
    placement = fits(model, budget)
    there = placement.away + placement.plan.host_pages
    assert there >= 20
    assert placed([model], replace(budget, host=there)) is not None
    assert placed([model], replace(budget, host=there - 1)) is None
    short = answered([model], replace(budget, host=there - 1))
    assert (short.fits, short.limit) == (False, "host")
    assert budget.pages < short.least <= everything([model])
    assert answered([model], replace(budget, pages=5, host=0)).limit == "memory"
    kept = answered([model], replace(budget, pages=1000, host=0, slo=10.0))
    assert (kept.limit, kept.least) == ("host", least([model], replace(budget, slo=10.0)))
    asked = Question(budget.pages, 64, 63, 1, host=there - 5)

    def ask(question: Question) -> PlanAnswer:
        return answered([model], replace(budget, pages=question.pages, host=question.host))

    named = {change.what: change.to for change in nearest(asked, ask(asked), ask)}
    assert named["host"] == there
