"""What a model looks like from outside: to tell that nothing about it has changed, and where its memory lies."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import ballonet
from ballonet.allocator._native import Device

from .pool import bytes_that_exist, in_pool, mapped


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return dict(named)


def bits(tensor: torch.Tensor) -> bytes:
    """The values as bytes outside of the pool; NaN and -0.0 count too."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(tensor.reshape(-1).view(torch.uint8).cpu().numpy())


class Portrait:
    """Everything about a model's tensors that must be the same later."""

    def __init__(self, model: nn.Module) -> None:
        named = tensors(model)
        self.bits = {name: bits(tensor) for name, tensor in named.items()}
        self.rest = {
            name: (id(tensor), tensor.dtype, tensor.shape, tensor.requires_grad, id(tensor.grad), tensor._version)
            for name, tensor in named.items()
        }
        self.strides = {name: tensor.stride() for name, tensor in named.items() if tensor.layout is torch.strided}
        self.hooks = [
            (name, *map(list, (module._forward_hooks, module._forward_pre_hooks, module._forward_hooks_always_called)))
            for name, module in model.named_modules()
        ]

    def is_of(self, model: nn.Module, hooks: bool = True) -> bool:
        other = Portrait(model)
        return (
            self.rest == other.rest
            and self.strides == other.strides
            and self.bits == other.bits
            and (not hooks or self.hooks == other.hooks)
        )


def all_in_pool(model: nn.Module, *places: str) -> bool:
    """On pages of the device, or of any of the `places`."""
    now = mapped(*places)
    return all(in_pool(tensor, now) for tensor in tensors(model).values())


def none_in_pool(model: nn.Module) -> bool:
    now = mapped()
    return not any(in_pool(tensor, now) for tensor in tensors(model).values())


def contents(model: nn.Module) -> dict[str, Any]:
    """Everything that a copy of the model's tensors would have to have, and which of them share memory."""
    named = tensors(model)
    first: dict[int, str] = {}
    return {
        name: (
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.requires_grad,
            bits(tensor),
            first.setdefault(tensor.untyped_storage().data_ptr(), name),
        )
        for name, tensor in named.items()
    } | {"state_dict": {name: bits(tensor) for name, tensor in model.state_dict().items()}}


def conserved(device: Device, managed: ballonet.Managed) -> bool:
    """Do the pages that exist add up, and are those of the weights those that the model has?"""
    device.trim()
    device.reap(wait=True)
    device.check()
    snapshot = device.snapshot()
    pages = snapshot["pages"]
    exist = bytes_that_exist() // device.page_size
    return bool(sum(pages.values()) == snapshot["created"] == exist and pages["weights"] == managed.report().pages)
