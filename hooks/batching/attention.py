"""Attention of a batch by request: the rows of each against its own keys, and no mask.

Note [By request]
    Without the package `flash_attn`, transformers computes all rows of a step against the keys of all requests under a
    mask, so a token costs the more, the more requests there are. A managed loop with "sdpa" attention computes each
    request alone: on CUDA in half precision in one call of the kernel for packed sequences that torch has itself, else
    by one call of SDPA per request. Any other attention ("eager": softcap, sinks), heads that the kernel refuses, and
    steps that are padded, for graphs or a compiler, stay as they are in transformers.

Note [Read in place]
    transformers copies the keys of all requests together, which on a CPU takes longer than attention does. Here they
    are read in the cache, where a layer's blocks lie like this, of `tokens` rows each:

        | K of layer 0 | V of layer 0 | K of layer 1 | V of layer 1 | ... | K of layer 0, next block | ...

    So the rows of a request follow each other within a block, and also across blocks of one layer that are the next in
    its view. SDPA gets these rows as they lie, and else a copy of one request's. The kernel gets the first row and the
    length of each request, and where torch is new enough a table of blocks; else, and for layers with a window, whose
    old rows are overwritten, all are copied together. So they are in a step whose new blocks go to the host
    (pages.py): these are not in the cache yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, Literal

import torch
from torch.nn.functional import scaled_dot_product_attention

Way = Literal["alone", "packed"]  # SDPA per request, the kernel for packed sequences
Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values

BY_REQUEST: Final = "by_request"  # argument of attention: (query, scale, dropout) -> [1, rows, heads, dim]
TABLE: Final = 256  # a kernel that reads tables of blocks takes blocks of a multiple of so many tokens
_HALF: Final = (torch.float16, torch.bfloat16)
_WIDEST: Final = 256  # head dimension of the kernel
_OLDEST: Final = (8, 0)  # compute capability


def choose_way(config: Any, settings: Any, device: torch.device, dtype: torch.dtype, dim: int) -> Way | None:
    """Returns how a loop computes attention, None for transformers' own way. `config`: of the model, with the attention
    of batches; `settings`: a resolved ContinuousBatchingConfig; `dim`: of a head. See Note [By request]."""
    padded = any(settings.cuda_graph_booleans) or settings.varlen_compile_config or settings.decode_compile_config
    if config._attn_implementation != "sdpa" or padded:
        return None
    if device.type != "cuda" or dtype not in _HALF:
        return "alone"
    there = torch.backends.cuda.is_flash_attention_available() and torch.backends.cuda.flash_sdp_enabled()
    fits = dim % 8 == 0 and dim <= _WIDEST and torch.cuda.get_device_capability(device) >= _OLDEST
    return "packed" if there and fits else None


def takes_tables() -> bool:
    """Does torch's kernel for packed sequences take tables of blocks?"""
    return any(argument.name == "block_table" for argument in _KERNEL._schema.arguments)


class Keys:
    """The keys of a step's requests in the layers of one kind, in the order of the requests."""

    in_place = False  # are they read where they lie? See Note [Read in place]

    def __init__(self, allocator: Any) -> None:
        """`allocator`: transformers' allocator of the blocks of these layers."""
        self._tokens: int = allocator.tokens_per_page  # of a block
        self._stride: int = allocator.block_physical_stride  # rows from a block to that of the next number
        self.window: int = getattr(allocator, "sliding_window", 0)  # tokens that a row sees, with itself; 0: all
        self.counts: list[int] = []  # keys of each request
        self.firsts: list[int | None] = []  # row of the first one in a layer's view; None if they do not follow
        self._tables: list[list[int]] = []  # blocks of each request, by their number in a layer's view
        self._masks: dict[tuple[int, int], torch.Tensor] = {}  # by (rows, keys)

    def add(self, count: int, table: Sequence[int]) -> None:
        """Adds a request with `count` keys in the blocks of a `table`, and perhaps fewer."""
        firsts = [block * self._stride for block in table[: -(-count // self._tokens)]]
        follow = all(after == before + self._tokens for before, after in pairwise(firsts))
        self.counts.append(count)
        self.firsts.append(firsts[0] if firsts and follow else None)
        self._tables.append([first // self._tokens for first in firsts])

    def readable(self, way: Way, tables: bool) -> bool:
        """Can attention computed in this way read the cache? `tables`: does the kernel take tables of blocks?"""
        if self.window:
            return False
        return way == "alone" or None not in self.firsts or (tables and self._tokens % TABLE == 0)

    def mask(self, rows: int, count: int, device: torch.device) -> torch.Tensor | None:
        """Returns which of `count` keys the last `rows` tokens of a request see, [rows, keys]; None where SDPA needs no
        mask: for one row, or all rows without a window."""
        if rows == 1 or (rows == count and not 0 < self.window < count):
            return None
        if (mask := self._masks.get((rows, count))) is None:
            mask = torch.ones(rows, count, dtype=torch.bool, device=device).tril_(count - rows)
            if self.window:
                mask.triu_(count - rows - self.window + 1)
            self._masks[rows, count] = mask
        return mask

    @functools.cached_property
    def most(self) -> int:
        """Keys of the request that has the most."""
        return max(self.counts)

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Returns for the kernel: first rows [requests + 1], numbers of keys [requests], and where keys do not follow
        each other tables of blocks [requests, blocks]; all int32. Made before the first layer of a step."""
        if self._tensors is None:
            make = functools.partial(torch.tensor, dtype=torch.int32, device=device)
            table = None
            if None in self.firsts:
                width = max(map(len, self._tables))
                table = make([blocks + [0] * (width - len(blocks)) for blocks in self._tables])
            self._tensors = make([first or 0 for first in [*self.firsts, 0]]), make(self.counts), table
        return self._tensors

    _tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None


def together(pair: Pair, counts: Sequence[int]) -> Iterator[Pair]:
    """Yields the keys and values of each request from those of all, [1, heads, tokens, dim]."""
    yield from zip(*(states.split(list(counts), 2) for states in pair), strict=True)


def where_they_lie(caches: Pair, keys: Keys, index: torch.Tensor) -> Iterator[Pair]:
    """Yields the keys and values of each request, [1, heads, tokens, dim], from a layer's views of the cache, [rows,
    heads, dim]. `index`: the rows of all requests. Valid until the next ones are yielded."""
    key, value = (cache.transpose(0, 1)[None] for cache in caches)
    copies, start = None, 0
    for count, first in zip(keys.counts, keys.firsts, strict=True):
        if first is not None:
            yield key.narrow(2, first, count), value.narrow(2, first, count)
        else:
            if copies is None:  # one for all: memory that is new is slow
                shape = keys.most, *caches[0].shape[1:]
                copies = caches[0].new_empty(shape), caches[1].new_empty(shape)
                views = [copy.transpose(0, 1)[None] for copy in copies]
            rows = index.narrow(0, start, count)
            for cache, copy in zip(caches, copies, strict=True):
                torch.index_select(cache, 0, rows, out=copy.narrow(0, 0, count))
            yield views[0].narrow(2, 0, count), views[1].narrow(2, 0, count)
        start += count


def attend_alone(
    query: torch.Tensor, states: Iterable[Pair], rows: list[int], keys: Keys, scale: float | None, dropout: float
) -> torch.Tensor:
    """Attends request by request. `query`: [1, heads, rows, dim], so many `rows` of each; `states`: yields the keys and
    values of each, [1, heads, tokens, dim]. Returns [1, rows, heads, dim]."""
    results = []
    for own, (key, value) in zip(query[0].transpose(0, 1).split(rows), states, strict=True):
        if len(own):  # else it is only there to be forked
            mask = keys.mask(len(own), key.shape[2], query.device)
            results.append(attend_one(own, key, value, mask, scale, dropout))
    return torch.cat(results).unsqueeze(0)


def attend_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    dropout: float,
) -> torch.Tensor:
    """Attends the rows of a request, [rows, heads, dim], to its keys and values, [1, KV heads, tokens, dim]: all heads
    that share one of those read it once. `mask`: of `Keys.mask`. Returns [rows, heads, dim]."""
    (count, heads, dim), shared = query.shape, key.shape[1]
    if count == 1:  # heads take the place of rows
        query = query.view(1, shared, heads // shared, dim)
        return scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=scale).reshape(1, heads, -1)
    query = query.transpose(0, 1).unflatten(0, (shared, -1))
    key, value = (states.transpose(0, 1).expand(-1, heads // shared, -1, -1) for states in (key, value))
    attended = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, is_causal=mask is None
    )
    return attended.flatten(0, 1).transpose(0, 1)


_KERNEL: Final = torch.ops.aten._flash_attention_forward.default


def attend_packed(
    query: torch.Tensor,
    states: Sequence[torch.Tensor],
    starts: tuple[torch.Tensor, torch.Tensor],
    most: tuple[int, int],
    window: int,
    scale: float | None,
    dropout: float,
    used: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends all requests in one call, without waiting for the device. `query`: [1, heads, rows, dim]; `states`: keys
    and values [rows, heads, dim], with a `table` of blocks [requests, blocks] those of each block
    [blocks, tokens, heads, dim]; `starts`: the first row of each request and of its keys, [requests + 1]; `most`: rows
    and keys of a request, at most; `used`: keys of each, [requests], where those of the next do not follow. All int32.
    Returns [1, rows, heads, dim]."""
    more = {} if table is None else {"block_table": table}
    if window:
        more["window_size_left"] = window - 1  # type: ignore[assignment]
    attended: torch.Tensor = _KERNEL(
        query[0].transpose(0, 1), *states, *starts, *most, dropout, True, False, scale=scale, seqused_k=used, **more
    )[0]
    return attended.unsqueeze(0)


class RequestAttention:
    """Attention by request in the loop of one cache, and the requests of its next step."""

    def __init__(self, way: Way, allocators: Sequence[Any]) -> None:
        """`allocators`: transformers' allocators of the blocks of each kind of layer."""
        self._way: Way = way
        self._allocators = allocators
        self._tables = takes_tables()
        self.begin(reads=False)

    def begin(self, reads: bool) -> None:
        """Forgets the requests of the step before. `reads`: has any of the next ones tokens in the cache already?
        Without, new keys are all keys."""
        self._reads = reads
        self._rows: list[int] = []  # new tokens of each request
        self._keys = [Keys(allocator) for allocator in self._allocators]

    def add(self, request: str, past: int, new: int) -> None:
        """Adds a request to the step, with so many `new` tokens after `past` ones."""
        self._rows.append(new)
        for keys, allocator in zip(self._keys, self._allocators, strict=True):
            keys.add(allocator.get_seqlen_k(past, new), allocator.block_table[request])

    def without_masks(self, inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        """Returns the model's inputs for the step with empty masks: models take one of four dimensions as it is, and
        without one would make their own."""
        mask = inputs["input_ids"].new_empty((1, 1, 0, 0), dtype=dtype)
        kinds = list(inputs["cu_seq_lens_k"])
        masks = mask if len(kinds) == 1 else dict.fromkeys(kinds, mask)
        return {**inputs, "attention_mask": masks, "is_causal": False}  # as transformers says of what has masks

    def prepare(self, layer: int, kind: int, kwargs: dict[str, Any], on_the_way: bool) -> Callable[[Pair], None]:
        """Has the cache's `update` of a layer write alone, where attention reads keys in place, which are not all `on
        the way` to the host. Returns what puts attention into the arguments `kwargs`, given what `update` returned."""
        keys, index = self._keys[kind], kwargs["read_index"][kind]
        keys.in_place = self._reads and not on_the_way and keys.readable(self._way, self._tables)
        if keys.in_place:
            kwargs["read_index"] = [rows[:0] for rows in kwargs["read_index"]]

        def put(pair: Pair) -> None:
            starts = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
            kwargs[BY_REQUEST] = functools.partial(self._attend, layer, kind, index, pair, starts)

        return put

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _attend(
        self,
        layer: int,
        kind: int,
        index: torch.Tensor,
        pair: Pair,
        starts: tuple[torch.Tensor, torch.Tensor],
        query: torch.Tensor,
        scale: float | None,
        dropout: float,
    ) -> torch.Tensor:
        """Attends to the keys of each request in a layer, under the forward's lease. `index`: rows of the cache that
        attention reads; `pair`: what `update` returned; `starts`: first row of each request and of its keys in
        `pair`. Returns [1, rows, heads, dim]."""
        keys, allocator = self._keys[kind], self._allocators[kind]
        if self._way == "alone":
            views = allocator._kv_token_views[layer]
            pairs = where_they_lie(views, keys, index) if keys.in_place else together(pair, keys.counts)
            return attend_alone(query, pairs, self._rows, keys, scale, dropout)
        states, used, table = [tokens[0].transpose(0, 1) for tokens in pair], None, None
        if keys.in_place:
            first, used, table = keys.tensors(query.device)
            starts = starts[0], first
            views = (allocator._kv_token_views if table is None else allocator._kv_page_views)[layer]
            states = [view[: len(views[1])] for view in views]  # keys have a block more
        most = max(self._rows), keys.most
        return attend_packed(query, states, starts, most, keys.window, scale, dropout, used, table)


def attending(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps transformers' "sdpa" attention: in a loop that attends by request it calls what the cache has put into the
    arguments, everything else is as it was. The cache is updated here, in newer transformers by the model before."""

    @functools.wraps(stock)
    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        # In few calls: this runs for each layer of each token, in loops or not.
        if BY_REQUEST not in kwargs and "cache" in kwargs:
            cache: Any = kwargs["cache"]
            if getattr(cache, "by_request", None) is not None:
                cache.update(key, value, module.layer_idx, kwargs)
        if BY_REQUEST not in kwargs:
            result: tuple[torch.Tensor, None] = stock(module, query, key, value, attention_mask, *args, **kwargs)
            return result
        by_request = kwargs[BY_REQUEST]
        return by_request(query, kwargs.get("scaling"), kwargs.get("dropout", 0.0)), None

    return attend
