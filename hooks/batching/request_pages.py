"""The pages of each request's KV, and moving them to the host and back at the same addresses."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ...allocator._native import Device
from ...allocator.errors import DriverError, PoolExhausted
from ..sectors.pages import SectorPages


class RequestPages:
    """The pages of the requests of one cache. `kinds`: transformers' allocators of its blocks, by kind of layer."""

    def __init__(self, on: Device, pages: SectorPages, kinds: Mapping[str, Any]) -> None:
        self._on = on
        self._pages = pages
        self._kinds = kinds

    def requests(self) -> set[str]:
        """Names of the requests that have blocks."""
        return {name for each in self._kinds.values() for name in each.block_table}

    def pieces(self, request: str) -> set[int]:
        """The pieces that the blocks of the request lie on."""
        return {
            piece
            for each in self._kinds.values()
            for block in each.block_table.get(request, ())
            for piece in self._pages.pieces(block // each.blocks_per_sector)
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
        return [n for n, found in pieces.items() if found <= away]

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
