"""Who else holds a module's tensors, and who is about to look at them.

Two answers for whoever has memory under tensors that is not always what it seems (streamed.py): `Watched`, a
dictionary that tells when it is read or written, and `Census`, which knows how often the tensors are referred to. Who
it is that refers to them is found out in held.py.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

REFERRED: Final = "someone outside of the model refers to it"
_KINDS = ("_parameters", "_buffers")
_PLAIN = (nn.Parameter, torch.Tensor)
Counts = tuple[int, int, int, int]  # references from Python, from torch (a graph of autograd), to the memory; which
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

    def __iter__(self) -> Iterator[str]:
        """As it is. A dictionary without one is copied by C code past all methods (`dict(watched)`, `{**watched}`)."""
        return super().__iter__()


def _reading(method: Callable[..., Any]) -> Callable[..., Any]:
    def answer(self: Watched, *args: Any) -> Any:
        found = method(self, *args)
        self._asked()
        return found

    def read(self: Watched, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return opaquely(answer, self, *args)
        found = method(self, *args)
        self._asked()
        return found

    return read


def _writing(method: Callable[..., Any]) -> Callable[..., Any]:
    def answer(self: Watched, *args: Any, **kwargs: Any) -> Any:
        held = self.plain()  # what is replaced lives until whoever has to know does
        self._asked()
        found = method(self, *args, **kwargs)
        del held
        return found

    def write(self: Watched, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return opaquely(answer, self, *args, **kwargs)
        return answer(self, *args, **kwargs)

    return write


@torch.compiler.disable(reason=_REASON)  # type: ignore[untyped-decorator]
def opaquely(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls what the compiler cannot follow: it breaks its graph, or says why where it was told not to."""
    return function(*args, **kwargs)


_READS = {name: getattr(dict, name) for name in ("__getitem__", "__or__", "__ror__", "__eq__", "get")}
_READS |= {
    "copy": Watched.plain,
    "items": lambda self: self.plain().items(),  # a view of itself would hand out later what was asked for now
    "values": lambda self: self.plain().values(),
}
_WRITES = ("__setitem__", "__delitem__", "__ior__", "pop", "popitem", "setdefault", "update", "clear")
for _name, _method in _READS.items():
    setattr(Watched, _name, _reading(_method))
for _name in _WRITES:
    setattr(Watched, _name, _writing(getattr(dict, _name)))


def watch(modules: Iterable[nn.Module], asked: Callable[[], None]) -> Callable[[], None]:
    """Watches what the modules hold. Returns what ends that."""
    replaced = []
    for each in modules:
        for kind in _KINDS:
            each.__dict__[kind] = Watched(each.__dict__[kind], asked)
            replaced.append((weakref.ref(each), kind))

    def end() -> None:
        for reference, kind in replaced:
            each = reference()
            found = each and each.__dict__.get(kind)
            if isinstance(found, Watched):
                each.__dict__[kind] = found.plain()

    return end


def holders(module: nn.Module, tensors: Set[int]) -> list[nn.Module]:
    """The module and those inside it, as far as they hold one of the tensors with these ids themselves."""
    return [each for each in module.modules() if any(id(tensor) in tensors for _, tensor in _places(each))]


def in_graphs(module: nn.Module) -> bool:
    """Does torch hold any tensor of it, as an autograd graph does?"""
    return any(_of_torch(tensor) != 1 for each in module.modules() for _, tensor in _places(each))


class Census:
    """How often tensors are referred to, compared with a model that nobody looks at from outside.

    It refers to them by their places: what is referred to weakly cannot be exchanged (`torch.utils.swap_tensors`).
    """

    def __init__(self, modules: Iterable[nn.Module], tensors: Set[int]) -> None:
        """Of the tensors with these ids. `modules`: all that hold one; they are not watched yet."""
        found = [each for module in modules for each in _places(module)]
        wanted = {place.top for place, tensor in found if id(tensor) in tensors}
        found = [(place, tensor) for place, tensor in found if place.top in wanted]
        names = Counter(id(tensor) for _, tensor in found)
        distinct = {id(tensor): (place, tensor) for place, tensor in found}
        shared = Counter(storage for _, tensor in distinct.values() if (storage := _storage(tensor)))
        self._places = [place for place, _ in distinct.values()]
        self._expected: list[Counts | None] = [
            (names[key], 1, storage and shared[storage], storage)
            for key, (_, tensor) in distinct.items()
            for storage in (_storage(tensor),)
        ]

    def others(self) -> bool:
        """Does anyone else hold one of them, or a view of one? True too where one is gone or has other memory."""
        return self.look()[0]

    def versions(self) -> int:
        """Another number once one of them has been written to, as far as torch counts that: not through `data`."""
        return self.look()[1]

    def look(self) -> tuple[bool, int]:
        """`others()` and `versions()`. Asked after each layer of each pass."""
        found, versions = _counts(self._places)
        return found != self._expected, versions

    def held(self) -> Iterator[tuple[Place, str]]:
        """Which of them someone else holds, and how."""
        for place, expected, found in zip(self._places, self._expected, _counts(self._places)[0], strict=True):
            assert expected is not None
            if found is None:
                yield place, "it is gone"
                continue
            references, of_torch, uses, storage = found
            if storage != expected[3]:
                yield place, "it has been given other memory"
            elif of_torch != 1:  # which counts as a reference from Python, too
                yield place, "torch holds it, as an autograd graph does"
            elif references != expected[0]:
                yield place, REFERRED
            elif uses != expected[2]:
                yield place, "someone holds a view of it, or its memory"


class Place(NamedTuple):
    """Where a tensor is: of a module its parameter or buffer `name`, of which it is the part at `path`, as in torchao's
    quantized weights."""

    module: weakref.ref[nn.Module]
    kind: str
    name: str
    path: tuple[str, ...] = ()

    @property
    def top(self) -> tuple[int, str, str]:
        return id(self.module()), self.kind, self.name

    def find(self) -> torch.Tensor | None:
        module = self.module()
        found = None if module is None else dict.get(module.__dict__[self.kind], self.name)
        for attribute in self.path:
            found = getattr(found, attribute, None)
        return found


def _places(module: nn.Module) -> Iterator[tuple[Place, torch.Tensor]]:
    """The tensors that the module holds itself, without asking; of a wrapper, every tensor inside it besides."""
    for kind in _KINDS:
        for name, tensor in list(dict.items(module.__dict__[kind])):
            if tensor is not None:
                yield from _parts(Place(weakref.ref(module), kind, name), tensor)


def _parts(place: Place, tensor: Any) -> Iterator[tuple[Place, torch.Tensor]]:
    yield place, tensor
    if is_traceable_wrapper_subclass(tensor):
        for attribute in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, attribute)
            if isinstance(inner, torch.Tensor):
                yield from _parts(place._replace(path=(*place.path, attribute)), inner)


def _storage(tensor: torch.Tensor) -> int:
    """What tells its memory apart, 0 where it has none of its own."""
    it: Any = tensor
    if type(it) not in _PLAIN and is_traceable_wrapper_subclass(it):
        return 0
    return int(it.untyped_storage()._cdata) if tensor.layout is torch.strided else 0


def _counts(places: Sequence[Place]) -> tuple[list[Counts | None], int]:
    """Of each tensor what refers to it, None where it is gone, and the sum of their versions. References that are there
    because this looks are not counted. They are more while frames are run for a compiler or a debugger: so each time it
    looks at a tensor that only its module has, too."""
    found: list[Counts | None] = []
    versions = 0
    for module, kind, name, path in (_SAMPLE, *places):
        holder = module()
        tensor = None if holder is None else dict.get(holder.__dict__[kind], name)
        for attribute in path:
            tensor = getattr(tensor, attribute, None)
        if tensor is None:
            found.append(None)
            continue
        storage = _storage(tensor)
        uses = storage and torch._C._storage_Use_Count(storage)
        found.append((sys.getrefcount(tensor), _of_torch(tensor), uses, storage))
        versions += 0 if tensor.is_inference() else tensor._version
    assert found[0] is not None
    own, own_uses = found[0][0] - 1, found[0][2] - 1
    return [each and (each[0] - own, each[1], each[3] and each[2] - own_uses, each[3]) for each in found[1:]], versions


def _of_torch(tensor: torch.Tensor) -> int:
    """References from torch, of which Python as a whole has one."""
    return tensor._use_count()  # type: ignore[attr-defined,no-any-return]


_sample = nn.Linear(1, 1, bias=False, device="meta")  # in nobody's memory
_SAMPLE = Place(weakref.ref(_sample), "_parameters", "weight")
