"""What a range of KV shows: the length of each layer, tensors over its tokens, and whether other views exist.

Note [Other views]
    Stock layers make new tensors whenever they change, so code that took `layer.keys` before keeps the old tokens. An
    elastic layer's tensors are views of one place, and their tokens must not change either. Appending is harmless: it
    writes behind everything shown. Reordering, or cutting the tail and appending again, is not. So every storage that
    is made over the range is remembered by a weak reference, and before tokens that were shown are overwritten the
    range drops its own views and checks whether any storage is still alive (`exclusive`). As a rule none is, and the
    work is done in place; otherwise the layer moves to a new range and leaves the old one to the other views. Pages
    that are given back under a view are freed with it: the core keeps the pages of a live tensor.

Note [Readable at any time]
    A compiler that traces `keys` or `values` can read a tensor, and make a view of one, but cannot make a tensor of
    mapped memory. Everything that it reads becomes a guard, so that another cache could mean another graph. So a layer
    holds two tensors (`Latest`), as a stock layer does, which are made again at once where the range had to drop them.
    As `exclusive` drops those of all layers, some may be missing until their layer's next update; they are then views
    of the tensor over all that is mapped, which always exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from ...offload.policy.geometry import Geometry
from .tensors import Pair, RangeTensors, Views


class Latest:
    """A layer's tokens now, which are all that a compiler sees of a range. See Note [Readable at any time]."""

    def __init__(self) -> None:
        self.length = 0  # tokens
        self.keys: torch.Tensor | None = None  # [batch, heads, length, k_dim]; None where the range has dropped it
        self.values: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class MappedTokens:
    """The mapped pieces of a range as one tensor, and views of it."""

    pieces: int
    flat: torch.Tensor  # over one storage of exactly the mapped pieces: a larger one could not be saved
    capacity: int  # tokens that lie wholly on it
    views: list[Views | None]  # by place


class ShownTokens:
    """The tokens of a range's layers, by their place, and the views of them. Maps nothing, and waits for nothing."""

    def __init__(self, geometry: Geometry, tensors: RangeTensors) -> None:
        self.latest: Final = [Latest() for _ in range(geometry.layers)]
        self.until = [0] * geometry.layers  # tokens that a view may exist of
        self.left: Final = set[int]()  # places whose layers need their tokens no more
        self.lost = 0  # pieces that have no page, from the start of the range: there is nothing to show
        self.mapped: MappedTokens | None = None
        self._geometry = geometry
        self._tensors = tensors
        self.open()

    def needed(self) -> int:
        """Pieces under the longest layer's tokens, which are mapped."""
        return self._geometry.pieces(max(latest.length for latest in self.latest))

    def lengths(self, but: int = -1) -> list[int]:
        """Lengths of all layers that may still write, except the place `but`."""
        return [tokens.length for place, tokens in enumerate(self.latest) if place != but and place not in self.left]

    def open(self, pieces: int | None = None) -> MappedTokens:
        """Opens the first `pieces` pieces, which are mapped, by default those that are needed. See Note [Readable at
        any time]."""
        pieces = self.needed() if pieces is None else pieces
        flat = self._tensors.over(0, 0 if self.lost else pieces)
        views: list[Views | None] = [None] * self._geometry.layers
        self.mapped = mapped = MappedTokens(pieces, flat, self._geometry.capacity(pieces), views)
        return mapped

    def views(self, mapped: MappedTokens, place: int) -> Views:
        """Makes the views of the layer's tokens, and keeps them in `mapped`."""
        with torch.inference_mode(False):
            views = self._tensors.views(mapped.flat, place, mapped.capacity)
        mapped.views[place] = views
        return views

    def pair(self, place: int) -> Pair:
        """The layer's keys, [batch, heads, length, k_dim], and values."""
        return self._tensors.pair((self.mapped or self.open()).flat, place, self.latest[place].length)

    def part(self, place: int, start: int, end: int) -> Pair:
        """The layer's keys and values of the tokens [start, end), as views of a new tensor."""
        geometry = self._geometry
        first, last = start * geometry.token_bytes // geometry.page, geometry.pieces(end)
        token = start * geometry.token_stride - first * geometry.page // geometry.itemsize
        return self._tensors.pair(self._tensors.over(first, last), place, end - start, token)

    def write(self, place: int, views: Views, keys: torch.Tensor, values: torch.Tensor, end: int) -> Pair:
        """Copies the tokens behind the layer's last one, so that it has `end`, and returns all of them."""
        latest = self.latest[place]
        start = latest.length
        views.write_keys.narrow(2, start, end - start).copy_(keys)
        views.write_values.narrow(2, start, end - start).copy_(values)
        shown = views.keys.narrow(2, 0, end), views.values.narrow(2, 0, end)
        latest.length, self.until[place], (latest.keys, latest.values) = end, end, shown
        return shown

    def exclusive(self) -> bool:
        """Is there no other view, so that tokens that were shown may change? Drops the range's own views to find out.

        See Note [Other views].
        """
        pieces = None if self.mapped is None else self.mapped.pieces
        self.drop()
        alone = self._tensors.none_is_held()
        self.open(pieces)
        if alone:
            self.until = [latest.length for latest in self.latest]
        return alone

    def drop(self) -> None:
        """Drops the range's own views."""
        self.mapped = None
        for latest in self.latest:
            latest.keys = latest.values = None
