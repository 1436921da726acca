"""What the tests of caches share: a pool under torch with pages of one size, and comparisons."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

import ballonet
from ballonet.allocator import devices
from ballonet.allocator._native import Device
from ballonet.hooks.kv.layer import ElasticLayer

from .models import prompts
from .pool import bytes_that_exist, take_out, take_out_leftovers

BUDGET: Final = 2**25
HOST: Final = 2**24


@contextmanager
def installed(page_size: int, budget: int = BUDGET) -> Iterator[int]:
    """Installs, for one thread of torch, and takes out what by then nothing may be in use of."""
    take_out_leftovers()
    ballonet.install(budget, page_size=page_size, host_budget=HOST, device="cpu")
    yield page_size
    torch._dynamo.reset()  # a compiled function keeps tensors
    gc.collect()
    device = devices.require()
    assert kv_pages(device) == 0
    device.check()
    assert bytes_that_exist() <= budget
    del device
    take_out()


def kv_pages(device: Device) -> int:
    device.reap(wait=True)
    pages: int = device.snapshot()["pages"]["kv"]
    return pages


def is_elastic(cache: Any) -> bool:
    return all(isinstance(layer, ElasticLayer) and layer.elastic for layer in cache.layers)


def filled(model: Any, **more: Any) -> Any:
    """The cache of a `generate()` of one sequence on that model."""
    inputs = {name: tensor[:1] for name, tensor in prompts(batch=3, longest=12).items()}
    out = model.generate(
        **inputs, max_new_tokens=20, min_new_tokens=20, do_sample=False, return_dict_in_generate=True, **more
    )
    return out.past_key_values


def fresh(count: int, seed: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of so many tokens, in two heads of eight."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, batch, 2, count, 8, generator=generator)
    return keys, values


def tensors(cache: Any) -> list[torch.Tensor]:
    """Copies of the keys and values of all layers."""
    return [tensor.clone() for layer in cache.layers for tensor in (layer.keys, layer.values)]


def same(ours: Any, theirs: Any) -> None:
    """Nests of tensors and other things, equal to the bit."""
    if isinstance(theirs, torch.Tensor):
        assert torch.equal(ours, theirs)
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            same(mine, other)
    else:
        assert ours == theirs
