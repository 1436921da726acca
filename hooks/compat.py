"""The one adapter in front of what drifts between versions of transformers, and of torch's less public names.

Supported are transformers 5.17 and newer. Importing this module checks that; the other hooks take the names from here.
"""

from __future__ import annotations

import re
from typing import Any, Final, cast

import torch
import transformers
from torch.multiprocessing.reductions import StorageWeakRef

from ..allocator.errors import UnsupportedVersion

OLDEST: Final = (5, 17)
_OLDEST: Final = ".".join(map(str, OLDEST))

# Where a configuration may give every layer a shape of its own.
_SHAPES: Final = ("num_key_value_heads", "num_attention_heads", "num_kv_heads", "head_dim", "block_configs")
# What configurations call the longest sequence that a model was made for.
_POSITIONS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def require_supported(version: str = transformers.__version__) -> None:
    """UnsupportedVersion unless `version` of transformers is one whose caches are made of the layers known here."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST:
        raise UnsupportedVersion(
            f"transformers {version} is not supported: the elastic KV cache is made for the cache layers of "
            f"{_OLDEST} and newer. pip install 'transformers>={_OLDEST}'"
        )


require_supported()

from transformers import cache_utils  # noqa: E402  (older versions lack some of these names)
from transformers.cache_utils import DynamicCache, DynamicLayer  # noqa: E402
from transformers.generation.utils import GenerationMixin  # noqa: E402

__all__ = [
    "FULL_ATTENTION",
    "PREPARE_CACHE",
    "DynamicCache",
    "DynamicLayer",
    "GenerationMixin",
    "StorageWeakRef",
    "cropped",
    "decodes_with_dynamic_cache",
    "full_attention_layers",
    "layer_types",
    "longest_sequence",
    "one_shape",
    "require_supported",
]

FULL_ATTENTION: Final = "full_attention"
LAYER_TYPES: Final = "DYNAMIC_LAYER_TYPE_MAPPING"  # in cache_utils: layer type -> what DynamicCache calls for it
PREPARE_CACHE: Final = "_prepare_cache_for_generation"  # the method in which generate() builds its cache


def layer_types() -> dict[str, Any]:
    """Layer type -> what `DynamicCache` calls for such a layer: the table itself. UnsupportedVersion."""
    table: dict[str, Any] | None = getattr(cache_utils, LAYER_TYPES, None)
    if table is None or not hasattr(GenerationMixin, PREPARE_CACHE):
        raise UnsupportedVersion(
            f"transformers {transformers.__version__} builds the cache of generate() in a way that ballonet does not "
            f"know: it looked for cache_utils.{LAYER_TYPES} and GenerationMixin.{PREPARE_CACHE}. Use an older "
            "transformers, or a newer ballonet"
        )
    return table


def decodes_with_dynamic_cache(model: Any) -> bool:
    """Is this a decoder-only model for which `generate()` builds a `DynamicCache`?"""
    if not isinstance(model, GenerationMixin):
        return False
    config = getattr(model, "config", None)
    return (
        config is not None
        and isinstance(getattr(_text(config), "num_hidden_layers", None), int)
        and not getattr(config, "is_encoder_decoder", False)
        and not getattr(config, "add_cross_attention", False)
        and bool(cast(Any, model)._supports_default_dynamic_cache())
    )


def full_attention_layers(config: Any) -> int:
    """How many full-attention layers a cache for `config` has."""
    types, _ = cache_utils.get_layer_types_and_kwargs(_text(config))
    return types.count(FULL_ATTENTION)


def one_shape(config: Any) -> bool:
    """Are the keys and values of all those layers alike, as far as `config` tells?"""
    text = _text(config)
    differ = any(isinstance(getattr(text, name, None), list | tuple) for name in _SHAPES)
    return not differ and not getattr(text, "is_heterogeneous", False)


def longest_sequence(config: Any) -> int:
    """Tokens of the longest sequence that the model was made for; 0 where its configuration does not say."""
    found = (getattr(_text(config), name, None) for name in _POSITIONS)
    return max((value for value in found if isinstance(value, int)), default=0)


def cropped(length: int, tokens_to_remove: int) -> int:
    """What is left of `length` tokens after `crop(tokens_to_remove)`, which is negative.

    A positive argument once was the length to keep; whether that works, warns or raises is left to transformers.
    """
    if tokens_to_remove <= 0:
        return max(0, length + tokens_to_remove)
    stock = DynamicLayer()
    tokens = torch.empty((1, 1, length, 1), device="meta")
    stock.update(tokens, tokens)
    stock.crop(tokens_to_remove)
    return stock.get_seq_length()


def _text(config: Any) -> Any:
    return config.get_text_config(decoder=True)
