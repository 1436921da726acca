"""The pages of a KV range, which may be taken to the host while the range is in use, and restored; and where pages for
new tokens come from when none is free.

Note [Full pages]
    A full page may be taken at any moment, between two lines too; its addresses lead to the host then, and are read and
    written there (offload/residency/kv_extent.py). Appending never writes to a full page. Code that does, or gives up
    its tokens, calls `lower` first; the page counts as full again last of all (`filled`).

Note [Last pages of idle caches]
    A page of 8 MiB holds 2,048 tokens of a layer of an 8B model, so a conversation of 200 tokens fills none, and its 32
    layers would keep 256 MiB of the device for good. Nothing is appended to a cache that is only kept for later
    prompts: its last pages count as full then (`final`), and leave for the host with the others. That ends before it is
    used again; pages that have left are on the host until they are restored, and tokens may be appended there.

Note [No page is free]
    The steps of `find_pages`, in this order:
    1  torch's cached blocks go back to the pool
    2  pages that are full by now are offered, those of the asking forward too, and the core takes some
    3  prefixes that are only kept for later prompts are dropped
    4  unreachable objects are collected: caches of calls that were interrupted are kept alive by tracebacks
    5  the controller of the model's replicas is told that pages are lacking (overview.py)
    6  pages that other threads lease are requested of them, and waited for
    7  host pages are mapped
    8  torch.OutOfMemoryError
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import torch

from ...allocator._native import Device, Group, Range
from ...allocator.errors import PoolExhausted
from ...allocator.install import reclaim, spilled
from ...offload.manager.kv_tier import KVTier
from ...offload.policy.geometry import Geometry
from ...offload.policy.kv_pages import ROWS
from ...offload.policy.reclaim_order import PageSource
from ...offload.residency.kv_extent import KVExtent
from ..device import graphs
from ..device.managers import give_up
from ..device.streams import raw_stream, relaxed
from ..forward.lease import ForwardLease, GroupLease, ThreadLease

Runs = list[tuple[int, int]]  # (first piece, count)


class KVPages:
    """The pages of `range_`, whose tokens lie as `geometry` says. Without a tier they stay on the device."""

    def __init__(
        self,
        device: Device,
        group: Group,
        range_: Range,
        geometry: Geometry,
        tier: KVTier | None,
        thread_lease: ThreadLease | None,
        alone: Callable[[], bool],
    ) -> None:
        """`tier`, `thread_lease`: of the cache, None where the device cannot read host pages. `alone`: is there no
        tensor over the range?"""
        self.range = range_
        self._device = device
        self._group = group
        self._geometry = geometry
        self._tier = tier
        self._thread_lease = thread_lease
        self._extent: KVExtent | None = None
        self.number = 0  # the range's number in its tier
        self.fills = sys.maxsize  # tokens of every layer with which one more page is full
        if tier is not None:
            self._extent = KVExtent(device, group, range_, tier.lock, alone)
            self.number = tier.extents.add(self._extent)
            self._count(self._extent)

    @property
    def stream(self) -> int:
        """The stream that this thread computes on; 0 on the stand-in."""
        return 0 if self._device.kind == "standin" else raw_stream(self._device.ordinal)

    def begin(self, layer: int, tokens: int, end: int, forward: ForwardLease | None) -> None:
        """Prepares for a layer, by its place in the range, that is about to append so many tokens, the last of them
        before `end`. Called under a lease, that of the `forward` where there is one. BallonetError, DriverError."""
        if self._tier is None or self._extent is None:
            return
        if self._thread_lease is not None and self._thread_lease.renew(forward) and self._device.page_request:
            self._device.yield_pages()  # a forward does so between its layers
        stream = self.stream
        if self._tier.turns.begins((self.number, layer)):
            more = max(0, self._geometry.pieces(end) - self._extent.end)
            self._tier.iteration(stream, tokens, more, 0 if forward is None else forward.number)
        self._tier.enter(self._extent, stream)
        if tokens > ROWS:
            self._tier.prefilling(-(-tokens * self._geometry.token_bytes // self._geometry.page))

    @property
    def needs_wait_or_remap(self) -> bool:
        """Is some of the range not readable at its addresses now? See `show`."""
        return self._extent is not None and self._extent.mover.needs_wait_or_remap

    def show(self) -> None:
        """Makes the tokens readable at their addresses, until a layer of the cache appends. Call it, on any thread,
        before tokens are read or overwritten other than by the layer that is about to run. BallonetError where the
        layer is in a slot while another thread uses the cache, or a CUDA graph is being captured; DriverError."""
        if self._tier is None or self._extent is None or not self._extent.mover.needs_wait_or_remap:
            return
        with GroupLease(self._group):
            if self._device.kind == "cuda" and torch.cuda.is_current_stream_capturing():
                with relaxed(self._device):
                    self._tier.show(self._extent, None)
            else:
                self._tier.show(self._extent, self.stream)

    def joined(self, number: int) -> None:
        """Notes one more layer in the range. `number`: of the layer in its model."""
        if self._tier is not None and self._extent is not None:
            self._tier.turns.layers += 1
            self._extent.layers += 1
            self._extent.numbers.append(number)

    def map(self, first: int, end: int, tokens: int) -> None:
        """Backs the pieces [first, end) with pages, for so many tokens. torch.OutOfMemoryError, DriverError."""
        runs = self._geometry.runs(first, end)
        try:
            map_device(self.range, runs)
        except PoolExhausted as error:
            find_pages(self._device, self._tier, self.range, runs, error, tokens)
        if self._extent is not None:
            self._extent.extended(first, end)

    def reachable(self, first: int, end: int) -> bool:
        """Can the pieces [first, end) be backed? Not while a tensor still shows tokens there whose page was taken."""
        return self._extent is None or all(self.range.leads_to(piece) != "alias" for piece in range(first, end))

    def retire(self, first: int, end: int) -> None:
        """Gives the pages of the pieces [first, end) back."""
        if self._extent is not None:
            self._extent.end = first
        for start, count in self._geometry.runs(first, end):
            self.range.retire(start, count)
        if self._extent is not None:
            self._extent.drop(first, end)

    def release_prefix(self, before: int, first: int) -> None:
        """Gives the pages of the pieces [before, first) back, which are full, while those behind them stay."""
        self.show()
        if self._extent is not None:
            with GroupLease(self._group):
                self._extent.release_prefix(first, self.stream)
        for start, count in self._geometry.runs(before, first):
            self.range.retire(start, count)
        if self._extent is not None:
            self._extent.drop(before, first)

    def map_prefix(self, first: int, tokens: int) -> None:
        """Backs the pieces [0, first), which hold so many tokens, again. torch.OutOfMemoryError, DriverError."""
        runs = self._geometry.runs(0, first)
        for start, count in runs:  # an interrupted call may have backed some
            self.range.retire(start, count)
        try:
            map_device(self.range, runs)
        except PoolExhausted as error:
            find_pages(self._device, self._tier, self.range, runs, error, tokens)
        if self._extent is not None:
            self._extent.prefix_mapped(first)

    def prefix_restored(self) -> None:
        """Marks pages as filled."""
        if self._tier is not None and self._extent is not None:
            self._tier.turns.stream = self.stream
            self._extent.first = 0

    def appended(self, *, took: bool, next_takes: bool) -> None:
        """Notes that a token was appended; see offload/policy/kv_pages.py."""
        if self._tier is not None and (took or next_takes):
            self._tier.appended(self.number, took=took, next_takes=next_takes)

    def filled(self, lengths: Iterable[int], soon: bool = False) -> None:
        """Offers the pages that the layers' tokens fill, to which nothing is written. `soon`: more tokens follow."""
        if self._tier is None or self._extent is None:
            return
        full = self._full(lengths)
        more = full - self._extent.full
        if more > 0:
            self._tier.turns.stream = self.stream
            self._extent.raise_to(full)
            self._count(self._extent)
            self._tier.grown(more, soon)

    def final(self, lengths: Iterable[int]) -> None:
        """Offers the last pages too, as the layers get no more tokens before `lower` is called. They may leave once the
        stream has appended what was submitted. See Note [Last pages of idle caches]."""
        if self._tier is None or self._extent is None:
            return
        full = self._geometry.pieces(max(lengths, default=0))
        if full > self._extent.full:
            self._extent.raise_to(full)
            self._tier.grown(1, soon=False)

    def lower(self, lengths: Iterable[int]) -> None:
        """Withdraws the pages behind these lengths, as the layers are about to cut their tokens or write there."""
        if self._extent is not None and (full := self._full(lengths)) < self._extent.full:
            if self._extent.touches(full):
                self.show()
            with GroupLease(self._group):
                self._extent.lower(full, self.stream)
            self._count(self._extent)

    def worth_copying(self, rows: int) -> bool:
        """Should attention of so many rows of a sequence read a copy, as some pages are on the host?"""
        if self._tier is None or self._extent is None or rows <= ROWS:
            return False
        self._tier.extents.look()
        return self._extent.away > 0 and not self._extent.mover.in_slot

    def _count(self, extent: KVExtent) -> None:
        self.fills = -(-(extent.full + 1) * self._geometry.page // self._geometry.token_bytes)

    def _full(self, lengths: Iterable[int]) -> int:
        return self._geometry.full(min(lengths, default=0))

    @property
    def full(self) -> int:
        """Pieces that may be taken, or were."""
        return 0 if self._extent is None else self._extent.full - self._extent.first

    @property
    def dirty(self) -> int:
        """Pages among `full` whose bytes only the device has."""
        return 0 if self._extent is None else self._extent.dirty


def find_pages(
    device: Device,
    tier: KVTier | None,
    range_: Range,
    runs: Sequence[tuple[int, int]],
    reason: PoolExhausted,
    goal: int,
) -> None:
    """Maps the pieces (first, count) of `range_`, for which no page was free. `goal`: tokens that the cache is to have.
    torch.OutOfMemoryError, DriverError."""

    def tried() -> bool:
        try:
            map_device(range_, runs)
        except PoolExhausted:
            return False
        return True

    if reclaim() and tried():
        return
    if tier is not None:
        tier.manager.reclaim.publish_now()
        if tried():
            return
    if give_up(device, sum(count for _, count in runs)) and tried():
        return
    if gc.collect() and tried():
        return
    if tier is not None:
        tier.manager.duplicates.request_drop(sum(count for _, count in runs))
        if _waited(device, tier, tried):
            return
        if tier.manager.spill:
            with suppress(PoolExhausted):
                for first, count in runs:
                    range_.map_host(first, count)
                tier.decided(PageSource.SPILL.label, "reclaim", sum(count for _, count in runs))
                spilled()
                return
    raise torch.OutOfMemoryError(f"no room for {goal} tokens of KV cache: {reason}{graphs.why_short()}") from reason


def map_device(range_: Range, runs: Iterable[tuple[int, int]]) -> None:
    """Backs these pieces with device pages, except those that an interrupted call has backed with host pages.
    PoolExhausted, DriverError."""
    for first, count in runs:
        for piece in range(first, first + count):
            if range_.leads_to(piece) == "host":
                range_.map_host(piece, 1)
                break
        else:
            range_.map(first, count)


def _waited(device: Device, tier: KVTier, tried: Callable[[], bool]) -> bool:
    waiting, clock = tier.manager.tuning.waiting, tier.manager.waits
    began, most, patience = clock(), 0, waiting.room if tier.last_wait_succeeded else waiting.room_look
    try:
        while (left := began + patience - clock()) > 0:
            requested = device.page_request
            most = max(most, requested)
            if requested:
                tier.manager.pages.wait(min(left, waiting.room_look))
            if tried():  # also without a request, as pages may have been given since
                tier.last_wait_succeeded = True
                return True
            if not requested and not device.page_request:
                return False
        tier.last_wait_succeeded = False
        return False
    finally:
        if most:
            tier.decided(PageSource.WAIT.label, "restore", most, measured=clock() - began)
