"""Writes the recipe of a forward down while it runs eagerly.

Note [Recording]
    The forward computes as ever, on the caller's thread, and what it returns is what counts: recording changes no value
    and captures nothing. Each operator is noted as torch dispatches it, with what it reads. What goes into no graph
    runs with recording paused: the cache's `update`, the attention function, mask functions, modules that are given the
    cache where attention is not cut (`whole`), layers that are away.

Note [What may be read]
    A graph reads the addresses that it has read at its capture. So an operator may read what this forward has made,
    what is copied in for each forward, and the model's own parameters and buffers, whose addresses stay. Anything else
    is refused by name: the cache's tensors (so no graph holds an address of KV), a table that a module keeps, tensors
    of other threads. So are operators whose result's shape is only known on the device, that draw random numbers, or
    that compute on the CPU, and such that write to weights or inputs. Operators on a mask are eager calls, as what they
    make is as long as that. A refused recording does not disturb the forward.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig

from ..compat import Cache, TorchDispatchMode
from ..forward.hook_base import remove_all
from .attention import TorchListener
from .batch import BatchStep
from .recipe import (
    OUTSIDE,
    THE_CACHE,
    EagerCall,
    Facts,
    Fresh,
    Given,
    LayerStep,
    Made,
    Number,
    Op,
    OutputFields,
    Recipe,
    Step,
    WeightOperand,
    operands,
    rebuild,
    without_unread,
    writes,
)

_UNKNOWN_SIZE: Final = "its result's shape is only known on the device"
_TAGS: Final = {
    torch.Tag.data_dependent_output: "the host needs its result",
    torch.Tag.dynamic_output_shape: _UNKNOWN_SIZE,
    torch.Tag.nondeterministic_seeded: "it draws random numbers",
}


OUTPUT: Final = (OUTSIDE, 0)  # the number under which `cuts` has what the forward returns


BATCH: Final = "the step of a loop"  # the name under which a forward is given it
_INDEXING: Final = frozenset((torch.ops.aten.index.Tensor,))
_CONSTANT: Final = (  # what an eager call may be given, beside tensors and the cache: it stays what it is
    type(None), bool, int, float, complex, str, bytes, slice, range, frozenset, Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.Generator,
    nn.Module, PreTrainedConfig, FunctionType, BuiltinFunctionType, MethodType, type, functools.partial,
)  # fmt: skip


class _Block:
    """The steps of a decoder layer, or of what is in none, and how many tensors and calls they have named."""

    def __init__(self, place: int, steps: list[Step] | None = None) -> None:
        self.place = place
        self.steps: list[Step] = [] if steps is None else steps
        self.made = 0
        self.calls = 0


class Refused(Exception):
    """Why a forward cannot be recorded as it was tried."""


class ForwardRecorder(TorchDispatchMode):
    """Records the forward within `recording()`. `refusal`: why there is no recipe, empty where there is one."""

    def __init__(
        self,
        weights: Mapping[int, tuple[torch.Tensor, ...]],
        device: torch.device,
        given: Mapping[str, Any],
        cache: Any,
        grows: Container[str],
        batch: BatchStep | None = None,
    ) -> None:
        """`weights`: address of a storage -> the parameters and buffers in it. `given`: the forward's keyword
        arguments. `grows`: names of those that are longer each time, which no operator may read. `batch`: the step of a
        loop that the forward is."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.refusal = ""
        self.never_alone = set[int]()  # layers that are away, and cannot run on their own
        self.fine = True  # is attention cut out?
        self.thread = threading.get_ident()
        self.cache = cache
        self.batch = batch
        self.new: tuple[Any, Any] | None = None  # keys and values that a batch's cache is to be updated with
        self.given = given
        self.inputs: dict[str, Made] = {}
        self.results: dict[tuple[int, int], Any] = {}  # what each eager call has returned, a tree with tensors
        self.cuts: dict[tuple[int, int], list[tuple[Made, torch.Tensor]]] = {}  # copies of what each call was given
        self.constants: dict[int, torch.Tensor] = {}  # weights by id, and inputs' tensors, for as long as this lives
        self._weights = weights
        self._device = device
        self._blocks = [_Block(OUTSIDE)]
        self._count = 0  # decoder layers so far
        self._layers: list[LayerStep] = []
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], Made | Fresh | Given]] = {}
        self._paused = 0
        self._awaits = ""  # what must come before the next operator
        tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
        self._given_storages = {value.untyped_storage().data_ptr() for value in tensors}
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                if name in grows:
                    self._remember(value, Given(name))
                else:
                    self.inputs[name] = self._make(value)
                self.constants[id(value)] = value
            elif name in grows and isinstance(value, Mapping):  # a mask for each kind of layer
                for kind, mask in value.items():
                    if isinstance(mask, torch.Tensor):
                        self._remember(mask, Given(f"{name}.{kind}"))

    # -- operators

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if not self._paused and not self.refusal:
            try:
                self._note(function, args, kwargs, result)
            except Refused as why:
                self.refuse(str(why))
        return result

    def refuse(self, why: str) -> None:
        """Notes why there will be no recipe; the first reason counts."""
        self.refusal = self.refusal or why

    def _note(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        if self._awaits:
            raise Refused(f"{function} runs between an update of the cache and its attention")
        if (why := _needs_host(function)) and not (function in _INDEXING and _by_numbers(args[1])):
            raise Refused(f"{function}: {why}")
        tensors = [leaf for leaf in operands(result) if isinstance(leaf, torch.Tensor)]
        if tensors and all(leaf.device.type == "cpu" != self._device.type and not leaf.dim() for leaf in tensors):
            return  # a scalar, which is read by value
        if any(
            isinstance(leaf, torch.Tensor) and isinstance(self.found(leaf), (Fresh, Given))
            for leaf in operands((args, kwargs))
        ):
            self._note_fresh(function, args, kwargs, result)
            return
        read = rebuild((tuple(args), dict(kwargs)), functools.partial(self._operand, function))
        for value in _written(function, args, kwargs):
            self._check_written(function, value)
        if not tensors:
            raise Refused(f"{function} makes no tensor")
        if any(leaf.device != self._device for leaf in tensors):
            raise Refused(f"{function} computes on {tensors[0].device}")
        made = tuple(self._make(leaf) for leaf in tensors)
        self._blocks[-1].steps.append(Op(function, read[0], read[1], made, tuple(map(Facts.of, tensors))))

    def _check_written(self, function: Any, value: torch.Tensor) -> None:
        """Refused where an operator writes to what this forward has not made, or to a view of that."""
        address = value.untyped_storage().data_ptr()
        if address and address in self._weights:
            raise Refused(f"{function} writes to {WeightOperand(self._weights[address][0])!r}")
        if address and address in self._given_storages:
            raise Refused(f"{function} writes to an argument of the forward")

    def _note_fresh(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Notes an operator on a mask: what it makes is as long as that, and is made anew each time."""
        if writes(function):
            raise Refused(f"{function} writes to a mask")
        self.returned(self.began("mask", function, args, kwargs), result)

    def _operand(self, function: Any, value: Any) -> Any:
        """Returns what a graph would read for this argument. Refused."""
        if not isinstance(value, torch.Tensor):
            return value
        known = self.found(value)
        if isinstance(known, Made):
            return known
        if value.device.type == "cpu" != self._device.type and not value.dim():
            return Number(value)
        return self._weight(value) or _refuse(
            f"{function} reads a tensor of {list(value.shape)} that is not the model's"
        )

    def _weight(self, value: torch.Tensor) -> WeightOperand | None:
        try:
            address = value.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # a tensor without memory of its own
            address = id(value)
        if not any(value is weight for weight in self._weights.get(address, ())):
            return None
        self.constants[id(value)] = value
        return WeightOperand(value)

    # -- tensors

    def _remember(self, tensor: torch.Tensor, value: Made | Fresh | Given) -> None:
        self._known[id(tensor)] = weakref.ref(tensor), value

    def found(self, tensor: torch.Tensor) -> Made | Fresh | Given | None:
        """Returns what a tensor is to this forward, None where that is not known."""
        known = self._known.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def _make(self, tensor: torch.Tensor, anew: bool = False) -> Made:
        """Returns what a tensor that was made is to be called; as before where it was written to in place, unless
        `anew`."""
        known = self.found(tensor)
        if isinstance(known, Made) and not anew:
            return known
        block = self._blocks[-1]
        block.made += 1
        self._remember(tensor, made := Made(block.place, block.made))
        return made

    # -- eager calls

    @contextmanager
    def _pause(self) -> Iterator[None]:
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def aside(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Makes a call that is of no use in a forward by graphs."""
        with self._pause():
            return function(*args, **kwargs)

    @property
    def records(self) -> bool:
        """Does an eager call that begins now have to be noted?"""
        return not self._paused and not self.refusal and threading.get_ident() == self.thread

    def call(self, kind: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Makes an eager call and notes it: returns what `function(*args, **kwargs)` does."""
        noted: EagerCall | None = None
        try:
            noted = self.began(kind, function, args, kwargs)
        except Refused as why:
            self.refuse(str(why))
        listener = TorchListener(lambda tensor: self.found(tensor) or self._weight(tensor))
        with self._pause(), listener if TorchListener.understands(function) else nullcontext():
            result = function(*args, **kwargs)
        if noted is not None:
            noted.calls = listener.returned(result)
            self.returned(noted, result)
        return result

    def began(self, kind: str, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> EagerCall:
        """Notes an eager call that begins. Refused."""
        self._check(kind)
        passed = {name: Given(name) for name, value in kwargs.items() if self._passes(name, value)}
        others = {name: value for name, value in kwargs.items() if name not in passed}
        read = rebuild((tuple(args), others), functools.partial(self._argument, kind))
        read[1].update(passed)
        block = self._blocks[-1]
        block.calls += 1
        call = EagerCall((block.place, block.calls), kind, function, *read)
        with self._pause():
            self.cuts[call.number] = [
                (made, value.clone())
                for value in operands((args, kwargs))
                if isinstance(value, torch.Tensor) and isinstance(made := self.found(value), Made)
            ]
        return call

    def _passes(self, name: str, value: Any) -> bool:
        """Is this an argument of a batch's forward that is passed on? They differ from step to step."""
        return self.batch is not None and value is self.given.get(name, self) and name not in self.inputs

    def _check(self, kind: str) -> None:
        if kind != "attention" and self._awaits:
            raise Refused(f"a second {kind} comes between an update of the cache and its attention")
        if kind == "update":
            self._awaits = "attention"
        elif kind == "attention":
            self._awaits = ""

    def _argument(self, kind: str, value: Any) -> Any:
        """Returns what an eager call reads for this argument. Refused."""
        if value is self.cache:
            return THE_CACHE
        if value is not None and value is self.batch:
            return Given(BATCH)
        if isinstance(value, Cache):
            raise Refused(f"{kind} uses another cache")
        if not isinstance(value, torch.Tensor):
            return value if isinstance(value, _CONSTANT) else _refuse(f"{kind} is given a {type(value).__name__}")
        known = self.found(value) or self._weight(value)
        if known is None:
            if value.device.type == "cpu" != self._device.type and not value.dim():
                return Number(value)
            raise Refused(f"{kind} reads a tensor of {list(value.shape)} that nothing recorded has made")
        return known

    def returned(self, noted: EagerCall, result: Any, layer: LayerStep | None = None) -> None:
        """Notes what an eager call has returned. `layer`: the one whose call it is."""
        fresh = noted.kind in ("update", "mask")
        count = 0

        def leaf(value: Any) -> Any:
            nonlocal count
            if isinstance(value, Cache):
                return THE_CACHE if value is self.cache else _refuse(f"{noted} returns another cache")
            if not isinstance(value, torch.Tensor):
                return value
            if fresh:
                count += 1
                name: Any = Fresh(noted.number, count - 1)
                self._remember(value, name)
                return name
            known = self.found(value)
            if isinstance(known, (Given, Fresh)):
                return known
            if torch._debug_has_internal_overlap(value) == 1:
                raise Refused(f"{noted} returns a tensor whose elements share memory")
            made = self._make(value, anew=layer is not None)
            noted.facts[made] = Facts.of(value)
            if layer is not None and layer.body is not None:
                layer.made[made] = known if isinstance(known, Made) else _refuse(f"{layer} returns something unknown")
            return made

        try:
            noted.results = rebuild(result, leaf)
        except Refused as why:
            self.refuse(str(why))
        if noted.kind == "mask":
            masks = (leaf for leaf in operands(result) if isinstance(leaf, torch.Tensor))
            noted.masks = tuple((mask.dtype, tuple(mask.shape[:-1])) for mask in masks)
        self.results[noted.number] = result
        self._blocks[-1].steps.append(layer or noted)

    # -- layers

    def enter_layer(self, index: int, module: nn.Module, args: Any, kwargs: Any, away: bool) -> None:
        """Begins a decoder layer; `away`: it is one eager call."""
        try:
            call, why_not = self.began("module", module, args, kwargs), ""
        except Refused as why:
            if away:
                self.never_alone.add(index)
                self.refuse(f"layer {index} is away: {why}")
                return
            call, why_not = self.began("module", module, (), {}), str(why)
        layer = LayerStep(index, call, None if away else [], why_not_alone=why_not)
        self._layers.append(layer)
        if layer.body is None:
            self._paused += 1
        else:
            self._blocks.append(_Block(self._count, layer.body))
        self._count += 1

    def leave_layer(self, result: Any) -> None:
        """Ends the decoder layer that was entered last."""
        if self.refusal or not self._layers:
            return
        layer = self._layers.pop()
        if layer.body is None:
            self._paused -= 1
        else:
            self._blocks.pop()
        self.returned(layer.call, result, layer)

    # -- the whole

    def has_seen(self, layer: LayerStep) -> bool:
        """Has it recorded this layer from within?"""
        return layer.body is not None and all(
            step.number in self.results for step in layer.body if isinstance(step, EagerCall)
        )

    def recipe(self, output: Any) -> Recipe | None:
        """Returns the recipe of a forward that has returned `output`; None where there is none, see `refusal`."""
        if self._awaits:
            self.refuse("the forward ends between an update of the cache and its attention")
        if not self.refusal:
            try:
                return without_unread(Recipe(self.inputs, self._blocks[0].steps, _fields(output, self._returned)))
            except Refused as why:
                self.refuse(str(why))
        return None

    def _returned(self, value: Any) -> Any:
        if value is self.cache:
            return THE_CACHE
        if isinstance(value, Cache):
            raise Refused("the forward returns another cache")
        if not isinstance(value, torch.Tensor):
            return value
        known = self.found(value)
        if not isinstance(known, Made):
            raise Refused(f"the forward returns a tensor of {list(value.shape)} that nothing recorded has made")
        with self._pause():
            self.cuts.setdefault(OUTPUT, []).append((known, value.clone()))
        return known


def _fields(output: Any, leaf: Callable[[Any], Any]) -> Any:
    """Returns the tree of what a forward has returned."""
    if isinstance(output, Mapping) and type(output) is not dict:
        return OutputFields(type(output), {name: rebuild(value, leaf) for name, value in output.items()})
    return rebuild(output, leaf)


def _refuse(why: str) -> Any:
    raise Refused(why)


@functools.cache
def _needs_host(function: Any) -> str:
    """Why an operator can be in no graph; empty where it can."""
    return next((why for tag, why in _TAGS.items() if tag in function.tags), "")


def _by_numbers(indices: Any) -> bool:
    """Are the elements chosen by numbers, so that it is known how many there are?"""
    return not any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _written(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    for place, name in writes(function):
        value = args[place] if place < len(args) else kwargs.get(name)
        yield from (leaf for leaf in operands(value) if leaf is not None)


class RecordedLayers:
    """Hooks of decoder layers, and of modules that are never captured, which tell a recorder of their calls.

    torch puts a hook in before it notes that it takes keyword arguments: a call of another thread that comes in between
    gives none.
    """

    def __init__(
        self,
        recorder: ForwardRecorder,
        layers: Sequence[nn.Module],
        whole: Sequence[nn.Module],
        away: Callable[[int], bool],
    ) -> None:
        """`whole`: modules that are one eager call each. `away`: must this layer be one?"""
        self._recorder = recorder
        self._layers = layers
        self._whole = [module for module in whole if module not in layers]
        self._away = away
        self._handles: list[RemovableHandle] = []
        self._open: list[tuple[nn.Module, EagerCall]] = []

    def add(self) -> None:
        """Puts the hooks in, until `remove`."""
        for index, layer in enumerate(self._layers):
            enter, leave = functools.partial(self._enter_layer, index), self._leave_layer
            self._handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(layer.register_forward_hook(leave))
        for module in self._whole:
            self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave))

    def remove(self) -> None:
        remove_all(self._handles)

    def _mine(self) -> bool:
        return threading.get_ident() == self._recorder.thread and not self._recorder.refusal

    def _enter_layer(self, index: int, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if self._mine() and self._recorder.records:
            self._recorder.enter_layer(index, module, args, kwargs, self._away(index))

    def _leave_layer(self, module: nn.Module, args: Any, result: Any) -> None:
        layers = self._recorder._layers
        if self._mine() and layers and layers[-1].call.function is module:
            self._recorder.leave_layer(result)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        recorder = self._recorder
        if not self._mine() or not recorder.records:
            return
        try:
            self._open.append((module, recorder.began("module", module, args, kwargs)))
        except Refused as why:
            recorder.refuse(str(why))
            return
        recorder._paused += 1

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        if self._mine() and self._open and self._open[-1][0] is module:
            _, call = self._open.pop()
            self._recorder._paused -= 1
            self._recorder.returned(call, result)
