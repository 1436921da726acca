"""What stored keys and values depend on beside their tokens.

Note [Weights and settings]
    A change of weights is final: once one was written to, replaced or removed, or a module was, everything stored
    before is dropped (`weights`). It is noticed by the storage, address and version of each, as in autograd, so writes
    through `.data` are not; adapters that are merged that way report it, and so do optimizers, as kernels that do a
    whole step at once count no version. New memory may have the address of old memory, so storages are told apart by
    weak references, which keep their ids from being used again. Settings that are switched to and fro are part of the
    salt instead (`settings`): adapters, types, implementations of attention, and hooks, which may change what a layer
    computes. A stored prefix is found again when the settings are as they were. "paged|eager", as continuous batching
    calls it, is the same arithmetic as "eager".

Note [Sampled]
    Files outlive the process, and so need a fingerprint of the model that is the same in all processes. Hashing all
    weights would take as long as loading them. The hash covers the class, the configuration, name, shape and dtype of
    every tensor, up to `SAMPLES` elements of each, evenly spread, and the versions and the device that decide how
    results are rounded. Training, merging, quantizing or another seed change nearly every element; after writing a few
    single ones by hand the user has to clear the folder.
"""

from __future__ import annotations

import hashlib
import json
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from ...allocator._native import Device
from ..compat import StorageWeakRef, attention_of
from ..device.key import key_of
from ..forward.hook_base import Hook

_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
SAMPLES: Final = 256  # elements of a tensor
_FACTS: Final = ("model", "size", "device", "torch", "transformers")  # keys of performance records that are hashed


class Identity(NamedTuple):
    """The `weights` and `settings` of a model at one moment."""

    weights: tuple[object, ...]
    settings: bytes


class Looks:
    """Finds the identity of one model repeatedly, in a fraction of a millisecond while no module is added or
    removed."""

    def __init__(self, model: nn.Module) -> None:
        """Does not keep it alive."""
        self._model = weakref.ref(model)
        self._found: list[weakref.ref[nn.Module]] = []  # all that modules() finds
        self._children: list[int] = []  # ids of the children of all of these
        self._adapted: list[int] = []  # which of them adapters have wrapped
        self._storages: list[StorageWeakRef] = []  # storages of the weights that have one
        self._changes = 0  # counts changes of modules and storages, and steps of optimizers
        self._lock = threading.RLock()

    def now(self) -> Identity:
        """Returns the identity of the model, which is about to generate, without an access to its weights that streamed
        layers would notice. Empty once the model is collected."""
        with self._lock:
            return self._now()

    def stepped(self, parameters: Collection[int]) -> None:
        """Notes that an optimizer has written to some of these parameters, by id."""
        model = self._model()
        if model is not None and any(id(tensor) in parameters for tensor in _tensors([*map(vars, model.modules())])):
            with self._lock:
                self._changes += 1

    def _now(self) -> Identity:
        model = self._model()
        if model is None:
            return Identity((), b"")
        states = [module.__dict__ for reference in self._found if (module := reference()) is not None]
        if not states or len(states) < len(self._found) or _children(states) != self._children:
            self._changes += 1
            modules = list(model.modules())
            states = [module.__dict__ for module in modules]
            self._found, self._children = [weakref.ref(module) for module in modules], _children(states)
            self._adapted = [n for n, state in enumerate(states) if "merged_adapters" in state]
        adapted = [(number, states[number]) for number in self._adapted]
        weights = (*self._weights(_tensors(states)), *(tuple(state["merged_adapters"]) for _, state in adapted))
        return Identity(weights, repr([*_settings(model, states), *_adapters(adapted)]).encode())

    def _weights(self, tensors: Sequence[torch.Tensor]) -> tuple[object, ...]:
        storages = [memory for tensor in tensors if (memory := _storage(tensor)) is not None]
        if [storage._cdata for storage in storages] != [storage.cdata for storage in self._storages]:
            self._changes += 1
            self._storages = [*map(StorageWeakRef, storages)]
        return self._changes, *_weights(tensors)


def _children(states: Iterable[dict[str, Any]]) -> list[int]:
    return [id(module) for state in states if (held := state["_modules"]) for module in held.values()]


def _tensors(states: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
    """Returns the parameters, and the buffers that are saved."""
    tensors = [tensor for state in states for tensor in dict.values(state["_parameters"]) if tensor is not None]
    for state in states:
        if held := state["_buffers"]:
            left_out = state["_non_persistent_buffers_set"]
            tensors += [tensor for name, tensor in dict.items(held) if tensor is not None and name not in left_out]
    return tensors


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # a wrapper without memory of its own
        return None


def _weights(tensors: Sequence[torch.Tensor]) -> tuple[object, ...]:
    """Returns addresses and versions."""
    try:
        return tuple([tensor.data_ptr() for tensor in tensors]), tuple([tensor._version for tensor in tensors])
    except (RuntimeError, NotImplementedError):  # not all of them have both
        return tuple(map(_version, tensors))


def _settings(model: Any, states: Iterable[dict[str, Any]]) -> Iterator[object]:
    yield type(model).__module__
    yield type(model).__qualname__
    yield str(getattr(model, "dtype", None))
    yield str(getattr(model, "device", None))
    yield attention_of(getattr(model, "config", None))
    yield _autocast()
    yield [tuple(getattr(torch_module, name, ())) for name in _GLOBAL_HOOKS]
    for number, state in enumerate(states):
        if state["_forward_hooks"] or state["_forward_pre_hooks"]:
            for kind in _HOOKS:
                if hooks := [key for key, hook in state[kind].items() if not isinstance(hook, Hook)]:
                    yield number, hooks


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    try:
        address = tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # a wrapper without memory of its own
        address = id(tensor)
    return address, 0 if tensor.is_inference() else tensor._version


def _adapters(adapted: Iterable[tuple[int, dict[str, Any]]]) -> Iterator[object]:
    """Yields the adapters that layers of peft have switched on; where they are off the chosen one does not matter."""
    for number, state in adapted:
        if state.get("_disable_adapters"):
            yield number, None
            continue
        scaling = state.get("scaling")
        scaling = sorted(scaling.items()) if isinstance(scaling, dict) else scaling
        yield number, state.get("_active_adapter"), scaling


def _autocast() -> object:
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            return device, str(torch.get_autocast_dtype(device))
    return None


def fingerprint(model: nn.Module, device: Device) -> bytes:
    """Returns 16 bytes. Reads the weights through the modules, which for streamed layers fills host pages."""
    facts = key_of(model, device)
    digest = hashlib.blake2b(json.dumps([facts[name] for name in _FACTS]).encode(), digest_size=16)
    for sample in samples(model):
        digest.update(sample.cpu().numpy().data)
    return digest.digest()


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
