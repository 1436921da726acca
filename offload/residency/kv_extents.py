"""The extents of one KV cache: one for each range that its layers lie in, by number."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from ...allocator._native import Device
from .kv_extent import KVExtent
from .kv_places import on_peer


class KVExtents:
    """The extents of a cache, by weak reference: a range goes with its layers. One thread adds; any may ask."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._refs: list[weakref.ref[KVExtent]] = []
        self._reclaimed = 0  # what the device had reclaimed when it was looked last

    def __len__(self) -> int:
        return len(self._refs)

    def add(self, extent: KVExtent) -> int:
        """Adds an extent and returns its number."""
        self._refs.append(weakref.ref(extent))
        return len(self._refs) - 1

    def get(self, number: int) -> KVExtent | None:
        """The extent of that number; None where it is gone."""
        return self._refs[number]()

    def all(self) -> list[KVExtent]:
        """The extents that are there, by number."""
        return [extent for ref in tuple(self._refs) if (extent := ref()) is not None]

    def numbered(self) -> list[tuple[int, KVExtent]]:
        """The extents that are there, with their numbers."""
        return [(number, extent) for number, ref in enumerate(tuple(self._refs)) if (extent := ref()) is not None]

    def first(self, numbers: Iterable[int]) -> list[KVExtent]:
        """The extents with `numbers`, in this order, then the others."""
        order = dict.fromkeys((*numbers, *range(len(self._refs))))
        return [extent for number in order if (extent := self.get(number)) is not None]

    def look(self) -> None:
        """Finds out what was taken, if the core took anything on the device since the last look."""
        reclaimed = self._device.reclaimed
        if reclaimed != self._reclaimed:
            self.look_anew()
            self._reclaimed = reclaimed

    def look_anew(self) -> None:
        """Finds out what was taken."""
        for extent in self.all():
            extent.look()

    def saved(self) -> bool:
        """Calls `Saving.saved` for all. The caller holds the cache's lock. DriverError."""
        return sum([extent.mover.saving.saved() for extent in self.all()]) > 0

    @property
    def busy(self) -> bool:
        """Is anything being copied to a backing? See `Saving.busy`."""
        busy = False
        for ref in tuple(self._refs):  # in one call, as `away`: this is asked for each token
            busy |= (extent := ref()) is not None and extent.mover.saving.busy
        return busy

    @property
    def lacks_bytes_or_copying(self) -> bool:
        """Is anything on its way to the device? See `Mover.lacks_bytes_or_copying`."""
        return True in [extent.mover.lacks_bytes_or_copying for extent in self.all()]

    @property
    def away(self) -> int:
        """Pieces that lead to a backing or a slot, as far as known."""
        pieces = 0
        for ref in tuple(self._refs):
            if (extent := ref()) is not None:
                pieces += extent.mover.away
        return pieces

    @property
    def pieces(self) -> int:
        """Pieces in use that have a page, wherever it is."""
        return sum([extent.pieces for extent in self.all()])

    @property
    def near(self) -> int:
        """Pieces that are away and lie on the peer."""
        return 0 if self._device.peer is None else sum(map(on_peer, self.all()))
