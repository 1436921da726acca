"""Tensors over a range of KV: their shape, where a layer's keys and values lie in it, and whether any is still alive.

Note [Two aliases]
    Writes go through an alias of the storage with a version counter of its own (`tensor.data`). Autograd compares
    versions to find out that something it saved was overwritten; appending overwrites nothing that was ever shown, so
    it must not count as such.
"""

from __future__ import annotations

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
    each by a weak reference. See shown.py, Note [Other views]."""

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
