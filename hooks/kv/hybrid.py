"""Layers that hold a recurrent state and a growing cache in one object, as Falcon-H1 and Zamba have them."""

from __future__ import annotations

from typing import Any

import torch

from ..compat import HybridLayer, LinearAttentionLayer
from .grouping import CacheRanges
from .layer import ElasticLayer


class ElasticHybridLayer(HybridLayer, ElasticLayer):  # type: ignore[misc, override]
    """The state of a linear-attention layer, which has a fixed size, beside keys and values in a range.

    The state is transformers' own. The stock class calls both halves by name and not by `super()`
    (`DynamicLayer.reset(self)`), so each of those methods is written again here with the elastic half; the others are
    inherited from the half that has them.
    """

    stock = HybridLayer

    def __init__(self, ranges: CacheRanges | None = None, number_of_states: int = 1, **kwargs: Any) -> None:
        """`ranges`: shared with the other layers of the cache. `kwargs`: what transformers gives to any layer."""
        ElasticLayer.__init__(self, ranges, **kwargs)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def offload(self) -> None:
        ElasticLayer.offload(self)
        LinearAttentionLayer.offload(self)

    def prefetch(self) -> None:
        ElasticLayer.prefetch(self)
        LinearAttentionLayer.prefetch(self)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        ElasticLayer.reset(self)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)  # type: ignore[arg-type]
        ElasticLayer.reorder_cache(self, beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        LinearAttentionLayer.crop(self, tokens_to_remove)
        ElasticLayer.crop(self, tokens_to_remove)
