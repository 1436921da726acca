"""Tiny models that decode by pieces of CUDA graphs, beside stock on the same device: equal to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import torch

import ballonet

from .. import models
from .scene import Place


class Kind(NamedTuple):
    """A kind of model: one of that name, with `changes` to its configuration. `coarse`: can attention not be cut out?
    `alone`: can its layers run on their own? `pooled`: does KV lie in the pool? `cuts`, `guesses`: does transformers
    take tokens back from its cache, and in assisted decoding? A state of past tokens keeps none to go back to, nor does
    a window that is full, but for assisted decoding."""

    name: str
    changes: Mapping[str, Any] = {}
    padded: bool = False
    coarse: bool = False
    alone: bool = True
    pooled: bool = True
    cuts: bool = True
    guesses: bool = True


KINDS: Mapping[str, Kind] = {
    "dense": Kind("llama", {"num_key_value_heads": 4}),
    "grouped heads": Kind("llama"),
    "padded": Kind("llama", padded=True),
    "latent": Kind("deepseek_v3", coarse=True),
    "windows": Kind("gemma3_text", cuts=False),
    "padded windows": Kind("gemma3_text", padded=True, cuts=False),
    "only windows": Kind("mistral-window", pooled=False, cuts=False),
    "shared KV": Kind("gemma3n_text", alone=False, cuts=False),
    "hybrid": Kind("falcon_h1", coarse=True, cuts=False, guesses=False),
    "experts": Kind("mixtral"),
    "many experts": Kind("qwen3_moe"),
}
TOKENS = 12
SHORT = 8  # tokens of a prompt whose cache is another one, of another length
LONG = 12


def prompt(name: str, place: Place, longest: int = LONG, rows: int = 2, *, padded: bool = False) -> dict[str, Any]:
    asked = models.questions(name, rows, longest, padded=padded)
    return {key: value.to(place.kind) for key, value in asked.items()}


def answer(
    model: Any, given: Mapping[str, Any], tokens: int = TOKENS, mode: str = "greedy", **more: Any
) -> models.Output:
    return models.generate(model, mode, given, tokens, **more)


def is_bit_equal(actual: models.Output, expected: models.Output) -> bool:
    """The same tokens, and logits that differ in no bit."""
    if not torch.equal(actual.tokens, expected.tokens) or actual.logits.shape != expected.logits.shape:
        return False
    return torch.equal(actual.logits.view(torch.int32), expected.logits.view(torch.int32))


def apart(actual: models.Output, expected: models.Output) -> str:
    """How two answers differ, nothing where they do not."""
    if is_bit_equal(actual, expected):
        return ""
    if actual.logits.shape != expected.logits.shape:
        return f"{tuple(actual.logits.shape)} in the place of {tuple(expected.logits.shape)}"
    wrong = (actual.logits != expected.logits).flatten(1).any(1)
    first = int(wrong.nonzero()[0]) if bool(wrong.any()) else -1
    return f"from token {first} on; logits up to {(actual.logits - expected.logits).abs().max().item()} apart"


def replays(managed: Any) -> int:
    """Forwards that graphs have computed so far."""
    count: int = managed.report().pieces.replayed
    return count


def captures(managed: Any) -> int:
    """Programs that were captured so far."""
    count: int = managed.report().pieces.captures
    return count


@contextmanager
def by_graphs(managed: Any) -> Iterator[None]:
    """Within it graphs are replayed."""
    before = replays(managed)
    yield
    assert replays(managed) > before, managed.report().pieces


@contextmanager
def decoding(model: Any, **options: Any) -> Iterator[Any]:
    """The model is managed, and decodes by graphs at least once within."""
    with ballonet.manage(model, **options) as managed, by_graphs(managed):
        yield managed


class Between:
    """A logits processor: calls `act(step)` between the forwards of a call, from the second one on, and changes
    nothing."""

    def __init__(self, act: Callable[[int], object]) -> None:
        self._act = act
        self.step = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.step += 1
        self._act(self.step)
        return scores


def between(act: Callable[[int], object], at: int = 0) -> dict[str, Any]:
    """Arguments of `generate()`: `act(step)` after each forward, or `at` one of them."""
    if at:
        return {"logits_processor": [Between(lambda step: act(step) if step == at else None)]}
    return {"logits_processor": [Between(act)]}


@contextmanager
def seeing_caches(model: Any, act: Callable[[int, Any], object]) -> Iterator[None]:
    """Within it `act(step, cache)` follows each forward of `generate()`; nothing watches the model's modules."""
    update, steps = model._update_model_kwargs_for_generation, count(1)

    def see(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        act(next(steps), next(value for value in outputs.values() if models.layers_of(value)))
        return update(outputs, *args, **kwargs)

    model._update_model_kwargs_for_generation = see
    try:
        yield
    finally:
        del model._update_model_kwargs_for_generation
