"""Groups of tiny models in one process, and what they answer."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

import ballonet
from ballonet.hooks.replicas.microbatch_plan import Request, Sampling, SplitPolicy, split_by_tokens
from ballonet.hooks.replicas.replica_model import GroupSettings, ReplicaModel
from ballonet.hooks.splice.splice import Splice
from ballonet.hooks.weights.model_parts import decoder_layers

from .in_process import InProcess

PAGE = 65536
BLOCK = 16  # tokens
CHUNK = 32  # new tokens of an iteration


def install(pages: int = 1024) -> None:
    ballonet.install(pages * PAGE, page_size=PAGE, host_budget=pages * PAGE, device="cpu")


def evenly(layers: int, stages: int) -> list[range]:
    ends = [layers * n // stages for n in range(stages + 1)]
    return [range(*each) for each in itertools.pairwise(ends)]


class Told:
    """What a leader tells: the tokens of every request, that it is over, or its error."""

    def __init__(self) -> None:
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.over: set[str] = set()
        self.errors: dict[str, Exception] = {}

    def __call__(self, request: Request, error: Exception | None) -> None:
        assert request.name not in self.over, f"{request.name} was over"
        if error is not None:
            self.errors[request.name] = error
            return
        before = self.tokens.get(request.name, ())
        assert request.delivered[:-1] == before, f"{request.name} has lost or repeated a token"
        self.tokens[request.name] = request.delivered
        if request.over:
            self.over.add(request.name)

    def answers(self, requests: Sequence[Request]) -> list[list[int]]:
        assert not self.errors
        assert {each.name for each in requests} <= self.over
        return [list(self.tokens[each.name]) for each in requests]


def hollow(model: Any, layers: range) -> Any:
    """A copy of a model that computes nothing but NaN in all layers but these."""
    found = copy.deepcopy(model)
    for number, layer in enumerate(decoder_layers(found)):
        if number not in layers:
            for parameter in layer.parameters():
                torch.nn.init.constant_(parameter, torch.nan)
    return found


class Replicas:
    """Managed models, each of which is a replica, until it is left."""

    def __init__(self, models: Sequence[Any], **batching: Any) -> None:
        self._models = models
        self._batching = {"page_size": BLOCK, **batching}
        self._stack = ExitStack()

    def __enter__(self) -> list[ReplicaModel]:
        for model in self._models:
            self._stack.enter_context(ballonet.manage(model))
        splices = [self._stack.enter_context(Splice(model)) for model in self._models]
        return [
            ReplicaModel(f"r{n}", model, splices[n], GroupSettings.of(model, CHUNK, **self._batching))
            for n, model in enumerate(self._models)
        ]

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


def requests(asked: Sequence[Sequence[int]], new: int = 12, sampling: Sampling | None = None) -> list[Request]:
    """A request for each prompt, named by its number; a seed of its own for each."""
    found = []
    for n, ids in enumerate(asked):
        given = Sampling() if sampling is None else Sampling(n, sampling.temperature, sampling.top_k, sampling.top_p)
        found.append(Request(f"q{n}", tuple(ids), new, given))
    return found


def answered(
    model: Any, asked: Sequence[Request], stages: int, *, split: SplitPolicy = split_by_tokens, broken: bool = True
) -> list[list[int]]:
    """What a group of copies of a model answers; `broken`: each copy can compute its own span alone."""
    spans, told = evenly(model.config.num_hidden_layers, stages), Told()
    models = [hollow(model, layers) if broken else copy.deepcopy(model) for layers in spans]
    with Replicas(models) as members:
        group = InProcess(1, members, spans, told, split)
        for each in asked:
            group.add(each)
        group.run()
        assert all(not follower.held for follower in group.followers)
    return told.answers(asked)
