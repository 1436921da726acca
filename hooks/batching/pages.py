"""The pages under the sectors of a paged cache: backed when a request gets the sector, freed when no request has it,
given and restored as those of a client of the manager (offload/manager/client.py); those of each request, which move
to the host and back at the same addresses; and new keys and values of prompts on their way to the host, beside the
computation of the layers that follow (eLLM §4.3.2).

Words
    sector   transformers' unit of the paged cache: so many bytes for one kind of attention
    page     the device's unit of memory; a sector may be a part of a page, or many pages

Note [Guard]
    A row of padding has -1 in its table of blocks, so kernels may read in front of the first sector. A guard of one
    sector lies there, and like the sectors that padding reads from and writes to it always has pages.

Note [One offer]
    Kernels write to any page of a request in any step, so that none is saved ahead and none stays clean: what is taken
    is copied then, by the core, in whatever wanted the page, be it an activation in the middle of a step (eLLM §4.3).
    Its addresses lead to the host from then on, where kernels read and write it, slower, until it is restored. Pages
    that no request of the batch reads are in an offer of their own, which comes first: those of requests that wait, and
    of blocks that are only kept for prompts.

Note [Full blocks]
    A prompt that is admitted with its KV on the host has pages there. Kernels could write to them, and attention read
    them back, but the layer would wait for the link both times. So the device's copy engine copies new KV that fills
    whole blocks, once the layer has computed it, while this and the next layer go on; kernels write these rows to the
    padding's sector, and attention gets them from the layer itself. Rows behind the last full block of a prompt, and
    single tokens that follow later, are written by kernels.

Note [One layer in flight]
    Before a layer uses the cache its stream waits for the copies of the layer before it. So the copies need no more
    memory than the admission has charged as staging: one layer's new KV. Later work on that stream comes after the
    copies, and pages do not leave their addresses before the streams of copies have passed
    (allocator/csrc/mapping/copies.h).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.continuous_batching.cache_allocators import CachePool

from ...allocator._native import Device, Done, Group, Range, Transfer
from ...allocator.errors import BallonetError, DriverError, PoolExhausted
from ...offload.manager.client import ModelClient, Offer, PageClient
from ...offload.manager.memory_manager import MemoryManager
from ...offload.policy.reclaim_order import PageSource
from ...offload.residency.backing import Backing
from ...offload.residency.mover import Mover, Runs
from ...offload.residency.pieces import PieceEvent, Pieces, PieceState, runs_of
from ..device import managers
from ..device.streams import stream_of
from ..forward.lease import GroupLease
from ..kv.pages import find_pages

if TYPE_CHECKING:
    from ...allocator._native import Place

RESERVED = 2  # sectors that padding reads from and writes to


class SectorClient(PageClient):
    """The `PageClient` of the pages of a paged KV cache. Used by the scheduling thread; the manager reads it on any.
    `lock`: held while pages are moved, and while others begin or end to read: see blocks.py, Note [Two threads]."""

    def __init__(
        self,
        device: Device,
        group: Group,
        range_: Range,
        manager: MemoryManager,
        model: str,
        of: ModelClient | None = None,
    ) -> None:
        """The pages of `range_`, of requests of a model that is called so. `of`: the model. DriverError."""
        self.name = f"KV of requests of {model}"
        self.manager = manager
        self.lock = RLock()
        self.used = manager.clock()  # when a step began last
        self.stream = 0  # that computed last
        self._device = device
        self._group = group
        self._range = range_
        self._in_use = Pieces()
        self.end = 0  # no piece from there on was ever in use
        self._read = Pieces()  # by requests of the batch, and those that came since it was chosen
        self._held = Pieces()  # by these, and others that have begun and only have no part in this step
        # what `begins` was given for these; None: others came or went
        self._begun: tuple[Collection[int], Collection[int]] | None = None
        self._transfer = Transfer(device)
        self.host_writes = HostWrites(self._transfer)
        self._backing = Backing(device, group, range_, "kv")
        self._mover = Mover(device, range_, self._backing, Lock())
        self._current = stream_of(device)
        self._changed = False  # since the manager was told
        self.only_cached = False  # is there nothing but blocks that are kept for prompts?
        self.lacking: Callable[[], int] = lambda: 0  # free pages that the step is about to take
        self.number = manager.add_client(self, of)

    # -- for the manager

    @property
    def running(self) -> bool:
        """Does any thread lease it?"""
        return self._group.leases > 0

    @property
    def displaced(self) -> int:
        """Pages of requests that lie on the host, as far as known."""
        return self._mover.away

    @property
    def pages(self) -> int:
        """Pages of requests, wherever they are."""
        return len(self._in_use)

    @property
    def device_pages(self) -> int:
        """Pages of requests on the device."""
        self._look()
        return len(self._in_use) - self._mover.away

    @property
    def ranges(self) -> list[tuple[str, Range]]:
        """The one range of all sectors."""
        return [("blocks of keys and values of all layers", self._range)]

    def offers(self) -> Sequence[Offer]:
        """The pages on the device, those that rest first: see Note [One offer]."""
        self._look()
        return [
            Offer(index, sum(end - first for first, end in runs), False, divisible=True, resting=index == 0)
            for index, runs in enumerate(self._takable())
            if runs
        ]

    def entry(self, index: int) -> tuple[Group, list[Any]] | None:
        """(group, parts) of an offer; None where there is nothing of it."""
        twin = self._backing.pages
        parts: list[Any] = [(self._range, first, end - first, twin, first, []) for first, end in self._takable()[index]]
        return (self._group, parts) if parts else None

    # -- for the cache

    @property
    def resting(self) -> int:
        """Pages on the device that no request that has begun reads, in this step or the next."""
        return sum(end - first for first, end in self._takable()[0])

    @property
    def read_displaced(self) -> int:
        """Pages on the host that requests of the batch read."""
        if not self._mover.away:
            return 0
        here = self._read.copy()
        here.difference_update(self._mover.states[PieceState.OFFLOADED])
        return len(self._read) - len(here)

    def extended(self, pieces: Iterable[int]) -> None:
        """Notes that these have pages now, of the device or the host."""
        for piece in pieces:
            self._forget(piece)
            self._in_use.add(piece)
            self.end = max(self.end, piece + 1)
            self._read.add(piece)
            self._begun = None
            self._held.add(piece)
            self._mover.look_for_host_pages(piece, piece + 1)
        self._changed = True

    def dropped(self, piece: int) -> None:
        """Gives the page back that nobody uses any more, once the device is done with it."""
        self._in_use.discard(piece)
        self._range.retire(piece, 1)
        self._forget(piece)
        self._changed = True

    def begins(self, reads: Collection[int], held: Collection[int] = ()) -> None:
        """A step is about to begin, whose requests have these pieces; `held` are of others that go on later. What is
        away is restored as far as there is room. DriverError."""
        self.used = self.manager.clock()
        self._changed, self.only_cached = self._changed or self.only_cached, False
        if (reads, held) != self._begun:
            self._begun = reads, held
            self._read, self._held = Pieces(runs_of(reads)), Pieces(runs_of({*reads, *held}))
        self.host_writes.arrive(self.stream)
        if self.manager.taken_of(self.number) or self._mover.away:
            self._look()
            if (away := self.displaced) and (pages := self.manager.restorable_pages(self.number, self.lacking())):
                back = [*self.away(reads), *self.away({*held}.difference(reads))][:pages]
                self._changed |= self.restore(back) > 0 or away != self.displaced
        if self._changed or self.manager.pages.scarce:
            self._changed = False
            self.manager.client_changed(self.number)

    def rests(self) -> None:
        """There is no request any more: what is there is only kept."""
        self._read, self._held, self._begun, self.only_cached = Pieces(), Pieces(), None, True
        self.manager.client_changed(self.number)

    def uses(self) -> None:
        """What this thread submits from now on, under its lease, reads and writes pages. DriverError."""
        self.stream = self._current()
        self.host_writes.arrive(self.stream)
        if self._mover.lacks_bytes_or_copying:
            if self._mover.lacks_bytes:  # as an interrupt has left it
                with self.lock:
                    self._mover.fetch(self._transfer, self.stream, 0)
            self._mover.arrive(self.stream)
        self._range.note_use(self.stream, True)

    def wait_restored(self, write: bool = False) -> bool:
        """Waits for what comes back, so that this thread may read pages under its lease, or `write` to them, beside
        the stream that computes. False where something lacks its bytes, as an interrupt has left it. DriverError."""
        with self.lock:
            self.host_writes.arrive(None)
            self._mover.arrive(None)
            self._range.note_use(self._current(), write)
            return not self._mover.lacks_bytes

    def away(self, pieces: Iterable[int]) -> list[int]:
        """Returns those of these whose bytes are on the host."""
        self._look()
        return sorted(piece for piece in pieces if piece in self._mover.states[PieceState.OFFLOADED])

    def evict(self, pieces: Iterable[int]) -> int:
        """Moves these to the host: all that have pages of the device, or PoolExhausted, and none. DriverError."""
        self._look()
        with self.lock, GroupLease(self._group):
            led = self._mover.evict(pieces, self._transfer, self.stream, whole=True)
        if led:
            self._changed = True
            self.manager.events.decided(PageSource.RUNNING_KV.label, "reclaim", led, what=self.name)
        return led

    def retreat(self) -> int:
        """Moves the pages of all sectors, those of padding too."""
        if not self.running:
            self.evict(range(self._range.pieces))
        return self.device_pages

    def restore(self, pieces: Sequence[int]) -> int:
        """Gives these pages of the device again, as far as there are free ones, and brings their bytes; returns how
        many. DriverError."""
        if not pieces:
            return 0
        with self.lock, GroupLease(self._group):
            try:
                back = self._mover.own(len(pieces), self._range.pieces, pieces)
                self._mover.fetch(self._transfer, self.stream, 0)
            except BaseException:
                self._mover.recall()  # their bytes have not come: they are read on the host
                self._mover.arrive(None)
                raise
        if back:
            self._changed = True
            self.manager.events.decided(PageSource.RUNNING_KV.label, "restore", back, what=self.name)
        return back

    def has(self, piece: int) -> bool:
        """Does any request have it?"""
        return piece in self._in_use

    def move(self, piece: int, to: Place) -> bool:
        """To another page of its own; False where that cannot be now. DriverError."""
        with self.lock:
            return self._mover.exchange(piece, to)

    def _look(self) -> None:
        self._mover.look(0, self._range.pieces)

    def _takable(self) -> tuple[Runs, Runs]:
        """The pieces on the device, as (first, end): of those that rest, and of the others."""
        here = self._in_use.copy()
        here.difference_update(self._mover.states[PieceState.OFFLOADED])
        here.difference_update(self._mover.states[PieceState.ARRIVING])
        resting = here.copy()
        resting.difference_update(self._held)
        here.difference_update(resting)
        return list(resting.runs), list(here.runs)

    def _forget(self, piece: int) -> None:
        self._mover.states.move_run(PieceEvent.DROP, piece, piece + 1)
        self._backing.release(piece, piece + 1)


@dataclass(frozen=True, slots=True)
class NewBlock:
    """A block that a batch fills. `row`: of its first token among the new ones; `place`: of that token in the cache;
    `read`: among the tokens that attention reads, None where those are the new ones."""

    row: int
    place: int
    read: int | None


class HostWrites:
    """The copies of one cache. Used by the computing thread; other threads only wait for them."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._flying: tuple[Done, Sequence[torch.Tensor]] | None = None  # (copies, tensors that they read)

    def write(
        self,
        caches: Sequence[torch.Tensor],
        new: Sequence[torch.Tensor],
        read: Sequence[torch.Tensor],
        blocks: Sequence[NewBlock],
        tokens: int,
        stream: int,
    ) -> None:
        """Copies blocks of so many `tokens` of a layer, after the work of `stream`, the current one, and fills them in
        where attention reads. Keys and values of each: `caches` [tokens of the cache, heads, dim], `new` [rows, heads,
        dim], `read` [tokens that are read, heads, dim]. Where the driver refuses, that stream writes them."""
        new = [states.contiguous() for states in new]
        parts = []
        for cache, states, reads in zip(caches, new, read, strict=True):
            size, to, of = states[0].nbytes, cache.data_ptr(), states.data_ptr()
            for block in blocks:
                parts.append((to + block.place * size, of + block.row * size, tokens * size))
                if block.read is not None:
                    reads[block.read : block.read + tokens] = states[block.row : block.row + tokens]
        try:
            self._flying = self._transfer.copy(parts, after=stream, owner="kv", to="host"), new
        except BallonetError:
            for cache, states in zip(caches, new, strict=True):
                for block in blocks:
                    cache[block.place : block.place + tokens] = states[block.row : block.row + tokens]

    def arrive(self, stream: int | None) -> None:
        """Makes `stream`, for None the host, wait for the copies. DriverError."""
        if (flying := self._flying) is not None:
            done, _ = flying
            done.wait() if stream is None else done.before(stream)
            if stream is not None:
                self._flying = None


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
        of: ModelClient | None = None,
    ) -> None:
        """Backs the guard and the reserved sectors, for good. `model`: its name, for logs; `of`: itself. `parts`: where
        the bytes of a sector lie, as (offset, stride, bytes): those of sector s at offset + s * stride; None: all
        together. torch.OutOfMemoryError, DriverError."""
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
        self.client = SectorClient(device, group, self.range, managers.of(device), model, of)
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
                    self.client.manager.reclaim.publish_now()
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

    def free_blocks(self, index: int, block_ids: list[int]) -> None:
        """Notes that no request has these blocks any more: an event, as `try_to_free_sectors` may free pages now."""
        super().free_blocks(index, block_ids)
        self._pages.client.manager.version.bump()

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
        self._known: dict[str, tuple[list[list[int]], set[int]]] = {}  # by request: its blocks, and their pieces

    def requests(self) -> set[str]:
        """Names of the requests that have blocks."""
        return {name for kind in self._kinds.values() for name in kind.block_table}

    def pieces(self, request: str) -> set[int]:
        """The pieces that the blocks of the request lie on, not to be changed; in one call while it has the same
        blocks."""
        known = self._known.get(request)
        if known is not None:
            for kind, blocks in zip(self._kinds.values(), known[0], strict=True):
                if kind.block_table.get(request, ()) != blocks:
                    break
            else:
                return known[1]
        pieces = {
            piece
            for kind in self._kinds.values()
            for block in kind.block_table.get(request, ())
            for piece in self._pages.pieces(block // kind.blocks_per_sector)
        }
        there = self.requests()
        self._known = {name: its for name, its in self._known.items() if name in there}
        if request in there:
            self._known[request] = [list(kind.block_table.get(request, ())) for kind in self._kinds.values()], pieces
        return pieces

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
