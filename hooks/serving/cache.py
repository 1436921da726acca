"""The paged cache of continuous batching on the pool: one tensor as large as it may ever get, with pages under the
sectors that requests have.

Kernels, tables of blocks, CUDA graphs and the counts of shared prefixes stay transformers' own: the cache is theirs but
for what lies behind its tensor.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from ...allocator._native import Device
from ..forward.lease import GroupLease
from .sectors import RESERVED, SectorPages, SectorPool


class ElasticPagedCache(PagedAttentionCache):
    """As a PagedAttentionCache that could use all pages of `on`, and has those of the requests that are there."""

    pool: SectorPool

    def __init__(self, *, on: Device, continuous_batching_config: Any, **kwargs: Any) -> None:
        """As PagedAttentionCache, which works out the geometry. torch.OutOfMemoryError, DriverError."""
        config = copy.copy(continuous_batching_config)
        config.num_blocks = 1  # stock's own tensor, which is dropped
        super().__init__(continuous_batching_config=config, **kwargs)
        self.on = on
        self.group = on.group()
        most = max(1, on.budget // self.bytes_per_sector)
        self.pages = SectorPages(on, self.group, RESERVED + most, self.bytes_per_sector)
        self._hold(most)

    def _hold(self, sectors: int) -> None:
        self.num_sectors = sectors
        with torch.inference_mode(False):
            self.cache_tensor = from_dlpack(self.pages.window())
        self.cache_tensor[: RESERVED * self.bytes_per_sector].zero_()
        self.pool = SectorPool(self.pages, sectors, len(self.cache_allocators))
        for allocator in self.cache_allocators.values():
            allocator.register_cache_tensor(
                self.bytes_per_sector, sectors * self.bytes_per_sector, self.cache_tensor, self.pool
            )
        self.num_blocks = (
            sectors * self.bytes_per_sector // sum(each.bytes_per_block for each in self.cache_allocators.values())
        )
        self.read_cache_limit = self._infer_read_cache_limit()
        self.max_tokens_read = max(each.tokens_per_page * each.num_blocks for each in self.cache_allocators.values())

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        """Also whether there are pages for them, all or none."""
        needed = sum(
            each.needs_new_sectors(state.request_id, state.current_len(), request_len)
            for each in self.cache_allocators.values()
        )
        if dry_run or not needed or needed > self.pool.num_free_sectors:
            return bool(super().can_store_request_tokens(state, request_len, dry_run))
        try:
            self.pool.take(needed)
        except torch.OutOfMemoryError:
            return False
        return bool(super().can_store_request_tokens(state, request_len))

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """As stock's, under a lease."""
        with GroupLease(self.group):
            keys, values = super().update(*args, **kwargs)
        return keys, values
