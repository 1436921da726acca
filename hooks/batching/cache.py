"""The paged cache of continuous batching on the pool: one tensor of the largest possible size, with pages under the
sectors that requests have; and how large a batch may be beside it.

Kernels, tables of blocks, CUDA graphs and the counts of shared prefixes stay transformers' own: only the memory of the
tensor is ballonet's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils.dlpack import from_dlpack
from transformers.generation.continuous_batching.cache import PagedAttentionCache, PagedAttentionMemoryHandler
from transformers.generation.continuous_batching.utils import find_num_key_value_heads

from ...allocator.errors import DriverError
from ...offload.policy.admission import logit_rows
from ...offload.record.record import Point
from ..device.shared import reach
from ..forward.lease import GroupLease, current
from .attention import BY_REQUEST, RequestAttention, Way
from .batched import Batched
from .blocks import ListedBlocks, PromptBlocks
from .pages import RESERVED, NewBlock, RequestPages, SectorPages, SectorPool

_STATICS: Final = 16  # inputs and masks of the largest batch, always there, take 1/16 of the budget at most. Chosen


class ElasticPagedCache(PagedAttentionCache):
    """A PagedAttentionCache that could use all pages of `on`, and has those of the present requests."""

    pool: SectorPool
    kept: ListedBlocks | None = None  # where beginnings of prompts are shared
    _renewed = False  # was the model looked at since the last batch?
    _indices: list[list[int]] | None = None  # of rows that the batch writes
    _displaced = False  # are pages on the host, where the batch may fill blocks?

    def __init__(
        self,
        config: Any,
        continuous_batching_config: Any,
        *args: Any,
        model: Batched,
        way: Way | None = None,
        **kwargs: Any,
    ) -> None:
        """PagedAttentionCache works out the geometry. `way`: of attention by request (attention.py), None for that of
        transformers. torch.OutOfMemoryError, DriverError."""
        given = copy.copy(continuous_batching_config)
        given.num_blocks, given.max_batch_tokens = 1, 16  # sizes of stock's own tensor, which is dropped
        super().__init__(config, given, *args, **kwargs)
        self.model = model
        self.way = way
        self.by_request = None if way is None else RequestAttention(way, [*self.cache_allocators.values()])
        self.on = on = model.device
        self.group = on.group()
        self.point: Point | None = None  # the next batch's
        self.batch: object = None  # the same while the same requests decode (repeated.py)
        self.user: Callable[[], object] = lambda: None  # returns the scheduler that uses it, or None
        self.block_tokens = continuous_batching_config.page_size
        self.vocabulary: int = config.vocab_size
        self.on_host: frozenset[str] = frozenset()  # requests whose new KV goes to the host
        self.new_blocks: dict[int, list[NewBlock]] = {}  # the batch's new blocks, by allocator: see pages.py
        handler = PagedAttentionMemoryHandler(
            config,
            continuous_batching_config,
            self.dtype,
            bytes_per_sector=self.bytes_per_sector,
            tokens_per_sector=self.tokens_per_sector,
            bytes_per_block=sum(allocator.bytes_per_block for allocator in self.cache_allocators.values()),
            attn_types=list(self.cache_allocators),
            model_supports_logits_to_keep=kwargs.get("model_supports_logits_to_keep", False),
        )
        if way is not None:  # nothing is repeated for heads that share keys, or masked
            handler.num_attention_masks, handler.kv_heads_at_peak = 0, 2 * find_num_key_value_heads(config)
        self.sizes = Sizes.of_handler(handler, config.num_hidden_layers)
        masks, size, budget = masks_of(handler), self.dtype.itemsize, reach(on)
        most, part = handler._default_max_batch_tokens, _STATICS
        self.max_batch_tokens = continuous_batching_config.max_batch_tokens or largest_batch(
            budget, part, self.sizes, masks, size, most
        )
        host: int = on.snapshot()["host_budget"] if on.host_pages else 0
        sectors = max(1, (budget + host) // self.bytes_per_sector)
        self.pages = SectorPages(
            on, self.group, RESERVED + sectors, self.bytes_per_sector, model.name, of=model.client()
        )
        model.clients.add(self.pages.client)
        self.request_pages = RequestPages(on, self.pages, self.cache_allocators)
        self._hold(sectors, handler.bytes_per_block)
        indices = len(self.cache_allocators) * handler.io_multiplier
        self.max_tokens_read = readable(budget, part, self.max_batch_tokens, masks, size, indices, self.max_tokens_read)

    def _hold(self, sectors: int, block: int) -> None:
        """Makes the cache's range of so many sectors. `block`: bytes of the KV of a block in all layers."""
        self.num_sectors = sectors
        with torch.inference_mode(False):
            self.cache_tensor = from_dlpack(self.pages.window())
        self.cache_tensor[: RESERVED * self.bytes_per_sector].zero_()
        self.pool = SectorPool(self.pages, sectors, len(self.cache_allocators))
        size = sectors * self.bytes_per_sector
        for allocator in self.cache_allocators.values():
            allocator.register_cache_tensor(self.bytes_per_sector, size, self.cache_tensor, self.pool)
        self.num_blocks = size // block
        if self.use_prefix_sharing and len(kinds := [*self.cache_allocators.values()]) == 1:
            self.kept = ListedBlocks(kinds[0], PromptBlocks(kinds[0], self.pool, self.pages, self.group))
        self.max_decode_fast_path_length = self._infer_max_decode_fast_path_length()
        self.max_tokens_read = max(
            allocator.tokens_per_page * allocator.num_blocks for allocator in self.cache_allocators.values()
        )

    def bytes_of(self, *tokens: int) -> int:
        """Bytes of KV that requests of so many tokens have, whichever blocks are free."""
        sectors = 0
        for allocator in self.cache_allocators.values():
            blocks = sum(allocator.needs_new_blocks("", 0, count) for count in tokens)
            sectors += -(-blocks // allocator.blocks_per_sector)
        return sectors * self.bytes_per_sector

    def bytes_needed(self, state: Any, tokens: int) -> int:
        """Bytes of KV that a request needs beyond what it has for so many more tokens."""
        return self._sectors_needed(state, tokens) * self.bytes_per_sector

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        """Allocates blocks as stock does, with pages under new ones: all, or none."""
        with self.pages.client.lock:
            needed = self._sectors_needed(state, request_len)
            if dry_run or not needed or needed > self.pool.num_free_sectors:
                return bool(super().can_store_request_tokens(state, request_len, dry_run))
            try:
                self.pool.take(needed, "host" if state.request_id in self.on_host else "device")
            except (torch.OutOfMemoryError, DriverError):
                return False
            return bool(super().can_store_request_tokens(state, request_len))

    @property
    def logit_rows(self) -> int:
        """Rows of logits that a step may work on at once."""
        return logit_rows(self.on.budget, self.vocabulary)

    def evict_kept(self, nbytes: int) -> bool:
        """Drops blocks that are only kept for prompts, the least valuable first, until sectors of so many bytes are
        free, or none is left. Returns whether there was any. DriverError."""
        gone = False
        while nbytes > 0 and self.kept is not None:
            before = self.pool.num_free_sectors
            if not self.kept.evict(-(-nbytes // self.bytes_per_sector)):
                break
            self.pool.try_to_free_sectors()
            nbytes -= (self.pool.num_free_sectors - before) * self.bytes_per_sector
            gone = True
        return gone

    def renew(self) -> None:
        """Drops blocks that were computed before the model changed. Checks once for each batch."""
        loop_caches = self.model.loop_caches
        if self.kept is not None and loop_caches is not None and loop_caches.store is not None and not self._renewed:
            self.kept.renew(loop_caches.store.identity())
            self._renewed = True

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Finds shared blocks, after `renew`."""
        self.renew()
        with self.pages.client.lock:
            tokens = int(super().search_prefix_match(request_id, prompt_ids))
        if tokens and self.kept is not None and self.model.loop_caches is None:  # else noted when it was looked at
            self.kept.used([*self.kept.hashes(prompt_ids[:tokens])])
        return tokens

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        """Marks full blocks, also those of a request that has just ended, so that the next one finds them."""
        if self.kept is not None and complete_blocks:
            (count,) = complete_blocks.values()
            with suppress(DriverError):  # no request finds them then
                self.kept.mark(state.request_id, state.initial_tokens + state.generated_tokens, count)

    def ended(self, state: Any) -> None:
        """Has the full blocks of a request that ends written to files, if there are any. Called before they are
        freed."""
        kept, loop_caches = self.kept, self.model.loop_caches
        if kept is not None and loop_caches is not None and kept.identity is not None:
            tokens = kept.full(state.request_id) * kept.tokens
            loop_caches.ended((state.initial_tokens + state.generated_tokens)[:tokens], kept.identity)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Frees the request's blocks. After the last request, cuts the blocks that are kept to their limit."""
        if no_cache and self.kept is not None:
            self.kept.discard(request_id)
        with self.pages.client.lock:
            super().free_blocks(request_id)
            if self.kept is not None:
                self.kept.stale.discard(request_id)
        if self.model.loop_caches is not None and not self.request_pages.requests():
            self.pool.try_to_free_sectors()
            self.model.loop_caches.rests(self)
            self.pages.client.rests()

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        """Frees the blocks of all requests."""
        with self.pages.client.lock:
            super().free_all_requests()
            if self.kept is not None:
                self.kept.stale.clear()
        if clear_ledgers and self.kept is not None:
            self.kept.forget()

    def evict_cached_blocks(self) -> bool:
        """Drops blocks that are only kept for prompts."""
        return self.evict_kept(self.pages.nbytes)

    def prepare_fork_request(self, src_state: Any, dst_req_ids: list[str], copy_src_and_dst: Any) -> list[str]:
        """Forks a request; children for which there is no memory are not forked."""
        made: list[str] = []
        with self.pages.client.lock:
            with suppress(torch.OutOfMemoryError, DriverError):
                for name in dst_req_ids:
                    made += super().prepare_fork_request(src_state, [name], copy_src_and_dst)
            if self.kept is not None and src_state.request_id in self.kept.stale:
                self.kept.stale.update(made)
        return made

    def reset(self) -> None:
        """Resets the cache after a loop's warmup; unlike stock's, keeps computed blocks."""
        with self.pages.client.lock:
            self.free_all_requests()
            self.pool.try_to_free_sectors()

    def begins(self, requests: Iterable[str], later: Iterable[str] = ()) -> None:
        """Prepares the pages of these requests for a step that is about to begin; `later`: those that have begun, and
        go on in one after it."""
        self._renewed = False
        with suppress(DriverError):  # pages that could not be restored are read on the host
            reads, held = (set[int]().union(*map(self.request_pages.pieces, some)) for some in (requests, later))
            self.pages.client.begins(reads, held)

    def extend_read_and_write_indices(
        self,
        request_id: str,
        past_length: int,
        query_length: int,
        read_index: list[list[int]] | None,
        write_index: list[list[int]],
    ) -> None:
        """Adds indices as stock does, and notes full blocks of prompts that are copied to the host (pages.py)."""
        if write_index is not self._indices:  # a batch begins, perhaps with a request that has nothing to compute
            self._indices, self.new_blocks = write_index, {}
            if self.by_request is not None:
                self.by_request.begin(reads=read_index is not None)
            self._displaced = self.pages.client.displaced > 0
        if self._displaced:
            rows = [len(index) for index in write_index]
            reads = [None] * len(rows) if read_index is None else [len(index) for index in read_index]
        super().extend_read_and_write_indices(request_id, past_length, query_length, read_index, write_index)
        if self.by_request is not None:
            self.by_request.add(request_id, past_length, query_length)
        if not self._displaced:
            return
        for n, (kind, allocator) in enumerate(self.cache_allocators.items()):
            if kind != "full_attention":
                continue
            size, read = allocator.tokens_per_page, reads[n]
            for block in self.request_pages.on_host_blocks(request_id, allocator, past_length, query_length):
                row = rows[n] + block * size - past_length
                at = None if read is None else read + block * size
                self.new_blocks.setdefault(n, []).append(NewBlock(row, write_index[n][row], at))
                write_index[n][row : row + size] = [allocator.write_trash_index] * size
                if read_index is not None and at is not None:
                    read_index[n][at : at + size] = [allocator.read_trash_index] * size

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Updates the cache under a lease, the forward's if there is one. `kwargs`: of the forward. Returns keys and
        values, [1, heads, tokens, dim]."""
        updated: tuple[torch.Tensor, torch.Tensor]
        client, lease = self.pages.client, current()
        with GroupLease(self.group) if lease is None else nullcontext():  # in few calls, as it runs for each layer
            if lease is not None:
                lease.enter_group(self.group)
                lease.touched(client)
            client.uses()
            allocator: Any = self.layer_to_allocator[layer_idx]
            put = None
            if self.by_request is not None:
                kind = allocator.index
                put = self.by_request.prepare(layer_idx, kind, kwargs, on_the_way=kind in self.new_blocks)
            updated = super().update(key_states, value_states, layer_idx, kwargs=kwargs)
            if kwargs.get("block_table") is None and (blocks := self.new_blocks.get(allocator.index)):
                new, read = (
                    [tokens.squeeze(0).transpose(0, 1) for tokens in pair]
                    for pair in ((key_states, value_states), updated)
                )
                caches = allocator._kv_token_views[layer_idx]
                client.host_writes.write(caches, new, read, blocks, allocator.tokens_per_page, client.stream)
        if put is not None:
            put(updated)
        return updated

    @property
    def decodes_by_request(self) -> bool:
        """Is the present step one in which each request has one new token, on a GPU, and attends by itself?"""
        point = self.point
        return self.by_request is not None and self.on.kind == "cuda" and point is not None and point.phase == "decode"

    def update_and_attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        layer_idx: int,
        kwargs: dict[str, Any],
        scale: float | None,
        dropout: float,
    ) -> torch.Tensor:
        """Updates the cache and attends by request. `kwargs`: of the forward, which it changes. Returns [1, rows,
        heads, dim]."""
        self.update(keys, values, layer_idx, kwargs)
        attended: torch.Tensor = kwargs[BY_REQUEST](query, scale, dropout)
        return attended

    def perform_cache_copy(self, copy_src_and_dst: dict[str, tuple[list[int], list[int]]]) -> None:
        """Copies blocks under a lease, one by one where there is no memory for intermediate copies."""
        with GroupLease(self.group):
            self.pages.client.uses()
            try:
                super().perform_cache_copy(copy_src_and_dst)
            except torch.OutOfMemoryError:
                for name, blocks in copy_src_and_dst.items():
                    view = self.cache_allocators[name]._copy_view
                    for source, target in zip(*blocks, strict=True):
                        view[target].copy_(view[source])

    def _sectors_needed(self, state: Any, tokens: int) -> int:
        held, name, sectors = state.current_len(), state.request_id, 0
        for allocator in self.cache_allocators.values():
            sectors += allocator.needs_new_sectors(name, held, tokens)
        return sectors


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes per token, as transformers works them out. `token`: a new token's activations and inputs. `read`: copies of
    the keys and values of a token that is read, and its indices. `kv`: a token's own KV in one layer."""

    token: int
    read: int
    kv: int

    @classmethod
    def of_handler(cls, handler: PagedAttentionMemoryHandler, layers: int) -> Sizes:
        """Makes the sizes of a cache with so many layers, from its memory handler."""
        return cls(
            handler.bytes_per_batch_token,
            handler.bytes_per_cache_token,
            handler.bytes_per_block // max(1, layers * handler.cb_config.page_size),
        )

    def of(self, new: int, held: int) -> int:
        """Bytes at the peak of a request that has so many new tokens and reads those it holds."""
        return new * self.token + (new + held) * self.read

    def staging(self, new: int) -> int:
        """Bytes of one layer's new KV, while it goes to the host."""
        return new * self.kv


def largest_batch(budget: int, part: int, sizes: Sizes, masks: int, itemsize: int, most: int) -> int:
    """New tokens that a batch may have at most so that their tensors, and masks [tokens, tokens + read] with as many
    read as the same part of the budget holds, take no more than 1/`part` of it. At least 16, at most `most`."""
    room = budget // part
    low, high = 16, max(16, most)
    while low < high:
        tokens = (low + high + 1) // 2
        if tokens * sizes.token + masks * itemsize * tokens * tokens <= room:
            low = tokens
        else:
            high = tokens - 1
    return low


def readable(budget: int, part: int, batch: int, masks: int, itemsize: int, indices: int, most: int) -> int:
    """Tokens that may be read in one step so that masks [batch, batch + tokens], and so many indices of 8 bytes for
    each token, take no more than 1/`part` of the budget; at most `most`."""
    return max(1, min(most, budget // (part * (masks * itemsize * batch + 8 * indices)) - batch))


def masks_of(handler: Any) -> int:
    """Masks that the attention of this model needs, for each batch that is in flight."""
    return int(handler.num_attention_masks * handler.io_multiplier)
