"""A model that computes nothing: its weights have real pages, and each step takes the time of a cost model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from .machine import Machine, MachineSizes, Tenant, smaller


class Clock:
    """A virtual clock: `now`, in seconds, is set by the simulation."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class VirtualModel(PreTrainedModel, GenerationMixin):
    """A causal language model whose next token is always 0. `step`: called in each forward."""

    _supports_flash_attn = _supports_sdpa = True
    main_input_name = "input_ids"
    step: Callable[[], None] = staticmethod(lambda: None)

    @classmethod
    def of(cls, tenant: Tenant, machine: Machine, weights: bool = True) -> VirtualModel:
        """Returns a model with the layers and heads of the tenant's. `weights`: as large as the tenant's, all 0; else
        next to none. Without attention masks, as the costs include pairs. ManageError."""
        sizes = MachineSizes.of(tenant.config) if weights else MachineSizes((), 0)
        text = smaller(copy.deepcopy(tenant.config), machine.scale)
        text.vocab_size = 1
        text._attn_implementation = "eager"
        dtype = text.dtype or torch.float32
        model = cls(text, [_elements(layer, machine.scale, dtype) for layer in (*sizes.layers, sizes.rest)], dtype)
        text._attn_implementation_internal = "paged|flash_attention_2"  # whose batches have no masks; none is called
        model.generation_config = GenerationConfig()
        return model

    def __init__(self, config: Any, layers: list[int], dtype: torch.dtype) -> None:
        """`layers`: elements of the weights of each, and then of the rest."""
        super().__init__(config)
        *sizes, rest = layers
        self.layers = nn.ModuleList(_Layer(elements, dtype) for elements in sizes)
        self.rest = _weight(rest, dtype)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        """Calls `step`, and returns logits [1, tokens, 1] of 0."""
        self.step()
        return _Output(torch.zeros(1, input_ids.shape[1], 1))


class _Layer(nn.Module):
    def __init__(self, elements: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _weight(elements, dtype)


class _Output:
    """A model output with the attributes that transformers reads."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


def _weight(elements: int, dtype: torch.dtype) -> nn.Parameter:
    """Returns a square weight, as activations are estimated from the widest weight."""
    side = max(1, math.isqrt(elements))
    return nn.Parameter(torch.zeros(-(-elements // side), side, dtype=dtype), requires_grad=False)


def _elements(nbytes: int, scale: int, dtype: torch.dtype) -> int:
    return max(1, nbytes // (scale * dtype.itemsize))
