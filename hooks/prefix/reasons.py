"""Which calls of `generate()` are left to transformers alone, and why: unknown arguments are not touched.

Checked when `generate()` has made its cache: its arguments and settings are known then, and nothing has been computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from ..cache_argument import CACHE_NAMES, given_cache
from ..compat import (
    PLAIN_MODES,
    DynamicCache,
    NoAttention,
    computes_whole_prompt,
    length_of_positions,
    slices_prompt,
    takes_positions,
)
from ..kv.layer import ElasticLayer
from .snapshot import STATES, keeps_state

# Arguments of a model on which keys and values do not depend, or which are checked below
_KNOWN: Final = frozenset(
    {"attention_mask", "position_ids", *CACHE_NAMES, "use_cache", "logits_to_keep", "return_dict"}
)
_KEPT: Final = (ElasticLayer, *STATES)  # layers that hold keys and values of every token, or a state
_DYNAMIC: Final = (None, "dynamic")


def why_not(
    model: Any, ids: torch.Tensor | None, user: Mapping[str, Any], given: Mapping[str, Any], expand: int
) -> str:
    """Returns why a call is left alone; empty where it is not.

    `ids`: of the prompts, int[sequences, tokens]. `user`: the keyword arguments of `generate()`. `given`: those of the
    method that prepares the cache. `expand`: sequences that are generated for each prompt.
    """
    config, kwargs = given["generation_config"], given["model_kwargs"]
    cache = given_cache(kwargs)
    if model.config.is_encoder_decoder:
        return "the model has an encoder"
    if given_cache(user) is not None:
        return "a cache was given"
    if not config.use_cache:
        return "use_cache is off"
    if config.cache_implementation not in _DYNAMIC or type(cache) is not DynamicCache:
        return "the cache is not dynamic"
    if ids is None or ids.dim() != 2 or ids.is_floating_point():
        return "no input_ids were given"
    if given["generation_mode"] not in PLAIN_MODES or user.get("custom_generate") is not None:
        return "neither sampling, greedy nor beam search"
    if config.is_assistant or config.token_healing:
        return "an assistant, or token healing"
    if not slices_prompt(config, kwargs, ids.shape[1]):
        return "this transformers would prefill the whole prompt"
    if user.get("position_ids") is not None:
        return "position_ids was given"
    if unknown := sorted(name for name, value in kwargs.items() if value is not None and name not in _KNOWN):
        return f"{unknown[0]} was given"
    length = length_of_positions(model)
    if length is not None and max(ids.shape[1], int(given.get("max_cache_length") or 0)) > length:
        return "the positions depend on how long the sequence gets"
    if model.training:
        return "the model is in training mode"
    if _prompt_learning(model):
        return "the adapter puts tokens before the prompt"
    if not any(type(layer) in _KEPT for layer in cache.layers):
        return "no layer of the cache is elastic"
    if not all(type(layer) in (*_KEPT, NoAttention) for layer in cache.layers):
        return "layers keep more than keys, values and states"
    mask = kwargs.get("attention_mask")
    if keeps_state(cache.layers):
        if ids.shape[0] * expand > 1:
            return "several sequences, of which layers keep a window or a state"
        if mask is not None and not bool((mask != 0).all()):
            return "an attention mask, where layers keep a window or a state"
        if computes_whole_prompt(cache) and getattr(model, "_compiled_call_impl", None) is not None:
            return "the whole prompt is computed in a compiled graph"
    return "" if mask is None else _mask(model, mask, ids, expand)


def _mask(model: Any, mask: torch.Tensor, ids: torch.Tensor, expand: int) -> str:
    if tuple(mask.shape) != (ids.shape[0] * expand, ids.shape[1]):
        return "the attention mask has another shape"
    ones = mask == 1
    if not bool((ones | (mask == 0)).all()):
        return "the attention mask says more than which tokens count"
    if not bool((ones[:, 1:] >= ones[:, :-1]).all()) or not bool(ones[:, -1].all()):
        return "the attention mask is more than padding on the left"
    if not bool(ones.all()) and not takes_positions(model):
        return "padding moves the positions of this model"
    return ""


def _prompt_learning(model: Any) -> bool:
    """Does peft call `generate()` for an adapter that is made of tokens?"""
    preparing = vars(model).get("prepare_inputs_for_generation")
    adapter = getattr(getattr(preparing, "__self__", None), "active_peft_config", None)
    return bool(getattr(adapter, "is_prompt_learning", False))
