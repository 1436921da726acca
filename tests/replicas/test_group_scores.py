"""Answers of groups of replicas behind a server's endpoints: settings of their own, and scores of prompts, as those of
a loop (tests/serving/test_loop.py), also where requests are preempted, computed again, or handed over.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import ballonet
from ballonet.hooks.batching.cache import ElasticPagedCache
from ballonet.hooks.replicas.follower import StageSampler
from ballonet.hooks.replicas.frontend import FleetEngine
from ballonet.hooks.replicas.microbatch_plan import Request
from ballonet.hooks.sampling.settings import ChosenToken, Sampling

from ..models import build
from ..serving.batches import prompts
from ..serving.sampled import alone, answer, close_to, named
from ..serving.test_loop import check_scores, logprobs, mixed
from .stages import PAGE, InProcess, Replicas, Told, evenly, in_a_group, install
from .test_kv_exchange import joined, serve
from .test_pipeline import Lacks

pytestmark = pytest.mark.usefixtures("nothing_is_left")
SCORED = Sampling(logprobs=2)


def to_score(asked: list[list[int]]) -> list[Request]:
    return [Request(f"q{n}", (ids[0],), len(ids) - 1, SCORED, scored=tuple(ids[1:])) for n, ids in enumerate(asked)]


def check_told(asked: list[list[int]], told: Told, plain: list[torch.Tensor]) -> None:
    assert not told.errors
    check_scores(asked, [(ChosenToken(ids[0]), *told.tokens[f"q{n}"]) for n, ids in enumerate(asked)], plain)


@functools.lru_cache
def llama(layers: int, count: int, length: int) -> tuple[Any, list[list[int]], list[torch.Tensor]]:
    """A model, prompts of so many tokens, and their logprobs."""
    model = build("llama", num_hidden_layers=layers)
    asked = [(ids * length)[:length] for ids in prompts(count, 60)]
    return model, asked, [logprobs(model, prompt) for prompt in asked]


@pytest.mark.parametrize("stages", [1, 3])
def test_requests_in_a_group_get_what_each_gets_alone(stages: int) -> None:
    asked, expected = mixed(3, 12)
    install()

    async def scene(engine: FleetEngine, _: InProcess) -> None:
        got = await asyncio.gather(*(answer(engine, request) for request in asked))
        assert all(close_to(tokens, right) for (tokens, _), right in zip(got, expected, strict=True))

    in_a_group(build("llama", num_hidden_layers=3, max_position_embeddings=512), scene, stages)


@pytest.mark.parametrize(("name", "stages"), [("llama", 1), ("llama", 3), ("phi", 2)])
def test_scores_of_a_group_are_those_of_a_plain_forward(
    name: str, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several at once, beside an answer, and with few logits at once; the first stage never has any."""
    asked, model = prompts(4, 100), build(name, num_hidden_layers=3)
    plain, free = [logprobs(model, prompt) for prompt in asked], named(prompts(1, 20)[0], 20, Sampling(3, 1.2))
    expected, rows, stock = alone(model, free), list[int](), StageSampler.choose
    monkeypatch.setattr(ElasticPagedCache, "logit_rows", property(lambda _: 8))

    def choose(self: StageSampler, chunks: Any, logits: torch.Tensor) -> Any:
        rows.append(len(logits))
        return stock(self, chunks, logits)

    monkeypatch.setattr(StageSampler, "choose", choose)
    install()

    async def scene(engine: FleetEngine, _: InProcess) -> None:
        beside = asyncio.ensure_future(answer(engine, free))
        check_scores(asked, await asyncio.gather(*(engine.score(named(prompt, 1, SCORED)) for prompt in asked)), plain)
        assert close_to((await beside)[0], expected)
        assert await engine.score(named([7], 1, Sampling())) == (ChosenToken(7),)
        assert max(rows) <= 9

    in_a_group(model, scene, stages)


@pytest.mark.parametrize(("stage", "first"), [(1, 3), (2, 6)])
def test_a_prompt_is_scored_once_where_a_stage_finds_no_memory(
    stage: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked, plain = llama(3, 4, 100)
    spans, told = evenly(3, 3), Told()
    install()
    with Replicas([model]) as (member,):
        group = InProcess(1, [member] * 3, spans, told)
        lacks = Lacks(group.caches[stage].store, first, 3, False)
        monkeypatch.setattr(group.caches[stage], "store", lacks)
        for request in to_score(asked):
            group.add(request)
        group.run()
        assert lacks.failed == 3
        assert all(not follower.held for follower in group.followers)
        del group
    check_told(asked, told, plain)


@pytest.mark.parametrize("host", [64, 1])
def test_prompts_are_scored_where_pages_run_out(host: int) -> None:
    model, asked, plain = llama(3, 10, 100)
    pages, page = 36, 3 * PAGE // 16
    ballonet.install(pages * page, page_size=page, host_budget=host * page, device="cpu")
    told = Told()
    with Replicas([model]) as (member,):
        group = InProcess(1, [member] * 3, evenly(3, 3), told)
        for request in to_score(asked):
            group.add(request)
        group.run()
        del group
    check_told(asked, told, plain)


def test_prompts_that_are_handed_over_are_scored_on() -> None:
    """Neither a score that was told, nor the KV behind it, is computed again."""
    _, asked, plain = llama(2, 5, 350)
    install()
    check_told(asked, joined(to_score(asked), serve), plain)


def test_a_prompt_whose_replica_was_lost_is_scored_from_where_it_was_told() -> None:
    model, asked, plain = llama(2, 4, 100)
    install()
    whole, told = Told(), Told()
    with Replicas([model]) as (member,):
        for heard, known in ((whole, 0), (told, 17)):
            group = InProcess(1, [member] * 2, evenly(2, 2), heard)
            for request in to_score(asked):
                heard.tokens[request.name] = tokens = whole.tokens.get(request.name, ())[:known]
                group.add(replace(request, delivered=tokens))
            group.run()
            del group
    check_told(asked, told, plain)
