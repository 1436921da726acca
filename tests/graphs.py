"""CUDA graphs without CUDA: what a capture computes is noted by addresses, and computed again from those at a replay.

As on a GPU nothing of what is captured is kept alive by its graph but what was made within the capture, and a replay
asks nobody: it reads what lies at the addresses then. Unlike there the capture computes, too.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from ballonet.allocator import install
from ballonet.hooks.compat import eager
from ballonet.hooks.device import graphs
from ballonet.hooks.device.streams import HostMarks
from ballonet.hooks.kv import layer

_capturing: set[int] = set()  # threads whose stream is captured


@dataclass(frozen=True)
class _At:
    """A tensor, by its address."""

    address: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        return cls(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def tensor(self) -> torch.Tensor:
        if 0 in self.size:
            return torch.empty(self.size, dtype=self.dtype)
        elements = 1 + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        memory = (ctypes.c_char * (elements * self.dtype.itemsize)).from_address(self.address)
        return torch.frombuffer(memory, dtype=self.dtype).as_strided(self.size, self.stride)


class _Notes(TorchDispatchMode):
    """What is computed within, and the memory that is made for it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, list[_At | None]]] = []
        self.memory: list[torch.Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [tensor for tensor in tree_flatten((args, kwargs))[0] if isinstance(tensor, torch.Tensor)]
        there = {tensor.untyped_storage().data_ptr() for tensor in given}
        noted = tree_map_only(torch.Tensor, _At.of, (args, kwargs))
        result = function(*args, **kwargs)
        made = [tensor for tensor in tree_flatten(result)[0] if isinstance(tensor, torch.Tensor)]
        new = [tensor if tensor.untyped_storage().data_ptr() not in there else None for tensor in made]
        self.memory += [tensor for tensor in new if tensor is not None]
        if function._schema.is_mutable or any(tensor is not None for tensor in new):
            self.steps.append((function, *noted, [None if tensor is None else _At.of(tensor) for tensor in new]))
        return result


class FakeGraph:
    """In the place of `torch.cuda.CUDAGraph`."""

    during: Callable[[], object] | None = None  # called while a replay is launched

    def __init__(self) -> None:
        self._notes: _Notes | None = None
        self._pool: object = None
        self._shared: object = None
        self.captured = False

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        assert not self.captured, "this instance owns a captured graph already"
        self._shared = pool
        self._notes = _Notes()  # type: ignore[no-untyped-call]
        _capturing.add(threading.get_ident())
        self._notes.__enter__()  # type: ignore[no-untyped-call]

    def capture_end(self) -> None:
        assert self._notes is not None
        self._notes.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        _capturing.discard(threading.get_ident())
        self._pool = self._shared or (0, id(self))
        self.captured = True

    def replay(self) -> None:
        assert self.captured
        assert self._notes is not None
        if self.during is not None:
            self.during()
        with torch.no_grad(), install.stock():  # a replay allocates nothing
            for function, args, kwargs, outputs in self._notes.steps:
                args, kwargs = tree_map_only(_At, _At.tensor, (args, kwargs))
                made = [
                    tensor for tensor in tree_flatten(function(*args, **kwargs))[0] if isinstance(tensor, torch.Tensor)
                ]
                for old, new in zip(outputs, made, strict=True):
                    if old is not None:
                        old.tensor().copy_(new)

    def reset(self) -> None:
        self._notes, self.captured = None, False

    def pool(self) -> object:
        assert self.captured, "called without a preceding successful capture"
        return self._pool


@contextmanager
def capture(graph: Any, pool: object = None) -> Iterator[None]:
    """As `torch.cuda.graph`."""
    graph.capture_begin(*(() if pool is None else (pool,)), capture_error_mode="global")
    try:
        yield
    finally:
        graph.capture_end()


@contextmanager
def captured_by_others() -> Iterator[None]:
    """Within it this thread's stream is captured, and torch knows of no graph."""
    _capturing.add(threading.get_ident())
    try:
        yield
    finally:
        _capturing.discard(threading.get_ident())


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on `torch.cuda.CUDAGraph` is that, and whoever asks is told what is captured."""

    def capturing(*_: object) -> bool:
        return threading.get_ident() in _capturing

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(HostMarks, "capturing", capturing)
    monkeypatch.setattr(graphs, "capturing", capturing)
    monkeypatch.setattr(layer, "eager", lambda *pair: not capturing() and eager(*pair))
