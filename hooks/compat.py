"""The one adapter in front of what drifts between versions of transformers, and of torch's less public names.

Supported are transformers 5.17 and newer. Importing this module checks that; the other hooks import those names from here.
"""

from __future__ import annotations

import re
from typing import Any, Final

import torch
import transformers
from torch.multiprocessing.reductions import StorageWeakRef

from ..allocator.errors import UnsupportedVersion

OLDEST: Final = (5, 17)

# Where a configuration may give every layer a shape of its own.
_SHAPES: Final = ("num_key_value_heads", "num_attention_heads", "num_kv_heads", "head_dim", "block_configs")
# What configurations call the longest sequence a model was made for.
_POSITIONS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def require_supported(version: str = transformers.__version__) -> None:
    """UnsupportedVersion unless `version` of transformers is one whose caches are made of layers as they are known here."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST:
        raise UnsupportedVersion(
            f"transformers {version} is too old for the elastic KV cache, which is made for the cache layers of "
            f"{OLDEST[0]}.{OLDEST[1]} and newer: pip install 'transformers>={OLDEST[0]}.{OLDEST[1]}'"
        )


require_supported()

from transformers import cache_utils  # noqa: E402  (older versions lack some of these names)
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer  # noqa: E402
from transformers.generation.utils import GenerationMixin  # noqa: E402

__all__ = [
    "FULL_ATTENTION",
    "LAYER_TYPES",
    "Cache",
    "DynamicCache",
    "DynamicLayer",
    "GenerationMixin",
    "StorageWeakRef",
    "cropped",
    "decodes_with_dynamic_cache",
    "layers_of_one_shape",
    "longest_sequence",
    "require_supported",
]

FULL_ATTENTION: Final = "full_attention"
LAYER_TYPES: Final[dict[str, Any]] = (
    cache_utils.DYNAMIC_LAYER_TYPE_MAPPING
)  # layer type -> what `DynamicCache` calls for it


def decodes_with_dynamic_cache(model: object) -> bool:
    """Is this a decoder-only model for which `generate()` builds a `DynamicCache`?"""
    config = getattr(model, "config", None)
    return (
        isinstance(model, GenerationMixin)
        and getattr(config, "num_hidden_layers", None if config is None else _text(config).num_hidden_layers)
        is not None
        and not getattr(config, "is_encoder_decoder", False)
        and not getattr(config, "add_cross_attention", False)
        and bool(model._supports_default_dynamic_cache())
    )


def _text(config: Any) -> Any:
    return config.get_text_config(decoder=True)


def layers_of_one_shape(config: Any) -> int:
    """How many full-attention layers a cache for `config` has whose keys and values are alike; 1 where they may differ."""
    text = _text(config)
    if getattr(text, "is_heterogeneous", False) or any(
        isinstance(getattr(text, name, None), list | tuple) for name in _SHAPES
    ):
        return 1
    layer_types, _ = cache_utils.get_layer_types_and_kwargs(text)
    return max(1, layer_types.count(FULL_ATTENTION))


def longest_sequence(config: Any) -> int:
    """Tokens of the longest sequence that the model was made for; 0 where its configuration does not say."""
    text = _text(config)
    found = (getattr(text, name, None) for name in _POSITIONS)
    return max((value for value in found if isinstance(value, int)), default=0)


def cropped(length: int, tokens_to_remove: int) -> int:
    """What is left of `length` tokens after `crop(tokens_to_remove)`, which is negative.

    A positive argument once was the length to keep; whether that still works, warns or raises is left to transformers.
    """
    if tokens_to_remove <= 0:
        return max(0, length + tokens_to_remove)
    stock = DynamicLayer()
    token = torch.empty((1, 1, length, 1), device="meta")
    stock.update(token, token)
    stock.crop(tokens_to_remove)
    return int(stock.get_seq_length())
