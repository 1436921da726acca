"""The pages of a KV range as chaos moves them (offload/governor/chaos.py), under a lease."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...allocator._native import Device, Range
from ...offload.governor.kv_tier import KVTier
from ...offload.residency.kv_extent import KVExtent
from ..device.streams import stream_of

if TYPE_CHECKING:
    from ...allocator._native import LeadsTo, Place


class MovableKV:
    """The pieces of `range_`. `extent` and `tier`: None where they stay on the device."""

    def __init__(self, device: Device, range_: Range, extent: KVExtent | None, tier: KVTier | None) -> None:
        self._stream = stream_of(device)
        self.range = range_
        self._extent = extent
        self._tier = tier

    @property
    def pieces(self) -> int:
        """The pieces in use."""
        return self.range.pieces if self._extent is None else self._extent.end

    def leads_to(self, piece: int) -> LeadsTo:
        """The kind of memory that the piece is mapped to."""
        return self.range.leads_to(piece)

    def move(self, piece: int, to: Place) -> bool:
        """Moves the piece to another page of its own. DriverError."""
        return self.range.move(piece, to) if self._extent is None else self._extent.mover.exchange(piece, to)

    def displace(self, piece: int) -> bool:
        """Copies the piece to its backing and maps it there. DriverError."""
        tier, extent = self._tier, self._extent
        return tier is not None and extent is not None and extent.evict((piece,), tier.transfer, self._stream()) > 0

    def demote(self, piece: int) -> bool:
        """Moves the backing from the peer to the host. DriverError."""
        tier, extent = self._tier, self._extent
        return tier is not None and extent is not None and tier.client.saving.demote_one(extent, piece, self._stream())

    def bring_back(self, piece: int) -> bool:
        """Gives the piece a page of its own again, with its bytes. DriverError."""
        tier, extent = self._tier, self._extent
        return tier is not None and extent is not None and tier.restore_one(extent, piece, self._stream())

    def unmap(self, piece: int) -> bool:
        """Unmaps a free page from the piece's addresses. DriverError."""
        return self.range.drop_kept(piece)
