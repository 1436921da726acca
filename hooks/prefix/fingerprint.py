"""The fingerprint of the model that stored keys and values belong to, the same in all processes: for prefix files.

Note [Sampled]
    Hashing all weights would take as long as loading them. The hash covers the class, the configuration, name, shape
    and dtype of every tensor, up to `SAMPLES` elements of each, evenly spread, and the versions and the device that
    decide how results are rounded. Training, merging, quantizing or another seed change nearly every element; after
    writing a few single ones by hand the user has to clear the folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Final

import torch
from torch import nn

from ...allocator._native import Device
from ..device.key import key_of

SAMPLES: Final = 256  # elements of a tensor
_FACTS: Final = ("model", "size", "device", "torch", "transformers")  # keys of performance records that are hashed


def fingerprint(model: nn.Module, device: Device) -> bytes:
    """Returns 16 bytes. Reads the weights through the modules, which for streamed layers fills host pages."""
    facts = key_of(model, device)
    found = hashlib.blake2b(json.dumps([facts[name] for name in _FACTS]).encode(), digest_size=16)
    for sample in samples(model):
        found.update(sample.cpu().numpy().data)
    return found.digest()


def samples(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yields sampled bytes of all weights, see Note [Sampled]; of all tensors of a device at once, to make few
    copies."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_meta or not tensor.numel() or tensor.layout is not torch.strided:
                continue
            flat = tensor.detach().reshape(-1)
            sample = flat[:: -(-flat.numel() // SAMPLES)].contiguous().view(torch.uint8)
            by_device.setdefault(tensor.device, []).append(sample)
    for samples in by_device.values():
        yield torch.cat(samples)
