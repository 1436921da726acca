"""A server's loop: requests with settings of their own in one batch get what each gets alone, however steps, preemption
and forks divide their work; prompts are scored; what cannot be answered is refused; a loop that died begins again.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching import continuous_api, initialization, model_runner
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

import ballonet
from ballonet import testing
from ballonet.allocator import devices
from ballonet.hooks.batching.steps import PagePreemption
from ballonet.hooks.sampling.carried import SAMPLING, SampledRequest
from ballonet.hooks.sampling.loop import LoopSampler
from ballonet.hooks.sampling.settings import ChosenToken, Sampling
from ballonet.hooks.server.engine import Denial, Generation, Update
from ballonet.hooks.server.loops import Loop

from ..models import VOCABULARY, build
from . import asynchronous
from .batches import BLOCK, greedily, install, prompts, starve_requests
from .sampled import SETTINGS, alone, answer, answer_of, close_to, denied, in_a_loop, named
from .test_trouble import Lacking

pytestmark = pytest.mark.usefixtures("nothing_is_left")
LONGEST = 512  # tokens of a sequence


@pytest.fixture(params=[False, True], ids=["one in flight", "two in flight"])
def two(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Are two batches in flight?"""
    if request.param:
        asynchronous.allow(monkeypatch)
    return bool(request.param)


def llama(layers: int = 2) -> Any:
    return build("llama", num_hidden_layers=layers, max_position_embeddings=LONGEST)


@lru_cache
def mixed(layers: int, most: int) -> tuple[list[Generation], list[list[ChosenToken]]]:
    """Requests with all kinds of settings, and what each gets alone."""
    asked = [named(prompt, most, given) for prompt, given in zip(prompts(len(SETTINGS), 60), SETTINGS, strict=True)]
    model = llama(layers)
    return asked, [alone(model, request) for request in asked]


def all_answers(
    model: Any, asked: Sequence[Generation], before: Callable[[], Any] = nullcontext, **settings: Any
) -> list[list[ChosenToken]]:
    """What a loop answers to requests that come together."""
    got: list[list[ChosenToken]] = []

    async def scene(loop: Loop) -> None:
        with before():
            got.extend([tokens for tokens, _ in await asyncio.gather(*(answer(loop, request) for request in asked))])

    in_a_loop(model, scene, **settings)
    return got


# Answers


@pytest.mark.parametrize("chaos", [None, 3], ids=["still", "moved"])
def test_requests_in_one_batch_get_what_each_gets_alone(chaos: int | None, two: bool) -> None:
    """Prompts are longer than a batch, so that prefills are split and decoding requests are beside them."""
    asked, expected = mixed(2, 12)
    install(256)
    managing = ballonet.manage if chaos is None else partial(testing.manage, chaos=chaos)
    got = all_answers(llama(), asked, managing=managing, use_async_batching=two)
    assert all(map(close_to, got, expected))
    assert len({token.token for tokens in got for token in tokens}) > 20


def test_requests_in_another_order_and_other_batches_get_the_same() -> None:
    asked, expected = mixed(2, 12)
    install(256)
    got = all_answers(llama(), asked[::-1], max_batch_tokens=24, max_requests_per_batch=3)
    assert all(map(close_to, got[::-1], expected))


def test_requests_that_are_preempted_get_the_same(two: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some move to the host and back, some are computed again."""
    asked, expected = mixed(2, 40)
    done = set[str]()
    for name in ("compute_again", "_keep_for_later"):
        stock = getattr(PagePreemption, name)

        def noted(self: Any, state: Any, stock: Any = stock, name: str = name) -> None:
            if state.generated_tokens:
                done.add(name)
            stock(self, state)

        monkeypatch.setattr(PagePreemption, name, noted)
    flips = iter(range(10_000))
    monkeypatch.setattr(PagePreemption, "_moves", lambda self, state: next(flips) % 2 == 0)
    starve_requests(monkeypatch)
    install(256)
    got = all_answers(llama(), asked, use_async_batching=two)
    assert all(map(close_to, got, expected))
    assert done == {"compute_again", "_keep_for_later"}


def test_requests_of_steps_that_find_no_memory_get_the_same(two: bool) -> None:
    asked, expected = mixed(4, 12)
    install(256)
    model = llama(4)

    @contextmanager
    def lacking() -> Iterator[None]:
        with Lacking(model, lambda step, *_: step in (2, 5, 9)) as lost:
            yield
        assert lost.failed == 3

    assert all(map(close_to, all_answers(model, asked, lacking, use_async_batching=two), expected))


def test_forked_requests_get_what_one_gets_alone(two: bool) -> None:
    asked, expected = mixed(2, 12)
    install(256)
    model = llama()
    settings = ContinuousBatchingConfig(page_size=BLOCK, max_batch_tokens=64, use_async_batching=two)
    with ballonet.manage(model):
        manager = model.init_continuous_batching(greedily(12, 3), settings)
        manager.batch_processor = manager._create_batch_processor()
        LoopSampler.attach(manager.batch_processor)
        manager.start()
        try:
            for request in asked:
                carried = {SAMPLING: SampledRequest(request.sampling)}
                manager.add_request(list(request.prompt), request.name, 12, eos_token_id=[], **carried)
            outputs = [manager.get_result(timeout=600) for _ in range(3 * len(asked))]
        finally:
            manager.stop(block=True)
        by_name = {request.name: tokens for request, tokens in zip(asked, expected, strict=True)}
        assert all(close_to(output.logprobs, by_name[output.request_id.partition("__")[0]]) for output in outputs)
        del manager


def test_requests_without_settings_are_sampled_by_transformers() -> None:
    """In a batch with what does."""
    asked, expected = mixed(2, 12)
    greedy = [alone(llama(), named(request.prompt, 12, Sampling())) for request in asked]
    install(256)
    model = llama()
    settings = ContinuousBatchingConfig(page_size=BLOCK, max_batch_tokens=64)
    with ballonet.manage(model):
        manager = model.init_continuous_batching(greedily(12), settings)
        manager.batch_processor = manager._create_batch_processor()
        LoopSampler.attach(manager.batch_processor)
        manager.start()
        try:
            for n, request in enumerate(asked):
                carried = {SAMPLING: SampledRequest(request.sampling)} if n % 2 else {}
                manager.add_request(list(request.prompt), str(n), 12, eos_token_id=[], **carried)
            outputs = {(output := manager.get_result(timeout=600)).request_id: output for _ in asked}
        finally:
            manager.stop(block=True)
        for n, (stock, ours) in enumerate(zip(greedy, expected, strict=True)):
            tokens = [token.token for token in (ours if n % 2 else stock)]
            assert outputs[str(n)].generated_tokens == tokens
            assert bool(outputs[str(n)].logprobs) == bool(n % 2)
        del manager


class Replayed:
    """Stands for a CUDA graph: computes what was captured, but nothing of what Python does beside it counts."""

    def __init__(self, replay: Callable[[], None]) -> None:
        self.replay = replay

    def reset(self) -> None:
        """Does nothing."""


def test_steps_of_graphs_leave_their_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs and rows are padded, and a step is replayed without its Python."""
    asked, expected = mixed(2, 12)
    replays = list[int]()

    def capture(self: Any, forward: Callable[..., None], stream: object, *inputs: Any) -> None:
        def replay() -> None:
            replays.append(1)
            forward(*inputs)
            self.sampler._logits = None

        forward(*inputs)
        self.inputs_and_outputs.set_graph(Replayed(replay))

    monkeypatch.setattr(initialization, "get_accelerator_graph_name", lambda: "a graph")
    monkeypatch.setattr(model_runner, "get_memory_pools", lambda: (None, None))
    monkeypatch.setattr(model_runner.ModelRunner, "_capture_graph", capture)
    install(256)
    got = all_answers(llama(), asked, use_cuda_graph=True, q_padding_interval_size=8, kv_padding_interval_size=64)
    assert all(map(close_to, got, expected))
    assert replays


def test_an_answer_ends_with_one_of_its_ends_once_it_is_long_enough() -> None:
    asked, expected = mixed(2, 12)
    token = expected[0][3].token
    ended = [named(asked[0].prompt, 12, Sampling(least=least), ends=(token, 7)) for least in (0, 6)]
    right = [alone(llama(), request) for request in ended]
    install(256)

    async def scene(loop: Loop) -> None:
        for request, tokens in zip(ended, right, strict=True):
            got, why = await answer(loop, request)
            assert close_to(got, tokens)
            assert why == ("stop" if tokens[-1].token in request.ends else "length")
        assert len(right[0]) <= 4
        assert len(right[1]) >= 7

    in_a_loop(llama(), scene)


# Logprobs


@torch.no_grad()
def logprobs(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Logprobs of the tokens behind each one, by one plain forward."""
    scores: torch.Tensor = model(input_ids=torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    return scores


def test_logprobs_are_those_of_a_plain_forward() -> None:
    prompt, model = prompts(1, 40)[0], llama()
    asked = named(prompt, 6, Sampling(3, 1.4, frequency=1.0, bias=((9, 4.0),), logprobs=4))
    install(256)
    [got] = all_answers(model, [asked])
    plain = logprobs(llama(), [*prompt, *(token.token for token in got)])
    for at, token in enumerate(got, len(prompt) - 1):
        assert token.logprob == pytest.approx(float(plain[at, token.token]), abs=1e-4)
        best = plain[at].topk(4)
        assert [likely for likely, _ in token.likeliest] == best.indices.tolist()
        assert [value for _, value in token.likeliest] == pytest.approx(best.values.tolist(), abs=1e-4)


def check_scores(asked: Sequence[Sequence[int]], got: Sequence[Sequence[ChosenToken]], plain: list[Any]) -> None:
    """Are these the scores of prompts, with two likeliest tokens each? `plain`: their `logprobs`."""
    for prompt, tokens, right in zip(asked, got, plain, strict=True):
        assert [token.token for token in tokens] == [*prompt]
        assert tokens[0] == ChosenToken(prompt[0])
        for at, token in enumerate(tokens[1:]):
            assert token.logprob == pytest.approx(float(right[at, token.token]), abs=1e-4)
            assert [value for _, value in token.likeliest] == pytest.approx(right[at].topk(2).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("name", ["llama", "phi"])
def test_scores_of_prompts_are_those_of_a_plain_forward(name: str, two: bool) -> None:
    """Several at once, beside answers, where blocks of the same prompt are kept; each in many chunks."""
    asked = prompts(4, 150)
    plain = [logprobs(build(name, max_position_embeddings=LONGEST), prompt) for prompt in asked]
    install(256)
    model = build(name, max_position_embeddings=LONGEST)
    rows = list[int]()

    async def scene(loop: Loop) -> None:
        await answer(loop, named(asked[0], 4, Sampling()))
        scorer = loop._manager.batch_processor.model_runner.sampler
        stock, forwarded = scorer._scored, loop._scheduler
        scorer._scored = lambda scoring, logits: rows.append(len(logits)) or stock(scoring, logits)
        scored = [loop.score(named(prompt, 1, Sampling(logprobs=2))) for prompt in asked]
        (*got, _) = await asyncio.gather(*scored, answer(loop, named(asked[1], 30, Sampling())))
        assert forwarded is not None
        assert max(rows) <= forwarded.cache.logit_rows < 150
        check_scores(asked, got, plain)
        assert await loop.score(named([7], 1, Sampling())) == (ChosenToken(7),)

    in_a_loop(model, scene, use_async_batching=two)


def test_a_prompt_is_scored_whole_where_steps_find_no_memory() -> None:
    prompt, model = prompts(1, 150)[0] * 2, llama()
    plain = logprobs(llama(), prompt)
    install(256)

    async def scene(loop: Loop) -> None:
        beside = asyncio.ensure_future(answer(loop, named([3, 4], 60, Sampling())))
        with Lacking(model, lambda step, *_: step in (3, 6)) as lost:
            tokens = await loop.score(named(prompt, 1, Sampling()))
        assert lost.failed == 2
        await beside
        got = [token.logprob for token in tokens[1:]]
        right = [float(plain[at, token]) for at, token in enumerate(prompt[1:])]
        assert got == pytest.approx(right, abs=1e-4)

    in_a_loop(model, scene)


# Refusals, cancellation and ends


def test_requests_that_cannot_be_answered_are_refused_with_the_reason() -> None:
    cases = [
        (Generation("a", (), 3, Sampling()), 400, "invalid_value", "no tokens"),
        (named([3, VOCABULARY], 3, Sampling()), 400, "invalid_value", "prompt"),
        (named([3], 3, Sampling(bias=((VOCABULARY, 1.0),))), 400, "invalid_value", "logit_bias"),
        (named([3] * LONGEST, 1, Sampling()), 400, "context_length_exceeded", f"has {LONGEST} tokens and asks for 1"),
        (named([3], 8, Sampling(), tpot=1e-9), 422, "slo_not_kept", "nearest"),
    ]

    async def scene(loop: Loop) -> None:
        for _ in range(3):  # so that it is known what steps take
            await asyncio.gather(*(answer(loop, named([3, 4 + n], 8, Sampling())) for n in range(4)))
        for asked, status, code, text in cases:
            denial = await denied(loop, asked)
            assert denial is not None
            assert (denial.status, denial.code) == (status, code)
            assert text in denial.message
            assert asked.name not in denial.message.split()
        assert loop._scheduler is not None
        assert not loop._scheduler.slos.known
        assert await denied(loop, named([3], 3, Sampling(), tpot=60.0, ttft=60.0)) is None

    install(256)
    in_a_loop(llama(), scene)


def test_a_request_that_never_fits_is_refused_with_the_numbers() -> None:
    async def scene(loop: Loop) -> None:
        denial = await denied(loop, named([3] * 30_000, 100, Sampling()))
        assert denial is not None
        assert (denial.status, denial.code) == (413, "request_too_large")
        assert denial.message.startswith("the request needs ")
        assert "MiB" in denial.message

    install(24)
    in_a_loop(build("llama", num_hidden_layers=2, max_position_embeddings=2**16), scene)


def test_more_requests_than_may_wait_are_told_when_to_come_again(
    at_steps: Callable[[Iterator[None]], None],
) -> None:
    """The loop stands still while they come."""
    go = asyncio.Event()

    async def scene(loop: Loop) -> None:
        events, held = asyncio.get_running_loop(), True

        def stands() -> Iterator[None]:
            while held:
                asyncio.run_coroutine_threadsafe(go.wait(), events).result()
                yield

        at_steps(stands())
        tasks = [asyncio.ensure_future(answer(loop, named([3, 4], 4, Sampling()))) for _ in range(8)]
        while loop.waiting < 4:
            await asyncio.sleep(0.001)
            tasks.append(asyncio.ensure_future(answer(loop, named([3, 4], 4, Sampling()))))
        denial = await denied(loop, named([3, 4], 4, Sampling()))
        assert denial is not None
        assert (denial.status, denial.retry_after) == (429, 1.0)
        held = False
        go.set()
        await asyncio.gather(*tasks, return_exceptions=True)

    install(256)
    in_a_loop(llama(), scene, waiting=4, max_requests_per_batch=2)


async def denial_of(updates: AsyncGenerator[Update, None]) -> Denial:
    """What ends an answer that has begun."""
    with pytest.raises(Denial) as caught:
        await answer_of(updates)
    return caught.value


async def first_of(loop: Loop, asked: Generation) -> tuple[AsyncGenerator[Update, None], Update]:
    """Begins an answer."""
    updates = loop.generate(asked)
    return updates, await anext(updates)


def test_a_cancelled_request_leaves_its_name_and_its_memory() -> None:
    async def scene(loop: Loop) -> None:
        asked = named([3, 4, 5], 400, Sampling())
        updates, first = await first_of(loop, asked)
        assert len(first.tokens) == 1
        denial = await denied(loop, asked)
        assert denial is not None
        assert denial.status == 409
        await updates.aclose()
        while await denied(loop, named([3], 1, Sampling())) or loop.queued != (0, 0):
            await asyncio.sleep(0.001)
        async with aclosing(loop.generate(asked)) as again:
            assert await anext(again) == first
        assert loop.steps < 400
        while loop.queued != (0, 0):
            await asyncio.sleep(0.001)

    install(256)
    in_a_loop(llama(), scene)


def test_a_loop_that_has_died_begins_again(monkeypatch: pytest.MonkeyPatch, two: bool) -> None:
    """Requests of the dead one are told; the next one is answered, and steps are counted on."""
    asked, expected = mixed(2, 12)
    monkeypatch.setattr(continuous_api.logger, "error", lambda *args, **kwargs: None)  # pytest keeps its frames

    async def scene(loop: Loop) -> None:
        steps = 0
        assert await denied(loop, named([3], 1, Sampling())) is None
        for _ in range(2):
            before = weakref.ref(loop._scheduler)
            with monkeypatch.context() as patch:
                updates, _first = await first_of(loop, named([3, 4], 400, Sampling()))
                patch.setattr(ContinuousBatchProcessor, "update_batch", _broken)
                denial = await denial_of(updates)
                assert (denial.status, denial.message) == (503, "broken, says the test")
            assert loop.answers
            assert close_to((await answer(loop, asked[1]))[0], expected[1])
            assert loop.steps > steps
            assert before() is None, "or its cache is in use"
            steps = loop.steps

    install(256)
    in_a_loop(llama(), scene, use_async_batching=two)


def _broken(*_: object) -> None:
    raise RuntimeError("broken, says the test")


def test_a_loop_without_memory_for_its_cache_answers_nothing_until_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(loop: Loop) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("ballonet.hooks.batching.cache.ElasticPagedCache.__init__", _none)
            denial = await denied(loop, named([3], 2, Sampling()))
            assert denial is not None
            assert denial.status == 503
            assert not loop.answers
        assert await denied(loop, named([3], 2, Sampling())) is None
        assert loop.answers

    install(256)
    in_a_loop(llama(), scene)


def _none(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("no memory, says the test")


def test_requests_that_wait_are_told_that_the_server_ends() -> None:
    async def scene(loop: Loop) -> None:
        streams = [(await first_of(loop, named([3, n], 400, Sampling())))[0] for n in range(4, 8)]
        loop.tell()
        for updates in streams:
            denial = await denial_of(updates)
            assert (denial.status, denial.message) == (503, "the server shuts down")
        denial = await denied(loop, named([3], 2, Sampling()))
        assert denial is not None
        assert (denial.status, loop.answers) == (503, False)
        await asyncio.to_thread(loop.close)

    install(256)
    in_a_loop(llama(), scene)


def test_figures_are_those_of_the_loop() -> None:
    async def scene(loop: Loop) -> None:
        assert (loop.queued, loop.steps, loop.buffer, loop.waiting) == ((0, 0), 0, 0, 0)
        updates, _ = await first_of(loop, named([3, 4], 400, Sampling()))
        assert loop.queued == (1, 0)
        assert loop.buffer > 0
        assert loop.steps > 0
        await updates.aclose()

    install(256)
    in_a_loop(llama(), scene)
    assert devices.require() is not None


# Sleep


@pytest.mark.parametrize("level", [1, 2])
def test_a_model_of_a_loop_sleeps_between_requests_and_the_next_one_wakes_it(level: int) -> None:
    asked = [named(prompt, 8, Sampling()) for prompt in prompts(2, 40)]
    expected = [alone(model := llama(), request) for request in asked]

    async def scene(loop: Loop) -> None:
        for request, tokens in zip(asked, expected, strict=True):
            assert close_to((await answer(loop, request))[0], tokens)
            await asyncio.to_thread(loop.sleep, level, 30.0)
            assert loop.asleep == level
            pages = ballonet.stats().pages
            assert pages.weights == pages.kv == 0
            assert loop.answers
        await asyncio.to_thread(loop.wake)
        assert loop.asleep == 0

    in_a_loop(model, scene)


def test_a_model_with_requests_does_not_sleep_and_says_why() -> None:
    request = named(prompts(1, 40)[0], 200, Sampling())

    async def scene(loop: Loop) -> None:
        running = asyncio.create_task(answer(loop, request))
        while not loop.queued[0]:
            await asyncio.sleep(0.01)
        with pytest.raises(Denial, match="serves requests") as denial:
            await asyncio.to_thread(loop.sleep, 1, 0.0)
        assert (denial.value.status, denial.value.code) == (409, "model_in_use")
        assert len((await running)[0]) == 200

    in_a_loop(llama(), scene)
