"""Groups of stages in one process: the answers of stock continuous batching in any order of stages, ends, cancellation,
preemption, faults of memory; records between stages, and batches over spans.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

import ballonet
from ballonet.hooks.replicas import kv_exchange
from ballonet.hooks.replicas.kv_exchange import Handed, HandedOver
from ballonet.hooks.replicas.microbatch_plan import (
    Begun,
    Chunk,
    MicrobatchPlan,
    Passing,
    Piece,
    Request,
    Size,
    record_of,
    tensor_of,
)
from ballonet.hooks.replicas.replica_model import SpanRunner
from ballonet.hooks.sampling.settings import ChosenToken, Sampling
from ballonet.hooks.splice import splice as splicing
from ballonet.hooks.splice.splice import Splice
from ballonet.offload.policy.replicas.groups import Group, Span

from ..models import build
from ..serving.batches import answers, prompts, stock
from ..serving.sampled import SETTINGS, close_to, named
from ..serving.sampled import alone as alone_of
from .stages import BLOCK, CHUNK, PAGE, InProcess, Replicas, Told, answered, chosen, evenly, hollow, install, requests

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def said(model: Any, asked: list[list[int]], new: int = 12) -> list[list[int]]:
    """Stock's answers, in batches of as many tokens."""
    outputs = answers(model, asked, new, num_blocks=400, page_size=BLOCK, max_batch_tokens=CHUNK)
    return [answer.tokens for answer in outputs]


def four_layers(name: str) -> Any:
    if name != "gemma2":
        return build(name, num_hidden_layers=4)
    kinds = ["sliding_attention", "full_attention"] * 2
    model = build(name, num_hidden_layers=4, layer_types=kinds)
    model.set_attn_implementation("eager")
    return model


# By how many stages. What depends on these llama shows; what depends on the model, any number.
MODELS = {
    "llama": (1, 2, 3, 4),
    "gemma2": (2, 3, 4),
    "mistral-window": (2, 4),
    "qwen2": (3,),
    "qwen3": (4,),
    "phi": (2,),
    "gpt2": (3,),
}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_stocks(name: str) -> None:
    """Prompts are longer than an iteration, and than a window."""
    model, asked = four_layers(name), prompts(4, 2 * CHUNK)
    expected = said(model, asked, 6)
    install()
    for stages in MODELS[name]:
        assert answered(model, requests(asked, 6), stages) == expected, stages


SAMPLED = Sampling(0, 1.1, 40, 0.95, presence=0.5, frequency=0.3, repetition=1.2, logprobs=2)


@functools.lru_cache
def llama(count: int, longest: int, new: int, layers: int = 3) -> tuple[Any, list[list[int]], list[list[int]]]:
    """A model, prompts, and what stock answers."""
    model, asked = build("llama", num_hidden_layers=layers), prompts(count, longest)
    return model, asked, said(model, asked, new)


@contextmanager
def grouped(model: Any, stages: int, **more: Any) -> Iterator[tuple[InProcess, Told]]:
    spans, told = evenly(model.config.num_hidden_layers, stages), Told()
    with Replicas([hollow(model, layers) for layers in spans]) as members:
        group = InProcess(1, members, spans, told, **more)
        yield group, told
        del group


def shuffled(group: InProcess, chance: random.Random) -> None:
    """Runs a group, whose stages do something whenever they can, in any order."""
    leader = group.leader

    def step(stage: int) -> bool:
        if stage:
            return group.stages[stage].step()
        if chance.random() < 0.5:
            return leader.launch()
        return group.stages[0]._answered() and leader.collect()

    while not leader.idle:
        step(chance.randrange(len(group.stages)))
    group.run()


def any_cuts(chance: random.Random) -> Callable[[Sequence[Size], int], list[list[Piece]]]:
    def split(chunks: Sequence[Size], places: int) -> list[list[Piece]]:
        microbatches: list[list[Piece]] = [[] for _ in range(places)]
        at = 0
        for index, (_, new) in enumerate(chunks):
            first = at
            while new:
                taken = new if at == places - 1 else chance.randint(1, new)
                microbatches[at].append((index, taken))
                new -= taken
                at = min(places - 1, at + 1) if new else chance.choice((first, at))
        return [microbatch for microbatch in microbatches if microbatch]

    return split


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_stages_and_any_cuts_give_the_same_tokens(seed: int) -> None:
    chance = random.Random(seed)
    model, asked, expected = llama(7, 2 * CHUNK, 8, 4)
    install()
    with grouped(model, 2 + seed % 3, split=any_cuts(chance)) as (group, told):
        waiting = requests(asked, 8)
        for request in waiting[:4]:
            group.add(request)
        for _ in range(8):
            group.step()
        for request in waiting[4:]:
            group.add(request)
        shuffled(group, chance)
    assert told.answers(waiting) == expected


def test_every_stage_has_a_microbatch() -> None:
    model, asked, _ = llama(6, CHUNK, 10)
    install()
    with grouped(model, 3) as (group, told):
        for request in requests(asked):
            group.add(request)
        busy = []
        while not group.leader.idle:
            busy.append([stage.has_work() for stage in group.stages[1:]])
            launched = group.leader.in_flight
            group.step()
            assert group.leader.in_flight <= 3
            busy[-1].append(group.leader.in_flight >= launched)
        assert sum(map(all, busy)) > 0.8 * len(busy)
        assert len(told.over) == 6


def test_an_answer_ends_with_a_token_that_ends_it() -> None:
    model, asked, whole = llama(6, CHUNK, 10)
    ends = whole[0][3], whole[1][7]
    install()
    told = answered(model, [Request(request.name, request.prompt, 10, ends=ends) for request in requests(asked)], 3)
    for tokens, all_ in zip(told, whole, strict=True):
        last = next((n for n, token in enumerate(all_) if token in ends), len(all_) - 1)
        assert tokens == all_[: last + 1]
    assert len(told[0]) <= 4


@pytest.mark.parametrize("when", [1, 4, 9])
def test_a_request_that_is_cancelled_ends_on_all_stages(when: int) -> None:
    """In its prompt, in flight, decoding; its name is used again at once."""
    model, asked, expected = llama(4, 2 * CHUNK, 8)
    install()
    with grouped(model, 3) as (group, told):
        waiting = requests(asked, 8)
        for request in waiting:
            group.add(request)
        for _ in range(when):
            group.step()
        for name in ("q0", "q3"):
            if name not in told.over:
                group.leader.requests.cancel(name)
        if "q0" not in told.over:
            told.tokens.pop("q0", None)
            group.add(waiting[0])
        heard = told.tokens.get("q3")
        group.run()
        assert told.tokens.get("q3") == heard
        others = [told.tokens[request.name] for request in waiting if request.name != "q3"]
        assert others == [chosen(*answer) for answer in (*expected[:3], *expected[4:])]
        assert all(not follower.held for follower in group.followers)


@pytest.mark.parametrize("host", [64, 1])
@pytest.mark.parametrize("stages", [1, 3])
def test_requests_are_preempted_where_pages_run_out(stages: int, host: int) -> None:
    """KV of requests goes to the host on all stages, or where there is no room they are computed again."""
    model, asked, expected = llama(10, 60, 24)
    pages = 36 + 2 * (stages - 1)  # each cache has a guard, and sectors for padding
    page = 3 * PAGE // 16  # a block of 16 tokens in 3 layers
    ballonet.install(pages * page, page_size=page, host_budget=host * page, device="cpu")
    spans, told = evenly(3, stages), Told()
    with Replicas([model]) as (member,):
        group = InProcess(1, [member] * stages, spans, told)
        for request in requests(asked, 24):
            group.add(request)
        group.run()
        assert told.answers(requests(asked, 24)) == expected
        if host > 1:
            assert ballonet.stats().copied.kv_d2h > 0
        del group


class Lacks:
    """In the place of a function that gets memory, which fails from its `first` call on, `times` times."""

    def __init__(self, stock: Callable[..., Any], first: int, times: int, error: Any) -> None:
        self._stock, self._first, self._times, self._error = stock, first, times, error
        self.calls = self.failed = 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if self.calls < self._first or self.failed == self._times:
            return self._stock(*args)
        self.failed += 1
        if isinstance(self._error, Exception):
            raise self._error
        return self._error


@functools.lru_cache
def alone(sampling: Sampling | None) -> tuple[Any, list[Request], list[list[int]]]:
    """A model, requests, and what one stage answers."""
    model, asked = build("llama", num_hidden_layers=4), requests(prompts(4, 2 * CHUNK), 6, sampling)
    install()
    return model, asked, answered(model, asked, 1)


@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampling"])
@pytest.mark.parametrize(("stage", "first"), [(1, 1), (1, 30), (2, 9)])
def test_a_follower_without_memory_has_the_request_computed_again(
    stage: int, first: int, sampling: Sampling | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked, expected = alone(sampling)
    install()
    with grouped(model, 3) as (group, told):
        lacks = Lacks(group.caches[stage].store, first, 3, False)
        monkeypatch.setattr(group.caches[stage], "store", lacks)
        for request in asked:
            group.add(request)
        group.run()
        assert lacks.failed == 3
        assert told.answers(asked) == expected
        assert all(not follower.held for follower in group.followers)


@pytest.mark.parametrize(("stage", "first"), [(0, 1), (0, 20), (1, 5), (1, 20), (2, 1), (2, 5)])
def test_a_stage_without_memory_in_the_middle_has_its_microbatch_computed_again(
    stage: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked, expected = llama(4, 2 * CHUNK, 8)
    install()
    lacks = Lacks(SpanRunner.run, first, 2, torch.OutOfMemoryError("planted"))
    with grouped(model, 3) as (group, told):
        whose = group.leader if stage == 0 else group.followers[stage - 1]
        stock = whose._runner.run

        def run(*args: Any) -> Any:
            return lacks(whose._runner, *args) if stock else None

        monkeypatch.setattr(whose._runner, "run", run)
        for request in requests(asked, 8):
            group.add(request)
        group.run()
        assert lacks.failed == 2
        assert told.answers(requests(asked)) == expected


@pytest.mark.parametrize(("stages", "first"), [(1, 1), (1, 9), (3, 1), (3, 9)])
def test_a_last_stage_without_memory_for_logits_has_the_microbatch_computed_again(
    stages: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked, expected = alone(SAMPLED)
    install()
    with grouped(model, stages) as (group, told):
        last = group.followers[-1] if group.followers else group.leader
        lacks = Lacks(last._sampler.choose, first, 2, torch.OutOfMemoryError("planted"))
        monkeypatch.setattr(last._sampler, "choose", lacks)
        for request in asked:
            group.add(request)
        group.run()
        assert lacks.failed == 2
        assert told.answers(asked) == expected


@pytest.mark.parametrize(("stage", "first"), [(1, 1), (1, 8), (2, 6)])
def test_a_follower_without_memory_for_what_it_is_given_has_the_microbatch_computed_again(
    stage: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States are put on the device as they are taken, and are lost where that fails."""
    model, asked, expected = llama(4, 2 * CHUNK, 8)
    install()
    with grouped(model, 3) as (group, told):
        link: Any = group.followers[stage - 1]._before
        stock, came = link.recv, list[str]()

        def recv(tag: str) -> torch.Tensor:
            received: torch.Tensor = stock(tag)
            came.append(tag)
            if tag == "states" and came.count(tag) in (first, first + 1):
                raise torch.OutOfMemoryError("planted")
            return received

        monkeypatch.setattr(link, "recv", recv)
        for request in requests(asked, 8):
            group.add(request)
        group.run()
        assert came.count("states") > first
        assert told.answers(requests(asked)) == expected
        assert all(not follower.held for follower in group.followers)


def test_a_request_that_is_alone_and_never_finds_memory_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked, _ = llama(4, 2 * CHUNK, 8)
    install()
    with grouped(model, 2) as (group, told):
        monkeypatch.setattr(group.caches[1], "store", lambda *_: False)
        group.add(requests(asked)[0])
        group.run()
        assert isinstance(told.errors["q0"], torch.OutOfMemoryError)
        assert not told.over
        assert all(not follower.held for follower in group.followers)


def test_sampled_tokens_do_not_depend_on_stages_or_on_where_a_request_begins_again() -> None:
    model, asked, expected = alone(SAMPLED)
    assert expected != said(model, [list(request.prompt) for request in asked], 6)
    install()
    for stages in (2, 3, 4):
        assert answered(model, asked, stages) == expected
    for known in (1, 5):
        begun = [
            Request(request.name, request.prompt, 6, request.sampling, delivered=chosen(*tokens[:known]))
            for request, tokens in zip(asked, expected, strict=True)
        ]
        with grouped(model, 2) as (group, told):
            for request in begun:
                told.tokens[request.name] = request.delivered
                group.add(request)
            group.run()
            assert told.answers(asked) == expected
            for request in asked:
                logprobs = [(token.logprob, len(token.likeliest)) for token in told.tokens[request.name][known:]]
                assert all(own is not None and own <= 0 and likeliest == 2 for own, likeliest in logprobs)


def test_a_stage_s_choices_are_those_of_a_whole_model() -> None:
    """Penalties over prompt and answer, logprobs, and an end that is put off."""
    model, settings = build("llama", num_hidden_layers=4), [*SETTINGS, Sampling(least=4)]
    asked = [
        named(prompt, 8, sampling, ends=(142,))
        for prompt, sampling in zip(prompts(9, 2 * CHUNK), settings, strict=True)
    ]
    expected = [alone_of(model, request) for request in asked]
    install()
    with grouped(model, 3) as (group, told):
        for request in asked:
            group.add(Request(request.name, request.prompt, request.most, request.sampling, request.ends))
        group.run()
        assert all(close_to(told.tokens[request.name], answer) for request, answer in zip(asked, expected, strict=True))


# Records


GROUP = Group((2, 0), (Span(0, 3), Span(3, 8)))


def test_records_arrive_as_they_were() -> None:
    plan = MicrobatchPlan(
        2,
        7,
        (Chunk("a", (3, 4, 5), 10, False), Chunk("b", (9,), 0, True)),
        (Begun("b", Sampling(-5, 0.7, 20, 0.9, presence=0.5), 3, (9,), (4, 5, 6, 7)),),
        ("c",),
        ("d", "e"),
    )
    passing = Passing(2, 7, (("a", 1),), (40, 50), 2)
    answer = Passing(2, 7, (("a", 1),), (40, 50, 60), tokens=(("b", ChosenToken(12, -0.5, ((3, -0.1),))),))
    handed = HandedOver(2, GROUP, (Handed(Request("a", (1, 2), 5, Sampling(7, 0.5), (9,), chosen(4)), 4),))
    for record in (plan, MicrobatchPlan(0, 0), passing, answer, handed, kv_exchange.Piece("a", 40, 3, 2, 5, -(2**62))):
        assert record_of(tensor_of(record), type(record)) == record


def test_a_chunk_samples_the_token_behind_it() -> None:
    assert Chunk("a", (3, 4, 5), 10, True).end == 13


# Batches over spans of one model: layers that do not run never touch the paged cache


PROMPTS = prompts(5, 30)
STEP = ContinuousBatchProcessor._generation_step


class InParts:
    """Called as the model, runs its layers span by span."""

    def __init__(self, splice: Splice, spans: list[Span]) -> None:
        self.splice = splice
        self.spans = spans
        self.steps = 0
        self.updated: list[set[int]] = [set() for _ in spans]

    def __call__(self, **inputs: Any) -> Any:
        cache, given = inputs["cache"], None
        attention = self.splice.model.config._attn_implementation
        update, signature = cache.update, inspect.signature(cache.update)

        for number, span in enumerate(self.spans):
            self.splice.span = span

            def noting(*args: Any, number: int = number, **kwargs: Any) -> Any:
                self.updated[number].add(signature.bind(*args, **kwargs).arguments["layer_idx"])
                return update(*args, **kwargs)

            cache.update = noting
            try:
                given = self.splice.run(inputs, given)
            finally:
                del cache.update
        assert self.splice.model.config._attn_implementation == attention  # also after the proof
        self.steps += 1
        assert given is not None
        return SimpleNamespace(logits=given[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.splice.model, name)


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> list[InParts]:
    """Has whatever is batched run in these parts."""
    parts: list[InParts] = []
    monkeypatch.setattr(ContinuousBatchProcessor, "_generation_step", lambda self, model: STEP(self, parts[0]))
    return parts


@pytest.mark.parametrize("managed", [False, True], ids=["stock", "managed"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss", "mixtral"])
def test_a_batch_in_parts_is_the_whole(name: str, managed: bool, in_parts: list[InParts], monkeypatch: Any) -> None:
    monkeypatch.setattr(splicing, "_known", {})  # the proof is made with the attention of batches
    model = build(name, num_hidden_layers=4, **({"layer_types": ["full_attention"] * 4} if name == "gpt_oss" else {}))
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(ContinuousBatchProcessor, "_generation_step", STEP)
        expected = stock(model, PROMPTS)
    assert not any(answer.error for answer in expected)
    splice = Splice(model)
    parts = InParts(splice, [Span(0, 1), Span(1, 3), Span(3, 4)])
    in_parts.append(parts)
    if managed:
        ballonet.install(2**24, page_size=65536, host_budget=2**24, device="cpu")
        with ballonet.manage(model):
            outputs = answers(model, PROMPTS)
    else:
        outputs = answers(model, PROMPTS, num_blocks=16 * len(PROMPTS))  # not what is known of it
    splice.close()
    assert outputs == expected
    assert parts.steps > 5
    assert parts.updated == [{0}, {1, 2}, {3}]
