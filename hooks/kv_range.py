"""A range of KV: the keys and values of a group of layers, mapped to the longest of them.

Note [Who else looks]
    Stock layers make new tensors whenever they change, so whoever took `layer.keys` before keeps what he saw. Here
    tensors are views of one place, and what was shown must not change under them either. Appending is harmless: it
    writes behind everything shown. But reordering, or cutting the tail and appending again, would show. So every
    storage that is made over the range is remembered by a weak reference, and before something shown is overwritten
    the range drops its own views and asks whether any storage is still alive (`exclusive`). As a rule none is, and
    the work is done in place; otherwise the layer that wants to change moves to a new range and leaves the old one to
    whoever looks at it. Pages given back under a view leave with it: the core keeps what a tensor covers.

Note [Two aliases]
    Writes go through an alias of the storage with a version counter of its own (`tensor.data`). Autograd compares
    versions to find out that something it saved was overwritten; appending overwrites nothing that was ever shown, so
    it must not count as such.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch.utils.dlpack import from_dlpack

from ..allocator._native import Device, Group
from ..allocator.errors import PoolExhausted
from ..offload.geometry import Geometry
from .compat import StorageWeakRef
from .lease import Holding, current

_UINT8: Final = (1, 8)  # DLPack's code and bits
_SCRATCH: Final = 32 * 2**20  # bytes: sequences are reordered in chunks of this size


class Shape(NamedTuple):
    """What layers must have in common to share a range: the group key of the design, and the batch."""

    device: torch.device
    dtype: torch.dtype
    batch: int
    heads: int
    k_dim: int
    v_dim: int

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> Shape:
        """Of keys [batch, heads, tokens, k_dim] and values [batch, heads, tokens, v_dim]."""
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


class _Views(NamedTuple):
    """A layer's keys and values over all mapped tokens: to be shown, and to be written. See Note [Two aliases]."""

    keys: torch.Tensor
    values: torch.Tensor
    write_keys: torch.Tensor
    write_values: torch.Tensor


class KVRange:
    """The range of a group of layers. A layer has a place in it (its index in the geometry) and its own length."""

    def __init__(self, device: Device, group: Group, geometry: Geometry, shape: Shape) -> None:
        """Reserves addresses for `geometry`, whose kind is `inner`; maps nothing. DriverError."""
        self.geometry: Final = geometry
        self.shape: Final = shape
        self.group: Final = group
        self.range: Final = device.reserve(geometry.reservation, "kv", group)
        self._device = device
        self._lengths = [0] * geometry.layers  # tokens
        self._shown = [0] * geometry.layers  # tokens that someone may have a view of
        self._joined = 0  # places given out; one that was left is not given out again
        self._pieces = 0  # mapped, from the start of the range
        self._capacity = 0  # tokens that lie wholly on mapped pieces
        self._views: list[_Views | None] = [None] * geometry.layers
        self._storages: list[StorageWeakRef] = []

    def join(self) -> int | None:
        """A place for one more layer, None where all are taken."""
        if self._joined == self.geometry.layers:
            return None
        self._joined += 1
        return self._joined - 1

    def leave(self, place: int) -> None:
        """The layer needs its tokens no more."""
        self.cut(place, 0)

    def length(self, place: int) -> int:
        """Tokens of the layer."""
        return self._lengths[place]

    def takes(self, place: int, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Can these tokens be appended here, in their shape and without changing what others look at?"""
        start = self._lengths[place]
        return (
            self.shape.fits(keys, values)
            and start + keys.shape[2] <= self.geometry.tokens
            and (start >= self._shown[place] or self.exclusive())
        )

    def append(self, place: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies the tokens behind the layer's last one and returns all of its keys and values.

        `takes` has said yes. Raises torch.OutOfMemoryError or DriverError, and has changed nothing, where no page is
        left to map.
        """
        start, tokens = self._lengths[place], keys.shape[2]
        end = start + tokens
        with Holding(self.group):
            if end > self._capacity:
                self._extend(end)
            views = self._views[place] or self._open(place)
            self._note(start, tokens)
            views.write_keys.narrow(2, start, tokens).copy_(keys)
            views.write_values.narrow(2, start, tokens).copy_(values)
        self._lengths[place] = self._shown[place] = end
        return views.keys.narrow(2, 0, end), views.values.narrow(2, 0, end)

    def keys(self, place: int) -> torch.Tensor:
        """[batch, heads, length, k_dim]"""
        return (self._views[place] or self._open(place)).keys.narrow(2, 0, self._lengths[place])

    def values(self, place: int) -> torch.Tensor:
        """[batch, heads, length, v_dim]"""
        return (self._views[place] or self._open(place)).values.narrow(2, 0, self._lengths[place])

    def cut(self, place: int, length: int) -> None:
        """Forgets the layer's tokens from `length` on; pages that no layer needs any more go back."""
        self._lengths[place] = length
        pieces = self.geometry.pieces(max(self._lengths))
        if pieces < self._pieces:
            runs = self.geometry.runs(pieces, self._pieces)
            self._set_pieces(pieces)
            for first, count in runs:
                self.range.retire(first, count)

    def reorder(self, place: int, rows: torch.Tensor) -> None:
        """Sequence i becomes what sequence rows[i] is (int64[batch]). The caller has made sure of `exclusive()`."""
        views, length = self._views[place] or self._open(place), self._lengths[place]
        shape = self.shape
        token = shape.batch * shape.heads * max(shape.k_dim, shape.v_dim)
        chunk = max(1, min(length, _SCRATCH // (token * shape.dtype.itemsize)))
        # Allocated before anything is written: past this line there is nothing that can run out.
        scratch = torch.empty(chunk * token, dtype=shape.dtype, device=shape.device)
        with Holding(self.group):
            self._note(0, length)
            for whole in (views.write_keys, views.write_values):
                by_token = whole.permute(2, 0, 1, 3).flatten(2)  # [tokens, batch, heads x dim], a view
                for start in range(0, length, chunk):
                    part = by_token[start : min(start + chunk, length)]
                    picked = scratch[: part.numel()].view(part.shape)
                    part.copy_(torch.ops.aten.index.Tensor_out(part, [None, rows], out=picked))

    def exclusive(self) -> bool:
        """Does nobody else hold a view, so that what was shown may change? Drops the range's own views.

        See Note [Who else looks].
        """
        self._views = [None] * self.geometry.layers
        self._storages = [storage for storage in self._storages if not storage.expired()]
        if self._storages:
            return False
        self._shown = self._lengths.copy()
        return True

    def _extend(self, tokens: int) -> None:
        pieces = self.geometry.pieces(tokens)
        try:
            for first, count in self.geometry.runs(self._pieces, pieces):
                self.range.map(first, count)
        except PoolExhausted as error:
            raise torch.OutOfMemoryError(f"no room for {tokens} tokens of KV cache: {error}") from error
        self._set_pieces(pieces)

    def _set_pieces(self, pieces: int) -> None:
        self._pieces = pieces
        self._capacity = self.geometry.capacity(pieces)
        self._views = [None] * self.geometry.layers

    def _open(self, place: int) -> _Views:
        """Views over everything that is mapped, and nothing else: a storage that spans more could not be saved."""
        geometry, shape = self.geometry, self.shape
        sides = (
            (shape.k_dim, geometry.k_strides, geometry.k_offset(place)),
            (shape.v_dim, geometry.v_strides, geometry.v_offset(place)),
        )
        size = (shape.batch, shape.heads, self._capacity)
        if not self._pieces:
            empty = [torch.empty((*size, dim), dtype=shape.dtype, device=shape.device) for dim, _, _ in sides]
            return _Views(*empty, *empty)
        # An inference tensor could not be written to outside of inference mode.
        with torch.inference_mode(False):
            flat = self._flat()
            views = _Views(
                *(
                    alias.as_strided((*size, dim), strides, offset)
                    for alias in (flat, flat.data)
                    for dim, strides, offset in sides
                )
            )
        self._views[place] = views
        return views

    def _flat(self) -> torch.Tensor:
        """The mapped bytes as elements, over one storage for all layers while the mapping stays as it is."""
        nbytes = self._pieces * self.geometry.page
        for views in self._views:
            if views is not None:
                return views.keys.as_strided((nbytes // self.geometry.itemsize,), (1,), 0)
        flat = from_dlpack(self.range.tensor(0, (nbytes,), (1,), *_UINT8))
        self._storages = [storage for storage in self._storages if not storage.expired()]
        self._storages.append(StorageWeakRef(flat.untyped_storage()))
        return flat.view(self.shape.dtype)

    def _note(self, start: int, tokens: int) -> None:
        """Tells the core who is about to write where."""
        if self._device.kind == "standin":
            step = self.geometry.token_bytes
            self._device.note_use(self.range.address + start * step, tokens * step, 0, True)
        else:
            self._device.note_stream(torch.cuda.current_stream(self.shape.device).cuda_stream)
        lease = current()
        if lease is not None:
            lease.touched(self.range)
