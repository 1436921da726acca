"""The paged cache of a stage: blocks of the layers of its span only.

Note [A cache for a span]
    A block of a paged cache holds a few tokens in all layers of a kind. The cache of a stage is one of a model that has
    the layers of the span alone, numbered from 0; so a token takes as many bytes as these layers need, and the pages of
    a budget hold more of them. Tables of blocks are the stage's own: another stage may have given the same request
    other blocks. Another span is another cache: the geometry of blocks differs. Requests that run are copied from the
    one to the other (kv_exchange.py), which costs memory traffic of what stays, and little beside what is exchanged
    over a link.
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
from .settings import GroupSettings


def config_of(config: Any, layers: range) -> Any:
    """A copy of a decoder's configuration with these layers alone."""
    found = copy.copy(config)
    found.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None) is not None:
        found.layer_types = [config.layer_types[layer] for layer in layers]
    return found


class SpanCache(ElasticPagedCache):
    """As ElasticPagedCache, of the model's `layers`, which `update` is called with by their numbers in the model."""

    def __init__(
        self, model: Any, batched: Batched, layers: range, settings: GroupSettings, tuning: Serving = DEFAULT.serving
    ) -> None:
        """`batched`: what is known of the model (hooks/batching/seams.py). torch.OutOfMemoryError, DriverError."""
        self.layers = layers
        # returns who is told when a request gives its blocks back
        self.who_is_told: Callable[[], Callable[[str], object] | None] = lambda: None
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
        """As stock's, for a layer of the span."""
        found: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states=key_states, value_states=value_states, layer_idx=layer_idx - self.layers.start, kwargs=kwargs
        )
        return found

    def store(self, state: Any, tokens: int) -> bool:
        """Gives a request blocks for so many more tokens, on the host where the device has no page, from where they are
        read more slowly. False, and nothing is given, where neither has room."""
        try:
            for on_host in (frozenset[str](), frozenset((state.request_id,))):
                self.on_host = on_host
                if self.can_store_request_tokens(state, tokens):
                    return True
            return False
        finally:
            self.on_host = frozenset()

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """As ElasticPagedCache's, and tells."""
        super().free_blocks(request_id, no_cache)
        if (told := self.who_is_told()) is not None:
            told(request_id)

    def give(self, request: str) -> None:
        """Frees the blocks of a request, and gives pages back that nobody else has a block on."""
        self.free_blocks(request)
        self.pool.try_to_free_sectors()

    @property
    def token_bytes(self) -> float:
        """Bytes of KV of a token."""
        return self.bytes_per_sector / self.tokens_per_sector

    def blocks_for(self, start: int, end: int) -> int:
        """Blocks that a request needs for its tokens [start, end), beyond those for the ones before."""
        size: int = self.block_tokens
        return -(-end // size) - -(-start // size)
