"""The paged cache of a stage: blocks of the layers of its span only.

Note [A cache for a span]
    A block of a paged cache holds a few tokens in all layers of a kind. The cache of a stage is that of a model with
    the layers of the span alone, numbered from 0; so a token takes only the bytes of these layers, and the pages of a
    budget hold more tokens. Block tables are the stage's own: another stage may have given the same request other
    blocks. Another span needs another cache, as the geometry of blocks differs. Running requests are copied from the
    old cache to the new one (kv_exchange.py): memory traffic for the layers that stay, little beside the KV exchanged
    over links.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ...offload.policy.tuning import DEFAULT, Serving
from ..batching.batched import Batched
from ..batching.cache import ElasticPagedCache
from .group_settings import GroupSettings


def config_of(config: Any, layers: range) -> Any:
    """Returns a copy of a decoder's configuration with these layers alone."""
    found = copy.copy(config)
    found.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None) is not None:
        found.layer_types = [config.layer_types[layer] for layer in layers]
    return found


class SpanCache(ElasticPagedCache):
    """An ElasticPagedCache of the model's `layers`; `update` takes their indices in the model."""

    def __init__(
        self, model: Any, batched: Batched, layers: range, settings: GroupSettings, tuning: Serving = DEFAULT.serving
    ) -> None:
        """`batched`: facts of the model (hooks/batching/seams.py). torch.OutOfMemoryError, DriverError."""
        self.layers = layers
        # a weak reference to a function that is called with each request whose blocks are freed
        self.on_freed: Callable[[], Callable[[str], object] | None] = lambda: None
        keeps = getattr(model, "_supports_logits_to_keep", None)
        super().__init__(
            config_of(model.config.get_text_config(), layers),
            settings.batching,
            model.device,
            settings.helper,
            model=replace(batched, loop_caches=None),
            tuning=tuning,
            dtype=model.dtype,
            model_supports_logits_to_keep=keeps is not None and keeps(),
        )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new keys and values as transformers' cache does. `layer_idx`: of the model, within the span."""
        found: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states=key_states, value_states=value_states, layer_idx=layer_idx - self.layers.start, kwargs=kwargs
        )
        return found

    def store(self, state: Any, tokens: int) -> bool:
        """Allocates blocks for so many more tokens of a request, on the host where the device has no page (reads are
        slower there). Returns False, and allocates none, where neither has room."""
        try:
            for on_host in (frozenset[str](), frozenset((state.request_id,))):
                self.on_host = on_host
                if self.can_store_request_tokens(state, tokens):
                    return True
            return False
        finally:
            self.on_host = frozenset()

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Frees a request's blocks, and calls `on_freed`."""
        super().free_blocks(request_id, no_cache)
        if (on_freed := self.on_freed()) is not None:
            on_freed(request_id)

    def give(self, request: str) -> None:
        """Frees the blocks of a request, and the pages on which no other request has a block."""
        self.free_blocks(request)
        self.pool.try_to_free_sectors()

    @property
    def token_bytes(self) -> float:
        """Bytes of KV per token, in the layers of the span."""
        return self.bytes_per_sector / self.tokens_per_sector

    def blocks_for(self, start: int, end: int) -> int:
        """Returns the blocks that a request needs for its tokens [start, end), beyond those for earlier tokens."""
        size: int = self.block_tokens
        return -(-end // size) - -(-start // size)
