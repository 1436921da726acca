"""Continuous batching of a managed model: stock's tokens, pages as the requests need them, all back at the end."""

from __future__ import annotations

import gc
import itertools
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers.generation.continuous_batching import continuous_api, input_outputs, scheduler
from transformers.modeling_utils import AttentionInterface

import ballonet
from ballonet import testing
from ballonet.allocator import devices
from ballonet.hooks.batching import patches
from ballonet.hooks.batching.cache import ElasticPagedCache
from ballonet.hooks.batching.memory import RequestMemory
from ballonet.hooks.batching.pages import RESERVED
from ballonet.hooks.batching.scheduler import ElasticScheduler
from ballonet.hooks.batching.steps import PagePreemption
from ballonet.offload.manager.turns import LoopTurns, LoopWork, Seat
from ballonet.offload.policy.admission import Memory
from ballonet.offload.policy.step_costs import Parts, RequestSLO, Step, StepCosts

from ..core import PAGE_CALLS, eventually
from ..models import build
from ..tuned import Clock, Tuned
from .batches import PAGE, TOGETHER, answers, ask, install, looping, prompts, stock

pytestmark = pytest.mark.chaos


PATCHES = (
    lambda: vars(continuous_api)["PagedAttentionCache"],
    lambda: vars(input_outputs)["attn_mask_is_needed"],
    lambda: AttentionInterface._global_mapping["sdpa"],
    lambda: scheduler.SCHEDULER_MAPPING["fifo"],
    lambda: continuous_api.ContinuousBatchingManager._create_batch_processor,
)


@pytest.fixture(autouse=True)
def _patches(nothing_is_left: None) -> Iterator[None]:
    before = [patch() for patch in PATCHES]
    yield
    gc.collect()
    assert [patch() for patch in PATCHES] == before


# full attention, a window in all layers, in some; norms of keys; experts; positions of their own
@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *((name, "sdpa") for name in ("llama", "mistral-window", "gemma3_text", "olmo3", "mixtral", "gpt_bigcode")),
        *((name, "eager") for name in ("llama", "cohere2", "exaone4", "gpt2")),
    ],
)
def test_tokens_are_stocks(name: str, attention: str) -> None:
    model = build(name)
    model.set_attn_implementation(attention)
    asked = prompts(6, 40)
    expected = stock(model, asked)
    install(256)
    with ballonet.manage(model):
        assert answers(model, asked) == expected
    assert answers(model, asked, num_blocks=96) == expected


def test_requests_that_do_not_fit_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that are admitted find their pages: no step lacks any in the middle."""
    lacked = list[object]()
    monkeypatch.setattr(ElasticScheduler, "lose_step", lambda *step: lacked.append(step))
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}  # 16 tokens take two pages
    model = build("llama", num_hidden_layers=4, **heads)
    asked = prompts(24, 60)
    expected = stock(model, asked, 40)
    install(40)
    with ballonet.manage(model):
        assert answers(model, asked, 40) == expected
        eventually(lambda: devices.require().snapshot()["pages"]["kv"] == 0)  # the loop's thread may end late
    assert lacked == []


@pytest.mark.counts
@pytest.mark.parametrize("host", [64, 0])
def test_pages_of_requests_go_to_the_host_and_come_back(host: int) -> None:
    """In the middle of a step, too, whose activations need them. Without room there requests are computed again."""
    model, asked = build("llama", num_hidden_layers=12), prompts(16, 60)
    expected = stock(model, asked, 60)
    ballonet.install(28 * PAGE, page_size=PAGE, host_budget=host * PAGE, device="cpu")
    with ballonet.manage(model):
        assert answers(model, asked, 60) == expected
        assert (ballonet.stats().copied.kv_d2h > 8 * PAGE) == (host > 0)
    device = devices.require()
    if not host:
        assert not device.host_pages
        assert "a host budget of 0" in device.host_refused
        assert device.snapshot()["host_pages"] == ballonet.stats().copied.kv_d2h == 0


@pytest.mark.parametrize(
    ("name", "seed", "tokens", "changes"),
    [
        ("llama", 1, 30, {"num_hidden_layers": 12}),
        ("mixtral", 2, 30, {"num_hidden_layers": 4}),
        ("gemma3_text", 8, 60, {}),
    ],
)
def test_tokens_are_stocks_while_pages_move(name: str, seed: int, tokens: int, changes: dict[str, int]) -> None:
    """Pages that requests leave are unmapped meanwhile, and nobody reads there."""
    model, asked = build(name, **changes), prompts(18, 60)
    expected = stock(model, asked, tokens)
    install(64)
    with testing.manage(model, chaos=seed) as managed:
        assert answers(model, asked, tokens, allow_block_sharing=False) == expected
        chaos = testing.chaos_of(managed)
        assert chaos is not None
        moved = {way: chaos.moved[f"kv_{way}"] for way in ("device", "host", "away", "restored", "unmapped")}
        assert min(moved.values()) > 0, moved


@pytest.mark.counts
@pytest.mark.parametrize("schedule", ["fifo", "prefill_first"])
def test_pages_follow_the_requests(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sector has pages from the request that gets it until the last one that has it is gone."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}  # 16 tokens take two pages
    model, asked, seen = build("llama", num_hidden_layers=4, **heads), prompts(8, 60), list[int]()
    expected = stock(model, asked)
    install(256)
    processor = continuous_api.ContinuousBatchProcessor
    step = processor._generation_step

    def watched(self: Any, model: Any) -> None:
        assert isinstance(self.cache, ElasticPagedCache)
        used = {piece for sector in self.cache.pool.used for piece in self.cache.pages.pieces(sector)}
        backed = {n for n in range(self.cache.pages.range.pieces) if self.cache.pages.range.leads_to(n) == "device"}
        assert used <= backed
        always = {piece for sector in range(RESERVED) for piece in self.cache.pages.pieces(sector)}
        assert self.cache.pages.pages == len(used | always)
        seen.append(len(backed))
        step(self, model)

    monkeypatch.setattr(processor, "_generation_step", watched)
    with ballonet.manage(model):
        assert answers(model, asked, scheduler_type=schedule, allow_block_sharing=False) == expected
    assert max(seen[0], seen[-1]) < max(seen) < 2 * 5 * len(asked), seen


@pytest.mark.counts
def test_requests_that_come_and_go_change_no_page() -> None:
    """Pages that requests leave are those of the next, though two models take turns: only a new peak maps any."""
    built = [build("llama", num_hidden_layers=12) for _ in range(2)]
    draw, changes = torch.Generator().manual_seed(0), list[float]()
    install(512)
    device = devices.require()
    with ExitStack() as stack:
        for model in built:
            stack.enter_context(ballonet.manage(model, batches="full"))
        loops = [
            stack.enter_context(looping(model, 24, max_batch_tokens=256, allow_block_sharing=False)) for model in built
        ]
        for turn in range(12):
            before, manager = device.snapshot()["driver_calls"], loops[turn % 2]
            lengths = torch.randint(20, 100, (8,), generator=draw).tolist()
            asked = [torch.randint(3, 60, (length,), generator=draw).tolist() for length in lengths]
            assert [answer.error for answer in ask(manager, asked)] == [None] * 8
            after = device.snapshot()["driver_calls"]
            changes.append(sum(after[call] - before[call] for call in PAGE_CALLS) / (8 * 24))
        device.check()
        assert changes[0] > 0.2
        assert sum(changes[-4:]) / 4 < 0.05, changes
        del manager, loops


@pytest.mark.counts
def test_a_loop_begins_with_the_pages_of_the_one_before() -> None:
    model, asked, changes = build("llama", num_hidden_layers=12), prompts(16, 60), list[int]()
    install(512)
    device = devices.require()
    with ballonet.manage(model, batches="full"):
        for _ in range(4):
            before = device.snapshot()["driver_calls"]
            answers(model, asked, 30, allow_block_sharing=False)
            after = device.snapshot()["driver_calls"]
            changes.append(sum(after[call] - before[call] for call in PAGE_CALLS))
    assert changes[0] > 80
    assert sum(changes[1:]) < 30, changes


class Batches:
    """Sizes of the batches of a loop: (new tokens of each request, prompts among them?)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[list[int]] = []
        processor = continuous_api.ContinuousBatchProcessor
        step = processor._generation_step

        def watched(processor: Any, model: Any) -> None:
            self.sizes.append([request.query_length for request in processor.inputs_and_outputs.requests_in_batch])
            step(processor, model)

        monkeypatch.setattr(processor, "_generation_step", watched)


@pytest.mark.parametrize("batches", ["fast", "full"])
def test_batches_are_as_large_as_is_fast(batches: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where attention costs much, few requests are in a batch, and prompts have steps of their own."""
    costly = Parts(0.01, 1e-6, 0.0, 1e-5)  # 6 requests of 30 tokens: sqrt(0.01 / 30e-5)
    monkeypatch.setattr(StepCosts, "observe", lambda self, step, seconds: setattr(self, "parts", costly))
    model, asked = build("llama", num_hidden_layers=4), prompts(24, 60)
    expected = stock(model, asked, 8)
    install(256)
    seen = Batches(monkeypatch)
    with ballonet.manage(model, batches=batches):
        assert answers(model, asked, 8) == expected
    largest = max(len(sizes) for sizes in seen.sizes)
    mixed = [sizes for sizes in seen.sizes[3:] if max(sizes) > 1 and 1 in sizes]
    assert (largest < 8 and not mixed) if batches == "fast" else (largest > 11 and mixed)


def known_costs(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Has loops know what steps take once they have run one. Returns [seconds of a page on the host], to be set."""
    away = [0.0]

    def known(costs: StepCosts, step: Step, seconds: float) -> None:
        costs.parts = costs._fitted = Parts(0.01, 1e-4, 0.0, 0.0, away=away[0])
        costs._copying = True

    monkeypatch.setattr(StepCosts, "observe", known)
    return away


@pytest.mark.counts
def test_batches_are_smaller_where_kv_on_the_host_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has room for a few requests, the host for all."""
    away, largest = known_costs(monkeypatch), list[int]()
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}  # 16 tokens take six pages
    model, asked = build("llama", num_hidden_layers=12, **sizes), prompts(16, 30)
    expected = stock(model, asked, 8)
    ballonet.install(120 * PAGE, page_size=PAGE, host_budget=512 * PAGE, device="cpu")
    with ballonet.manage(model, interval=None):
        for away[0] in (1.0, 0.0, 1.0):
            seen = Batches(monkeypatch)
            assert answers(model, asked[:1], 8) == expected[:1]  # after which it is known what steps take
            assert answers(model, asked, 8) == expected
            largest.append(max(map(len, seen.sizes)))
    assert largest[1] > max(largest[0], largest[2]), largest


@pytest.mark.counts
def test_requests_begin_with_pages_that_others_use_only_where_those_hardly_wait_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """200 of 320 pages are in use by other models, as far as the scheduler is told."""
    away, largest, now = known_costs(monkeypatch), list[int](), RequestMemory.now

    def used(memory: RequestMemory, *, plain: bool = False) -> Memory:
        all_of_it = now(memory, plain=plain)
        return replace(all_of_it, host=0, in_use=min(all_of_it.elsewhere, 200 * PAGE))

    monkeypatch.setattr(RequestMemory, "now", used)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}  # 16 tokens take six pages
    model, asked = build("llama", num_hidden_layers=12, **sizes), prompts(16, 30)
    expected = stock(model, asked, 8)
    install(320)
    with ballonet.manage(model, interval=None):
        for away[0] in (1.0, 0.0, 1.0):
            seen = Batches(monkeypatch)
            assert answers(model, asked[:1], 8) == expected[:1]  # after which it is known what steps take
            assert answers(model, asked, 8) == expected
            largest.append(max(map(len, seen.sizes)))
    assert largest[1] > max(largest[0], largest[2]), largest


@pytest.mark.counts
def test_requests_that_run_give_up_their_pages_before_they_take_those_that_others_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once four requests run, others use all pages that are free, as far as the scheduler is told. Steps are costed by
    what they read on the host once requests that had given up theirs are back."""
    away, preempted, now = known_costs(monkeypatch), list[int](), RequestMemory.now
    step, reads = continuous_api.ContinuousBatchProcessor._generation_step, list[tuple[int, int]]()

    def watched(processor: Any, model: Any) -> None:
        reads.append((processor.scheduler.next.away, processor.cache.pages.client.read_displaced))
        step(processor, model)

    def used(memory: RequestMemory, *, plain: bool = False) -> Memory:
        all_of_it, running = now(memory, plain=plain), memory._cache.user().active_requests
        return replace(all_of_it, host=0, in_use=all_of_it.total if len(running) > 3 else 0)

    monkeypatch.setattr(RequestMemory, "now", used)
    preempt = PagePreemption._preempt
    monkeypatch.setattr(PagePreemption, "_preempt", lambda self, state: (preempted.append(1), preempt(self, state)))
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}  # 16 tokens take six pages
    model, asked = build("llama", num_hidden_layers=12, **sizes), prompts(4, 30)
    expected = stock(model, asked, 40)
    monkeypatch.setattr(continuous_api.ContinuousBatchProcessor, "_generation_step", watched)
    install(320)
    with ballonet.manage(model, interval=None):
        for away[0], gives in ((0.0, False), (1.0, True)):
            assert answers(model, asked[:1], 40) == expected[:1]  # after which it is known what steps take
            preempted.clear()
            assert answers(model, asked, 40) == expected
            assert bool(preempted) == gives
            assert all(told == read for told, read in reads)


def test_requests_wait_for_what_others_are_promised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, at_steps: Callable[[Iterator[None]], None]
) -> None:
    """A request that has waited for too long is told."""
    costly = Parts(0.01, 1e-6, 0.0, 1e-5)  # a step of 3 requests of 24 tokens takes 12.2 ms
    monkeypatch.setattr(StepCosts, "observe", lambda self, step, seconds: setattr(self, "parts", costly))
    model, asked = build("llama", num_hidden_layers=4), prompts(10, 30)
    expected = stock(model, asked, 8)
    install(256)
    seen, by_id = Batches(monkeypatch), dict[str, Any]()

    def many(manager: Any) -> Iterator[None]:
        schedule = manager.batch_processor.scheduler
        for n, prompt in enumerate(asked):
            schedule.slos.note(str(n), RequestSLO(tpot=0.012, arrived=schedule.clock()))
            manager.add_request(prompt, request_id=str(n))
        schedule.slos.note("late", RequestSLO(ttft=1.0, arrived=schedule.clock() - 5))
        manager.add_request(asked[0], request_id="late")
        yield

    def one(manager: Any) -> Iterator[None]:
        schedule = manager.batch_processor.scheduler
        schedule.slos.note("alone", RequestSLO(tpot=0.0105))  # 50 tokens at most
        manager.add_request(asked[2], request_id="alone")
        while "alone" not in schedule.waiting_requests:
            yield
        schedule.slos.note("alone", RequestSLO(1.0, 0.0105, arrived=schedule.clock() - 5))
        while "alone" in schedule.waiting_requests:
            yield
        manager.cancel_request("long")

    with ballonet.manage(model, batches="full"):
        with looping(model, 8) as manager:
            first = manager.add_request(asked[0])  # after which it is known what steps take
            while manager.get_result(timeout=1) is None:
                pass
            at_steps(many(manager))
            manager.add_request(asked[0], request_id="before")
            while len(by_id) < len(asked) + 2:
                if (answer := manager.get_result(timeout=1)) is not None:
                    by_id[answer.request_id] = answer
            at_steps(one(manager))
            manager.add_request(asked[1], request_id="long", max_new_tokens=400)
            while (answer := manager.get_result(timeout=1)) is None or answer.request_id != "alone":
                pass
            by_id["alone"] = answer
        del manager, answer
    assert first is not None
    for name in ("late", "alone"):
        assert "ttft of 1 s cannot be kept; the nearest that can is 5.0" in str(by_id.pop(name).error)
    caplog.clear()  # which holds a traceback
    assert [by_id[str(n)].generated_tokens for n in range(len(asked))] == [right.tokens for right in expected]
    assert 1 < max(len(sizes) for sizes in seen.sizes) <= 3


@pytest.mark.counts
def test_the_intervals_are_those_that_requests_allow(tuned: Tuned) -> None:
    """Nobody asked anything of the model: as many layers stream as the requests of a batch allow, and none after."""
    tuned(weights={"large": 2**11}, serving={"behind": -1.0})  # tiny layers have ranges; nobody is ever behind
    model, asked = build("llama", num_hidden_layers=6), prompts(4, 30)
    expected = stock(model, asked, 40)
    install(256)
    streamed: list[tuple[int, ...]] = []
    with ballonet.manage(model) as managed:
        assert [answers(model, asked, 40), answers(model, asked, 40)] == [expected, expected]  # what batches take
        assert managed.report().streamed == ()
        with looping(model, 40) as manager:
            schedule = manager.batch_processor.scheduler
            for n, prompt in enumerate(asked):
                schedule.slos.note(str(n), RequestSLO(ttft=600.0, tpot=60.0, arrived=schedule.clock()))
                manager.add_request(prompt, request_id=str(n), streaming=True)
            by_id: dict[str, list[int]] = {}
            while len(by_id) < len(asked):
                if (answer := manager.get_result(timeout=1)) is not None:
                    streamed.append(managed.report().streamed)
                    if answer.is_finished():
                        by_id[answer.request_id] = answer.generated_tokens
            manager.add_request(asked[0], request_id="nothing asked")
            while manager.get_result(timeout=1) is None:
                pass
        del manager, schedule, answer
        assert [by_id[str(n)] for n in range(len(asked))] == [right.tokens for right in expected]
        assert max(map(len, streamed)) > 2
        assert managed.report().streamed == ()


@pytest.mark.counts
def test_layers_stay_resident_while_requests_wait(tuned: Tuned) -> None:
    tuned(weights={"large": 2**11})
    model, asked = build("llama", num_hidden_layers=6), prompts(12, 30)
    expected = stock(model, asked, 40)
    install(256)
    with ballonet.manage(model) as managed:
        assert [answers(model, asked, 40), answers(model, asked, 40)] == [expected, expected]  # what batches take
        with looping(model, 40) as manager:
            schedule = manager.batch_processor.scheduler
            for n, prompt in enumerate(asked):
                schedule.slos.note(str(n), RequestSLO(ttft=600.0, tpot=60.0, arrived=schedule.clock()))
                manager.add_request(prompt, request_id=str(n))
            done = 0
            while done < len(asked):
                done += manager.get_result(timeout=1) is not None
                assert managed.report().streamed == ()
        del manager, schedule


def test_the_buffer_on_the_host_follows_what_is_violated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Algorithm 2 of eLLM in the loop: it falls while steps are too slow, and no request is lost by that."""
    monkeypatch.setattr(StepCosts, "observe", lambda *_: None)  # so that nothing is refused
    model, asked = build("llama", num_hidden_layers=4), prompts(24, 30)
    expected = stock(model, asked, 8)
    install(24)
    sizes: list[int] = []
    with ballonet.manage(model):
        with looping(model, 8) as manager:
            schedule = manager.batch_processor.scheduler
            watch = model.register_forward_pre_hook(
                partial(lambda it, *_: sizes.append(it.memory.buffer.size), schedule)
            )
            for slo in (RequestSLO(), RequestSLO(tpot=1e-9), RequestSLO(ttft=1e-9)):
                sizes.clear()
                by_id: dict[str, Any] = {}
                with TOGETHER:
                    for n, prompt in enumerate(asked):
                        schedule.slos.note(f"{n} {slo}", replace(slo, arrived=schedule.clock()))
                        manager.add_request(prompt, request_id=f"{n} {slo}")
                while len(by_id) < len(asked):
                    if (answer := manager.get_result(timeout=1)) is not None:
                        by_id[answer.request_id] = answer.generated_tokens
                assert [by_id[f"{n} {slo}"] for n in range(len(asked))] == [right.tokens for right in expected]
                if slo.tpot:
                    assert sizes[-1] < sizes[0] == 24 * PAGE
                    assert sizes == sorted(sizes, reverse=True)
                elif slo.ttft:
                    assert sizes[-1] > sizes[0]
                else:
                    assert set(sizes) == {24 * PAGE}
        watch.remove()
        del manager, schedule, answer


def test_slo_of_a_model_is_that_of_its_requests() -> None:
    install(64)
    model: Any = build("llama")
    asked: list[RequestSLO] = []
    with ballonet.manage(model, tpot_slo=60.0):
        with looping(model, 4) as manager:
            schedule = manager.batch_processor.scheduler
            names = iter(("none",) * 4 + ("own",) * 4)
            watch = model.register_forward_pre_hook(
                partial(lambda it, *_: asked.append(it.slos.asked(next(names))), schedule)
            )
            manager.add_request([5, 6, 7], request_id="none")
            assert manager.get_result(timeout=600).error is None
            schedule.slos.note("own", RequestSLO(tpot=50.0))
            manager.add_request([5, 6, 7], request_id="own")
            assert manager.get_result(timeout=600).error is None
        watch.remove()
        del manager, schedule
        asked_of = [(request.ttft, request.tpot, request.arrived > 0) for request in asked]
        assert asked_of == [(None, 60.0, True)] * 4 + [(None, 50.0, False)] * 4


def test_a_model_is_wanted_as_long_as_it_has_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that only wait count."""
    install(64)
    model: Any = build("llama")
    with ballonet.manage(model):
        batched, seen, waiting = patches.batched(model), list[float | None](), list[float | None]()
        assert batched is not None
        assert batched.wanted is None
        process = ElasticScheduler._process_candidates

        def watched(self: Any, *args: Any) -> Any:
            if self.waiting_requests and not self.active_requests:
                waiting.append(batched.wanted)
            return process(self, *args)

        monkeypatch.setattr(ElasticScheduler, "_process_candidates", watched)
        model.register_forward_pre_hook(lambda *_: seen.append(batched.wanted))
        with looping(model, 4) as manager:
            manager.add_request([5, 6, 7])
            assert manager.get_result(timeout=600).error is None
            while not 0 < (batched.wanted or 0) < math.inf:
                assert manager.get_result(timeout=0.01) is None
            assert batched.wanted <= time.monotonic()
        assert ({*waiting}, seen) == ({math.inf}, [math.inf] * 4)
        del manager
        gc.collect()
        assert batched.wanted is None


def test_loops_of_models_that_do_not_fit_take_turns_and_answer_as_stock(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a slow link, and with answers far longer than a turn: each is suspended, more than once."""
    monkeypatch.setenv("BALLONET_LINK", "20MB/s")
    monkeypatch.setenv("BALLONET_TURN", "1s")
    tuned(clock=Clock(step=0.03), weights={"large": 2**11}, turns={"patience": 4.0})
    built = [build("llama", num_hidden_layers=12, hidden_size=128) for _ in range(2)]
    asked = prompts(3, 40)
    expected = stock(built[0], asked, 60)
    install(100)
    had, waits = list[int](), list[bool]()
    step = LoopTurns.may_step

    def watched(turns: LoopTurns, seat: Seat, work: LoopWork | None) -> bool:
        may = step(turns, seat, work)
        had.extend([seat.number] if may and work is not None and turns._turn.has else [])
        waits.extend([seat.until is not None])
        return may

    monkeypatch.setattr(LoopTurns, "may_step", watched)
    with ExitStack() as stack:
        for model in built:
            stack.enter_context(ballonet.manage(model))
        loops = [stack.enter_context(looping(model, 60)) for model in built]
        with TOGETHER:
            names = [[loop.add_request(prompt) for prompt in asked] for loop in loops]
        for loop, its in zip(loops, names, strict=True):
            outputs = {(output := loop.get_result(timeout=600)).request_id: output for _ in its}
            assert [outputs[name].generated_tokens for name in its] == [answer.tokens for answer in expected]
            assert {output.error for output in outputs.values()} == {None}
        del loop, loops
    turns = sum(one != other for one, other in itertools.pairwise(had))
    assert any(waits)
    assert turns >= 2, had


@pytest.mark.counts
@pytest.mark.parametrize(("pages", "streams"), [(64, True), (512, False)])
def test_the_heap_gives_back_what_a_batch_took_where_layers_stream(pages: int, streams: bool, tuned: Tuned) -> None:
    """The manager counts with free pages alone, so that layers would not come home else. Where all are there the heap
    keeps what the next batch takes again."""
    tuned(weights={"large": 2**11})  # so that tiny layers have ranges
    model = build("llama", num_hidden_layers=12, hidden_size=128)
    install(pages)
    with ballonet.manage(model) as managed, looping(model, 4) as manager:
        assert bool(managed.report().streamed) == streams
        batched = patches.batched(model)
        assert batched is not None
        manager.add_request([*range(3, 60)])
        assert manager.get_result(timeout=600).error is None
        while not 0 < (batched.wanted or 0) < math.inf:
            assert manager.get_result(timeout=0.01) is None
        assert (devices.require().trim() == 0) == streams


def test_layers_come_home_after_a_burst_though_requests_never_pause(tuned: Tuned) -> None:
    """A short request comes whenever one of three ends, and they never end at the same step."""
    tuned(clock=Clock(step=0.01), weights={"large": 2**11}, serving={"idle": 16})
    model = build("llama", num_hidden_layers=12, hidden_size=128)
    install(80)
    lengths = itertools.cycle((8, 11, 13))
    with ballonet.manage(model) as managed, looping(model, 8, max_batch_tokens=256) as manager:

        def ask() -> None:
            manager.add_request([*range(3, 11)], max_new_tokens=next(lengths))

        def answered() -> bool:
            """Is it one of the burst?"""
            answer = manager.get_result(timeout=600)
            assert answer.error is None
            large = len(answer.prompt_ids) > 8
            if not large:
                ask()
            return large

        with TOGETHER:
            for _ in range(16):
                manager.add_request([*range(3, 193)])
            for _ in range(3):
                ask()
        left = 16
        while left:
            left -= answered()
        assert ballonet.stats().copied.weights_h2d > 0, "layers have streamed"
        for _ in range(400):
            answered()
            if not managed.report().streamed:
                break
        assert not managed.report().streamed


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (continuous_api.ContinuousBatchingManager, "_create_batch_processor"),
        (continuous_api.ContinuousBatchProcessor, "_generation_step"),
    ],
)
def test_wrapper_of_another_library_stays(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, stock_s := getattr(owner, name))  # which is put back at the end
    install(64)
    model = build("llama")
    with ballonet.manage(model):
        mine = getattr(owner, name)
        assert mine is not stock_s
        setattr(owner, name, theirs := lambda *args, **kwargs: mine(*args, **kwargs))
    assert getattr(owner, name) is theirs


def test_other_models_stay_stock() -> None:
    model, other, asked = build("llama"), build("qwen2"), prompts(3, 20)
    expected, stock_cache = (stock(model, asked), stock(other, asked)), PATCHES[0]()
    install(256)
    with ballonet.manage(model):
        assert (answers(model, asked), answers(other, asked, num_blocks=48)) == expected
        with looping(other, 4, num_blocks=48) as manager:
            assert type(manager.batch_processor.cache) is stock_cache
        del manager


def test_where_it_cannot_be_elastic_it_stays_stock_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler.Scheduler, "_process_candidates", lambda self, states: None)
    model = build("llama")
    install(256)
    patches.why_stock.cache_clear()
    try:
        with (
            pytest.warns(RuntimeWarning, match="stays transformers' own: .*candidates"),
            ballonet.manage(model),
        ):
            assert vars(continuous_api)["PagedAttentionCache"] is PATCHES[0]()
    finally:
        patches.why_stock.cache_clear()


def test_a_request_that_can_never_run_is_refused_at_once_and_others_are_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, asked = build("llama", num_hidden_layers=4), prompts(3, 20)
    expected = stock(model, asked)
    install(16)
    with ballonet.manage(model):
        first, second, large, last, empty = answers(model, [*asked[:2], asked[0] * 400, asked[2], []])
    caplog.clear()  # which holds the traceback
    assert [first, second, last] == expected
    assert large.tokens == empty.tokens == []
    assert "no tokens" in str(empty.error)
    assert re.search(r"req_2 needs .* of KV and activations, of which the device can have .*KiB", str(large.error))


@pytest.mark.parametrize("name", ["gpt_bigcode", "gpt2"])
def test_request_beyond_a_table_of_positions_is_refused_alone(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where positions are computed requests go on as stock's do."""
    model, rotary = build(name, max_position_embeddings=32), build("llama", max_position_embeddings=32)
    asked = prompts(2, 8)
    fits, over = [[5] * 21, *asked], [[5] * 22, *asked]
    expected = stock(model, fits), stock(rotary, over)
    install(64)
    with ballonet.manage(model), ballonet.manage(rotary):
        assert answers(model, fits) == expected[0]
        refused, *others = answers(model, over)
        assert answers(rotary, over) == expected[1]
    caplog.clear()  # which holds the traceback
    assert others == expected[0][1:]
    assert "has 22 tokens and asks for 12 more, and the model's longest sequence has 32" in str(refused.error)
