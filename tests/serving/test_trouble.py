"""Steps that find no memory, with one batch in flight or two: the requests go on, and only one that is alone fails."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from statistics import median
from typing import Any

import pytest
import torch
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus

import ballonet
from ballonet import testing
from ballonet.allocator import devices
from ballonet.allocator.errors import DriverError
from ballonet.hooks.batching import patches
from ballonet.hooks.batching.pages import RequestPages
from ballonet.hooks.batching.scheduler import ElasticScheduler
from ballonet.hooks.batching.steps import PagePreemption
from ballonet.hooks.measure.timings import Latencies
from ballonet.offload.timeline.recorder import Recorder, recorders_of

from ..models import build
from ..pool import take_out
from ..tuned import Tuned
from . import asynchronous
from .batches import PAGE, TOGETHER, answers, ask, install, looping, prompts, starve_requests, stock

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture(params=[False, True], ids=["one in flight", "two in flight"])
def two(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Are two batches in flight?"""
    if request.param:
        asynchronous.allow(monkeypatch)
    return bool(request.param)


class Lacking:
    """Forwards of a model that find no memory, in their last layer: those for which `when` (number, tokens, requests)
    is true. `error`: raised in place of that."""

    def __init__(self, model: Any, when: Callable[[int, int, int], bool], error: Exception | None = None) -> None:
        self.steps = self.failed = 0
        self._error = error or torch.OutOfMemoryError("no memory, says the test")
        self._when = when
        self._hook = model.model.layers[-1].register_forward_pre_hook(self._before, with_kwargs=True)

    def __enter__(self) -> Lacking:
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _before(self, _: object, inputs: tuple[torch.Tensor, ...], more: dict[str, Any]) -> None:
        self.steps += 1
        if self._when(self.steps, inputs[0].shape[1], len(more["cu_seq_lens_q"]) - 1):
            self.failed += 1
            raise self._error


# each two of these that go together
@pytest.mark.parametrize(
    ("two", "schedule", "children"),
    [(False, "fifo", 1), (False, "prefill_first", 3), (True, "fifo", 3), (True, "prefill_first", 1)],
    indirect=["two"],
)
def test_requests_of_a_step_that_finds_no_memory_begin_again(two: bool, schedule: str, children: int) -> None:
    """In the first step, in the last one, and in two in a row; with children, which are forks of their prompt."""
    model, asked = build("llama", num_hidden_layers=4), prompts(8, 60)
    expected = [answer for answer in stock(model, asked, 12) for _ in range(children)]
    install(256)
    settings = {"use_async_batching": two, "scheduler_type": schedule, "children": children}
    with ballonet.manage(model):
        with Lacking(model, lambda *_: False) as whole:
            assert sorted(answers(model, asked, 12, **settings)) == sorted(expected)
        for when in ({1}, {4, 5}, {whole.steps - 1}, set(range(3, 40, 3))):
            with Lacking(model, lambda step, *_, when=when: step in when) as lacking:  # type: ignore[misc]
                assert sorted(answers(model, asked, 12, **settings)) == sorted(expected)
            assert lacking.failed == len(when) or max(when) > 30


def test_a_request_that_is_alone_fails_and_those_after_it_are_answered(two: bool) -> None:
    """The third token finds no memory. Nor does any part that is computed again: 8 tokens, 4, 2, and one."""
    model, asked = build("llama", num_hidden_layers=4), prompts(4, 20)
    expected = stock(model, asked, 6)
    install(256)
    with ballonet.manage(model), looping(model, 6, use_async_batching=two) as manager:
        with Lacking(model, lambda step, *_: step >= 3) as lacking:
            manager.add_request(asked[0], request_id="alone")
            error = manager.get_result(timeout=600).error
            numbers = "in 4 steps of it alone: of a budget of 16MiB, .* are free"
            assert re.search(f"no memory for token .* of request alone, {numbers}.*says the test", error)
        tokens = len(asked[0]) + 2
        assert lacking.failed == tokens.bit_length() - 1 + 4
        for prompt, right in zip(asked, expected, strict=True):
            manager.add_request(prompt)
            answer = manager.get_result(timeout=600)
            assert (answer.generated_tokens, answer.error) == right
        del manager


def test_requests_of_a_step_whose_driver_call_fails_are_told_and_the_loop_lives(two: bool) -> None:
    model, asked = build("llama", num_hidden_layers=4), prompts(4, 20)
    expected = stock(model, asked, 6)
    install(256)
    failed = DriverError("cuStreamWaitEvent", 304, "CUDA_ERROR_OPERATING_SYSTEM")
    with ballonet.manage(model), looping(model, 6, use_async_batching=two) as manager:
        with Lacking(model, lambda step, *_: step == 1, failed):
            manager.add_request(asked[0], request_id="told")
            assert "cuStreamWaitEvent failed" in manager.get_result(timeout=600).error
        assert ask(manager, asked) == expected
        del manager


def test_tokens_are_stocks_with_two_batches_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all fit, where requests wait and are preempted, and while pages move."""
    asynchronous.allow(monkeypatch)
    model, asked = build("llama", num_hidden_layers=12), prompts(16, 60)
    expected = stock(model, asked, 40)
    for pages, managing in ((256, ballonet.manage), (34, ballonet.manage), (96, partial(testing.manage, chaos=3))):
        install(pages)
        with managing(model):
            assert answers(model, asked, 40, use_async_batching=True) == expected
        take_out()


def test_waiting_request_runs_once_the_running_one_is_cancelled(
    two: bool, at_steps: Callable[[Iterator[None]], None]
) -> None:
    """After requests were preempted none begins until one ends: here the one that runs is cancelled, and none ends."""
    model, asked = build("llama", num_hidden_layers=4), prompts(2, 20)
    expected = stock(model, asked, 6)
    install(256)

    def act(manager: Any) -> Iterator[None]:
        schedule = manager.batch_processor.scheduler
        schedule.block_new_requests = True
        manager.add_request(asked[1], request_id="waits", max_new_tokens=6)
        while "waits" not in schedule.waiting_requests:
            yield
        manager.cancel_request("cancelled")

    with ballonet.manage(model), looping(model, 200, use_async_batching=two) as manager:
        at_steps(act(manager))
        manager.add_request(asked[0], request_id="cancelled")
        answer = manager.get_result(timeout=600)
        manager.cancel_request("waits")
        assert answer is not None
        assert (answer.request_id, answer.generated_tokens) == ("waits", expected[1].tokens)
        del manager


def test_a_request_that_begins_again_gets_no_token_of_its_former_self(
    two: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be scheduled for a moment, while its next token is on its way. Its latency counts at its end."""
    model, asked = build("llama", num_hidden_layers=4), prompts(1, 20)
    expected, calls = stock(model, asked, 20), count()
    process = ElasticScheduler._process_candidates

    def lacking(self: Any, candidates: list[Any], *args: Any) -> Any:
        if not self.active_requests or next(calls) % 9 < 5:
            return process(self, candidates, *args)
        self.starved_requests = [(state, 1) for state in candidates]
        return [], True, False, 0, 0

    monkeypatch.setattr(ElasticScheduler, "_process_candidates", lacking)
    again, latencies = list[int](), list[Latencies]()
    compute_again = PagePreemption.compute_again

    def counted(self: Any, state: Any) -> None:
        compute_again(self, state)
        latencies.append(self.cache.model.latencies)
        again.append(_measured(latencies[0]))

    monkeypatch.setattr(PagePreemption, "compute_again", counted)
    install(256)
    with ballonet.manage(model):
        assert answers(model, asked, 20, use_async_batching=two) == expected
    assert len(again) > 1
    assert (set(again), _measured(latencies[0])) == ({0}, 1)


def _measured(latencies: Latencies) -> int:
    """Requests whose time per token was."""
    return sum(latencies.tpot.to_dict()["counts"])


def test_requests_that_wait_where_a_loop_ends_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeline says so of them, and of the one that runs."""
    model = build("llama", num_hidden_layers=4)
    processor, (asked, two_wait, go_on) = continuous_api.ContinuousBatchProcessor, (threading.Event() for _ in range(3))
    step = processor._generation_step

    def held(self: Any, model: Any) -> None:
        assert asked.wait(600)
        if len(self.scheduler.waiting_requests) == 2:
            two_wait.set()
            assert go_on.wait(600)
        step(self, model)

    monkeypatch.setattr(processor, "_generation_step", held)
    install(256)
    with ballonet.manage(model), Recorder(recorders_of(devices.holding(devices.require()))) as recorder:
        with looping(model, 400, max_requests_per_batch=1) as manager:
            for prompt in prompts(3, 20):
                manager.add_request(prompt)
            asked.set()
            assert two_wait.wait(600)
            rank = manager.distributed_helper.global_rank
            manager.background_thread_status.request_stop(BackgroundThreadStatus.HARD_STOP, rank)
            go_on.set()
        assert [request.end for request in recorder.recording().requests] == ["failed"] * 3


def test_a_request_that_comes_just_as_a_loop_is_to_end_is_told(at_steps: Callable[[Iterator[None]], None]) -> None:
    model, (first, second) = build("llama", num_hidden_layers=4), prompts(2, 20)
    install(256)

    def act(manager: Any) -> Iterator[None]:
        manager.add_request(second, request_id="comes")
        rank = manager.distributed_helper.global_rank
        manager.background_thread_status.request_stop(BackgroundThreadStatus.HARD_STOP, rank)
        yield from ()

    with ballonet.manage(model), looping(model, 400) as manager:
        at_steps(act(manager))
        manager.add_request(first, request_id="runs")
        results = [manager.get_result(timeout=600) for _ in range(2)]
        assert {answer.request_id for answer in results} == {"runs", "comes"}
        assert all("loop finished" in answer.error for answer in results)
        del manager


@pytest.mark.parametrize("host", [256, 0])
def test_a_request_that_is_preempted_goes_on_where_it_was(
    two: bool, host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The KV goes to the host, and comes back once another request has ended; with no host it is computed again."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}  # a block has pages of its own
    model, asked = build("llama", num_hidden_layers=4, **heads), prompts(4, 20)
    expected = stock(model, asked, 20)
    preempt, came_back = PagePreemption._keep_for_later, list[int]()
    preempted, again, to_device = list[str](), list[str](), RequestPages.to_device
    compute_again = PagePreemption.compute_again

    def kept(self: Any, state: Any) -> None:
        preempted.append(state.request_id)
        preempt(self, state)

    def counted(self: Any, state: Any) -> None:
        again.append(state.request_id)
        compute_again(self, state)

    def back(self: RequestPages, request: str) -> None:
        away = self.on_host_bytes(request)
        to_device(self, request)
        came_back.append(away - self.on_host_bytes(request))

    starve_requests(monkeypatch)
    monkeypatch.setattr(PagePreemption, "_moves", lambda *_: True)
    monkeypatch.setattr(PagePreemption, "_keep_for_later", kept)
    monkeypatch.setattr(PagePreemption, "compute_again", counted)
    monkeypatch.setattr(RequestPages, "to_device", back)
    ballonet.install(256 * PAGE, page_size=PAGE, host_budget=host * PAGE, device="cpu")
    with ballonet.manage(model):
        assert answers(model, asked, 20, use_async_batching=two) == expected
    assert len(preempted if host else again) > 1
    assert sum(came_back) > 0 if host else not preempted


def test_children_that_find_no_memory_begin_with_the_prompt(two: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = build("llama", num_hidden_layers=4), prompts(4, 60)
    expected = [answer for answer in stock(model, asked, 12) for _ in range(3)]
    install(256)
    processor, full = continuous_api.ContinuousBatchProcessor, list[bool]()
    update = processor.update_batch

    def updated(self: Any) -> None:
        """With no page for children, and then none for copies on the way."""
        with pytest.MonkeyPatch.context() as patch:
            if forks := self.scheduler._requests_to_fork:
                full.append(len(full) % 2 == 0)
                if full[-1]:
                    patch.setattr(self.cache.pool, "take", _none)
                    self.cache.pool.try_to_free_sectors()
                else:
                    patch.setattr(torch.Tensor, "index_select", _none)
            del forks
            update(self)

    monkeypatch.setattr(processor, "update_batch", updated)
    with ballonet.manage(model):
        settings = {"use_async_batching": two, "children": 3, "max_batch_tokens": 32}
        assert sorted(answers(model, asked, 12, **settings)) == sorted(expected)
    assert len(full) >= 2


def test_a_prompt_has_several_answers_of_which_one_token_is_not_known(two: bool) -> None:
    """Nothing is computed before its answers part. Alone, as any other request in the step would bring tokens: the
    whole prompt is one token, and one is left after blocks that are shared."""
    model, asked = build("llama", num_hidden_layers=4), [[5], *prompts(1, 33)]
    asked[1] = (asked[1] * 33)[:33]
    expected = [stock(model, [prompt], 6)[0] for prompt in asked]
    install(256)
    with ballonet.manage(model), looping(model, 6, use_async_batching=two) as manager:
        for children in (1, 3):
            for prompt, right in zip(asked, expected, strict=True):
                manager.num_return_sequences = children
                manager.add_request(prompt)
                results = [manager.get_result(timeout=600) for _ in range(children)]
                assert [(answer.generated_tokens, answer.error) for answer in results] == [right] * children
        del manager


def _none(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("no memory, says the test")


def test_kept_host_pages_make_no_request_too_large() -> None:
    """What a cache keeps there goes as soon as somebody needs it."""
    model, asked = build("llama", num_hidden_layers=12), prompts(1, 40)[0]
    ballonet.install(48 * PAGE, page_size=PAGE, host_budget=80 * PAGE, device="cpu")
    with ballonet.manage(model, interval=None), looping(model, 200) as manager:
        manager.add_request(asked, max_new_tokens=1)
        assert manager.get_result(timeout=600).error is None
        schedule = manager.batch_processor.scheduler
        before = schedule.memory.refusal("huge", len(asked), 10**6)
        for prompt in prompts(4, 40):
            manager.add_request(prompt)
        assert [manager.get_result(timeout=600).error for _ in range(4)] == [None] * 4
        client = schedule.cache.pages.client
        assert client.evict(range(1, 9)) >= 4
        after = schedule.memory.refusal("huge", len(asked), 10**6)
        assert (after.device, after.host) == (before.device, before.host)
        del client, schedule, manager


def test_waiting_request_fails_while_memory_is_taken(tuned: Tuned) -> None:
    """A tensor has the memory that the request was admitted with, and nobody runs who could give some."""
    tuned(serving={"lonely": 3})
    model, asked = build("llama", num_hidden_layers=12), prompts(1, 40)[0]
    expected = stock(model, [asked], 6)
    ballonet.install(64 * PAGE, page_size=PAGE, host_budget=0, device="cpu")
    with ballonet.manage(model, interval=None), looping(model, 6) as manager:
        device = devices.require()
        for lacks in (False, True, False):
            block = device.allocate(device.available * PAGE) if lacks else None
            manager.add_request(asked if block is None else prompts(1, 200)[0])
            answer = manager.get_result(timeout=600)
            if block is not None:
                assert "of KV and activations" in answer.error
                device.deallocate(block)
            else:
                assert (answer.generated_tokens, answer.error) == expected[0]
        del manager


@pytest.mark.parametrize("left", [20, 23])
def test_requests_waiting_for_a_reserve_run_one_by_one_or_fail(tuned: Tuned, left: int) -> None:
    """No more is free than always stays so, or little more."""
    tuned(serving={"lonely": 3})
    model, asked = build("llama", num_hidden_layers=4), prompts(16, 60)
    expected = stock(model, asked, 24)
    install(256)
    with ballonet.manage(model):
        device = devices.require()
        filler = device.reserve(device.budget, "kv", device.group())
        filler.map(0, device.available - left)
        results = answers(model, asked, 24)
        filler.close()
    assert [answer.tokens for answer in results if answer.error is None] == [
        right.tokens for right, answer in zip(expected, results, strict=True) if answer.error is None
    ]
    assert all(answer.error is None or "budget" in answer.error for answer in results)
    if left > 20:
        assert not all(answer.error for answer in results)


@pytest.mark.parametrize(("two", "most"), [(False, 1), (False, 3), (True, 1), (True, 5)], indirect=["two"])
def test_requests_are_answered_where_no_larger_step_finds_memory(tuned: Tuned, two: bool, most: int) -> None:
    """A step of so many requests always finds memory, as where a library takes a workspace for each."""
    tuned(serving={"lonely": 3})
    model, asked = build("llama", num_hidden_layers=4), prompts(16, 60)
    expected = stock(model, asked, 24)
    install(256)
    with ballonet.manage(model):
        device = devices.require()
        filler = device.reserve(device.budget, "kv", device.group())
        filler.map(0, device.available - (48 if two else 36))  # a second batch has inputs of its own
        with Lacking(model, lambda *step: step[2] > most) as lacking:
            assert answers(model, asked, 24, use_async_batching=two) == expected
        filler.close()
        assert 0 < lacking.failed < 0.1 * lacking.steps
        batched = patches.batched(model)
        assert batched is not None
        assert batched.latencies.lost == lacking.failed


def test_kept_blocks_leave_before_each_step_maps_its_activations_anew() -> None:
    """Once what was kept of requests fills the pool, those that come take its pages; the heap keeps its own."""
    model, draw = build("llama", num_hidden_layers=12), torch.Generator().manual_seed(0)
    ballonet.install(128 * PAGE, page_size=PAGE, host_budget=512 * PAGE, device="cpu")
    with ballonet.manage(model, interval=None), looping(model, 12, max_batch_tokens=256) as manager:
        device, calls = devices.require(), []
        for _ in range(16):
            began = device.snapshot()["driver_calls"]["cuMemSetAccess"]
            with TOGETHER:
                for _ in range(8):
                    manager.add_request(torch.randint(3, 60, (60,), generator=draw).tolist())
            assert [manager.get_result(timeout=600).error for _ in range(8)] == [None] * 8
            calls.append(device.snapshot()["driver_calls"]["cuMemSetAccess"] - began)
        kept = manager.batch_processor.scheduler.cache.pages.client
        assert kept.displaced > 0
        before, then = median(calls[1:7]), median(calls[-6:])  # when requests come decides about a single round
        assert then <= 3.4 * before, "each page that comes, and one that goes to the host for it"
        del kept, manager
