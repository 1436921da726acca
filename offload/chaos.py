"""Chaos mode: moves random pages of weights and KV to other pages while a model runs, to prove that no one can tell.

What lives at a fixed address must give the same results whatever page is behind it. So at the boundaries of decoder
layers pages that the running forward itself has leased are swapped for others: of weights within the device (weights
are never copied back to the host), of KV to another page of the device or of the host, and back. Which ones is drawn
from a generator of its own, so that sampling draws what it would have drawn. Switched on by BALLONET_CHAOS=seed or
`manage(model, chaos=seed)`.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

Kind = Literal["weights", "kv"]
MOVES = 2  # attempts per boundary and kind


class Pages(Protocol):
    """What chaos needs of a `Range`."""

    @property
    def pieces(self) -> int: ...
    def backing(self, piece: int) -> str: ...
    def move(self, piece: int, to: Literal["device", "host"]) -> bool: ...


class Chaos:
    """One generator and what it has done so far. Several threads may act at once."""

    def __init__(self, seed: int, host: bool) -> None:
        """`host`: whether host pages can be mapped in the place of device pages here."""
        self.seed = seed
        self._places: tuple[Literal["device", "host"], ...] = ("device", "host") if host else ("device",)
        self._random = random.Random(seed)
        self._moved: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def moved(self) -> Mapping[str, int]:
        """Pages moved so far: `weights` (to another device page), `kv_device` and `kv_host` (to a page of the device,
        the host)."""
        with self._lock:
            return {name: self._moved[name] for name in ("weights", "kv_device", "kv_host")}

    def act(self, weights: Sequence[Pages], caches: Sequence[Pages]) -> None:
        """Moves a few random pages of ranges that this thread has leased; a page that cannot be moved now stays.
        DriverError."""
        for _ in range(MOVES):
            if (drawn := self._draw(weights)) is not None and drawn[0].move(drawn[1], "device"):
                self._count("weights")
            if (drawn := self._draw(caches)) is not None:
                place = self._random.choice(self._places)
                if drawn[0].move(drawn[1], place):
                    self._count(f"kv_{place}")

    def _draw(self, ranges: Sequence[Pages]) -> tuple[Pages, int] | None:
        """A random piece that has a page, of a random range that has one."""
        for pages in self._random.sample(ranges, len(ranges)):
            backed = [piece for piece in range(pages.pieces) if pages.backing(piece) in ("device", "host")]
            if backed:
                return pages, self._random.choice(backed)
        return None

    def _count(self, name: str) -> None:
        with self._lock:
            self._moved[name] += 1
