"""Device pages for layers that are restored: allocated then, or reserved before, so KV does not take them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...allocator._native import Range
from ...allocator.errors import PoolExhausted
from ...offload.residency.slots import open_pages
from ..weights.ranges import Weights


class RestorePages:
    """Pages for layers that are restored. Used under the lock of HeldLayers."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._kept: dict[int, Range] = {}  # reserved pages, by layer

    def keep(self, layers: Iterable[int]) -> None:
        """Reserves pages for these dropped layers, as far as there are free ones."""
        for layer in layers:
            each = self._weights.ring.layer(layer)
            if each is None or layer in self._kept:
                continue
            try:
                self._kept[layer] = self._open(layer, each.pages)
            except torch.OutOfMemoryError:
                return

    def give_back(self) -> None:
        """Frees the reserved pages. Idempotent."""
        while self._kept:
            self._kept.popitem()[1].close()

    def take(self, layer: int, pages: int) -> Range:
        """Returns the pages reserved for a layer, or else allocates so many. torch.OutOfMemoryError."""
        return self._kept.pop(layer, None) or self._open(layer, pages)

    def _open(self, layer: int, pages: int) -> Range:
        """Allocates free pages, without reclaiming any. torch.OutOfMemoryError."""
        device = self._weights.device
        if device.available < pages:
            device.trim()
            device.reap(wait=True)
        try:
            if device.available < pages:
                raise PoolExhausted(f"it has {pages} pages, and {device.available} are free")
            return open_pages(device, self._weights.group, "weights", pages)
        except PoolExhausted as error:
            raise torch.OutOfMemoryError(f"no room for layer {layer}, which is dropped: {error}") from error
