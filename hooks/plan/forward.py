"""A model from its configuration, without a value: the sizes of its weights and of its KV, and the operations, reads
and allocations of a forward, found by running it.

Note [The class decides]
    The model is built on the meta device by the class that would load it, in the dtype of its checkpoint: so tied
    weights, experts and buffers are those of a run, and no formula for an architecture is needed. The widths of keys
    and values come from one token through the model (compat.run_without_values), as configurations are wrong about
    some.

Note [What is watched]
    Every operator of a forward on the meta device is seen: the bytes of each storage for as long as it lives, whose
    largest sum is the peak of the heap, and the operations of matrix products. Attention is seen as one operator that
    allocates its result, as fused kernels do. KV of elastic layers lies in ranges, so tensors that a cache returns do
    not count. Allocations inside of a kernel are not seen.

Note [Layers that are alike]
    If layers have one class and shape and an elastic cache, only the first two are run. The others return a tensor like
    theirs, and count as the second one did: they allocate nothing that lives longer than a layer.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Final

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from ...allocator.errors import BallonetError, ConfigError
from ...offload.policy.layout import Block
from ...offload.policy.planner.hardware import ForwardWork
from ..compat import (
    cache_name,
    generating_class,
    load_config,
    longest_sequence,
    prepared_caches,
    quantization,
    run_without_values,
)
from ..kv.cache import CachePlan
from ..programs.model_info import Widths, dtype_of, planned, quiet, widths_of
from ..weights.model_parts import decoder_layers, members

_GROUPED: Final = frozenset(
    grouped
    for owner in (torch, functional)
    for name in ("_grouped_mm", "grouped_mm")
    if (grouped := getattr(owner, name, None))
)


@dataclass(frozen=True, slots=True)
class Weight:
    """A block of weights: its bytes, the only decoder layer that uses it, else None, and how many of the bytes are
    elements of matrices, which can be quantized."""

    nbytes: int
    layer: int | None
    matrix: int


@dataclass(frozen=True, slots=True)
class Described:
    """A configuration and the class that would load it; equal if their `text` (JSON) is equal."""

    model_class: Any
    text: str
    config: Any = field(compare=False)

    @classmethod
    def of(cls, model_class: Any, config: Any) -> Described:
        return cls(model_class, f"{config._attn_implementation} {config.to_json_string(use_diff=False)}", config)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model without values; equal if their descriptions are equal. `model`: on the meta device. `weights`: in the
    order in which they are moved. `layers`: the number of decoder layers. `widths`: of each elastic layer of its cache,
    by index. `positions`: its longest sequence, 0 where the configuration has none."""

    described: Described
    name: str = field(compare=False)
    model: Any = field(compare=False)
    weights: tuple[Weight, ...] = field(compare=False)
    layers: int = field(compare=False)
    widths: Mapping[int, Widths] = field(compare=False)
    dtype: torch.dtype = field(compare=False)
    positions: int = field(compare=False)

    @property
    def config(self) -> Any:
        return self.described.config

    def blocks(self, bits: int | None = None) -> list[Block]:
        """Returns the weights for `layout.place`. `bits`: of an element of quantized matrices, None: not quantized."""
        wide = 8 * self.dtype.itemsize
        share = 1.0 if bits is None else min(1.0, bits / wide)
        return [
            Block(key, max(1, weight.nbytes - int(weight.matrix * (1 - share))), weight.layer)
            for key, weight in enumerate(self.weights)
        ]


def shape_of(name: str) -> ModelShape:
    """Returns the shape of a model: a folder, a name on the hub, or a type with its defaults. ConfigError where its
    configuration cannot be read, is incomplete, or is of no decoder of text."""
    quiet()
    config = load_config(name)
    model_class: Any = generating_class(config)
    if model_class is None:
        raise ConfigError(f"{name}: transformers has no class that generates text with a {type(config).__name__}")
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{name} has an encoder, whose tokens a plan does not count: give a model that only decodes")
    if quantization(config, {}):
        raise ConfigError(
            f"{name} is quantized, and its configuration does not say how large its weights are: give the model that "
            "it was made of; what fewer bits would change is among the changes"
        )
    described, caches = Described.of(model_class, config), planned(name, model_class, config)
    model, dtype = _built(name, model_class, config)
    layers = decoder_layers(model)
    if not layers:
        raise ConfigError(f"{name}: the configuration does not say how many decoder layers there are")
    return ModelShape(
        described,
        name,
        model,
        tuple(_weights(model, layers)),
        len(layers),
        _widths(name, described, caches),
        dtype,
        longest_sequence(config),
    )


def _built(name: str, model_class: Any, config: Any) -> tuple[Any, torch.dtype]:
    dtype = dtype_of(config)
    try:
        with torch.device("meta"):
            return model_class._from_config(copy.deepcopy(config), dtype=dtype).eval(), dtype
    except Exception as error:  # any error: the model's code runs on an incomplete configuration
        raise ConfigError(
            f"{name}: {model_class.__name__} cannot be built from this configuration, which may lack sizes: "
            f"{type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def _weights(model: nn.Module, layers: tuple[nn.Module, ...]) -> Iterator[Weight]:
    """Yields a block for the tensors of each storage, as they move (model_parts.py, Note [What moves together])."""
    storages: dict[int, tuple[list[torch.Tensor], set[int | None]]] = {}
    for member in members(model, layers):
        if member.tensor.numel():
            tensors, users = storages.setdefault(member.tensor.untyped_storage()._cdata, ([], set()))
            tensors.append(member.tensor)
            users.update(member.layers)
    for tensors, users in storages.values():
        nbytes = max(tensor.untyped_storage().nbytes() for tensor in tensors)
        matrix = tensors[0].dim() > 1 and tensors[0].is_floating_point()
        layer = users.pop() if len(users) == 1 else None
        yield Weight(nbytes, layer, nbytes if matrix and layer is not None else 0)


def _widths(name: str, described: Described, caches: CachePlan) -> Mapping[int, Widths]:
    elastic = [index for index, layer in enumerate(caches.layers) if layer.elastic]
    if not elastic:
        return {}
    try:
        widths = _all_widths(described)
    except BallonetError:
        raise
    except Exception as error:  # any error: the model's own code runs without values
        raise ConfigError(
            f"{name}: the widths of its keys and values are known with the first token only, as its code asks for "
            f"values: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    known = {index: width for index in elastic if (width := widths[index]) is not None}
    if len(known) < len(elastic):
        raise ConfigError(f"{name}: its keys and values have other dimensions than sequences, heads, tokens, elements")
    return known


@lru_cache(maxsize=64)
def _all_widths(described: Described) -> tuple[Widths | None, ...]:
    """Returns the widths of each layer of its cache. Raises any error of the model's code."""
    (cache,) = run_without_values(described.model_class, described.config)
    return tuple(widths_of(cache))


@dataclass(frozen=True, slots=True)
class SeenForward:
    """A forward's work, and the peak bytes of its tensors in each of its `stages`: before the first elastic layer
    appends its tokens, from there until the next one does, and so on."""

    work: ForwardWork
    stages: tuple[int, ...]

    @property
    def peak(self) -> int:
        """The peak of all stages, in bytes."""
        return max(self.stages)


@lru_cache(maxsize=256)
def seen(shape: ModelShape, batch: int, prompt: int, context: int, alike: int = 2) -> tuple[SeenForward, SeenForward]:
    """Returns the prefill of `prompt` tokens, and the decode step with which each sequence has `context` tokens.
    ConfigError where the model's code asks for values. `alike`: see Note [Layers that are alike]."""
    logging.disable(logging.WARNING)
    try:
        with torch.device("meta"), torch.no_grad():
            cache = prepared_caches(shape.model, context)[0]
            lengths = _Lengths(cache, shape)
            first = _forward(shape, cache, lengths, batch, prompt, alike)
            lengths.held = context - 1
            return first, _forward(shape, cache, lengths, batch, 1, alike)
    except Exception as error:  # any error: the model's own code runs without values
        raise ConfigError(
            f"{shape.name}: what a forward allocates cannot be told without values: {type(error).__name__}: "
            f"{' '.join(str(error).split())}"
        ) from error
    finally:
        logging.disable(logging.NOTSET)


class _Lengths:
    """The elastic layers of a cache, with `held` tokens each, but no tensors of them."""

    def __init__(self, cache: Any, shape: ModelShape) -> None:
        self.held = 0
        self.meter: _Meter | None = None
        for index in shape.widths:
            layer = cache.layers[index]
            layer.update = partial(self._update, shape.widths[index])
            layer.get_seq_length = lambda *_: self.held

    def _update(
        self, widths: tuple[int, int, int], keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any
    ) -> Any:
        assert self.meter is not None
        self.meter.next_stage()
        tokens = self.held + keys.shape[2]
        with self.meter.paused():
            return tuple(
                torch.empty((keys.shape[0], widths[0], tokens, width), dtype=keys.dtype, device=keys.device)
                for width in widths[1:]
            )


def _forward(shape: ModelShape, cache: Any, lengths: _Lengths, batch: int, tokens: int, alike: int) -> SeenForward:
    model, meter = shape.model, _Meter(shape.dtype.itemsize)
    lengths.meter = meter
    given: dict[str, Any] = {cache_name(model): cache, "use_cache": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        given["logits_to_keep"] = 1
    with ExitStack() as stack:
        stack.enter_context(_alike(shape, meter, alike))
        stack.enter_context(_experts(model))
        stack.enter_context(meter)
        stack.enter_context(_Fused(meter))
        out = model(input_ids=torch.zeros((batch, tokens), dtype=torch.int64), **given)
        out.logits[:, -1, :].to(copy=True, dtype=torch.float32)  # `generate()` makes this copy
    meter.next_stage()
    return SeenForward(meter.work, tuple(meter.stages))


class _Meter(TorchDispatchMode):
    """Counts operations, reads and allocations of operators. See Note [What is watched]."""

    def __init__(self, itemsize: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops, self.read, self.calls = 0.0, 0.0, 0
        self.stages: list[int] = []  # the peaks of stages that are over
        self.peak = 0  # the present stage's
        self._now = 0
        self._itemsize = itemsize
        self._paused = False
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def work(self) -> ForwardWork:
        """The work so far."""
        return ForwardWork(self.flops, self.read, self.calls, self._itemsize)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A `with` block in which nothing is counted."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def add(self, other: ForwardWork, peaks: Sequence[int]) -> None:
        """Counts the work of another meter, in stages with these peaks."""
        self.flops += other.flops
        self.read += other.read
        self.calls += other.calls
        for peak in peaks:
            self.peak = max(self.peak, peak)
            self.next_stage()
        self.peak = self.stages.pop()  # the last one goes on

    def next_stage(self) -> None:
        """Begins another stage."""
        self.stages.append(self.peak)
        self.peak = self._now

    def attended(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Counts an attention: each of several queries sees half of the keys on average."""
        pairs = query.numel() // query.shape[-1] * key.shape[-2]
        self.flops += 2 * pairs * (key.shape[-1] + value.shape[-1]) / (2 if query.shape[-2] > 1 else 1)
        self.read += key.nbytes + value.nbytes

    def multiplied(self, rows: torch.Tensor, weights: torch.Tensor) -> None:
        """Counts products of rows with a matrix each; at most as many matrices are read as there are rows."""
        self.flops += 2 * rows.numel() * weights.shape[-1]
        self.read += rows.nbytes + weights.nbytes * min(1.0, rows.shape[0] / weights.shape[0])
        self.calls += 1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            return 1
        if function is torch.ops.aten.nonzero.default:
            return torch.zeros((1, args[0].dim()), dtype=torch.int64, device="meta")
        out = function(*args, **(kwargs or {}))
        if not self._paused:
            self._note(function, args, kwargs or {}, out)
        return out

    def _note(self, function: Any, args: Any, kwargs: Any, out: Any) -> None:
        for key in [key for key, (reference, _) in self._live.items() if reference.expired()]:
            self._now -= self._live.pop(key)[1]
        known = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        fresh = False
        for tree_leaf in filter(_is_tensor, tree_leaves(out)):
            storage = tree_leaf.untyped_storage()
            if storage._cdata not in known and storage._cdata not in self._live:
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self._now += storage.nbytes()
                fresh = True
        self.peak = max(self.peak, self._now)
        self.calls += fresh
        if (flops := flop_registry.get(function._overloadpacket)) is not None:
            self.flops += flops(*args, **kwargs, out_val=out)
            self.read += sum(leaf.nbytes for leaf in tree_leaves(args) if _is_tensor(leaf))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class _Fused(TorchFunctionMode):
    """Makes fused attention, and experts in groups, allocate only their result."""

    def __init__(self, meter: _Meter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if function is functional.scaled_dot_product_attention:
            return self._attend(*args, **given)
        if function in _GROUPED:
            return self._experts(*args, **given)
        return function(*args, **given)

    def _attend(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        self._meter.attended(query, key, value)
        return query.new_empty((*query.shape[:-1], value.shape[-1]))

    def _experts(self, rows: Any, weights: Any, *_: Any, **__: Any) -> Any:
        """Multiplies `rows` of tokens, each with the matrix of its expert: [experts, elements, elements]."""
        self._meter.multiplied(rows, weights)
        return rows.new_empty((*rows.shape[:-1], weights.shape[-1]))


@contextmanager
def _alike(shape: ModelShape, meter: _Meter, most: int) -> Iterator[None]:
    """A `with` block in which layers that are like `most` earlier ones are not run. See Note [Layers that are
    alike]."""
    runs: dict[Any, list[_Ran]] = {}
    layers = decoder_layers(shape.model)
    for index, layer in enumerate(layers):
        if index in shape.widths or len(shape.widths) == len(layers):
            sizes = tuple(tuple(parameter.shape) for parameter in (*layer.parameters(), *layer.buffers()))
            kind = getattr(layer, "attention_type", None), getattr(layer, "layer_type", None)
            ran = runs.setdefault((type(layer), sizes, kind), [])
            vars(layer)["forward"] = partial(_run, layer, type(layer).forward, ran, meter, most)
    try:
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


@dataclass(frozen=True, slots=True)
class _Ran:
    """A layer's work, the peaks of its stages, and the shapes of its result."""

    work: ForwardWork
    peaks: tuple[int, ...]
    like: Any


def _run(
    layer: nn.Module, forward: Callable[..., Any], ran: list[_Ran], meter: _Meter, most: int, *args: Any, **kw: Any
) -> Any:
    if len(ran) < most:
        before, stages = meter.work, len(meter.stages)
        out = forward(layer, *args, **kw)
        after = meter.work
        done = ForwardWork(
            after.flops - before.flops, after.read - before.read, after.calls - before.calls, after.itemsize
        )
        like = tree_map(lambda value: (value.shape, value.dtype) if _is_tensor(value) else value, out)
        ran.append(_Ran(done, (*meter.stages[stages:], meter.peak), like))
        return out
    calls, out = meter.calls, _made(ran[-1].like)
    meter.calls = calls
    meter.add(ran[-1].work, ran[-1].peaks)
    return out


def _made(like: Any) -> Any:
    """Makes tensors of these shapes."""
    if isinstance(like, tuple) and len(like) == 2 and isinstance(like[0], torch.Size):
        return torch.empty(like[0], dtype=like[1], device="meta")
    return type(like)(map(_made, like)) if isinstance(like, tuple | list) else like


@contextmanager
def _experts(model: Any) -> Iterator[None]:
    """A `with` block in which experts use the implementation that neither depends on values nor copies weights."""
    config = model.config.get_text_config(decoder=True)
    before = getattr(config, "_experts_implementation", None)
    if before is not None:
        config._experts_implementation = "grouped_mm"
    try:
        yield
    finally:
        if before is not None:
            config._experts_implementation = before
