"""KV pages as chaos moves them, under a lease: those of a cache, and those of continuous batching."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..allocator.errors import PoolExhausted
from ..hooks.batching.pages import SectorClient
from ..hooks.device.streams import stream_of
from ..hooks.kv.pages import KVPages
from ..offload.residency.kv_extent import coldest

if TYPE_CHECKING:
    from ..allocator._native import LeadsTo, Place


def movable(pages: object) -> MovableKV | MovableSectors:
    """Returns what moves the pages that a lease has noted."""
    if isinstance(pages, SectorClient):
        return MovableSectors(pages)
    assert isinstance(pages, KVPages)
    return MovableKV(pages)


class MovableKV:
    """The pages of a range of a cache, in pieces."""

    def __init__(self, pages: KVPages) -> None:
        self._stream = stream_of(pages._device)
        self.range = pages.range
        self._extent = pages._extent  # None, as the tier, where the pages stay on the device
        self._tier = pages._tier

    @property
    def pieces(self) -> int:
        """The pieces in use."""
        return self.range.pieces if self._extent is None else self._extent.end

    def leads_to(self, piece: int) -> LeadsTo:
        """The kind of memory that the piece is mapped to."""
        return self.range.leads_to(piece)

    def move(self, piece: int, to: Place) -> bool:
        """Moves the piece to another page of its own: not of the host while layers are read in slots, which are filled
        from backings. DriverError."""
        if self._extent is None:
            return self.range.move(piece, to)
        if to != "device" and self._tier is not None and self._tier.client.way.kv_slots.slots:
            return False
        return self._extent.mover.exchange(piece, to)

    def displace(self, piece: int) -> bool:
        """Copies the piece to its backing and maps it there. DriverError."""
        tier, extent = self._tier, self._extent
        if tier is None or extent is None:
            return False
        tier.turns.validity = None  # the next iteration finds the piece away
        return extent.evict((piece,), tier.transfer, self._stream()) > 0

    def demote(self, piece: int) -> bool:
        """Moves the backing from the peer to the host. DriverError."""
        tier, extent = self._tier, self._extent
        if tier is None or extent is None:
            return False
        with tier.lock:
            ready, copies = extent.demote([cold for cold in coldest(extent) if cold == piece])
            if not ready:
                return False
            done = tier.transfer.copy(copies, after=self._stream(), owner="kv", to="host")
            extent.backing.demoting(ready, done)
            done.wait()
            extent.mover.saving.saved()
            return extent.backing.pages.leads_to(piece) == "host"

    def bring_back(self, piece: int) -> bool:
        """Gives the piece a page of its own again, with its bytes. DriverError."""
        tier, extent = self._tier, self._extent
        if tier is None or extent is None:
            return False
        return tier.bring_back([extent], 1, [extent], self._stream(), (piece,)) > 0

    def unmap(self, piece: int) -> bool:
        """Unmaps a free page from the piece's addresses. DriverError."""
        return self.range.drop_kept(piece)


class MovableSectors:
    """The pages of continuous batching, under a lease. Their peer pages never leave."""

    def __init__(self, client: SectorClient) -> None:
        self._client = client
        self._range = client._range

    @property
    def pieces(self) -> int:
        """Pieces that requests may have had: those before a certain one."""
        return self._client.end

    def leads_to(self, piece: int) -> str:
        """What the piece leads to: a page of a request, or "kept", one that nobody has; else "none"."""
        leads = self._range.leads_to(piece)
        return leads if leads == "kept" or self._client.has(piece) else "none"

    def move(self, piece: int, to: Place) -> bool:
        """To another page of its own. DriverError."""
        return self._client.move(piece, to)

    def displace(self, piece: int) -> bool:
        """Leads it to its backing, which gets its bytes. DriverError."""
        try:
            return self._client.evict((piece,)) > 0
        except PoolExhausted:
            return False

    def demote(self, piece: int) -> bool:
        """Nothing goes from the peer to the host."""
        return False

    def bring_back(self, piece: int) -> bool:
        """Restores it, for whatever this thread submits from now on. DriverError."""
        back = self._client.restore([piece]) > 0
        self._client.uses()
        return back

    def unmap(self, piece: int) -> bool:
        """Takes a free page from its addresses. DriverError."""
        return self._range.drop_kept(piece)
