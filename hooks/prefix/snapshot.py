"""The state of a sequence at one of its lengths: the windows and recurrent states that its layers keep then.

Note [State snapshots]
    Keys and values of a token do not change when others follow, so that any beginning of a stored sequence can be used.
    A window has lost the tokens before it, and a recurrent state depends on all tokens so far: neither can be
    shortened. So they are kept whole at some lengths, and used by prompts that begin with exactly those tokens. Layers
    beside them that keep every token are stored in blocks, as in any model.

Note [Copies]
    Transformers writes to recurrent states in place. So a cache never computes with a kept state: each request that
    starts from one gets a copy. The state of a request that ends is taken over without a copy where no other code has
    its cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Final, NamedTuple

import torch

from ...allocator._native import Device
from ...allocator.errors import DriverError, PoolExhausted
from ...offload.governor.governor import Governor
from ...offload.policy.prefixes import chain
from ...offload.policy.tuning import DEFAULT
from ..compat import HybridSlidingLayer, LinearAttentionLayer, SlidingLayer
from ..device.streams import torch_device
from ..kv.hybrid import ElasticHybridLayer
from ..kv.layer import ElasticLayer
from .state_pages import StatePages

STATES: Final = (SlidingLayer, LinearAttentionLayer, HybridSlidingLayer, ElasticHybridLayer)  # layers that keep a state
_OF_TOKENS: Final = ("device", "dtype")  # attributes that both halves of a hybrid layer have

Part = dict[str, Any]  # attributes of a layer by name


def keeps_state(layers: Sequence[Any]) -> bool:
    """Does any layer of a cache keep a state?"""
    return any(type(layer) in STATES for layer in layers)


def is_recurrent(layers: Sequence[Any]) -> bool:
    """Is any of these states more than a window?"""
    return any(type(layer) in STATES and isinstance(layer, LinearAttentionLayer) for layer in layers)


def state_key(ids: Sequence[int], salt: bytes) -> bytes:
    """Returns the key of the state behind exactly these tokens, at least one. `salt`: as of blocks."""
    return chain(ids, len(ids), salt + b"state")[0]


class _Paged(NamedTuple):
    """The placeholder of a tensor that lies in the pages of a state, by its number there."""

    number: int


class StateSnapshot:
    """The states of a cache's layers behind the tokens `ids`, without keys and values of every token."""

    def __init__(self, ids: Sequence[int], salt: bytes, parts: Sequence[Part | None], growing: bool) -> None:
        """`parts`: the states by layer, None for layers without one; no other code has their tensors. `growing`: do
        other layers keep every token?"""
        self.ids = array("q", ids)
        self.salt = salt
        self.growing = growing
        self.key = state_key(ids, salt)
        self.blocks: list[bytes] = []  # keys of the full blocks before it
        self._parts = list(parts)
        storages = {each.data_ptr(): each.nbytes() for each in (t.untyped_storage() for t in self._tensors())}
        self.nbytes = sum(storages.values())
        self._pages: StatePages | None = None  # where its tensors lie, if not in torch's memory
        stream = _stream(self._tensors())
        self._written = None if stream is None else stream.record_event()

    @property
    def pages(self) -> StatePages | None:
        """The pages of the state; None where it lies in torch's memory."""
        return self._pages

    def into_pages(self, device: Device, governor: Governor) -> None:
        """Moves the state to pages that may leave the device, if it fills at least one and enough are free. Called
        before any other use."""
        tensors = list(self._tensors())
        if not device.host_pages or self.nbytes < device.page_size:
            return
        if any(tensor.device != torch_device(device) for tensor in tensors):
            return
        stream = _stream(tensors)
        if stream is not None and self._written is not None:
            stream.wait_event(self._written)
        with suppress(PoolExhausted, DriverError):
            self._pages = StatePages(device, governor, tensors)
            numbers = count()
            self._parts = _in_parts(self._parts, lambda _: _Paged(next(numbers)))
            self.nbytes = self._pages.pages * device.page_size
        if stream is not None:
            for tensor in tensors:
                tensor.record_stream(stream)
            self._written = stream.record_event()

    @classmethod
    def of(
        cls,
        layers: Sequence[Any],
        ids: Sequence[int],
        salt: bytes,
        *,
        move: bool,
        loose: float = DEFAULT.prefixes.loose,
    ) -> StateSnapshot | None:
        """Takes the state behind the last token of a cache. `move`: takes it from the layers, which are not used any
        more. `loose`: see Prefixes. None where the model keeps its state outside of the cache.
        torch.OutOfMemoryError."""
        parts: list[Part | None] = []
        for layer in layers:
            if type(layer) not in STATES:
                parts.append(None)
                continue
            part = {name: _taken(vars(layer)[name], move, loose) for name in _names(layer)}
            if not any(True for _ in _tensors_in(part, everything=False)):
                return None
            parts.append(part)
        made = cls(ids, salt, parts, any(isinstance(layer, ElasticLayer) for layer in layers))
        for layer in layers if move else ():
            if isinstance(layer, ElasticHybridLayer):  # the elastic half is used on
                _forget(layer)
        return made

    def let_go(self) -> None:
        """Frees its memory, even if it is still referred to."""
        self._parts, self._pages = [], None

    def copied(self) -> list[Part | None]:
        """Returns a copy for `begin`; empty where the state was freed. torch.OutOfMemoryError."""
        parts, pages = self._parts, self._pages
        if pages is not None and parts:
            with pages.read() as tensors:
                self._wait_written(tensors)
                return _in_parts(parts, lambda at: tensors[at.number].clone(), _Paged)
        tensors = [tensor for part in parts if part is not None for tensor in _tensors_in(part)]
        stream = self._wait_written(tensors)
        copies = _in_parts(parts, torch.clone)
        if stream is not None:
            for tensor in tensors:
                tensor.record_stream(stream)
        return copies

    def _wait_written(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Makes this thread's current stream wait for writes of the state; returns the stream, None on a CPU."""
        stream = _stream(tensors)
        if stream is not None and self._written is not None:
            stream.wait_event(self._written)
        return stream

    def _tensors(self) -> Iterator[torch.Tensor]:
        for part in self._parts:
            if part is not None:
                yield from _tensors_in(part)


def begin(layers: Sequence[Any], parts: Sequence[Part | None]) -> None:
    """Gives the layers of a cache, which have their other tokens, that state. `parts`: of `StateSnapshot.copied`."""
    for layer, part in zip(layers, parts, strict=True):
        if part is not None:
            vars(layer).update(part)


def _stream(tensors: Iterable[torch.Tensor]) -> Any:
    """Returns this thread's current stream on the device of these tensors, None on a CPU."""
    device = next((each.device for each in tensors if each.device.type == "cuda"), None)
    return None if device is None else torch.cuda.current_stream(device)


def _names(layer: Any) -> list[str]:
    """The names of the attributes that are its state."""
    if isinstance(layer, ElasticLayer):
        return [name for name in vars(LinearAttentionLayer()) if name not in _OF_TOKENS]
    return list(vars(layer))


def _forget(layer: ElasticHybridLayer) -> None:
    fresh = vars(LinearAttentionLayer(number_of_states=layer.number_of_states))
    vars(layer).update({name: fresh[name] for name in _names(layer)})


def _in_parts(parts: Sequence[Part | None], act: Callable[[Any], Any], kind: type = torch.Tensor) -> list[Part | None]:
    """Applies `act` to the members of each part, as `_each` does."""
    return [None if part is None else _each(part, act, kind) for part in parts]


def _each(value: Mapping[str, Any], act: Callable[[Any], Any], kind: type = torch.Tensor) -> Part:
    """Returns `value` with each member of that kind, however deep, replaced by `act(member)`, in the order of
    `_tensors_in`."""
    return {
        key: _each(each, act, kind) if isinstance(each, Mapping) else act(each) if isinstance(each, kind) else each
        for key, each in value.items()
    }


def _taken(value: Any, move: bool, loose: float) -> Any:
    """Returns a copy of the value; with `move` the value itself, where its memory is at most `loose` times the size of
    the tensor."""
    if isinstance(value, torch.Tensor):
        own = value.untyped_storage().nbytes() <= loose * value.nbytes
        return value if move and own else value.clone()
    if isinstance(value, Mapping):
        return {key: _taken(each, move, loose) for key, each in value.items()}
    return value


def _tensors_in(value: Mapping[Any, Any], everything: bool = True) -> Iterator[torch.Tensor]:
    """Yields the tensors of a part; without `everything` only those with more than one element."""
    for each in value.values():
        if isinstance(each, Mapping):
            yield from _tensors_in(each, everything)
        elif isinstance(each, torch.Tensor) and (everything or each.numel() > 1):
            yield each
