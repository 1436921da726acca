"""The states that are kept of a sequence at some of its lengths: the windows and recurrent states of its layers, where
they lie, and which one a prompt begins with.

Note [State snapshots]
    Keys and values of a token do not change when others follow, so that any beginning of a stored sequence can be used.
    A window has lost the tokens before it, and a recurrent state depends on all tokens so far: neither can be
    shortened. So they are kept whole at some lengths, and used by prompts that begin with exactly those tokens. Layers
    beside them that keep every token are stored in blocks, as in any model.

Note [Copies]
    Transformers writes to recurrent states in place. So a cache never computes with a kept state: each request that
    starts from one gets a copy. The state of a request that ends is taken over without a copy where no other code has
    its cache. A kept state is never written to, and read once per request, whole. So its pages may leave the device at
    any moment and are never restored: copying it for a request from the host costs the same.

Note [Ignored]
    Every model goes on from a state token by token, as `generate()` could not work otherwise. But for several tokens at
    once the code of some (Mamba's first version and its derivatives, in transformers 5.23 without its kernels) begins
    with an empty state, whatever the cache holds, so that stock gives other results with a cache held by hand than
    without. Nothing tells that in advance. So before a state is used for the first time, a few tokens are computed
    behind one, and behind the same with other numbers in it. If no logit changes, the state was not read.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, Final, NamedTuple

import torch
from torch.utils.dlpack import from_dlpack

from ...allocator._native import Device
from ...allocator.errors import DriverError, PoolExhausted
from ...offload.manager.kv_tier import KVTier
from ...offload.manager.memory_manager import MemoryManager
from ...offload.policy.layout import ALIGNMENT
from ...offload.policy.prefixes import chain
from ...offload.residency.kv_extent import KVExtent
from ..compat import DynamicCache, HybridSlidingLayer, LinearAttentionLayer, SlidingLayer, cache_name
from ..device.streams import stream_of, torch_device
from ..forward.lease import GroupLease
from ..kv.cache import ElasticHybridLayer
from ..kv.layer import ElasticLayer

STATES: Final = (SlidingLayer, LinearAttentionLayer, HybridSlidingLayer, ElasticHybridLayer)  # layers that keep a state
_OF_TOKENS: Final = ("device", "dtype")  # attributes that both halves of a hybrid layer have
_UINT8: Final = (1, 8)  # DLPack's code and bits
_KINDS: Final = ("conv_states", "recurrent_states")

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


# Bytes of a storage for each that a tensor shows, from which on a state is copied rather than kept whole. Chosen.
_LOOSE: Final = 1.25


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
        storages = {storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in self._tensors())}
        self.nbytes = sum(storages.values())
        self._pages: StatePages | None = None  # where its tensors lie, if not in torch's memory
        stream = _stream(self._tensors())
        self._written = None if stream is None else stream.record_event()

    @property
    def pages(self) -> StatePages | None:
        """The pages of the state; None where it lies in torch's memory."""
        return self._pages

    def move_to_pages(self, device: Device, manager: MemoryManager) -> None:
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
            self._pages = StatePages(device, manager, tensors)
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
    ) -> StateSnapshot | None:
        """Takes the state behind the last token of a cache. `move`: takes it from the layers, which are not used any
        more. None where the model keeps its state outside of the cache.
        torch.OutOfMemoryError."""
        parts: list[Part | None] = []
        for layer in layers:
            if type(layer) not in STATES:
                parts.append(None)
                continue
            part = {name: _taken(vars(layer)[name], move) for name in _names(layer)}
            if not any(True for _ in _tensors_in(part, everything=False)):
                return None
            parts.append(part)
        made = cls(ids, salt, parts, any(isinstance(layer, ElasticLayer) for layer in layers))
        for layer in layers if move else ():
            if isinstance(layer, ElasticHybridLayer):  # the elastic half is used on
                _forget(layer)
        return made

    def free(self) -> None:
        """Frees its memory, even if it is still referred to."""
        self._parts, self._pages = [], None

    def copied(self) -> list[Part | None]:
        """Returns a copy for `give_state`; empty where the state was freed. torch.OutOfMemoryError."""
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


def give_state(layers: Sequence[Any], parts: Sequence[Part | None]) -> None:
    """Gives the layers of a cache, which have their other tokens, that state. `parts`: of `StateSnapshot.copied`."""
    for layer, part in zip(layers, parts, strict=True):
        if part is not None:
            vars(layer).update(part)


def _stream(tensors: Iterable[torch.Tensor]) -> Any:
    """Returns this thread's current stream on the device of these tensors, None on a CPU."""
    device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
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
    """Applies `act` to the members of each part, as `_replaced` does."""
    return [None if part is None else _replaced(part, act, kind) for part in parts]


def _replaced(value: Mapping[str, Any], act: Callable[[Any], Any], kind: type = torch.Tensor) -> Part:
    """Returns `value` with each member of that kind, however deep, replaced by `act(member)`, in the order of
    `_tensors_in`."""

    def replacement(member: Any) -> Any:
        if isinstance(member, Mapping):
            return _replaced(member, act, kind)
        return act(member) if isinstance(member, kind) else member

    return {key: replacement(member) for key, member in value.items()}


def _taken(value: Any, move: bool) -> Any:
    """Returns a copy of the value; with `move` the value itself, where its memory is at most `_LOOSE` times the size of
    the tensor."""
    if isinstance(value, torch.Tensor):
        own = value.untyped_storage().nbytes() <= _LOOSE * value.nbytes
        return value if move and own else value.clone()
    if isinstance(value, Mapping):
        return {key: _taken(member, move) for key, member in value.items()}
    return value


def _tensors_in(value: Mapping[Any, Any], everything: bool = True) -> Iterator[torch.Tensor]:
    """Yields the tensors of a part; without `everything` only those with more than one element."""
    for member in value.values():
        if isinstance(member, Mapping):
            yield from _tensors_in(member, everything)
        elif isinstance(member, torch.Tensor) and (everything or member.numel() > 1):
            yield member


class StatePages:
    """Copies of some tensors in pages of their own."""

    def __init__(self, device: Device, manager: MemoryManager, tensors: Sequence[torch.Tensor]) -> None:
        """Copies `tensors` on the current stream. PoolExhausted, DriverError."""
        self._stream = stream_of(device)
        self._places: list[tuple[int, torch.dtype, torch.Size]] = []
        end = 0
        for tensor in tensors:
            self._places.append((end, tensor.dtype, tensor.shape))
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        pieces = -(-end // device.page_size)
        self._group = device.group()
        self._range = device.reserve(pieces * device.page_size, "kv", self._group)
        self._range.map(0, pieces)
        self._tier = KVTier(device, self._group, manager)
        self._tier.client.name = "state"
        self._extent = KVExtent(device, self._group, self._range, self._tier.lock, lambda: False)
        self._extent.kind = "recurrent states"
        self._tier.extents.add(self._extent)
        with GroupLease(self._group), torch.inference_mode(False):
            self._range.note_use(self._stream(), True)
            for view, tensor in zip(self._views(), tensors, strict=True):
                view.copy_(tensor)
            self._tier.turns.stream = self._stream()
        self._extent.extended(0, pieces)
        self._tier.client.only_cached = True
        self._extent.raise_to(pieces)
        manager.client_changed(self._tier.number)

    @property
    def pages(self) -> int:
        """Pages of the state, on the device or the host."""
        return self._extent.pieces

    @property
    def dirty(self) -> int:
        """Pages whose bytes only the device has."""
        return self._extent.dirty

    @property
    def number(self) -> int:
        """The number of this client of the manager."""
        return self._tier.number

    @property
    def device_pages(self) -> int:
        """The pages of these that are on the device."""
        return self._tier.client.device_pages

    @contextmanager
    def read(self) -> Iterator[list[torch.Tensor]]:
        """Yields the tensors, for reads that the current stream is given within the block. BallonetError,
        DriverError."""
        with GroupLease(self._group):
            self._tier.client.used = self._tier.manager.clock()
            self._tier.show(self._extent, self._stream())
            self._range.note_use(self._stream(), False)
            yield self._views()

    def _views(self) -> list[torch.Tensor]:
        flat = from_dlpack(self._range.tensor(0, (self._range.nbytes,), (1,), *_UINT8))
        views = []
        for start, dtype, shape in self._places:
            nbytes = shape.numel() * dtype.itemsize
            views.append(flat.narrow(0, start, nbytes).view(dtype).view(shape))
        return views


class States:
    """The kept states, by the tokens before them."""

    def __init__(self) -> None:
        self._kept: dict[bytes, StateSnapshot] = {}
        self._behind: dict[bytes, list[StateSnapshot]] = {}  # by key of the last full block, or the salt

    def __contains__(self, state: object) -> bool:
        return isinstance(state, StateSnapshot) and self._kept.get(state.key) is state

    def __iter__(self) -> Iterator[StateSnapshot]:
        return iter(tuple(self._kept.values()))

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes of all states, on the device or the host."""
        return sum(state.nbytes for state in self)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of states in torch's memory."""
        return sum(state.nbytes for state in self if state.pages is None)

    @property
    def device_pages(self) -> int:
        """Device pages of states that have their own pages."""
        return sum(state.pages.device_pages for state in self if state.pages is not None)

    @property
    def dirty(self) -> int:
        """Pages among these whose bytes only the device has."""
        return sum(state.pages.dirty for state in self if state.pages is not None)

    def add(self, state: StateSnapshot) -> None:
        """Adds a state; there is none behind the same tokens."""
        self._kept[state.key] = state
        self._behind.setdefault(_place(state), []).append(state)

    def drop(self, state: StateSnapshot) -> None:
        """Removes a state, if it is kept."""
        if state in self:
            del self._kept[state.key]
            state.free()  # the index may remember it for a while
            place = _place(state)
            self._behind[place].remove(state)
            if not self._behind[place]:
                del self._behind[place]

    def clear(self) -> None:
        for state in self:
            self.drop(state)

    def behind(self, place: bytes) -> Sequence[StateSnapshot]:
        """Returns the states behind that block and before the end of the next one; for a salt, those before the end of
        the first block."""
        return tuple(self._behind.get(place, ()))

    def longest(self, prompt: array[int], places: Sequence[bytes]) -> StateSnapshot | None:
        """Returns the longest state of a prompt's beginning. `places`: the salt, and the keys of its full blocks, as
        far as they are needed."""
        for place in reversed(places):
            fitting = [state for state in self._behind.get(place, ()) if state.ids == prompt[: len(state.ids)]]
            if fitting:
                return max(fitting, key=lambda state: len(state.ids))
        return None


def _place(state: StateSnapshot) -> bytes:
    return state.blocks[-1] if state.blocks else state.salt


def state_affects_logits(model: Any, prompt: Sequence[int], tokens: tuple[int, int] = (4, 3)) -> bool:
    """Do tokens depend on the state before them? Runs the model on the first tokens of a prompt, four times at most:
    `tokens` are those of the state, and those computed behind it. Chosen: few."""
    begun_with, more = tokens
    some = [prompt[n % len(prompt)] for n in range(begun_with + more)]
    ids = torch.tensor([some], device=model.device)
    begun = DynamicCache(config=model.config.get_text_config(decoder=True))
    with torch.no_grad():
        _logits(model, ids[:, :begun_with], begun)
        want = _logits(model, ids[:, begun_with:], copy.deepcopy(begun))
        for kind in _KINDS:
            other = copy.deepcopy(begun)
            held = [getattr(layer, kind) for layer in other.layers if isinstance(layer, LinearAttentionLayer)]
            if _doubled(held) and torch.equal(_logits(model, ids[:, begun_with:], other), want):
                return False
    return True


def _logits(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    output: Any = model(input_ids=ids, use_cache=True, return_dict=True, **{cache_name(model): cache})
    logits: torch.Tensor = output.logits
    return logits


def _doubled(held: Sequence[Mapping[int, torch.Tensor | None]]) -> bool:
    """Doubles all numbers in place. Returns whether there were any."""
    tensors = [tensor for states in held for tensor in states.values() if tensor is not None]
    for tensor in tensors:
        tensor.add_(tensor).add_(1)
    return bool(tensors)
