"""The shape of a model from its configuration: the sizes of its weights and of its KV, without a value.

Note [The class decides]
    The model is built on the meta device by the class that would load it, in the dtype of its checkpoint: so tied
    weights, experts and buffers are those of a run, and no formula for an architecture is needed. The widths of keys
    and values come from one token through the model (compat.run_without_values), as configurations are wrong about
    some.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from ...allocator.errors import BallonetError, ConfigError
from ...offload.policy.layout import Block
from ..compat import generating_class, load_config, longest_sequence, quantization, run_without_values
from ..kv.kinds import CachePlan
from ..programs.model_info import Widths, dtype_of, planned, quiet, widths_of
from ..weights.layers import decoder_layers
from ..weights.storages import members


@dataclass(frozen=True, slots=True)
class Weight:
    """A block of weights: its bytes, the only decoder layer that uses it, else None, and how many of the bytes are
    elements of matrices, which can be quantized."""

    nbytes: int
    layer: int | None
    matrix: int


@dataclass(frozen=True, slots=True)
class Described:
    """A configuration and the class that would load it; equal if their `text` (JSON) is equal."""

    model_class: Any
    text: str
    config: Any = field(compare=False)

    @classmethod
    def of(cls, model_class: Any, config: Any) -> Described:
        return cls(model_class, f"{config._attn_implementation} {config.to_json_string(use_diff=False)}", config)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model without values; equal if their descriptions are equal. `model`: on the meta device. `weights`: in the
    order in which they are moved. `layers`: the number of decoder layers. `widths`: of each elastic layer of its cache,
    by index. `positions`: its longest sequence, 0 where the configuration has none."""

    described: Described
    name: str = field(compare=False)
    model: Any = field(compare=False)
    weights: tuple[Weight, ...] = field(compare=False)
    layers: int = field(compare=False)
    widths: Mapping[int, Widths] = field(compare=False)
    dtype: torch.dtype = field(compare=False)
    positions: int = field(compare=False)

    @property
    def config(self) -> Any:
        return self.described.config

    def blocks(self, bits: int | None = None) -> list[Block]:
        """Returns the weights for `layout.place`. `bits`: of an element of quantized matrices, None: not quantized."""
        wide = 8 * self.dtype.itemsize
        share = 1.0 if bits is None else min(1.0, bits / wide)
        return [
            Block(key, max(1, weight.nbytes - int(weight.matrix * (1 - share))), weight.layer)
            for key, weight in enumerate(self.weights)
        ]


def shape_of(name: str) -> ModelShape:
    """Returns the shape of a model: a folder, a name on the hub, or a type with its defaults. ConfigError where its
    configuration cannot be read, is incomplete, or is of no decoder of text."""
    quiet()
    config = load_config(name)
    model_class: Any = generating_class(config)
    if model_class is None:
        raise ConfigError(f"{name}: transformers has no class that generates text with a {type(config).__name__}")
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{name} has an encoder, whose tokens a plan does not count: give a model that only decodes")
    if quantization(config, {}):
        raise ConfigError(
            f"{name} is quantized, and its configuration does not say how large its weights are: give the model that "
            "it was made of; what fewer bits would change is among the changes"
        )
    described, caches = Described.of(model_class, config), planned(name, model_class, config)
    model, dtype = _built(name, model_class, config)
    layers = decoder_layers(model)
    if not layers:
        raise ConfigError(f"{name}: the configuration does not say how many decoder layers there are")
    return ModelShape(
        described,
        name,
        model,
        tuple(_weights(model, layers)),
        len(layers),
        _widths(name, described, caches),
        dtype,
        longest_sequence(config),
    )


def _built(name: str, model_class: Any, config: Any) -> tuple[Any, torch.dtype]:
    dtype = dtype_of(config)
    try:
        with torch.device("meta"):
            return model_class._from_config(copy.deepcopy(config), dtype=dtype).eval(), dtype
    except Exception as error:  # any error: the model's code runs on an incomplete configuration
        raise ConfigError(
            f"{name}: {model_class.__name__} cannot be built from this configuration, which may lack sizes: "
            f"{type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def _weights(model: nn.Module, layers: tuple[nn.Module, ...]) -> Iterator[Weight]:
    """Yields a block for the tensors of each storage, as they move (storages.py, Note [What moves together])."""
    storages: dict[int, tuple[list[torch.Tensor], set[int | None]]] = {}
    for member in members(model, layers):
        if member.tensor.numel():
            tensors, users = storages.setdefault(member.tensor.untyped_storage()._cdata, ([], set()))
            tensors.append(member.tensor)
            users.update(member.layers)
    for tensors, users in storages.values():
        nbytes = max(tensor.untyped_storage().nbytes() for tensor in tensors)
        matrix = tensors[0].dim() > 1 and tensors[0].is_floating_point()
        layer = users.pop() if len(users) == 1 else None
        yield Weight(nbytes, layer, nbytes if matrix and layer is not None else 0)


def _widths(name: str, described: Described, caches: CachePlan) -> Mapping[int, Widths]:
    elastic = [index for index, layer in enumerate(caches.layers) if layer.elastic]
    if not elastic:
        return {}
    try:
        widths = _all_widths(described)
    except BallonetError:
        raise
    except Exception as error:  # any error: the model's own code runs without values
        raise ConfigError(
            f"{name}: the widths of its keys and values are known with the first token only, as its code asks for "
            f"values: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    known = {index: width for index in elastic if (width := widths[index]) is not None}
    if len(known) < len(elastic):
        raise ConfigError(f"{name}: its keys and values have other dimensions than sequences, heads, tokens, elements")
    return known


@lru_cache(maxsize=64)
def _all_widths(described: Described) -> tuple[Widths | None, ...]:
    """Returns the widths of each layer of its cache. Raises any error of the model's code."""
    (cache,) = run_without_values(described.model_class, described.config)
    return tuple(widths_of(cache))
