"""Tensors as bytes in memory of the host that nobody remaps, and back.

Note [Staged]
    While a message is on its way, threads of gloo and the network read and write its memory. Pages of a managed model
    may be taken and given others meanwhile, so nothing of the pool is lent to a link: `send` copies a tensor once, in
    the order of the caller's stream, into memory of torch's own allocator, which is pinned where the tensor lies on a
    GPU. Whoever sends holds the lease on what it reads until `send` returns; on a GPU the copy is ordered before later
    work of the same stream, which is what the pool waits for before it moves a page. What arrives lies in such memory
    too, and is copied to the device by whoever takes it, in the order of its own stream.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...allocator import install


@dataclass(frozen=True, slots=True)
class Staged:
    """A copy of a tensor: `data`, uint8[bytes] on the host, or on its device where it is `direct`, complete once `wait`
    has returned."""

    data: torch.Tensor
    dtype: str
    shape: tuple[int, ...]
    wait: Callable[[], None]
    direct: bool = False


def staged(tensor: torch.Tensor, direct: bool = False) -> Staged:
    """A copy of a tensor, see Note [Staged]; `direct`: on its own device. ValueError: a tensor that has no plain
    memory."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ValueError(f"a tensor of layout {tensor.layout} on {tensor.device} has no plain bytes that can be sent")
    data = buffer(tensor.nbytes, tensor.device) if direct else room(tensor.nbytes, pinned=tensor.is_cuda)
    if tensor.numel():
        data.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach(), non_blocking=True)
    return Staged(data, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), _event(tensor), direct)


def room(nbytes: int, pinned: bool) -> torch.Tensor:
    """uint8[nbytes] on the host, outside the pool."""
    with install.stock():
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)


def buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8[nbytes] on a device, an activation like others: its pages stay where they are while it lives."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def unstaged(data: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor that was staged as `data`, whose memory it shares. ValueError: these are bytes of another one."""
    kind: torch.dtype = getattr(torch, dtype)
    if torch.Size(shape).numel() * kind.itemsize != data.numel():
        raise ValueError(f"{data.numel()} bytes are no {dtype} tensor of shape {shape}")
    return data.view(kind).view(shape)


def checksum(data: torch.Tensor) -> int:
    """CRC-32 of uint8[bytes]."""
    return zlib.crc32(data.cpu().numpy().data)


def _event(tensor: torch.Tensor) -> Callable[[], None]:
    """What waits for the copy of a tensor that this thread's stream was just given."""
    if not tensor.is_cuda:
        return _nothing
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    waiting: Callable[[], None] = event.synchronize
    return waiting


def _nothing() -> None:
    pass
