"""Prefills over keys and values that are on the host: copied to the device once per layer, as many rows read them.

A kernel reads keys and values once per block of its rows, over the link where they lie on the host: with few rows that
is as fast as copying them, with many it is a multiple (DESIGN §1: in place is for decoding).

Note [One place at a time]
    The driver tells from the first address of a copy whether its source is the device or the host, and may have the CPU
    make it. What CUDA does where later bytes lie elsewhere is not documented. So no copy of torch's, which is one call
    of the driver where both sides are contiguous, spans pages of both; kernels may read any.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Final

import torch

from ...allocator._native import Device, Range
from ...offload.policy.geometry import Geometry
from .tensors import Pair

_ALIGNMENT: Final = 512  # bytes: kernels are chosen by no more


def copied_in(device: Device, range_: Range, geometry: Geometry, flat: torch.Tensor, shown: Pair) -> Pair | None:
    """Copies the keys and values of one layer, `shown`, which lie in `flat`, the first pieces of `range_`, to tensors
    with the strides of a layer alone in its range. None where the copies would take pages from others."""
    one = replace(geometry, layers=1)
    keys, values = shown
    size = keys.shape[2] * one.token_bytes + _ALIGNMENT
    if (device.available + device.idle) * device.page_size < size:
        return None
    try:
        memory = torch.empty(size // geometry.itemsize, dtype=flat.dtype, device=flat.device)
    except torch.OutOfMemoryError:
        return None
    start = -memory.data_ptr() % _ALIGNMENT // geometry.itemsize
    copies = (
        memory.as_strided(keys.shape, one.k_strides, start + one.k_offset(0)),
        memory.as_strided(values.shape, one.v_strides, start + one.v_offset(0)),
    )
    if geometry == one:
        length, page = keys.shape[2] * one.token_stride, geometry.page // geometry.itemsize
        pieces = range(geometry.pieces(keys.shape[2]))
        for _, alike in groupby(pieces, range_.place):
            first, *others = alike
            part = flat[first * page : min(length, (first + 1 + len(others)) * page)]
            memory[start + first * page :][: part.numel()].copy_(part)  # at the speed of the link
    else:
        for copy, original in zip(copies, shown, strict=True):
            copy.copy_(original)
    return copies
