"""Moves KV of running requests to other replicas when a group changes its spans (KunServe §4.2).

Note [Pieces]
    The KV of a request in a layer is a row of blocks. A piece is some whole blocks of one layer, sent in one transfer,
    so an activation waits for at most one piece. Blocks have other numbers on each replica; a piece names them by their
    index in the request's row, which is the same everywhere, also where the row is the ring of a sliding window. A
    request goes on once every layer of its new spans has all of its blocks. New requests are served meanwhile, in the
    new caches.

Note [What is wrong is computed again]
    A piece with a wrong checksum, or without memory, costs the request only time: its tokens are known, so it is
    computed anew on all stages. Without memory the group's first stage decides that alone. Damage is reported to the
    supervisor, which has the request computed anew, or ends it after too many attempts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from transformers.generation.continuous_batching.requests import RequestState

from ..forward.lease import GroupLease
from .span_cache import SpanCache


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks [first, first + count) of a request's KV in one layer. `held`: tokens of the request that have KV;
    `check`: checksum of the bytes."""

    request: str
    held: int
    layer: int
    first: int
    count: int
    check: int = 0


def moves(old: Mapping[str, range], new: Mapping[str, range]) -> list[tuple[str, str, range]]:
    """Returns (source, target, layers) so that each target gets all its `new` layers. `old`, `new`: layers by replica.
    Layers that a target already has stay there (source and target are the same); others come from the first source."""
    found = []
    for target, wanted in new.items():
        stays = _common(old.get(target, range(0)), wanted)
        if stays:
            found.append((target, target, stays))
        missing = [layer for layer in wanted if layer not in stays]
        for source, has in old.items():
            if source == target or not (layers := [layer for layer in missing if layer in has]):
                continue
            missing = [layer for layer in missing if layer not in has]
            found += [(source, target, run) for run in _consecutive(layers)]
        assert not missing, f"no replica has layers {missing}"
    return found


def pieces(cache: SpanCache, request: str, held: int, layers: range, most: int) -> Iterator[Piece]:
    """Yields the pieces of a request in these layers of a cache, of at most `most` blocks each."""
    for layer in layers:
        blocks = len(_table(cache, request, layer))
        for first in range(0, blocks, most):
            yield Piece(request, held, layer, first, min(most, blocks - first))


def exported(cache: SpanCache, piece: Piece) -> torch.Tensor:
    """Returns a copy of the KV of a piece, [blocks, 2, tokens, heads, width]."""
    rows, index = _rows(cache, piece)
    with GroupLease(cache.group), torch.no_grad():
        cache.pages.client.uses()
        return rows[index]


def checksum(tensor: torch.Tensor) -> int:
    """Returns the sum of the piece's 4-byte words, each weighted by its index, modulo 2**64. Computed on its device."""
    words = tensor.contiguous().view(torch.int32).flatten()
    weights = torch.arange(1, words.numel() + 1, device=words.device) * 2654435761 % 2**31
    return int((words * weights).sum())


class Arrival(Enum):
    """How the transfer of a request's KV to one replica ended."""

    COMPLETE = "all of it came"
    ABSENT = "there was none, or no memory for it"
    DAMAGED = "a checksum was wrong"


class Arrivals:
    """KV that arrives for one replica's new cache. `lost`: requests that have to be computed anew, and why."""

    def __init__(self, cache: SpanCache) -> None:
        self.lost: dict[str, Arrival] = {}
        self._cache = cache
        self._missing: dict[str, dict[int, set[int]]] = {}  # by request and layer: blocks that have not come

    def take(self, piece: Piece, tensor: torch.Tensor) -> bool:
        """Copies a piece into the request's blocks, which are allocated with its first piece. Returns whether the
        request is now complete, in all layers of the span."""
        name = piece.request
        if name in self.lost:
            return False
        if checksum(tensor) != piece.check:
            self.lose(name, Arrival.DAMAGED)
            return False
        if not self._allocate(name, piece.held):
            self.lose(name, Arrival.ABSENT)
            return False
        rows, index = _rows(self._cache, piece)
        with GroupLease(self._cache.group), torch.no_grad():
            self._cache.pages.client.uses()
            rows[index] = tensor.to(rows.device)
        missing = self._missing[name]
        missing[piece.layer] -= set(range(piece.first, piece.first + piece.count))
        if any(missing.values()):
            return False
        del self._missing[name]
        return True

    def lose(self, request: str, why: Arrival) -> None:
        """Frees the pieces of a request that have come; later ones are dropped."""
        self.lost.setdefault(request, why)
        self._missing.pop(request, None)
        self._cache.give(request)

    def _allocate(self, name: str, held: int) -> bool:
        if name not in self._missing:
            if not self._cache.store(RequestState(name, []), held):
                return False
            cache = self._cache
            self._missing[name] = {layer: set(range(len(_table(cache, name, layer)))) for layer in cache.layers}
        return True


def _table(cache: SpanCache, request: str, layer: int) -> list[int]:
    found: list[int] = cache.layer_to_allocator[layer - cache.layers.start].block_table[request]
    return found


def _rows(cache: SpanCache, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns all blocks of the layer, [blocks, 2, tokens, heads, width], and the indices of the piece's blocks."""
    layer = piece.layer - cache.layers.start
    kind: Any = cache.layer_to_allocator[layer]
    shape = (-1, len(kind.layer_indices), 2, kind.tokens_per_page, kind.num_key_value_heads, kind.head_dim)
    blocks = _table(cache, piece.request, piece.layer)[piece.first : piece.first + piece.count]
    index = torch.tensor(blocks, device=kind.cache_tensor.device)
    return kind.cache_tensor.view(shape)[:, kind.layer_indices.index(layer)], index


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), max(one.start, other.start, min(one.stop, other.stop)))


def _consecutive(layers: list[int]) -> list[range]:
    found: list[range] = []
    for layer in layers:
        if found and found[-1].stop == layer:
            found[-1] = range(found[-1].start, layer + 1)
        else:
            found.append(range(layer, layer + 1))
    return found
