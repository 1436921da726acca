"""Views of its slot, which a streamed layer's own forward reads in place of its parameters and buffers.

Note [Who reads what]
    The parameters of a streamed layer show its backing, at any time and to all code but the layer's own call. From the
    moment its copy has arrived until that call ends, frames that the call has called get views of the slot from the
    layer's modules. Other threads, a user's code between two calls, and code that runs after an exception or Ctrl-C are
    not among these frames, so nothing has to be put back. With gradients enabled no view is given out: backward would
    read it later. The call's frame is known by its id, and as alive by its keywords: what Ctrl-C broke off would else
    be kept, with the request's cache, until the next forward.
    The dictionaries of the modules hold the parameters themselves throughout. Code that bypasses their methods, as the
    interpreter and torch.compile's guards may, finds the backing: slower, and right.

Note [Views that outlive their call]
    A view that outlives the call (in a hook that collects weights, in an exception's traceback) would show the next
    layer's bytes. So each call gets views of its own, made when they are asked for and dropped when it has ended. If
    torch then counts more references to the memory of the slot than before the call, one is still held: the slot's
    addresses lead to the layer's backing from then on and the slot gets others.

Note [Written between two passes]
    A layer that was copied to its slot for the next pass may be written on the host before that pass begins. Writing
    takes a reference: those that exist are counted (`unheld`, by device/references.py), those that are got through a
    module are noticed (`asked`). Where there are none of either kind, from before the copy to the beginning of the
    pass, the slot equals the layer. Where there are, or may be, the layer is copied again when the pass begins. A view
    that outlives its call may write to its layer through memory of its own: while there is one, each layer is copied
    again.

Note [Why a layer's own addresses do not lead to its slot]
    Layers of one slot could share its pages by aliasing, the layer's call would read its own parameters, and all other
    code would be given views of the backing. That was built and held against tests/streaming/test_who_looks.py. What is
    asked of modules is right then, and so is what is written to it. But who holds a parameter itself, as an optimizer
    does, or a hook that collects weights in the layer's call, reads another layer's bytes later, and no count of
    references can tell; memory that is given to a parameter (`weight.data = ...`) reaches a view only; and after Ctrl-C
    nothing says that the call has ended, so frames would have to be looked at all the same. A slot's addresses are
    fixed as well: a graph of a streamed layer would need no more than to be captured over its slot.
"""

from __future__ import annotations

import copy
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter, methodcaller
from types import FrameType
from typing import Any, Final

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..device.references import THIS, Interpreter, memory_references, perhaps_referenced
from ..forward.hook_base import CALL, CallKeywords, opaquely
from ..weights.model_parts import like_over

_KINDS: Final = ("_parameters", "_buffers")
_address, _size, _stride = methodcaller("data_ptr"), methodcaller("size"), methodcaller("stride")
_version = attrgetter("_version")
_inference = methodcaller("is_inference")  # has no versions
_Maker = Callable[[], Any]
_Layouts = tuple[list[int], list[Any], list[Any]]
Spot = Callable[[int], int | None]  # the address of a byte of the layer's ranges -> its offset in the slot


class Bound:
    """One streamed layer: the dictionaries of its modules, and the views that its own call reads."""

    def __init__(
        self, layer: nn.Module, tensors: Iterable[int], asked: Callable[[], object], interpreter: Interpreter = THIS
    ) -> None:
        """`tensors`: ids of those in its ranges; `asked` is called before code outside the layer's call gets one."""
        self.asked = asked
        self._interpreter = interpreter
        self.call = 0  # the id of the frame of the call that reads the slot, 0 where none does
        self.alive: Callable[[], object] = object  # does that frame still exist? Another one may have its id then
        self.thread = 0  # the thread of that call
        self._makers: tuple[_Maker, ...] = ()  # make the views of the layer's tensors, in their order
        self.now: dict[int, tuple[Any, _Maker]] = {}  # by id: a tensor of the layer, and what makes its view
        self.given: dict[int, Any] = {}  # by id: the views that the call has been given
        self._leaves: list[torch.Tensor] = []  # over the slot; their versions count writes to views
        self._layouts: _Layouts | None = None
        self._storage: torch.UntypedStorage | None = None  # the slot's
        self._references = 0  # counted to the slot's memory while no call has views; 0: not counted yet
        self._before = 0
        wanted = frozenset(tensors)
        self._modules: list[tuple[weakref.ref[nn.Module], str, tuple[str, ...]]] = []
        for module in layer.modules():
            for kind in _KINDS:
                plain = module.__dict__[kind]
                if isinstance(plain, Shown):  # of a layer, which has all of it
                    continue
                names = tuple(name for name, tensor in plain.items() if tensor is not None and _within(tensor, wanted))
                if names:
                    self._modules.append((weakref.ref(module), kind, names))
                    module.__dict__[kind] = Shown(plain, self)
        self.wraps = any(map(_wraps, self._held() or ()))

    def release(self) -> None:
        """Gives the modules plain dictionaries again, and drops the views."""
        self.show(None, None)
        for reference, kind, _ in self._modules:
            module = reference()
            shown = module and module.__dict__.get(kind)
            if isinstance(shown, Shown) and shown.bound is self:
                assert module is not None
                module.__dict__[kind] = shown.plain()
        self._modules.clear()

    def show(self, flat: torch.Tensor | None, spot: Spot | None) -> None:
        """Has the layer's call read `flat`, a slot, at the offsets of `spot`; with None the layer's own tensors."""
        self.call, self.now, self.given, self._makers = 0, {}, {}, ()
        self._leaves, self._layouts, self._storage, self._references = [], None, None, 0
        held = self._held()
        if flat is None or spot is None or held is None:
            return
        leaves: list[torch.Tensor] = []
        makers = [_maker(tensor, flat, spot, leaves) for tensor in held]
        present = tuple(maker for maker in makers if maker is not None)
        if len(present) < len(makers):
            return
        self._makers = present
        self._leaves = leaves if not any(map(_inference, leaves)) else []
        self._layouts = _layouts(self._flat(held) if self.wraps else held)
        self._storage = flat.untyped_storage()

    def look(self) -> tuple[int, bool]:
        """Returns (a number that changes when the layer's tensors are written to, except through `data`, which torch
        does not count; whether there are views of the layer as it is: False where a tensor has got other memory)."""
        held = self._held()
        if held is None:
            return 0, False
        leaves = self._flat(held) if self.wraps else held
        written = sum(map(_version, leaves)) if not any(map(_inference, leaves)) else 0  # inlined `_versions`
        if (
            not self._makers
            or ([*map(_address, leaves)], [*map(_size, leaves)], [*map(_stride, leaves)]) != self._layouts
        ):
            return written, False
        self.now = dict(zip(map(id, held), zip(held, self._makers, strict=True), strict=True))
        return written, True

    def written(self) -> int:
        """Returns the number that changes with writes, as `look` does."""
        held = self._held()
        if held is None:
            return 0
        leaves = self._flat(held) if self.wraps else held
        return sum(map(_version, leaves)) if not any(map(_inference, leaves)) else 0  # inlined `_versions`

    def enter(self, call: int, keywords: CallKeywords | None) -> None:
        """Has the call with the frame of this id, and these keywords, read the slot, which holds the layer. Follows a
        `look` that found views."""
        if not self._references:  # all layers of the slot have theirs by now
            self._references = self._count()
        self._before = sum(map(_version, self._leaves))
        self.thread = threading.get_ident()
        self.alive = object if keywords is None else weakref.ref(keywords)
        self.call = call

    def unheld(self) -> bool:
        """Do only the layer's modules refer to its tensors and their memory? Then they can be written to only through a
        module. False where that cannot be told."""
        held = self._held()
        return held is not None and not self.wraps and not perhaps_referenced(held, self._interpreter)

    def examine(self) -> tuple[int, bool]:
        """Returns (`written`, `unheld`), in one call."""
        held = self._held()
        if held is None:
            return 0, False
        if self.wraps:
            return _versions(self._flat(held)), False
        written = sum(map(_version, held)) if not any(map(_inference, held)) else 0  # inlined `_versions`
        return written, not perhaps_referenced(held, self._interpreter)

    def active(self, frame: FrameType | None) -> bool:
        """Does this frame belong to a call that reads the slot?"""
        call = self.call
        if not call or self.thread != threading.get_ident():
            return False
        while frame is not None and not (frame.f_code is CALL and id(frame) == call):
            frame = frame.f_back
        return frame is not None and self.alive() is not None

    def leave(self) -> tuple[bool, bool]:
        """Ends the call. Returns (has it written to the slot?, is a view of it still held?)."""
        self.call, self.now, self.given = 0, {}, {}
        return sum(map(_version, self._leaves)) != self._before, self._count() != self._references

    def memory(self) -> list[StorageWeakRef]:
        """Returns the memory of the slot that the layer's call reads; nothing where it reads none."""
        return [] if self._storage is None else [StorageWeakRef(self._storage)]

    def _held(self) -> list[Any] | None:
        """The tensors as they are now; None where one is gone."""
        tensors = []
        for reference, kind, names in self._modules:
            module = reference()
            if module is None:
                return None
            plain = module.__dict__[kind]
            for name in names:
                tensor = dict.get(plain, name)
                if tensor is None:
                    return None
                tensors.append(tensor)
        return tensors

    def _count(self) -> int:
        """Counts references to the slot's memory. A method of its own: a variable of the caller would be one."""
        return 0 if self._storage is None else memory_references(self._storage, self._interpreter)

    def _flat(self, tensors: list[Any]) -> list[Any]:
        """Returns the tensors that have memory, for a wrapper those inside of it."""
        return [leaf for tensor in tensors for leaf in _leaves(tensor)]


class Shown(dict[str, Any]):
    """The parameters or buffers of a module in a streamed layer, which show other tensors to the layer's call than to
    other code: see Note [Who reads what]. Copies and pickles are plain dictionaries."""

    __slots__ = ("bound",)

    def __init__(self, plain: Mapping[str, Any], bound: Bound) -> None:
        super().__init__(plain)
        self.bound = bound

    def plain(self) -> dict[str, Any]:
        """Returns the module's own tensors."""
        return dict(super().items())

    def __getitem__(self, name: str) -> Any:
        # for each weight of each layer of each token: all in one call
        held = super().__getitem__(name)
        if held is None:
            return None
        bound = self.bound
        call = bound.call
        if call and (entry := bound.now.get(id(held))) is not None:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and not (frame.f_code is CALL and id(frame) == call):  # inlined `Bound.active`
                frame = frame.f_back
            mine = frame is not None and bound.thread == threading.get_ident() and bound.alive() is not None
            if mine and not torch.is_grad_enabled():
                view = bound.given.get(id(held))
                if view is None:
                    view = bound.given[id(held)] = entry[1]()
                    if not (bound.wraps and _wraps(held)):
                        view.__dict__ = held.__dict__  # what is noted at one is noted at the other
                return view
        if is_dynamo_compiling():  # not before: the compiler cannot trace what looks at frames
            return opaquely(Shown.__getitem__, self, name)
        bound.asked()
        return held

    def __iter__(self) -> Iterator[str]:
        """Unchanged, but defined: C code copies a dictionary without it past all methods (`dict(shown)`)."""
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name, default) if super().get(name) is None else self[name]

    def copy(self) -> dict[str, Any]:
        return {name: self[name] for name in self}

    def items(self) -> Any:
        return self.copy().items()

    def values(self) -> Any:
        return self.copy().values()

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def pop(self, name: str, *default: Any) -> Any:
        if name in self:
            self.bound.asked()
        return super().pop(name, *default)

    def popitem(self) -> tuple[str, Any]:
        self.bound.asked()
        return super().popitem()

    def setdefault(self, name: str, default: Any = None) -> Any:
        super().setdefault(name, default)
        return self[name]

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        self.bound.asked()
        return copy.deepcopy(self.plain(), memo)

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        self.bound.asked()
        return dict, (self.plain(),)


def _within(tensor: Any, wanted: frozenset[int]) -> bool:
    return any(id(leaf) in wanted for leaf in _leaves(tensor))


def _leaves(tensor: Any) -> Iterator[Any]:
    """The tensor; of a wrapper (torchao's quantized weights) the tensors inside of it that have memory."""
    if not _wraps(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):
            yield from _leaves(inner)


def _wraps(tensor: Any) -> bool:
    return type(tensor) not in (nn.Parameter, torch.Tensor) and bool(is_traceable_wrapper_subclass(tensor))


def _layouts(leaves: Sequence[Any]) -> _Layouts:
    """Returns addresses, sizes and strides."""
    return [*map(_address, leaves)], [*map(_size, leaves)], [*map(_stride, leaves)]


def _versions(leaves: Sequence[Any]) -> int:
    return sum(map(_version, leaves)) if not any(map(_inference, leaves)) else 0


def _maker(tensor: Any, flat: torch.Tensor, spot: Spot, leaves: list[torch.Tensor]) -> _Maker | None:
    """Returns a function that makes a tensor like it over a slot, where memory outside of the layer's ranges stays as
    it is; None where all of it is outside. Adds tensors to `leaves` whose versions count writes to what it makes."""
    if _wraps(tensor):
        names, context = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}
        tensors = {name: value for name, value in inner.items() if isinstance(value, torch.Tensor)}
        makers = {name: _maker(value, flat, spot, leaves) for name, value in tensors.items()}
        return partial(_wrapper, tensor, context, inner, {name: maker for name, maker in makers.items() if maker})
    offset = spot(tensor.data_ptr())
    if offset is None:
        return None
    like = like_over(tensor, flat, offset)
    leaves.append(like)
    kind = type(tensor)
    if kind is torch.Tensor:
        return like.detach
    make = partial(torch.Tensor._make_subclass, kind, like, tensor.requires_grad)
    return partial(_inference_tensor, make) if tensor.is_inference() else make


def _inference_tensor(make: _Maker) -> Any:
    with torch.inference_mode():
        return make()


def _wrapper(tensor: Any, context: Any, inner: Mapping[str, Any], makers: Mapping[str, _Maker]) -> Any:
    """Makes a wrapper like this one around tensors of the makers."""
    made = dict(inner)
    for name, make in makers.items():
        made[name] = make()
        if not _wraps(made[name]):
            made[name].__dict__ = inner[name].__dict__
    wrapper: Any = type(tensor).__tensor_unflatten__(made, context, tensor.size(), tensor.stride())
    wrapper.requires_grad_(tensor.requires_grad)
    for name, value in tensor.__dict__.items():
        wrapper.__dict__.setdefault(name, value)
    return wrapper
