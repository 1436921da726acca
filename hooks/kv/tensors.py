"""What a range of KV shows: the length of each layer, tensors over its tokens, where keys and values lie in it, and
whether other views exist.

Note [Two aliases]
    Writes go through an alias of the storage with a version counter of its own (`tensor.data`). Autograd compares
    versions to find out that something it saved was overwritten; appending overwrites nothing that was ever shown, so
    it must not count as such.

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
from typing import Final, NamedTuple

import torch
from torch.utils.dlpack import from_dlpack

from ...allocator._native import Range
from ...offload.policy.geometry import Geometry
from ..compat import StorageWeakRef

Pair = tuple[torch.Tensor, torch.Tensor]
_UINT8: Final = (1, 8)  # DLPack's code and bits


class KVShape(NamedTuple):
    """The shape, dtype and device that layers must have in common to share a range."""

    device: torch.device
    dtype: torch.dtype
    batch: int
    heads: int
    k_dim: int
    v_dim: int

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> KVShape:
        """Returns the shape of keys [batch, heads, tokens, k_dim] and values [batch, heads, tokens, v_dim]."""
        batch, heads, _, k_dim = keys.shape
        return cls(keys.device, keys.dtype, batch, heads, k_dim, values.shape[3])

    def fits(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Are these keys and values of this shape, and equally many?"""
        tokens = keys.shape[-2]
        return (
            keys.shape == (self.batch, self.heads, tokens, self.k_dim)
            and values.shape == (self.batch, self.heads, tokens, self.v_dim)
            and keys.dtype == self.dtype == values.dtype
            and keys.device == self.device == values.device
        )


class Views(NamedTuple):
    """A layer's keys and values over all mapped tokens, to show and to write. See Note [Two aliases]."""

    keys: torch.Tensor  # [batch, heads, tokens, k_dim]
    values: torch.Tensor
    write_keys: torch.Tensor
    write_values: torch.Tensor
    write_both: torch.Tensor | None  # [2 x batch, heads, tokens, dim]: keys, then values, where nothing lies between


class RangeTensors:
    """Makes tensors of shape `shape` over `range_`, whose tokens lie as `geometry` says, and remembers the storage of
    each by a weak reference. See Note [Other views]."""

    def __init__(self, range_: Range, geometry: Geometry, shape: KVShape, storages: int) -> None:
        """`storages`: how many to remember before dead ones are forgotten."""
        self._range = range_
        self._geometry = geometry
        self._shape = shape
        # in elements, of each layer's keys and values
        self._offsets = [(geometry.k_offset(place), geometry.v_offset(place)) for place in range(geometry.layers)]
        self._storages: list[StorageWeakRef] = []
        self._most = storages

    def over(self, first: int, end: int) -> torch.Tensor:
        """A tensor of the mapped pieces [first, end), over a new storage."""
        page = self._geometry.page
        with torch.inference_mode(False):  # an inference tensor could not be written to outside of inference mode
            if first >= end:
                return torch.empty(0, dtype=self._shape.dtype, device=self._shape.device)
            flat = from_dlpack(self._range.tensor(first * page, ((end - first) * page,), (1,), *_UINT8))
            if len(self._storages) > self._most:
                self._storages = [storage for storage in self._storages if not storage.expired()]
            self._storages.append(StorageWeakRef(flat.untyped_storage()))
            return flat.view(self._shape.dtype)

    def pair(self, flat: torch.Tensor, place: int, tokens: int, token: int = 0) -> Pair:
        """The keys and values of the layer at `place`, [batch, heads, tokens, dim], where `flat` has its first token
        `token` elements before its own start."""
        shape, geometry, (keys, values) = self._shape, self._geometry, self._offsets[place]
        size = shape.batch, shape.heads, tokens
        return (
            flat.as_strided((*size, shape.k_dim), geometry.k_strides, token + keys),
            flat.as_strided((*size, shape.v_dim), geometry.v_strides, token + values),
        )

    def views(self, flat: torch.Tensor, place: int, tokens: int) -> Views:
        """The views of the layer at `place` over so many tokens of `flat`, which begins with the first."""
        shape, geometry, (keys, values) = self._shape, self._geometry, self._offsets[place]
        k_size, v_size = (
            (shape.batch, shape.heads, tokens, shape.k_dim),
            (shape.batch, shape.heads, tokens, shape.v_dim),
        )
        k_strides, v_strides, write = geometry.k_strides, geometry.v_strides, flat.data
        joint = shape.k_dim == shape.v_dim and values - keys == shape.batch * shape.heads * shape.k_dim
        return Views(
            flat.as_strided(k_size, k_strides, keys),
            flat.as_strided(v_size, v_strides, values),
            write.as_strided(k_size, k_strides, keys),
            write.as_strided(v_size, v_strides, values),
            write.as_strided((2 * shape.batch, *k_size[1:]), k_strides, keys) if joint else None,
        )

    def none_is_held(self) -> bool:
        """Is every storage freed that this object has made?"""
        self._storages = [storage for storage in self._storages if not storage.expired()]
        return not self._storages


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
