"""The parts of a model: its decoder layers, which are hooked, streamed and moved one at a time, and the memory behind
its parameters and buffers: which bytes they use, and which of them must move together.

Note [What moves together]
  A tied weight is one storage under two names; an LSTM's weights are views of one flat buffer that cuDNN wants in one
  piece. So what moves is the span of bytes that the tensors of one storage use, once and as a whole, and every tensor
  keeps its place, shape and strides within it. Spans that overlap although their storages are different objects
  (slices of one mapped file) are one span.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...allocator.errors import ManageError, WrongDevice

_WIDEST = 16  # bytes of the widest element (complex128): a span starts at a multiple of it in its storage


Blocks = nn.ModuleList | nn.Sequential
# Part of a model's weights that a block may have at most to stream as a whole: more would make the slots, which hold
# the largest, as large as what is gained. Chosen.
_BLOCK: Final = 0.25


def decoder_layers(model: nn.Module) -> tuple[nn.Module, ...]:
    """The decoder layers of `model` in order, each once; of a model without such its blocks, see `layer_lists`."""
    return tuple(dict.fromkeys(layer for modules in layer_lists(model) for layer in modules))


def layer_lists(model: nn.Module) -> Sequence[Blocks]:
    """The lists that hold the decoder layers of `model`, in order.

    The outermost ones whose length is the configuration's `num_hidden_layers` (of the text part of a multimodal model):
    those whose children the model names in `_no_split_modules` if there are such, else all of them. If none has that
    length, as layers were added or removed, those of any length whose children are all named. A module without such a
    configuration may contain modules with one. Where there is no configuration, as in a UNet, the outermost lists of
    several blocks with parameters; a list of which one block has a large part of the model's weights is none, but what
    is inside of it may be.
    """
    return _configured_lists(model) or list(
        _lists_of_blocks(model, sum(weight.nbytes for weight in model.parameters()))
    )


def _configured_lists(model: nn.Module) -> list[nn.ModuleList]:
    return _lists_of(model) or [modules for child in model.children() for modules in _configured_lists(child)]


def _lists_of_blocks(module: nn.Module, total: int) -> Iterator[Blocks]:
    """`total`: bytes of the weights of the whole model."""
    if isinstance(module, Blocks):
        sizes = [sum(weight.nbytes for weight in child.parameters()) for child in module]
        if sum(size > 0 for size in sizes) > 1 and max(sizes) <= total * _BLOCK:
            yield module
            return
    for child in module.children():
        yield from _lists_of_blocks(child, total)


def runners(model: nn.Module) -> dict[nn.Module, bool]:
    """The modules inside of `model` whose forwards run decoder layers, the outermost first: do they run all of them?
    Some are called by themselves, as an encoder is by `generate()`."""
    lists = set(layer_lists(model))
    inside = [name.split(".")[:-1] for name, module in model.named_modules() if module in lists]
    paths = dict.fromkeys(tuple(names[:end]) for names in inside for end in range(1, len(names) + 1))
    return {
        model.get_submodule(".".join(path)): all(tuple(names[: len(path)]) == path for names in inside)
        for path in paths
    }


def bytes_of_weights(config: Any) -> tuple[tuple[int, ...], int]:
    """Bytes of the weights of a model with this configuration, in its own dtype: (of each decoder layer, of the rest).
    The model has no values."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)
    layers = tuple(sum(weight.nbytes for weight in layer.parameters()) for layer in decoder_layers(model))
    return layers, sum(weight.nbytes for weight in model.parameters()) - sum(layers)


def _lists_of(model: nn.Module) -> list[nn.ModuleList]:
    length = getattr(text_config(model), "num_hidden_layers", None)
    if not isinstance(length, int) or length < 1:
        return []
    named = set(getattr(model, "_no_split_modules", None) or ())
    candidates = list(_outermost_lists(model, length))
    return _only_of(candidates, named) or candidates or _only_of(_outermost_lists(model, None), named)


def _only_of(lists: Iterable[nn.ModuleList], named: set[str]) -> list[nn.ModuleList]:
    """Returns the lists that are not empty and hold only modules of the named classes."""
    return [modules for modules in lists if len(modules) and all(type(child).__name__ in named for child in modules)]


def text_config(model: nn.Module) -> object:
    """The configuration of the part of `model` that writes text, None where it has none."""
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", None)
    return text(decoder=True) if callable(text) else getattr(config, "text_config", config)


def _outermost_lists(module: nn.Module, length: int | None) -> Iterable[nn.ModuleList]:
    """Returns the outermost lists of that length; None: of any length."""
    for child in module.children():
        if isinstance(child, nn.ModuleList) and length in (None, len(child)):
            yield child
        else:
            yield from _outermost_lists(child, length)


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """Bytes [start, start + nbytes) and the tensors that use them. `layer`: index of the only decoder layer that uses
    them, else None."""

    start: int
    nbytes: int
    tensors: tuple[torch.Tensor, ...]
    layer: int | None

    def bases(self) -> dict[int, torch.UntypedStorage]:
        """The storages that hold the bytes, by address."""
        return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in self.tensors}

    def sources(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The bytes themselves: (offset in the span, uint8 view of one storage's part of it)."""
        for base, storage in self.bases().items():
            first = max(base, self.start)
            last = min(base + storage.nbytes(), self.start + self.nbytes)
            view = torch.empty(0, dtype=torch.uint8, device=storage.device)
            view.set_(storage, first - base, (last - first,), (1,))
            yield first - self.start, view

    def over(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Makes a like of each tensor over `flat`, a uint8[nbytes] that has its storage to itself."""
        return [like_over(tensor, flat, tensor.data_ptr() - self.start) for tensor in self.tensors]


@dataclass(frozen=True, slots=True)
class TensorMember:
    """A tensor of a model. `layers`: the indices of the decoder layers that use it, None for use outside of layers."""

    name: str
    tensor: torch.Tensor
    layers: set[int | None]


@dataclass(frozen=True, slots=True)
class Survey:
    """Which tensors can be moved to a device: `spans`. `left`: name of one that cannot -> why. `refused`: the error to
    raise where all of them have to be on that device, with their values."""

    spans: tuple[TensorSpan, ...]
    left: Mapping[str, str]
    refused: ManageError | None


def members(model: nn.Module, layers: Sequence[nn.Module]) -> list[TensorMember]:
    """Every parameter and buffer of `model`, each once, under its first name; of a wrapper (torchao's quantized
    weights) every tensor inside it.

    State that a module keeps outside of its parameters and buffers (bitsandbytes' quant_state) is not among them.
    """
    layer_of = _layers_by_module(model, layers)
    tensors: dict[int, TensorMember] = {}
    for module, name, tensor in _tensors(model):
        tensors.setdefault(id(tensor), TensorMember(name, tensor, set())).layers.update(layer_of[module])
    return list(tensors.values())


def survey(tensors: Iterable[TensorMember], device: torch.device, *, from_host: bool = False) -> Survey:
    """Finds out which of them can be moved into the pages of `device`. ManageError for overlaps that no storage can
    hold.

    Tensors stay where they are that have no plain memory of their own (sparse, of torch's quantized dtypes), are shared
    with other processes, have no value yet, or are on another device, except the CPU with `from_host`.
    """
    movable: list[torch.Tensor] = []
    layers_of: dict[int, set[int | None]] = {}
    left: dict[str, str] = {}
    refused: ManageError | None = None
    for member in tensors:
        error = None if from_host and _on_host(member.tensor) else _elsewhere(member, device)
        reason = _reason_to_leave(member.tensor) if error is None else str(error)
        refused = refused or error
        if reason is not None:
            left[member.name] = reason
        elif member.tensor.numel():
            movable.append(member.tensor)
            layers_of[id(member.tensor)] = member.layers
    return Survey(tuple(spans(movable, layers_of)), left, refused)


def has_bytes(tensor: torch.Tensor) -> bool:
    """Has the tensor memory of its own that can be read?"""
    if is_lazy(tensor) or tensor.device.type == "meta":
        return False
    return tensor.numel() > 0 and _reason_to_leave(tensor) is None


def spans(tensors: Iterable[torch.Tensor], layers_of: Mapping[int, set[int | None]]) -> Iterator[TensorSpan]:
    """Groups `tensors` by the bytes they use, in the order in which they come. `layers_of`: id of a tensor -> its
    layers."""
    storages: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        storages.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    order = {base: position for position, base in enumerate(storages)}
    merged: list[tuple[int, int, int, list[torch.Tensor]]] = []
    for start, end, base in sorted((*_extent(base, group), base) for base, group in storages.items()):
        if merged and start < merged[-1][1]:
            position, last_end, first, group = merged[-1]
            merged[-1] = (min(position, order[base]), max(end, last_end), first, group + storages[base])
        else:
            merged.append((order[base], end, start, storages[base]))
    for _, end, start, group in sorted(merged, key=lambda run: run[0]):
        layers = set[int | None]().union(*(layers_of.get(id(tensor), {None}) for tensor in group))
        yield _checked(TensorSpan(start, end - start, tuple(group), layers.pop() if len(layers) == 1 else None))


def _extent(base: int, tensors: Iterable[torch.Tensor]) -> tuple[int, int]:
    """First and last address (exclusive) that the tensors of the storage at `base` use."""
    start = min(tensor.data_ptr() for tensor in tensors)
    end = max(
        tensor.data_ptr()
        + (1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)))
        * tensor.itemsize
        for tensor in tensors
    )
    return start - (start - base) % _WIDEST, end


def _checked(span: TensorSpan) -> TensorSpan:
    if any((tensor.data_ptr() - span.start) % tensor.itemsize for tensor in span.tensors):
        raise ManageError(
            f"tensors of shapes {[tuple(tensor.shape) for tensor in span.tensors]} overlap in memory at addresses that "
            "no single storage can hold: clone one of them before manage()"
        )
    return span


def like_over(tensor: torch.Tensor, flat: torch.Tensor, offset: int) -> torch.Tensor:
    """A tensor of the same dtype, shape and strides over the storage of `flat`, `offset` bytes from its start."""
    # A tensor made under torch.inference_mode can only be replaced by another such, and a plain one by a plain one.
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        like = torch.empty(0, dtype=tensor.dtype, device=flat.device)
        like.set_(flat.untyped_storage(), offset // tensor.itemsize, tensor.size(), tensor.stride())
        if tensor.is_conj():
            like = like.conj()
        return torch._neg_view(like) if tensor.is_neg() else like


def _tensors(model: nn.Module) -> Iterator[tuple[int, str, torch.Tensor]]:
    """(id of the module, name, tensor) of every parameter and buffer; of a wrapper, of every tensor inside it."""
    for prefix, module in model.named_modules():
        members = (
            *module.named_parameters(prefix, recurse=False, remove_duplicate=False),
            *module.named_buffers(prefix, recurse=False, remove_duplicate=False),
        )
        for name, tensor in members:
            for inner_name, inner in _unwrapped(name, tensor):
                yield id(module), inner_name, inner


def _unwrapped(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    wrapper: Any = tensor
    if not is_traceable_wrapper_subclass(wrapper):
        yield name, tensor
        return
    for attribute in wrapper.__tensor_flatten__()[0]:
        inner = getattr(wrapper, attribute)
        if isinstance(inner, torch.Tensor):  # DTensor names its mesh, too
            yield from _unwrapped(f"{name}.{attribute}", inner)


def in_graphs(model: nn.Module) -> bool:
    """Does torch refer to any tensor of the model, as an autograd graph does?"""
    return any(inner._use_count() != 1 for _, inner in held(model))  # type: ignore[attr-defined]


def held(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every parameter and buffer, of a wrapper of every tensor inside it, under each of its names,
    read from the modules' dictionaries so that no streamed layer notices it (hooks/streaming/bound.py)."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for kind in ("_parameters", "_buffers"):
            for name, tensor in dict.items(module.__dict__[kind]):
                if tensor is not None:
                    yield from _unwrapped(f"{prefix}.{name}" if prefix else name, tensor)


def _layers_by_module(model: nn.Module, layers: Sequence[nn.Module]) -> dict[int, set[int | None]]:
    """Returns, id of a module -> indices of the layers that contain it, and None if it is reached outside of them."""
    indices: dict[int, set[int | None]] = {}

    def visit(module: nn.Module, layer: int | None) -> None:
        if layer not in indices.setdefault(id(module), set()):
            indices[id(module)].add(layer)
            for child in module.children():
                if layer is not None or id(child) not in tops:
                    visit(child, layer)

    tops = {id(layer) for layer in layers}
    visit(model, None)
    for index, layer in enumerate(layers):
        visit(layer, index)
    return indices


def _on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and not is_lazy(tensor)


def _elsewhere(member: TensorMember, device: torch.device) -> ManageError | None:
    """Returns the error for a tensor that has no values, or is not on `device`."""
    if is_lazy(member.tensor):
        return ManageError(
            f"{member.name} has no shape yet: run the model once, so that its lazy modules know their sizes"
        )
    if member.tensor.device.type == "meta":
        return ManageError(
            f"{member.name} is on the meta device, which holds no values: load the weights first, without offloading "
            f"them (device_map={str(device)!r})"
        )
    if member.tensor.device != device:
        return WrongDevice(
            f"{member.name} is on {member.tensor.device}, but ballonet was installed for {device}: call "
            f"model.to({str(device)!r}) first, or load the model with ballonet.from_pretrained(), also where it is "
            "larger than the device, or install(device=...) for the device that the model is on"
        )
    return None


def _reason_to_leave(tensor: torch.Tensor) -> str | None:
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}"
    if tensor.is_quantized:
        return f"its dtype is {tensor.dtype}, whose scales lie outside its memory"
    if tensor.numel() and not _has_memory(tensor):
        return f"it is a {type(tensor).__name__}, which has no memory of its own"
    if tensor.device.type == "cpu" and tensor.is_shared():
        return "it is shared with other processes"
    if hasattr(tensor, "CB") and hasattr(tensor, "SCB"):  # an Int8Params of bitsandbytes
        return f"it is a {type(tensor).__name__}, whose layer puts its memory back after each forward"
    return None


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return tensor.untyped_storage().data_ptr() != 0
    except (NotImplementedError, RuntimeError):
        return False
