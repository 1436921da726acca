"""How a KV cache in use reads its pages on the host: restored, streamed through slots, or read in place. Decided anew
as pages come and go (kv_pages.py), and arranged between two iterations.

Note [Room for slots]
    Where pages of a cache were taken no page is free, as a rule. So slots are made of what the cache has: some more of
    its oldest pages go to the host, as many of each layer (SwiftCache Eq. 4 and 5), and the layers take turns in what
    that frees. A slot is somewhat larger than it must be, so that it is not made anew with every page. An operator that
    needs pages may take those of slots, after all others of the cache (`slices`): each page serves all layers in turn.
    So some pages stay with the cache, to be taken before.

Note [Reads from outside]
    A read of a layer in slot from outside its forward maps it to the host, and waits for all that is submitted. A
    program that does so in each iteration (a beam search, which reorders) would pay for that again and again. So after
    such a read the layer stays host-mapped, twice as long each time; each iteration with others in slot shortens that.

Note [Threads]
    The thread that uses the cache calls everything but `give_if_unused`, which may be called on any thread and in the
    middle of anything, holds the lock for a moment or not at all, and does nothing while anyone leases the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Final

from ...allocator._native import Device, Group, Transfer
from ...allocator.errors import BallonetError, PoolExhausted
from ...allocator.interrupts import if_free
from ..policy.kv_pages import LEFT, Choice, LayerReads, Way, choose
from ..policy.tuning import KVReads
from ..residency.kv_extent import KVExtent
from ..residency.kv_slots import KVSlots
from .activity import Intervals, StreamMarks

_ZERO_COPY: Final = Choice(Way.ZERO_COPY, 0, 0, 0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Streamed:
    """How a cache reads its `away` pages, those on the host. `slots` of `slot_pages` each; `copied`: bytes copied to
    them so far; `exposed`: seconds of an iteration in which it is expected to wait for the link."""

    way: Way
    away: int
    slots: int
    slot_pages: int
    copied: int
    exposed: float


@dataclass(slots=True)
class _Iteration:
    """`rows` of each sequence; pages `away`; the `link`, in bytes per second; whether anything came `through` slots,
    which is known at its end."""

    rows: int
    away: int
    link: float
    through: bool = False


_SLACK: Final = 8  # 1/8 of a slot, and of what streams, may come before slots are arranged anew. Chosen
_PENDING: Final = 16  # beginnings of iterations that have not passed: more than a host launches ahead. Chosen


class KVReadPlan:
    """How one cache is read. See Note [Threads]."""

    def __init__(
        self,
        device: Device,
        group: Group,
        transfer: Transfer,
        marks: StreamMarks | None,
        clock: Callable[[], float],
        tuning: KVReads,
    ) -> None:
        """`group`: of all its ranges; `transfer`: the stream of its copies; `marks`: of the device's streams, None
        where operators are complete when they return; then `clock`, in seconds, tells how long they take."""
        self._tuning = tuning
        self._device = device
        self._group = group
        self._transfer = transfer
        self.kv_slots: Final = KVSlots(device, group, transfer)
        self._lock = Lock()
        self._choice = Choice(Way.RESIDENT, 0, 0, 0, 0.0, 0.0)
        self._wait = 0  # iterations without slots from now on
        self._look = 0  # iterations until the next decision
        self._backoff = 1  # iterations without slots after the next read from outside
        self._intervals = Intervals[_Iteration](marks, clock, _PENDING)
        self._iteration: _Iteration | None = None  # that has begun
        self._computes: float | None = None  # seconds that an iteration of one row does, as far as known

    @property
    def _within_reach(self) -> int:
        """Device pages that slots can have without taking any, the idle ones of activations among them."""
        return self._device.available + self._device.idle

    def status(self, away: int) -> Streamed:
        """Returns how the cache is read now. `away`: pages."""
        way = Way.RESIDENT if not away else Way.STREAMED if self.kv_slots.pieces else Way.ZERO_COPY
        return Streamed(way, away, self.kv_slots.slots, self.kv_slots.pages, self.kv_slots.copied, self._choice.exposed)

    # -- for the thread that uses it

    def enter(self, extent: KVExtent, stream: int) -> None:
        """Prepares a layer's slot before it appends and is read. BallonetError, DriverError."""
        if self.kv_slots.slots:
            with self._lock:
                self.kv_slots.enter(extent, stream)

    def map_to_host(self, extent: KVExtent) -> None:
        """Maps a layer to the host, for a read from outside or before its tokens go. BallonetError, DriverError."""
        with self._lock:
            self.kv_slots.map_to_host(extent)
            if not self.kv_slots.pieces:
                self.kv_slots.close()
        self._wait = max(self._wait, self._backoff)
        self._backoff = min(2 * self._backoff, self._tuning.look)

    def give(self) -> None:
        """Gives the slots back. DriverError."""
        if self.kv_slots.slots:
            with self._lock:
                self.kv_slots.close()
            self._wait = self._tuning.again

    def forget_iteration(self) -> None:
        """Learns nothing from the last iteration: others came after it that were not noted."""
        self._intervals.forget()
        self._iteration = None

    def nothing_away(self, rows: int) -> None:
        """Does what `arrange` does where nothing is away and there are no slots."""
        self._begin(rows, 0, self._tuning.link)

    def arrange(self, extents: Sequence[KVExtent], rows: int, link: float | None, stream: int) -> Choice | None:
        """Decides and arranges how the cache is read, between two iterations, the next of which has so many `rows` of
        each sequence. `extents`: of all ranges, in the order in which they compute; `link`: bytes per second. Returns
        the choice, where slots changed. BallonetError, DriverError."""
        speed = link or self._tuning.link
        if self.kv_slots.slots:
            with self._lock:
                self.kv_slots.look()
        away = sum([extent.mover.away for extent in extents])
        self._begin(rows, away, speed)
        if self.kv_slots.pieces:
            self._backoff = max(1, self._backoff - 1)
        if not away:
            self.give()
        if not away or self._settled(away, rows):
            return None
        layers = [extent for extent in extents if extent.layers == 1]  # several in a range cannot take turns
        before = self.kv_slots.slots, self.kv_slots.pages
        self._choice, self._look = self._choose(layers, rows, speed), self._tuning.look
        with self._lock:
            if self._choice.way is Way.STREAMED:
                self._stream(layers, stream)
            elif self._choice.way is Way.ZERO_COPY or away > self._within_reach:
                self.kv_slots.close()
            elif self.kv_slots.slots:  # until it is restored
                self.kv_slots.bind(layers)
        if away > self.kv_slots.pieces:
            self._wait = self._tuning.again
        return None if before == (self.kv_slots.slots, self.kv_slots.pages) else self._choice

    def _settled(self, away: int, rows: int) -> bool:
        """Is there nothing to arrange?"""
        self._wait -= 1
        self._look -= 1
        in_slot = self.kv_slots.pieces
        if away - in_slot > in_slot // _SLACK:
            return self._wait > 0 and rows == 1
        return self._look > 0

    def _choose(self, extents: Sequence[KVExtent], rows: int, link: float) -> Choice:
        if len(extents) < 2:
            return _ZERO_COPY
        free = self._within_reach + self.kv_slots.slots * self.kv_slots.pages
        page = self._device.page_size
        free += sum(max(0, extent.held - extent.away) for extent in extents)
        free -= self._device.budget // page // LEFT
        held = [max(extent.held, extent.away) for extent in extents]
        # Unknown compute time: assume it equals copy time. All of it comes before the next layer enters, which shows
        # that the attention of the last one has been launched.
        seconds = sum(held) * page / link if self._computes is None else self._computes
        layers = [LayerReads(pages, 0.0, seconds / len(extents)) for pages in held]
        return choose(layers, page=page, link=link, free=max(0, free), rows=rows, tuning=self._tuning)

    def _stream(self, extents: Sequence[KVExtent], stream: int) -> None:
        """Makes the chosen slots, and leads all that is away to them. See Note [Room for slots]."""
        wanted, most = self._choice.streamed, max(extent.away for extent in extents)
        fits = most <= self.kv_slots.pages and self.kv_slots.pieces <= sum(extent.away for extent in extents)
        if self.kv_slots.slots != self._choice.slots or not fits:
            self.kv_slots.close()
            self._device.reap()  # pages of former slots are free then
            wanted = max(wanted, most)
            pages = wanted + max(1, wanted // _SLACK)
            lacking = self._choice.slots * pages - self._within_reach
            share = -(-max(0, lacking) // len(extents))
            for extent in extents:
                extent.evict(extent.oldest(max(share, wanted - extent.away)), self._transfer, stream)
            room = self._within_reach // self._choice.slots
            if room < max(extent.away for extent in extents):
                return
            self.kv_slots.open(self._choice.slots, min(pages, room))
        if self.kv_slots.slots:
            self.kv_slots.bind(extents)

    def _begin(self, rows: int, away: int, link: float) -> None:
        """Notes that an iteration begins, and learns from those that have ended."""
        if self._iteration is not None:
            self._iteration.through = self.kv_slots.pieces > 0
        self._iteration = _Iteration(rows, away, link)
        for iteration, seconds in self._intervals.begin(self._iteration):
            if iteration.rows == 1:
                self._learn(iteration, seconds)

    def _learn(self, iteration: _Iteration, seconds: float) -> None:
        """Updates how long an iteration computes. `seconds`: its time."""
        copying = iteration.away * self._device.page_size / iteration.link
        if not iteration.through:
            self._computes = max(0.0, seconds - copying / self._tuning.in_place)
        elif self._computes is None or seconds > copying:
            self._computes = seconds

    # -- for the manager

    def give_if_unused(self) -> None:
        """Gives the slots back, unless the cache is leased."""
        if self.kv_slots.slots and not self._group.leases:
            if_free(self._lock, self._close)

    def _close(self) -> None:
        if not self._group.leases:
            with suppress(BallonetError, PoolExhausted):
                self.kv_slots.close()
