"""Copies of tensors as bytes in host memory outside of the pool, whose pages are never moved.

Note [Staged]
    While a message is on its way, threads of gloo and the network read and write its memory. Pages of the pool may move
    meanwhile, so a link gets no memory of the pool: `send` copies a tensor once, in the order of the caller's stream,
    into memory of torch's own allocator, pinned where the tensor lies on a GPU. The sender holds the lease on the
    tensor until `send` returns; on a GPU the copy is ordered before later work of the same stream, for which the pool
    waits before it moves a page. Received bytes lie in such memory too; `take` copies them to the device, in the order
    of the caller's stream.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...allocator import install


@dataclass(frozen=True, slots=True)
class Staged:
    """A copy of a tensor. `data`: uint8[bytes] on the host, or on the tensor's device if `direct`; complete once `wait`
    has returned."""

    data: torch.Tensor
    dtype: str
    shape: tuple[int, ...]
    wait: Callable[[], None]
    direct: bool = False


def staged(tensor: torch.Tensor, direct: bool = False) -> Staged:
    """Starts to copy a tensor, and returns the copy. `direct`: on the tensor's own device. ValueError: a sparse,
    quantized or meta tensor. See Note [Staged]."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ValueError(f"a tensor of layout {tensor.layout} on {tensor.device} has no plain bytes that can be sent")
    data = device_buffer(tensor.nbytes, tensor.device) if direct else host_buffer(tensor.nbytes, pinned=tensor.is_cuda)
    if tensor.numel():
        data.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach(), non_blocking=True)
    return Staged(data, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), _event(tensor), direct)


def host_buffer(nbytes: int, pinned: bool) -> torch.Tensor:
    """Returns uint8[nbytes] on the host, uninitialized, outside of the pool."""
    with install.stock():
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)


def device_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Returns uint8[nbytes] on a device, uninitialized: an activation, whose pages do not move while it lives."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def unstaged(data: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns the tensor that was staged as `data`, as a view of it. ValueError where the sizes do not match."""
    kind: torch.dtype = getattr(torch, dtype)
    if torch.Size(shape).numel() * kind.itemsize != data.numel():
        raise ValueError(f"{data.numel()} bytes are no {dtype} tensor of shape {shape}")
    return data.view(kind).view(shape)


def checksum(data: torch.Tensor) -> int:
    """Returns the CRC-32 of uint8[bytes]."""
    return zlib.crc32(data.cpu().numpy().data)


def _event(tensor: torch.Tensor) -> Callable[[], None]:
    """Returns a function that waits for the work submitted so far to this thread's stream of the tensor's device."""
    if not tensor.is_cuda:
        return _nothing
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    waiting: Callable[[], None] = event.synchronize
    return waiting


def _nothing() -> None:
    pass
