"""Requests that carry their settings, asked of a server's loop, and what the model answers alone."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import torch
from transformers import ContinuousBatchingConfig

import ballonet
from ballonet.hooks.sampling.grammar import Matcher
from ballonet.hooks.sampling.sampler import SampledRow, TokenCounts, draw
from ballonet.hooks.sampling.settings import ChosenToken, Sampling
from ballonet.hooks.server.engine import Denial, Engine, Generation, Update
from ballonet.hooks.server.loops import Loop

from .batches import BLOCK

_NUMBERS = itertools.count()
DRAWN = Sampling(5, 1.3)
SETTINGS = [
    Sampling(),
    DRAWN,
    Sampling(6, 1.1, top_k=20, top_p=0.9),
    Sampling(7, 0.8, min_p=0.05, presence=0.5, frequency=0.3),
    Sampling(presence=1.0, frequency=0.5),
    Sampling(repetition=1.5),
    Sampling(8, 1.0, repetition=1.3, bias=((5, 2.0), (9, -3.0))),
    Sampling(logprobs=2, frequency=-0.3),
]


def named(prompt: Sequence[int], most: int, sampling: Sampling, **more: Any) -> Generation:
    """A request with a name of its own."""
    return Generation(f"request {next(_NUMBERS)}", tuple(prompt), most, sampling, **more)


@torch.no_grad()
def alone(model: Any, asked: Generation, matcher: Matcher | None = None) -> list[ChosenToken]:
    """What the model answers, a whole forward per token; before it is managed. `matcher`: of its grammar."""
    tokens, chosen = list(asked.prompt), list[ChosenToken]()
    while len(chosen) < asked.most and not (chosen and chosen[-1].token in asked.ends):
        logits = model(input_ids=torch.tensor([tokens])).logits[0, -1:].float()
        answer = [token.token for token in chosen]
        counts = TokenCounts(asked.prompt, answer, logits.shape[-1], logits.device)
        allowed = None if matcher is None else partial(matcher.allowed, answer)
        row = SampledRow(asked.sampling, len(tokens), len(answer), asked.ends, counts, allowed)
        drawn = draw(logits, [row], 8)
        chosen += drawn.told(drawn.tokens.tolist())
        tokens.append(chosen[-1].token)
    return chosen


async def answer(engine: Engine, asked: Generation) -> tuple[list[ChosenToken], str | None]:
    """All tokens of an answer, and why it ended."""
    return await answer_of(engine.generate(asked))


async def answer_of(updates: AsyncGenerator[Update, None]) -> tuple[list[ChosenToken], str | None]:
    """What is left of an answer."""
    tokens, ended = list[ChosenToken](), None
    async for update in updates:
        tokens += update.tokens
        ended = update.ended
    return tokens, ended


async def denied(engine: Engine, asked: Generation) -> Denial | None:
    """Why a request is refused; None where it is answered."""
    with suppress(StopAsyncIteration):
        try:
            await answer(engine, asked)
        except Denial as denial:
            return denial
    return None


def in_a_loop(
    model: Any,
    scene: Callable[[Loop], Awaitable[None]],
    waiting: int = 64,
    tokenizer: Any = None,
    managing: Callable[[Any], AbstractContextManager[Any]] = ballonet.manage,
    **settings: Any,
) -> None:
    """Runs a scene with the loop of a model, which `managing` manages. `settings`: of continuous batching."""
    batching = ContinuousBatchingConfig(**{"page_size": BLOCK, "max_batch_tokens": 64, **settings})

    async def run() -> None:
        loop = Loop(model, tokenizer, batching, waiting)
        try:
            await asyncio.wait_for(scene(loop), 300)
        finally:
            await asyncio.to_thread(loop.close)

    with managing(model):
        asyncio.run(run())


def close_to(one: Sequence[ChosenToken], other: Sequence[ChosenToken]) -> bool:
    """Are these the same tokens, with the same logprobs but for rounding?"""
    if [token.token for token in one] != [token.token for token in other]:
        return False
    numbers = [
        [value for token in tokens for value in (token.logprob or 0.0, *(value for _, value in token.likeliest))]
        for tokens in (one, other)
    ]
    ids = [[likely for token in tokens for likely, _ in token.likeliest] for tokens in (one, other)]
    return ids[0] == ids[1] and torch.tensor(numbers[0]).allclose(torch.tensor(numbers[1]), atol=1e-4)
