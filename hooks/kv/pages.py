"""The pages of a KV range as one that may lose them to the host while it is in use, and get them back.

Note [Full pages]
    Pages that are full may be taken at any moment, between two lines too; then their addresses lead to the host, and
    all that is done to them is done there (offload/move/kv_twin.py). Appending never writes to one. Whatever does, or
    lets go of its tokens, says so first (`lower`); it is said to be full again after everything else (`filled`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import torch

from ...allocator._native import Device, Group, Range
from ...allocator.errors import PoolExhausted
from ...offload.decide.geometry import Geometry
from ...offload.govern.kv_tier import KVTier
from ...offload.move.kv_twin import KVTwin
from ..lease import Holding, Kept
from .prefill import ROWS, worth_copying
from .room import find_room, map_device

if TYPE_CHECKING:
    from ...allocator._native import Backing

Runs = list[tuple[int, int]]  # (first piece, count)


class KVPages:
    """Of the range `home`, whose tokens lie as `geometry` says. Without a tier its pages stay where they are."""

    def __init__(
        self,
        device: Device,
        group: Group,
        home: Range,
        geometry: Geometry,
        place: torch.device,
        tier: KVTier | None,
        kept: Kept | None,
    ) -> None:
        """`place`: the device, to torch. `tier` and `kept`: of the cache, where the host can show pages on the
        device."""
        self.home = home
        self._device = device
        self._group = group
        self._geometry = geometry
        self._place = place
        self._tier = tier
        self._kept = kept
        self._twin: KVTwin | None = None
        self.fills = sys.maxsize  # tokens of every layer with which one more page is full
        if tier is not None:
            self._twin = KVTwin(device, group, home, tier.lock)
            self._number = tier.add(self._twin, geometry.page / geometry.token_bytes)
            self._count(self._twin)

    @property
    def stream(self) -> int:
        """That this thread computes on; 0 on the stand-in."""
        if self._device.kind == "standin":
            return 0
        stream: int = torch.cuda.current_stream(self._place).cuda_stream
        return stream

    def begin(self, layer: int) -> None:
        """The layer at this place of the range is about to append, under a lease. DriverError."""
        if self._tier is None or self._twin is None:
            return
        if self._kept is not None and self._kept.renew() and self._device.demand:  # as a forward between its layers
            self._device.obey()
        if self._twin.interrupted:
            self._twin.finish(self._tier.transfer, self.stream)
        if self._tier.begins((self._number, layer)):
            self._tier.iteration(self.stream)

    def joined(self) -> None:
        """One more layer is in the range."""
        if self._tier is not None:
            self._tier.layers += 1

    def map(self, first: int, end: int, tokens: int) -> None:
        """Backs the pieces [first, end), so that there is room for so many tokens. torch.OutOfMemoryError,
        DriverError."""
        runs = self._geometry.runs(first, end)
        try:
            map_device(self.home, runs)
        except PoolExhausted as error:
            find_room(self._device, self._tier, self.home, runs, error, tokens)
        if self._twin is not None:
            self._twin.extended(first, end)

    def reachable(self, first: int, end: int) -> bool:
        """Can the pieces [first, end) be backed? Not where a tensor still shows what was there and was taken."""
        return self._twin is None or all(self.home.backing(piece) != "alias" for piece in range(first, end))

    def retire(self, first: int, end: int) -> None:
        """Gives the pages of the pieces [first, end) back."""
        if self._twin is not None:
            self._twin.extent = first
        for start, count in self._geometry.runs(first, end):
            self.home.retire(start, count)
        if self._twin is not None:
            self._twin.drop(first, end)

    def appended(self, *, took: bool, next_takes: bool) -> None:
        """A token came; see offload/decide/ahead.py."""
        if self._tier is not None and (took or next_takes):
            self._tier.appended(self._number, took=took, next_takes=next_takes)

    def filled(self, lengths: Iterable[int], soon: bool = False) -> None:
        """The layers have so many tokens, and nothing is written to those. `soon`: more are on their way."""
        if self._tier is None or self._twin is None:
            return
        full = self._full(lengths)
        if full > self._twin.full:
            self._twin.raise_to(full)
            self._count(self._twin)
            self._tier.grown(soon)

    def lower(self, lengths: Iterable[int]) -> None:
        """The layers are about to have no more tokens than that, or to write behind them."""
        if self._twin is not None and (full := self._full(lengths)) < self._twin.full:
            with Holding(self._group):
                self._twin.lower(full, self.stream)
            self._count(self._twin)

    def worth_copying(self, rows: int) -> bool:
        """Should attention of so many rows of a sequence read a copy, as some pages are away?"""
        if rows <= ROWS or self._tier is None or self._twin is None:
            return False
        self._tier.look()
        return worth_copying(rows, self._twin.away)

    def _count(self, twin: KVTwin) -> None:
        self.fills = -(-(twin.full + 1) * self._geometry.page // self._geometry.token_bytes)

    def _full(self, lengths: Iterable[int]) -> int:
        return min(lengths, default=0) * self._geometry.token_bytes // self._geometry.page

    # -- for chaos, under a lease

    @property
    def pieces(self) -> int:
        """Those in use."""
        return self.home.pieces if self._twin is None else self._twin.extent

    def backing(self, piece: int) -> Backing:
        return self.home.backing(piece)

    def move(self, piece: int, to: Literal["device", "host"]) -> bool:
        """To another page, its own one. DriverError."""
        return self.home.move(piece, to)

    def displace(self, piece: int) -> bool:
        """To its twin, whose bytes it shows from then on. DriverError."""
        tier, twin = self._tier, self._twin
        return tier is not None and twin is not None and twin.displace(piece, tier.transfer, self.stream)

    def bring_back(self, piece: int) -> bool:
        """From its twin to a page of its own. DriverError."""
        tier, twin = self._tier, self._twin
        return tier is not None and twin is not None and twin.bring_back(1, tier.transfer, self.stream, (piece,)) > 0
