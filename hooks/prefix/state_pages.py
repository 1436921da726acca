"""The memory of a kept state (snapshot.py) as a client of the governor: unshared pages, which may leave the device at
any moment, and are read on the device or the host when a prompt begins with the state.

A state is never written to, and read once per request, whole. So it is never restored: copying it for a request from
the host costs the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch.utils.dlpack import from_dlpack

from ...allocator._native import Device
from ...offload.governor.governor import Governor
from ...offload.governor.kv_tier import KVTier
from ...offload.policy.layout import ALIGNMENT
from ...offload.residency.kv_extent import KVExtent
from ..device.streams import stream_of
from ..forward.lease import GroupLease

_UINT8: Final = (1, 8)  # DLPack's code and bits


class StatePages:
    """Copies of some tensors in pages of their own."""

    def __init__(self, device: Device, governor: Governor, tensors: Sequence[torch.Tensor]) -> None:
        """Copies `tensors` on the current stream. PoolExhausted, DriverError."""
        self._stream = stream_of(device)
        self._places: list[tuple[int, torch.dtype, torch.Size]] = []
        end = 0
        for tensor in tensors:
            self._places.append((end, tensor.dtype, tensor.shape))
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        pieces = -(-end // device.page_size)
        self._group = device.group()
        self._range = device.reserve(pieces * device.page_size, "kv", self._group)
        self._range.map(0, pieces)
        self._tier = KVTier(device, self._group, governor)
        self._tier.client.name = "state"
        self._extent = KVExtent(device, self._group, self._range, self._tier.lock, lambda: False)
        self._extent.kind = "recurrent states"
        self._tier.add(self._extent)
        with GroupLease(self._group), torch.inference_mode(False):
            self._range.note_use(self._stream(), True)
            for view, tensor in zip(self._views(), tensors, strict=True):
                view.copy_(tensor)
            self._tier.turns.stream = self._stream()
        self._extent.extended(0, pieces)
        self._tier.client.only_cached = True
        self._extent.raise_to(pieces)
        governor.client_changed(self._tier.number)

    @property
    def pages(self) -> int:
        """Pages of the state, on the device or the host."""
        return self._extent.pieces

    @property
    def dirty(self) -> int:
        """Pages whose bytes only the device has."""
        return self._extent.dirty

    @property
    def number(self) -> int:
        """The number of this client of the governor."""
        return self._tier.number

    @property
    def device_pages(self) -> int:
        """The pages of these that are on the device."""
        return self._tier.client.device_pages

    @contextmanager
    def read(self) -> Iterator[list[torch.Tensor]]:
        """Yields the tensors, for reads that the current stream is given within the block. BallonetError,
        DriverError."""
        with GroupLease(self._group):
            self._tier.client.used = self._tier.governor.clock()
            self._tier.show(self._extent, self._stream())
            self._range.note_use(self._stream(), False)
            yield self._views()

    def _views(self) -> list[torch.Tensor]:
        flat = from_dlpack(self._range.tensor(0, (self._range.nbytes,), (1,), *_UINT8))
        found = []
        for start, dtype, shape in self._places:
            nbytes = shape.numel() * dtype.itemsize
            found.append(flat.narrow(0, start, nbytes).view(dtype).view(shape))
        return found
