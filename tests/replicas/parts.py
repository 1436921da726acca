"""Tiny decoders in parts: every part a copy of the model in which the layers of the others are not a number. Tokens
before those of a step lie in copies of the cache of the whole, as a model asks a cache of its own for the lengths of
layers that do not run."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from ballonet.allocator import install
from ballonet.hooks.compat import cache_name
from ballonet.hooks.splice.forms import States
from ballonet.hooks.splice.splice import Splice
from ballonet.hooks.weights.model_parts import decoder_layers
from ballonet.offload.policy.replicas.groups import Span

from ..architectures import ARCHITECTURES, PAD
from ..architectures.decoders import DECODERS, EXPERT_MODELS, PLAIN
from ..architectures.recurrent import RECURRENT
from ..models import build, prompts

NAMES: Final = tuple(PLAIN | DECODERS | EXPERT_MODELS | RECURRENT)


@functools.lru_cache(2)
def deeper(name: str) -> Any:
    """The tiny model of that name, with four layers where it has two or three, all of one kind."""
    settings, changes = ARCHITECTURES[name].config, dict[str, Any]()
    layers = len(decoder_layers(build(name)))
    kinds = [key for key in ("layer_types", "layers_block_type", "attention_types") if key in settings]
    if layers == 2 or not kinds:
        for key in ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "decoder_layers"):
            if key in settings:
                changes[key] = 4 if layers == 3 else 2 * settings[key] if layers == 2 else settings[key]
        changes |= {key: settings[key] * 2 for key in kinds}
    with install.stock():
        return build(name, **changes)


def cuts(layers: int, parts: int) -> list[Span]:
    """Spans, of which no two need be alike."""
    inner = {2: [layers // 2], 3: [1, layers - 1], 4: [1, 2, layers - 1]}[parts]
    return [Span(begin, end) for begin, end in pairwise([0, *inner, layers])]


def without_others(model: nn.Module, span: Span) -> nn.Module:
    """A copy in which what only the layers outside of the span have is not a number."""
    part = copy.deepcopy(model)
    layers = decoder_layers(part)
    kept = {id(tensor) for layer in layers[span.begin : span.end] for tensor in (*layer.parameters(), *layer.buffers())}
    for index, layer in enumerate(layers):
        for tensor in (*layer.parameters(), *layer.buffers()):
            if index not in span and id(tensor) not in kept and tensor.is_floating_point():
                tensor.data.fill_(float("nan"))
    return part


class Step(NamedTuple):
    """Some new tokens of a request, all of whose tokens so far are `ids`, int64[rows, tokens]."""

    request: str
    ids: torch.Tensor
    new: int


def steps(chunk: int) -> list[Step]:
    """Two requests: one of two padded rows, whose prompt comes in chunks, and another between its steps."""
    first = torch.where(prompts(2, 9)["attention_mask"] == 0, PAD, prompts(2, 9)["input_ids"].clamp(3, 190))
    other, more = prompts(1, 5)["input_ids"].clamp(3, 190), torch.tensor([[7, 90], [64, 5]])
    made, at = [], 0
    while at < 9:
        new = min(chunk, 9 - at)
        made.append(Step("first", first[:, : at + new], new))
        at += new
    made.append(Step("other", other, 5))
    for end in range(1, 3):
        made.append(Step("first", torch.cat([first, more[:, :end]], dim=1), 1))
        made.append(Step("other", torch.cat([other, more[:1, :end]], dim=1), 1))
    return made


def inputs_of(model: Any, step: Step, cache_name: str, cache: Any) -> Mapping[str, Any]:
    """Returns the arguments of a forward."""
    ids = step.ids if type(model).__name__.startswith("CpmAnt") else step.ids[:, -step.new :]
    inputs = {"input_ids": ids, "use_cache": True}
    if "attention_mask" in inspect.signature(model.forward).parameters:
        inputs["attention_mask"] = (step.ids != PAD).long()
    return inputs | ({} if cache is None else {cache_name: cache})


class Whole:
    """A model as it is, with a cache for each request. `before`: the cache as it was before the latest step."""

    def __init__(self, model: Any) -> None:
        self.before: Any = None
        self._model = model
        self._caches: dict[str, Any] = {}

    @torch.no_grad()
    def run(self, step: Step) -> torch.Tensor:
        """The logits of a step."""
        name, cache = cache_name(self._model), self._caches.get(step.request)
        self.before = copy.deepcopy(cache)
        output = self._model(**inputs_of(self._model, step, name, cache))
        self._caches[step.request] = output.get(name)
        logits: torch.Tensor = output["logits"]
        return logits


def in_one(model: Any, all_steps: Sequence[Step]) -> list[torch.Tensor]:
    """The logits of these steps by the whole model."""
    whole = Whole(model)
    return [whole.run(step) for step in all_steps]


def through(splices: Sequence[Splice], step: Step, before: Any) -> torch.Tensor:
    """The logits of a step by stages that hand one forward to each other. `before`: the cache of the tokens before."""
    given: States | None = None
    for splice in splices:
        inputs = inputs_of(splice.model, step, splice.cache_name, copy.deepcopy(before))
        given = tuple(tensor.clone() for tensor in splice.run(inputs, given))  # as another process has them
    assert given is not None
    return given[0]


def in_parts(model: Any, spans: Sequence[Span], all_steps: Sequence[Step]) -> list[torch.Tensor]:
    """Computes by stages, each of which has only its own layers."""
    with Splice(model) as splice:
        splice.prove()  # with all layers
    splices = [Splice(without_others(model, span)) for span in spans]
    for splice, span in zip(splices, spans, strict=True):
        splice.span = span
    whole, logits = Whole(model), []
    for step in all_steps:
        whole.run(step)
        logits.append(through(splices, step, whole.before))
    return logits
