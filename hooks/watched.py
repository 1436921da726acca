"""Who else holds a module's tensors, and who is about to look at them.

Two answers for whoever has memory under tensors that is not always what it seems (streaming.py): `Watched`, a
dictionary that tells when it is read or written, and `Census`, which knows how often the tensors are referred to.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

_KINDS = ("_parameters", "_buffers")
_REASON = (
    "ballonet streams the weights of this layer through slots that it shares with others, which a compiled graph "
    "cannot follow: compile without fullgraph=True, or give a budget in which nothing streams"
)


class Watched(dict[str, Any]):
    """The parameters or buffers of a module. Calls `asked` before any of them is handed out or replaced.

    Whoever asks holds what it gets by then, so that a census finds it. Copies and pickles are plain dictionaries.
    """

    __slots__ = ("_asked",)

    def __init__(self, plain: dict[str, Any], asked: Callable[[], None]) -> None:
        super().__init__(plain)
        self._asked = asked

    def plain(self) -> dict[str, Any]:
        """The content, without asking."""
        return dict(super().items())

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        self._asked()
        return copy.deepcopy(self.plain(), memo)

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        self._asked()
        return dict, (self.plain(),)

    def copy(self) -> dict[str, Any]:
        found = self.plain()
        self._asked()
        return found

    def items(self) -> Any:  # of a copy: a view would hand out later what was asked for now
        return self.copy().items()

    def values(self) -> Any:
        return self.copy().values()

    def __iter__(self) -> Iterator[str]:
        """As it is. A dictionary without one is copied by C code past all methods (`dict(watched)`, `{**watched}`)."""
        return super().__iter__()


def _asking(name: str) -> Callable[..., Any]:
    method = getattr(dict, name)

    def answer(self: Watched, *args: Any, **kwargs: Any) -> Any:
        found = method(self, *args, **kwargs)
        self._asked()
        return found

    def ask(self: Watched, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return opaquely(answer, self, *args, **kwargs)
        found = method(self, *args, **kwargs)
        self._asked()
        return found

    ask.__name__ = name
    return ask


@torch.compiler.disable(reason=_REASON)  # type: ignore[untyped-decorator]
def opaquely(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls what the compiler cannot follow: it breaks its graph, or says why where it was told not to."""
    return function(*args, **kwargs)


for _name in ("__getitem__", "__setitem__", "__delitem__", "__or__", "__ror__", "__ior__", "__eq__", "get", "items",
              "values", "pop", "popitem", "setdefault", "update", "clear"):  # fmt: skip
    setattr(Watched, _name, _asking(_name))


def watch(module: nn.Module, asked: Callable[[], None]) -> Callable[[], None]:
    """Watches what the module and those inside it hold. Returns what ends that."""
    replaced = []
    for each in module.modules():
        for kind in _KINDS:
            plain = each.__dict__[kind]
            each.__dict__[kind] = Watched(plain, asked)
            replaced.append((weakref.ref(each), kind))

    def end() -> None:
        for reference, kind in replaced:
            each = reference()
            found = each and each.__dict__.get(kind)
            if isinstance(found, Watched):
                each.__dict__[kind] = found.plain()

    return end


class Census:
    """How often tensors are referred to, compared with a model that nobody looks at from outside."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Of every parameter and buffer of `modules` and what is inside them, which are not watched yet."""
        found = [
            tensor
            for top in modules
            for each in top.modules()
            for kind in _KINDS
            for tensor in each.__dict__[kind].values()
            if tensor is not None and tensor.numel()
        ]
        names = Counter(map(id, found))
        tensors = {id(tensor): tensor for tensor in found}.values()
        shared = Counter(tensor.untyped_storage()._cdata for tensor in tensors)
        self._expected = [
            (weakref.ref(each), names[id(each)], shared[each.untyped_storage()._cdata]) for each in tensors
        ]

    def others(self) -> bool:
        """Does anyone else hold one of them, or a view of one? True too where one is gone."""
        for reference, names, shared in self._expected:
            tensor = reference()
            if tensor is None or _counts(tensor) != (_REFERENCES + names, 1, _USES + shared):
                return True
        return False


def _counts(tensor: torch.Tensor) -> tuple[int, int, int]:
    """References from Python, from torch (a graph of autograd), and to the memory."""
    uses: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return sys.getrefcount(tensor), tensor._use_count(), uses  # type: ignore[attr-defined]


def _calibrate() -> tuple[int, int]:
    """What `_counts` finds beyond the references that a module has, when it is called as `others` does."""
    module = nn.Linear(1, 1, bias=False)
    reference = weakref.ref(module.weight)
    tensor = reference()
    assert tensor is not None
    references, _, uses = _counts(tensor)
    return references - 1, uses - 1


_REFERENCES, _USES = _calibrate()
