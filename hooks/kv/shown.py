"""What a range of KV shows: how many tokens each layer has, tensors over them, and what others may look at.

Note [Who else looks]
    Stock layers make new tensors whenever they change, so whoever took `layer.keys` before keeps what he saw. Here
    tensors are views of one place, and what was shown must not change under them either. Appending is harmless: it
    writes behind everything shown. But reordering, or cutting the tail and appending again, would show. So every
    storage that is made over the range is remembered by a weak reference, and before something shown is overwritten
    the range drops its own views and asks whether any storage is still alive (`exclusive`). As a rule none is, and
    the work is done in place; otherwise the layer that wants to change moves to a new range and leaves the old one to
    whoever looks at it. Pages given back under a view leave with it: the core keeps what a tensor covers.

Note [Readable at any time]
    A compiler that traces `keys` or `values` can read a tensor, and make a view of one, but cannot make a tensor of
    mapped memory. And whatever it reads on the way it guards, so that another cache could mean another graph. So what
    a layer has is kept as two tensors (`Latest`), as a stock layer keeps it, and made anew at once where the range had
    to drop them; as it drops those of all layers to find out who else looks, some may be missing until their layer's
    next update, and are then made of the tensor over all that is mapped, which is always there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from ...offload.policy.geometry import Geometry
from .tensors import Pair, RangeTensors, Views


class Latest:
    """What a layer has now, and all that the compiler sees of a range. See Note [Readable at any time]."""

    def __init__(self) -> None:
        self.length = 0  # tokens
        self.keys: torch.Tensor | None = None  # [batch, heads, length, k_dim]; None where the range has dropped it
        self.values: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class MappedTokens:
    """The pieces that are mapped, as elements, and views of them."""

    pieces: int
    flat: torch.Tensor  # over one storage, which is all that is mapped: one that spans more could not be saved
    capacity: int  # tokens that lie wholly on it
    views: list[Views | None]  # by place


class ShownTokens:
    """What the layers of a range have, by their place, and what is shown of it. Maps nothing, and waits for nothing."""

    def __init__(self, geometry: Geometry, tensors: RangeTensors) -> None:
        self.latest: Final = [Latest() for _ in range(geometry.layers)]
        self.until = [0] * geometry.layers  # tokens that someone may have a view of
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
        """Tokens of all layers that may still write, without the place `but`."""
        return [each.length for place, each in enumerate(self.latest) if place != but and place not in self.left]

    def open(self, pieces: int | None = None) -> MappedTokens:
        """Opens the first `pieces` pieces, which are mapped, by default those that are needed. See Note [Readable at
        any time]."""
        pieces = self.needed() if pieces is None else pieces
        flat = self._tensors.over(0, 0 if self.lost else pieces)
        views: list[Views | None] = [None] * self._geometry.layers
        self.mapped = found = MappedTokens(pieces, flat, self._geometry.capacity(pieces), views)
        return found

    def views(self, mapped: MappedTokens, place: int) -> Views:
        """Makes the views of the layer's tokens, which `mapped` keeps."""
        with torch.inference_mode(False):
            found = self._tensors.views(mapped.flat, place, mapped.capacity)
        mapped.views[place] = found
        return found

    def pair(self, place: int) -> Pair:
        """The layer's keys, [batch, heads, length, k_dim], and values."""
        return self._tensors.pair((self.mapped or self.open()).flat, place, self.latest[place].length)

    def part(self, place: int, start: int, end: int) -> Pair:
        """The layer's keys and values of the tokens [start, end), by a tensor of their own."""
        geometry = self._geometry
        first, last = start * geometry.token_bytes // geometry.page, geometry.pieces(end)
        token = start * geometry.token_stride - first * geometry.page // geometry.itemsize
        return self._tensors.pair(self._tensors.over(first, last), place, end - start, token)

    def write(self, place: int, views: Views, keys: torch.Tensor, values: torch.Tensor, end: int) -> Pair:
        """Copies the tokens behind the layer's last one, so that it has `end`, and returns what it has then."""
        latest = self.latest[place]
        start = latest.length
        views.write_keys.narrow(2, start, end - start).copy_(keys)
        views.write_values.narrow(2, start, end - start).copy_(values)
        shown = views.keys.narrow(2, 0, end), views.values.narrow(2, 0, end)
        latest.length, self.until[place], (latest.keys, latest.values) = end, end, shown
        return shown

    def exclusive(self) -> bool:
        """Does nobody else hold a view, so that what was shown may change? Drops the range's own views to find out.

        See Note [Who else looks].
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
