"""Requests that `generate_batch` answers, with and without ballonet."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import ballonet
from ballonet.hooks.batching import selection
from ballonet.hooks.batching.scheduler import ElasticScheduler
from ballonet.hooks.batching.steps import PagePreemption
from ballonet.offload.policy.admission import Admission, Demand, Memory

BLOCK = 16  # tokens
PAGE = 65536


class Answer(NamedTuple):
    tokens: list[int]
    error: str | None


def install(pages: int) -> None:
    """A pool of so many pages, and as many on the host."""
    ballonet.install(pages * PAGE, page_size=PAGE, host_budget=pages * PAGE, device="cpu")


def starve_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every fifth step of two requests and more lack pages for each of them, until one is left."""
    process, steps = ElasticScheduler._process_candidates, itertools.count(1)

    def lacking(self: Any, candidates: list[Any], *args: Any) -> Any:
        if len(self.active_requests) < 2 or next(steps) % 5:
            return process(self, candidates, *args)
        self.starved_requests = [(state, 1) for state in candidates if state.request_id in self.active_requests]
        return [], True, False, 0, 0

    monkeypatch.setattr(ElasticScheduler, "_process_candidates", lacking)
    monkeypatch.setattr(PagePreemption, "_fits", lambda _, starved: len(starved) < 2)


def prompts(count: int, longest: int, highest: int = 60) -> list[list[int]]:
    """`count` prompts of 2 to `longest` tokens below `highest`."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, highest, (length,), generator=generator).tolist() for length in lengths]


def greedily(tokens: int, children: int = 1) -> GenerationConfig:
    """Answers of so many tokens."""
    settings = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    generation = GenerationConfig(max_new_tokens=tokens, **settings)
    generation.num_return_sequences = children  # which generate() would refuse
    return generation


def answers(
    model: Any, asked: list[list[int]], tokens: int = 12, *, children: int = 1, **settings: Any
) -> list[Answer]:
    """What `generate_batch` answers, in the order of the prompts, `children` times each. `settings`: of continuous
    batching."""
    outputs = model.generate_batch(
        asked,
        generation_config=greedily(tokens, children),
        continuous_batching_config=ContinuousBatchingConfig(**{"page_size": BLOCK, "max_batch_tokens": 64, **settings}),
        progress_bar=False,
    )
    by_number = sorted(outputs.values(), key=lambda each: int(each.request_id.removeprefix("req_").partition("__")[0]))
    return [Answer(output.generated_tokens, output.error) for output in by_number]


def looping(model: Any, tokens: int, **settings: Any) -> AbstractContextManager[Any]:
    """The manager of a generation loop whose answers have so many tokens. `settings`: of continuous batching."""
    batching = ContinuousBatchingConfig(**{"page_size": BLOCK, "max_batch_tokens": 64, **settings})
    manager: AbstractContextManager[Any] = model.continuous_batching_context_manager(
        generation_config=greedily(tokens), continuous_batching_config=batching
    )
    return manager


TOGETHER = threading.RLock()  # held while requests are added that come together, and while a loop takes those that came


def ask(manager: Any, asked: Iterable[list[int]]) -> list[Answer]:
    """What a loop answers, which is asked all of it at once; in the order of the prompts."""
    with TOGETHER:
        names = [manager.add_request(prompt) for prompt in asked]
    outputs = {(output := manager.get_result(timeout=600)).request_id: output for _ in names}
    return [Answer(outputs[name].generated_tokens, outputs[name].error) for name in names]


_KNOWN: dict[Any, list[Answer]] = {}  # of stock


def stock(model: Any, asked: list[list[int]], tokens: int = 12) -> list[Answer]:
    """What it answers without ballonet, with as much memory as it takes; computed once for models that are alike."""
    config = model.config.to_json_string(use_diff=False), model.config._attn_implementation
    weights = tuple(float(parameter.detach().double().sum()) for parameter in model.parameters())
    key = config, weights, tuple(map(tuple, asked)), tokens
    if key not in _KNOWN:
        results = answers(model, asked, tokens, num_blocks=16 * len(asked))
        assert [answer.error for answer in results] == [None] * len(asked), "or nothing would be compared"
        _KNOWN[key] = results
    return list(_KNOWN[key])


@contextmanager
def kv_to_the_host() -> Iterator[None]:
    """Whoever is admitted has new KV on the host while that has room, as where the device has none."""
    stock = selection.admit

    def admitted(demands: Iterable[Demand], memory: Memory, *args: Any, **options: Any) -> Admission:
        demands, left = list(demands), memory.host // 2
        admission = stock(demands, memory, *args, **options)
        where = dict(admission.where)
        for demand in demands:
            if demand.request in where and demand.kv <= left:
                where[demand.request], left = "host", left - demand.kv
        return replace(admission, where=where)

    selection.admit = admitted
    try:
        yield
    finally:
        selection.admit = stock
