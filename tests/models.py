"""Tiny models of many architectures, random but reproducible, whose tokens depend on what is in the cache.

With the usual `initializer_range` of 0.02 and tied embeddings most tokens of an untrained model are decided by the last
input token alone; so weights are drawn ten times as wide and the head has weights of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
import transformers
from transformers import GenerationMixin, PreTrainedModel

from ballonet.hooks.cache_argument import given_cache
from ballonet.hooks.compat import cache_name

from . import architectures
from .architectures import LAYERS, PAD, VOCABULARY

__all__ = ["LAYERS", "PAD", "VOCABULARY"]

ARCHITECTURES: Final = tuple(architectures.PLAIN)
_COMMON: Final[Mapping[str, Any]] = {
    "vocab_size": VOCABULARY,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": PAD,
}
_PARTS: Final = ("text_config", "encoder", "decoder")  # of composite configurations


def build(name: str, **changes: Any) -> Any:
    """The tiny model of that name, in float32 and evaluation mode. `changes` go to its configuration."""
    architecture = architectures.ARCHITECTURES[name]
    settings = {**_COMMON, **copy.deepcopy(dict(architecture.config)), **changes}
    for part in _PARTS:
        if part in settings:
            settings[part] = {**_COMMON, **settings[part]}
    config = transformers.AutoConfig.for_model(architecture.model_type or name, **settings)
    torch.manual_seed(20)
    model = getattr(transformers, architecture.auto).from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():  # some begin with what says nothing
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def prompts(batch: int, longest: int) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of `batch` prompts of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(2, VOCABULARY, (batch, longest), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        padding = min(longest - 2, 3 * row)
        ids[row, :padding], mask[row, :padding] = PAD, 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """What it makes of two prompts, [2, 9, vocabulary]."""
    scores: torch.Tensor = model(**prompts(2, 9)).logits
    return scores


def questions(name: str, batch: int, longest: int = 12, *, padded: bool = False) -> dict[str, torch.Tensor]:
    """Inputs that the architecture of that name takes, for `generate()`. Prompts repeat themselves, so that prompt
    lookup finds something in them; with `padded` they are of different lengths."""
    architecture = architectures.ARCHITECTURES[name]
    extra = {} if architecture.extra is None else dict(architecture.extra(batch))
    if not architecture.tokens:
        return extra
    given = prompts(batch, longest)
    ids, mask = given["input_ids"].clamp(max=architectures.TEXT), given["attention_mask"]
    ids[:, longest // 2 :] = torch.where(mask[:, : longest // 2] == 1, ids[:, : longest // 2], ids[:, longest // 2 :])
    if not padded:
        ids[mask == 0], mask[:] = 2, 1
    first = torch.tensor(architecture.prefix, dtype=ids.dtype)
    for row in range(batch):
        start = int((mask[row] == 0).sum())
        ids[row, start : start + len(first)] = first
    return {"input_ids": ids, "attention_mask": mask, **extra}


# How tokens are chosen -> arguments of `generate()`
MODES: Final[Mapping[str, Mapping[str, Any]]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 20},
    "beam": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
}


class Output(NamedTuple):
    """What `generate()` returned: int64[sequences, tokens], and float32[steps, rows, vocabulary]."""

    tokens: torch.Tensor
    logits: torch.Tensor

    def agrees(self, other: Output) -> bool:
        """The same tokens, and logits that differ by no more than another order of additions would explain."""
        return torch.equal(self.tokens, other.tokens) and torch.allclose(
            self.logits, other.logits, rtol=1e-4, atol=1e-4
        )


def generate(model: Any, mode: str, inputs: Mapping[str, torch.Tensor], tokens: int = 14, **more: Any) -> Output:
    """What `model.generate()` returns, seeded."""
    torch.manual_seed(3)
    length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
    result = model.generate(**inputs, **length, **MODES[mode], return_dict_in_generate=True, output_logits=True, **more)
    return Output(result.sequences, torch.stack(result.logits))


def ask(model: Any, name: str, way: str, tokens: int = 10) -> Output:
    """What the model of that name generates in one of `MODES`, "padded", "assisted" or "continued"."""
    if way == "padded":
        return generate(model, "greedy", questions(name, 3, 16, padded=True), tokens)
    if way == "assisted":
        return generate(model, "greedy", questions(name, 1), tokens, prompt_lookup_num_tokens=3)
    if way != "continued":
        return generate(model, way, questions(name, 2), tokens)
    inputs, half = questions(name, 2), tokens // 2
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": half, "min_new_tokens": half}
    begun = model.generate(**inputs, **settings, return_dict_in_generate=True)
    if model.config.is_encoder_decoder:
        more = inputs | {"decoder_input_ids": begun.sequences}
    else:
        more = {"input_ids": begun.sequences, "attention_mask": torch.ones_like(begun.sequences)}
    return generate(model, "greedy", more, half, **{cache_name(model): begun.past_key_values})


Hook = Callable[[int, Any], None]


def before_each_forward(model: PreTrainedModel, act: Hook) -> Any:
    """Calls act(step, cache) before each forward; cache is None where there is none yet. Returns the hook's handle."""
    step = iter(range(10**9))

    def hook(_: Any, args: Any, kwargs: Any) -> None:
        act(next(step), given_cache(kwargs))

    inner = getattr(model, "language_model", None)  # some call the `generate()` of a model inside them
    speaker = inner if isinstance(inner, GenerationMixin) else model
    return speaker.register_forward_pre_hook(hook, with_kwargs=True)


def layers_of(cache: Any) -> list[Any]:
    """The layers of a cache, in an encoder-decoder's those of self-attention first; empty for what is no `Cache`."""
    if isinstance(cache, transformers.EncoderDecoderCache):
        return [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    return list(getattr(cache, "layers", ()))
