"""What the own forward of a streamed layer reads in place of its parameters and buffers: views of its slot.

Note [Who reads what]
    The parameters of a streamed layer show its backing, for everyone and at any time. Only the layer's own call reads
    its slot: from the moment its copy has arrived until the call ends, what is asked of its modules by frames that this
    call has called is answered with views of the slot. Other threads, a user's code between two calls, and whatever
    comes after an exception or Ctrl-C are not among these frames, so nothing has to be put back. With gradients enabled
    nobody is given a view: backward would read it later.
    The dictionaries of the modules hold the parameters themselves throughout. What looks past their methods, as the
    interpreter and torch.compile's guards may, finds the backing: slower, and right.

Note [A view that is kept]
    Who keeps a view beyond the call (a hook that collects weights, an exception's traceback) would see the next layer's
    bytes. So the references to the views are counted when the call has ended; if there are more than before, the slot's
    addresses lead to the layer's backing from then on and the slot gets others.

Note [Written between two passes]
    What a slot is given for the next pass may be written on the host before that begins. Writing takes a reference: who
    has one is counted (`unheld`), and who gets one through a module is noticed (`asked`). Where there is nobody of
    either kind, from before the copy to the beginning of the pass, the slot is what the layer is. Where there is, the
    layer is copied again when the pass begins.
"""

from __future__ import annotations

import copy
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, methodcaller
from types import FrameType
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..forward.hook import opaquely
from ..weights.storages import like_over

_KINDS: Final = ("_parameters", "_buffers")
_LAYOUT: Final = (methodcaller("data_ptr"), methodcaller("size"), methodcaller("stride"))
_version = attrgetter("_version")
_inference = methodcaller("is_inference")  # has no versions
_uses = methodcaller("_use_count")
Spot = Callable[[int], int | None]  # the address of a byte of the layer's ranges -> its offset in the slot


class Bound:
    """One streamed layer: the dictionaries of its modules, and the views that its own call reads."""

    def __init__(self, layer: nn.Module, tensors: Iterable[int], asked: Callable[[], None]) -> None:
        """`tensors`: ids of those in its ranges; `asked` is called before anyone else is handed one of them."""
        self.asked = asked
        self._call: FrameType | None = None
        self._thread = 0
        self._now: dict[int, tuple[Any, Any]] = {}  # by id: what the layer holds, and its view
        self._views: tuple[Any, ...] = ()
        self._leaves: tuple[Any, ...] = ()  # the views with memory of their own
        self._layouts: list[Any] = []
        self._storage = 0
        self._counts: tuple[Any, ...] = ()
        self._before = 0
        self._wraps = False  # is any of them a wrapper?
        wanted = frozenset(tensors)
        self._modules: list[tuple[weakref.ref[nn.Module], str, tuple[str, ...]]] = []
        for module in layer.modules():
            for kind in _KINDS:
                plain = module.__dict__[kind]
                names = tuple(name for name, each in plain.items() if each is not None and _within(each, wanted))
                if names:
                    self._modules.append((weakref.ref(module), kind, names))
                    module.__dict__[kind] = Shown(plain, self)

    def release(self) -> None:
        """The modules have plain dictionaries again, and there are no views."""
        self.show(None, None)
        for reference, kind, _ in self._modules:
            module = reference()
            found = module and module.__dict__.get(kind)
            if isinstance(found, Shown) and found.bound is self:
                assert module is not None
                module.__dict__[kind] = found.plain()
        self._modules.clear()

    def show(self, flat: torch.Tensor | None, spot: Spot | None) -> None:
        """From now on its call reads `flat`, a slot, where `spot` says; with None what the layer itself holds."""
        self._call, self._now, self._views, self._leaves, self._layouts, self._counts = None, {}, (), (), [], ()
        held = self._held()
        if flat is None or spot is None or held is None:
            return
        made = [_view(each, flat, spot) for each in held]
        if any(each is None for each in made):
            return
        self._views = tuple(made)
        self._wraps = any(map(_wraps, made))
        self._leaves = tuple(self._leaves_of(made))
        self._layouts = _layouts(self._leaves_of(held))
        self._storage = int(flat.untyped_storage()._cdata)

    def written(self) -> int:
        """Another number once the layer's tensors have been written to, as far as torch counts that: not through
        `data`."""
        held = self._held()
        return 0 if held is None else _versions(self._leaves_of(held))

    def fits(self) -> bool:
        """Are there views, of what the layer holds now? Not where something in it has been given other memory."""
        held = self._held() if self._views else None
        if held is None or _layouts(self._leaves_of(held)) != self._layouts:
            return False
        self._counts = self._counts or self._references()  # all layers of the slot have their views by now
        self._now = {id(each): (each, view) for each, view in zip(held, self._views, strict=True)}
        return True

    def enter(self, call: FrameType | None) -> None:
        """The slot holds the layer: the call with this frame reads it. Follows `fits`."""
        self._before = _versions(self._leaves)
        self._thread = threading.get_ident()
        self._call = call

    def unheld(self) -> bool:
        """Does nobody but the layer's modules refer to what it holds, or to its memory? Then only who asks a module for
        it can write to it. False too where that cannot be told."""
        held = self._held()
        if held is None or self._wraps:
            return False
        times = Counter(map(id, held))
        storages = Counter(map(_memory, {id(each): each for each in held}.values()))
        references = map(sys.getrefcount, held)
        return (
            all(found == _ALONE[0] + 2 * (times[id(each)] - 1) for each, found in zip(held, references, strict=True))
            and all(map((1).__eq__, map(_uses, held)))
            and all(torch._C._storage_Use_Count(each) == _ALONE[1] + n - 1 for each, n in storages.items())
        )

    @property
    def active(self) -> bool:
        """Does the frame that asks belong to a call that reads the slot?"""
        return self._call is not None and self._called(sys._getframe(1))

    def leave(self) -> tuple[bool, bool]:
        """The call has ended, however. Has it written to the slot, and does someone keep what it has read?"""
        self._call, self._now = None, {}
        return _versions(self._leaves) != self._before, self._references() != self._counts

    def read(self, tensor: Any) -> Any:
        """What whoever asks is given for it."""
        call = self._call
        if call is not None and (found := self._now.get(id(tensor))) is not None:
            # as `_called`, of whoever has asked the dictionary: for each weight of each layer
            frame: FrameType | None = sys._getframe(2)
            while frame is not None and frame is not call:
                frame = frame.f_back
            if frame is not None and self._thread == threading.get_ident() and not torch.is_grad_enabled():
                return found[1]
        self.asked()
        return tensor

    def _called(self, frame: FrameType | None) -> bool:
        """Is this frame of the layer's call, or of what it has called?"""
        if self._thread != threading.get_ident():
            return False
        call = self._call
        while frame is not None and frame is not call:
            frame = frame.f_back
        return frame is not None

    def _held(self) -> list[Any] | None:
        """The tensors as they are now; None where one is gone."""
        found = []
        for reference, kind, names in self._modules:
            module = reference()
            if module is None:
                return None
            plain = module.__dict__[kind]
            for name in names:
                tensor = dict.get(plain, name)
                if tensor is None:
                    return None
                found.append(tensor)
        return found

    def _leaves_of(self, tensors: list[Any]) -> list[Any]:
        return [leaf for each in tensors for leaf in _leaves(each)] if self._wraps else tensors

    def _references(self) -> tuple[Any, ...]:
        """To the views, from Python and from torch, and to their memory."""
        views = self._views
        if not views:
            return ()
        return (
            tuple(map(sys.getrefcount, views)),
            tuple(map(_uses, views)),
            torch._C._storage_Use_Count(self._storage),
        )


class Shown(dict[str, Any]):
    """The parameters or buffers of a module in a streamed layer: what is read depends on who reads, see Note [Who reads
    what]. Copies and pickles are plain dictionaries."""

    __slots__ = ("bound",)

    def __init__(self, plain: Mapping[str, Any], bound: Bound) -> None:
        super().__init__(plain)
        self.bound = bound

    def plain(self) -> dict[str, Any]:
        """What the module itself holds."""
        return dict(super().items())

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if found is None:
            return None
        if torch.compiler.is_compiling():
            return opaquely(self.bound.read, found)
        return self.bound.read(found)

    def __iter__(self) -> Iterator[str]:
        """As it is. A dictionary without one is copied by C code past all methods (`dict(shown)`, `{**shown}`)."""
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


def _memory(tensor: torch.Tensor) -> int:
    """What tells its memory apart."""
    return int(tensor.untyped_storage()._cdata)


def _alone() -> tuple[int, int]:
    """References to a tensor, and to its memory, that only a dictionary and a list have, as `Bound.unheld` counts."""
    its = {"weight": nn.Parameter(torch.empty(1, device="cpu"), requires_grad=False)}
    held = list(its.values())
    (found,) = [found for each, found in zip(held, map(sys.getrefcount, held), strict=True)]
    return found, torch._C._storage_Use_Count(_memory(held[0]))


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


def _layouts(leaves: Sequence[Any]) -> list[Any]:
    """Where they lie and how."""
    return [list(map(ask, leaves)) for ask in _LAYOUT]


def _versions(leaves: Sequence[Any]) -> int:
    return sum(map(_version, leaves)) if not any(map(_inference, leaves)) else 0


def _view(tensor: Any, flat: torch.Tensor, spot: Spot) -> Any:
    """A tensor like it over a slot; what is outside of the layer's ranges stays its own. None where all is."""
    if _wraps(tensor):
        names, context = tensor.__tensor_flatten__()
        made = {name: getattr(tensor, name) for name in names}
        for name, inner in made.items():
            if isinstance(inner, torch.Tensor) and (view := _view(inner, flat, spot)) is not None:
                made[name] = view
        wrapper: Any = type(tensor).__tensor_unflatten__(made, context, tensor.size(), tensor.stride())
        wrapper.requires_grad_(tensor.requires_grad)
        for name, value in tensor.__dict__.items():
            wrapper.__dict__.setdefault(name, value)
        return wrapper
    offset = spot(tensor.data_ptr())
    if offset is None:
        return None
    like = like_over(tensor, flat, offset)
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if type(tensor) is not torch.Tensor:
            like = torch.Tensor._make_subclass(type(tensor), like, tensor.requires_grad)
    like.__dict__ = tensor.__dict__  # what is noted at one is noted at the other
    return like


_ALONE: Final = _alone()
