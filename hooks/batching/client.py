"""The pages under the sectors of a paged cache as a client of the governor (offload/governor/client.py), and new keys
and values of prompts on their way to the host, beside the computation of the layers that follow (eLLM §4.3.2).

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

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any

import torch

from ...allocator._native import Device, Done, Group, Range, Transfer
from ...allocator.errors import BallonetError
from ...offload.governor.client import Offer, PageClient
from ...offload.governor.governor import Governor
from ...offload.policy.reclaim_order import Rung
from ...offload.residency.backing import Backing
from ...offload.residency.mover import Mover, Runs
from ...offload.residency.pieces import PieceEvent, Pieces, PieceState, runs_of
from ..device.streams import stream_of
from ..forward.lease import GroupLease

if TYPE_CHECKING:
    from ...allocator._native import Place


class SectorClient(PageClient):
    """The `PageClient` of the pages of a paged KV cache. Used by the scheduling thread; the governor reads it on any.
    `lock`: held while pages are moved, and while others begin or end to read: see blocks.py, Note [Two threads]."""

    def __init__(self, device: Device, group: Group, range_: Range, governor: Governor, model: str) -> None:
        """The pages of `range_`, of requests of a model that is called so. DriverError."""
        self.name = f"KV of requests of {model}"
        self.governor = governor
        self.lock = RLock()
        self.used = governor.clock()  # when a step began last
        self.stream = 0  # that computed last
        self._device = device
        self._group = group
        self._range = range_
        self._in_use = Pieces()
        self.end = 0  # no piece from there on was ever in use
        self._read = Pieces()  # by requests of the batch, and those that came since it was chosen
        self._transfer = Transfer(device)
        self.host_writes = HostWrites(self._transfer)
        self._backing = Backing(device, group, range_, "kv")
        self._mover = Mover(device, range_, self._backing, Lock())
        self._current = stream_of(device)
        self._changed = False  # since the governor was told
        self.only_cached = False  # is there nothing but blocks that are kept for prompts?
        self.number = governor.add_client(self)

    # -- for the governor

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
        """See Note [One offer]."""
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
        """Pages on the device that no request of the batch reads."""
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
            self._mover.look_for_host_pages(piece, piece + 1)
        self._changed = True

    def dropped(self, piece: int) -> None:
        """Gives the page back that nobody uses any more, once the device is done with it."""
        self._in_use.discard(piece)
        self._range.retire(piece, 1)
        self._forget(piece)
        self._changed = True

    def begins(self, reads: Collection[int]) -> None:
        """A step is about to begin, whose requests have these pieces. What is away is restored as far as there is room.
        DriverError."""
        self.used = self.governor.clock()
        self._changed, self.only_cached = self._changed or self.only_cached, False
        self._read = Pieces(runs_of(reads))
        self.host_writes.arrive(self.stream)
        if self.governor.taken_of(self.number) or self.displaced:
            self._look()
        if (away := self.displaced) and (pages := self.governor.restorable_pages(self.number)):
            self._changed |= self.restore(self.away(reads)[:pages]) > 0 or away != self.displaced
        if self._changed or self.governor.pages.scarce:
            self._changed = False
            self.governor.client_changed(self.number)

    def rests(self) -> None:
        """There is no request any more: what is there is only kept."""
        self._read, self.only_cached = Pieces(), True
        self.governor.client_changed(self.number)

    def uses(self) -> None:
        """What this thread submits from now on, under its lease, reads and writes pages. DriverError."""
        self.stream = self._current()
        self.host_writes.arrive(self.stream)
        if self._mover.lacks_bytes_or_copying:
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
            self.governor.events.decided(Rung.RUNNING_KV.label, "pull", led, what=self.name)
        return led

    def restore(self, pieces: Sequence[int]) -> int:
        """Gives these pages of the device again, as far as there are free ones, and brings their bytes; returns how
        many. DriverError."""
        if not pieces:
            return 0
        with self.lock, GroupLease(self._group):
            back = self._mover.own(len(pieces), self._range.pieces, pieces)
            self._mover.fetch(self._transfer, self.stream, 0)
        if back:
            self._changed = True
            self.governor.events.decided(Rung.RUNNING_KV.label, "revert", back, what=self.name)
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
        resting.difference_update(self._read)
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
