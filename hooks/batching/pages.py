"""The pages under the sectors of a paged cache: backed when a request gets the sector, freed when no request has it;
and those of each request, which move to the host and back at the same addresses.

Words
    sector   transformers' unit of the paged cache: so many bytes for one kind of attention
    page     the device's unit of memory; a sector may be a part of a page, or many pages

Note [Guard]
    A row of padding has -1 in its table of blocks, so kernels may read in front of the first sector. A guard of one
    sector lies there, and like the sectors that padding reads from and writes to it always has pages.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.continuous_batching.cache_allocators import CachePool

from ...allocator._native import Device, Group, Range
from ...allocator.errors import DriverError, PoolExhausted
from ...offload.residency.pieces import runs_of
from ..device import governors
from ..kv.pages import find_pages
from .client import SectorClient

if TYPE_CHECKING:
    from ...allocator._native import Place

RESERVED = 2  # sectors that padding reads from and writes to


def counted_runs(pieces: Iterable[int]) -> list[tuple[int, int]]:
    """Returns the pieces as runs (first, count), as ranges take them."""
    return [(first, end - first) for first, end in runs_of(pieces)]


class SectorPages:
    """The range of `sectors` sectors of `sector` bytes behind a guard. Not thread-safe: several threads use it under
    the client's lock."""

    def __init__(
        self,
        device: Device,
        group: Group,
        sectors: int,
        sector: int,
        model: str,
        parts: Sequence[tuple[int, int, int]] | None = None,
    ) -> None:
        """Backs the guard and the reserved sectors, for good. `model`: its name, for logs. `parts`: where the bytes of
        a sector lie, as (offset, stride, bytes): those of sector s at offset + s * stride; None: all together.
        torch.OutOfMemoryError, DriverError."""
        self.sector = sector
        self.device = device
        self._parts = tuple(parts or ((0, sector, sector),))
        self._page = device.page_size
        self._front = -(-sector // self._page) * self._page  # bytes of the guard: whole pages, so that sectors lie well
        size = self._front + sectors * sector
        self.range: Range = device.reserve(size, "kv", group, expected=size, keeps=True)
        self._users = [0] * self.range.pieces  # sectors in use, by piece
        self.pages = 0  # under sectors in use, without the guard's
        self._sectors = sectors
        self.client = SectorClient(device, group, self.range, governors.of(device), model)
        fixed = {piece for sector in range(RESERVED) for piece in self.pieces(sector)}
        self.fixed = len(fixed) * self._page  # bytes that are always backed, included in `nbytes`
        self._map(counted_runs((*range(self._front // self._page), *fixed)))
        self._use(fixed)

    def window(self) -> object:
        """A DLPack capsule over all sectors, uint8."""
        return self.range.window(self._front, self._sectors * self.sector)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages under sectors in use."""
        return self.pages * self._page

    def pieces(self, sector: int) -> Sequence[int]:
        """The pieces that the sector lies on, each once."""
        runs = [
            range((first := self._front + offset + sector * stride) // self._page, -(-(first + nbytes) // self._page))
            for offset, stride, nbytes in self._parts
        ]
        return runs[0] if len(runs) == 1 else sorted({piece for run in runs for piece in run})

    def of_piece(self, piece: int) -> slice:
        """The bytes of `window` that lie on this piece."""
        first = piece * self._page - self._front
        return slice(max(0, first), max(0, min(first + self._page, self._sectors * self.sector)))

    def missing(self, sectors: Iterable[int]) -> list[tuple[int, int]]:
        """The pieces (first, count) that have no page yet and would need one for these sectors."""
        return counted_runs({piece for sector in sectors for piece in self.pieces(sector) if not self._users[piece]})

    def take(self, sectors: Iterable[int], place: Place = "device") -> None:
        """Takes these sectors into use, and backs them with pages in `place` where they have none: all, or none.
        torch.OutOfMemoryError, DriverError."""
        sectors = list(sectors)
        runs = self.missing(sectors)
        self._map(runs, place)
        self.client.extended(piece for first, count in runs for piece in range(first, first + count))
        for sector in sectors:
            self._use(self.pieces(sector))

    def give(self, sectors: Iterable[int]) -> None:
        """Takes these sectors out of use; pages without a sector in use are freed once the device is done with them."""
        for sector in sectors:
            for piece in self.pieces(sector):
                self._users[piece] -= 1
                if not self._users[piece]:
                    self.pages -= 1
                    self.client.dropped(piece)

    def _use(self, pieces: Iterable[int]) -> None:
        for piece in pieces:
            self.pages += not self._users[piece]
            self._users[piece] += 1

    def _map(self, runs: list[tuple[int, int]], place: Place = "device") -> None:
        done: list[tuple[int, int]] = []
        try:
            for run in runs:
                try:
                    self.range.map_host(*run) if place == "host" else self.range.map(*run)
                except PoolExhausted as error:
                    if place == "host":
                        raise torch.OutOfMemoryError(f"no room for KV on the host: {error}") from error
                    self.client.governor.reclaim.publish_now()
                    find_pages(self.device, None, self.range, [run], error, 0)
                done.append(run)
        except BaseException:
            for run in done:
                self.range.retire(*run)
            raise


class SectorPool(CachePool):
    """The free sectors of a paged cache. The lowest are handed out first, with pages, so that sectors in use lie close
    together and share pages. The free ones are a heap: each change costs O(log sectors)."""

    def __init__(self, pages: SectorPages, sectors: int, allocators: int) -> None:
        self._pages = pages
        self.used: set[int] = set()  # sectors that are backed: handed out, or about to be
        self._backed: set[int] = set()  # backed sectors that are free
        super().__init__(sectors, allocators, RESERVED)

    def reset(self) -> None:
        """Frees all sectors."""
        super().reset()
        self._pages.give(self.used)
        self.used, self._backed = set(), set()

    def lowest(self, count: int) -> list[int]:
        """Returns the sectors that are handed out next."""
        heap, sectors = self.free_sectors, list[int]()
        edge = [(heap[0], 0)] if heap else []  # what may be next, with its place in the heap
        while edge and len(sectors) < count:
            sector, at = heapq.heappop(edge)
            sectors.append(sector)
            for below in range(2 * at + 1, min(2 * at + 3, len(heap))):
                heapq.heappush(edge, (heap[below], below))
        return sectors

    def take(self, count: int, place: Place = "device") -> None:
        """Backs the sectors that are handed out next. torch.OutOfMemoryError, DriverError."""
        fresh = [sector for sector in self.lowest(count) if sector not in self.used]
        self._pages.take(fresh, place)
        self._backed.update(fresh)
        self.used.update(fresh)

    def allocate_sector(self, index: int) -> None:
        """Hands the lowest free sector to an allocator. torch.OutOfMemoryError, DriverError."""
        self.take(1)
        sector = heapq.heappop(self.free_sectors)
        self._backed.discard(sector)
        self._free_blocks[index].add_tree(sector)

    def try_to_free_sectors(self) -> None:
        """Frees sectors of which no request has a block, and their pages."""
        with self._pages.client.lock:
            free, before = self.free_sectors, len(self.free_sectors)
            super().try_to_free_sectors()  # appends them
            freed = free[before:]
            del free[before:]
            for sector in freed:
                heapq.heappush(free, sector)
            unused = self.used.intersection(self._backed.union(freed))
            self._backed = set()
            self.used -= unused
            self._pages.give(unused)


class RequestPages:
    """The pages of the requests of one cache. `kinds`: transformers' allocators of its blocks, by kind of layer."""

    def __init__(self, on: Device, pages: SectorPages, kinds: Mapping[str, Any]) -> None:
        self._on = on
        self._pages = pages
        self._kinds = kinds

    def requests(self) -> set[str]:
        """Names of the requests that have blocks."""
        return {name for kind in self._kinds.values() for name in kind.block_table}

    def pieces(self, request: str) -> set[int]:
        """The pieces that the blocks of the request lie on."""
        return {
            piece
            for kind in self._kinds.values()
            for block in kind.block_table.get(request, ())
            for piece in self._pages.pieces(block // kind.blocks_per_sector)
        }

    def count(self, request: str) -> int:
        """Pages that the blocks of the request lie on."""
        return len(self.pieces(request))

    def on_host_bytes(self, request: str) -> int:
        """Bytes of the request's KV that lie on the host."""
        return self._on.page_size * len(self._pages.client.away(self.pieces(request)))

    def on_host_blocks(self, request: str, kind: Any, past: int, new: int) -> list[int]:
        """Returns, by their order from 0, the request's blocks that lie on the host and that `new` tokens after `past`
        ones fill. `kind`: the allocator whose blocks they are."""
        size, table = kind.tokens_per_page, kind.block_table[request]
        pieces = {
            n: set(self._pages.pieces(table[n] // kind.blocks_per_sector))
            for n in range(-(-past // size), (past + new) // size)
        }
        away = frozenset(self._pages.client.away(set().union(*pieces.values())))
        return [n for n, its in pieces.items() if its <= away]

    def to_host(self, request: str) -> bool:
        """Moves the KV of a request to the host, except pages that it shares. False, and nothing is moved, where the
        host is full or the driver refuses."""
        others = {piece for name in self.requests() - {request} for piece in self.pieces(name)}
        try:
            self._pages.client.evict(self.pieces(request) - others)
        except (PoolExhausted, DriverError):
            return False
        return True

    def to_device(self, request: str) -> None:
        """Restores the KV of a request, as far as there are pages; the rest is read on the host."""
        client = self._pages.client
        away = client.away(self.pieces(request))
        lacking = len(away) - self._on.available  # read once: other threads take and free pages, and change budgets
        if lacking > 0:
            self._on.take(self._on.published, lacking)
        with suppress(DriverError):
            client.restore(away)
