"""Chaos mode: moves random pages of weights and KV to other pages while a model runs, to prove that results do not
depend on it.

Tensors at fixed addresses must give the same results whatever page is behind them. So at the boundaries of decoder
layers pages that the running forward itself has leased are swapped for others: of weights within the device (weights
are never copied back to the host), of KV to another page of the device, of the peer or of the host, and back, or to its
backing, as when the core takes it, and restored, or with it from the peer to the host. A free page that is still mapped
leaves its addresses, so that a read there fails. Which ones is drawn from a generator of its own, so that sampling
draws what it would have drawn. Now and then a source of pages is reclaimed or restored there as well, whether
pages are short or not. Switched on by BALLONET_CHAOS=seed or `ballonet.testing.manage`.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeVar

from ..offload.policy.reclaim_order import PageSource
from ..offload.policy.tuning import DEFAULT
from .sources import ReclaimSource

if TYPE_CHECKING:
    from ..allocator._native import Place

Way = Literal["device", "host", "peer", "away", "down", "restored", "unmapped"]
WHERE: Final[Mapping[Way, tuple[str, ...]]] = {  # what a piece must lead to for each way
    "device": ("device", "host", "peer"),
    "host": ("device", "host", "peer"),
    "peer": ("device", "host", "peer"),
    "away": ("device",),
    "down": ("alias",),
    "restored": ("alias",),
    "unmapped": ("kept",),
}
OF_A_PEER: Final[tuple[Way, ...]] = ("peer", "down")
# Attempts at each boundary of layers, for weights and for KV, and pages that a source is asked for in a reclaim, at
# most. Chosen: much in a short test, and a forward still ends.
MOVES: Final = 2
PAGES: Final = 32


class MovablePages(Protocol):
    """The part of `Range` that chaos needs."""

    @property
    def pieces(self) -> int: ...
    def leads_to(self, piece: int) -> str: ...
    def move(self, piece: int, to: Place) -> bool: ...


class KV(MovablePages, Protocol):
    """The part of a KV range's pages that chaos needs."""

    def displace(self, piece: int) -> bool: ...
    def demote(self, piece: int) -> bool: ...
    def bring_back(self, piece: int) -> bool: ...
    def unmap(self, piece: int) -> bool: ...


P = TypeVar("P", bound=MovablePages)


class Chaos:
    """A random generator, and counts of the moves made so far. Several threads may act at once."""

    def __init__(self, seed: int, host: bool, peer: bool = False, seldom: int = DEFAULT.chaos.seldom) -> None:
        """`host`: can host pages be mapped in the place of device pages? `peer`: is there one?"""
        self.seed = seed
        self.chosen = False  # by `testing.manage`, and not by the environment
        self._seldom = seldom  # boundaries for one at which a source is reclaimed, on average
        self._ways: tuple[Way, ...] = ("device", "unmapped", *(("host", "away", "restored") if host else ()))
        if peer:
            self._ways += OF_A_PEER
        self._shown = [way for way in WHERE if peer or way not in OF_A_PEER]
        self._random = random.Random(seed)
        self._sources = random.Random(seed)  # of its own: which pages move does not depend on what else there is
        self._moved: Counter[str] = Counter()
        self._pulled: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    @property
    def moved(self) -> Mapping[str, int]:
        """Pages moved so far: `weights` (to another device page), `kv_device`, `kv_host`, `kv_peer` (to a page of the
        device, the host, the peer), `kv_away` and `kv_restored` (evicted to their backing, restored), `kv_down` (with
        it to the host), `kv_unmapped` (free ones, from where they were still mapped). `kv_peer` and `kv_down` only
        where there is a peer."""
        with self._lock:
            return {name: self._moved[name] for name in ("weights", *(f"kv_{way}" for way in self._shown))}

    @property
    def reclaimed(self) -> Mapping[tuple[str, str], int]:
        """Pages that sources freed so far, or gave back, by (level, "reclaim" or "restore")."""
        with self._lock:
            return dict(self._pulled)

    def act(self, weights: Sequence[MovablePages], caches: Sequence[KV]) -> None:
        """Moves a few random pages of ranges that this thread has leased; a page that cannot be moved now stays.
        DriverError."""
        for _ in range(MOVES):
            if (drawn := self._draw(weights, "device")) is not None and drawn[0].move(drawn[1], "device"):
                self._count("weights")
            for way in self._random.sample(self._ways, len(self._ways)):
                if (pair := self._draw(caches, way)) is not None:
                    if _go(*pair, way):
                        self._count(f"kv_{way}")
                    break

    def reclaim(self, sources: Sequence[ReclaimSource]) -> None:
        """Reclaims or restores a random source now and then, of those that need no consent. A whole layer is taken
        however few pages it is asked for, and a layer goes back as a whole or not at all: so a restore is asked for all
        pages that are to spare, else layers would only ever leave. DriverError."""
        sources = [entry for entry in sources if entry.source is not PageSource.DUPLICATES]
        if sources and self._sources.randrange(self._seldom) == 0:
            source, pages = self._sources.choice(sources), self._sources.randint(1, PAGES)
            verb = self._sources.choice(("reclaim", "reclaim", "restore"))
            moved = source.reclaim(pages) if verb == "reclaim" else source.restore(sys.maxsize)
            with self._lock:
                self._pulled[source.source.label, verb] += moved

    def _draw(self, ranges: Sequence[P], way: Way) -> tuple[P, int] | None:
        """A random piece that can go that way, of a random range that has one."""
        for pages in self._random.sample(ranges, len(ranges)):
            pieces = [piece for piece in range(pages.pieces) if pages.leads_to(piece) in WHERE[way]]
            if pieces:
                return pages, self._random.choice(pieces)
        return None

    def _count(self, name: str) -> None:
        with self._lock:
            self._moved[name] += 1


def _go(pages: KV, piece: int, way: Way) -> bool:
    if way == "away":
        return pages.displace(piece)
    if way == "down":
        return pages.demote(piece)
    if way == "unmapped":
        return pages.unmap(piece)
    return pages.bring_back(piece) if way == "restored" else pages.move(piece, way)
