"""The state of a sequence at one of its lengths: the windows and recurrent states that its layers keep then.

Note [State snapshots]
    Keys and values of a token stay what they are when others follow, so that any beginning of what is stored can be
    used. A window has lost what lies before it, and a recurrent state is one of all tokens so far: neither can be
    shortened. So they are kept as they are at some lengths, as a whole, and used by prompts that begin with exactly
    those tokens. Layers that keep every token beside them go on in blocks, as in any model.

Note [Copies]
    Transformers writes to recurrent states in place. So a cache never computes with what is kept: whoever begins with
    a state gets a copy, and many may begin with the same. What a request leaves behind is taken over without one where
    nobody else has its cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from ...offload.policy.prefixes import chain
from ...offload.policy.tuning import DEFAULT
from ..compat import HybridSlidingLayer, LinearAttentionLayer, SlidingLayer
from ..kv.hybrid import ElasticHybridLayer
from ..kv.layer import ElasticLayer

STATES: Final = tuple(  # classes of layers that keep a state
    each for each in (SlidingLayer, LinearAttentionLayer, HybridSlidingLayer, ElasticHybridLayer) if each is not None
)
_OF_TOKENS: Final = ("device", "dtype")  # of a hybrid layer: what both of its halves have

Part = dict[str, Any]  # attributes of a layer by name


def keeps_state(layers: Sequence[Any]) -> bool:
    """Does any of the layers of a cache keep one?"""
    return any(type(layer) in STATES for layer in layers)


def is_recurrent(layers: Sequence[Any]) -> bool:
    """Is one of these states more than a window?"""
    return any(type(layer) in STATES and isinstance(layer, LinearAttentionLayer) for layer in layers)


def state_key(ids: Sequence[int], salt: bytes) -> bytes:
    """Stands for the state behind exactly these tokens, at least one. `salt`: as of blocks."""
    return chain(ids, len(ids), salt + b"state")[0]


class StateSnapshot:
    """What the layers of a cache keep behind the tokens `ids`, but for keys and values of every token."""

    def __init__(self, ids: Sequence[int], salt: bytes, parts: Sequence[Part | None], growing: bool) -> None:
        """`parts`: of its layers, None of those that keep none. Nobody else has their tensors. `growing`: do others
        keep every token?"""
        self.ids = array("q", ids)
        self.salt = salt
        self.growing = growing
        self.key = state_key(ids, salt)
        self.blocks: list[bytes] = []  # keys of the full blocks before it
        self._parts = list(parts)
        storages = {each.data_ptr(): each.nbytes() for each in (t.untyped_storage() for t in self._tensors())}
        self.nbytes: Final = sum(storages.values())
        stream = self._stream()
        self._written = None if stream is None else stream.record_event()

    @classmethod
    def of(cls, layers: Sequence[Any], ids: Sequence[int], salt: bytes, *, move: bool) -> StateSnapshot | None:
        """Behind the last token of a cache. `move`: its layers are used no more, and lose it. None where a layer has
        none, as its model keeps it elsewhere. torch.OutOfMemoryError."""
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
            if isinstance(layer, ElasticHybridLayer):  # its other half lives on
                _forget(layer)
        return made

    def let_go(self) -> None:
        """Gives its memory back, whoever still knows it."""
        self._parts = []

    def copied(self) -> list[Part | None]:
        """What `begin` takes; empty where it is gone. torch.OutOfMemoryError."""
        parts = self._parts
        stream = self._stream()
        if stream is not None and self._written is not None:
            stream.wait_event(self._written)
        copies = [
            None if part is None else {name: _taken(each, False) for name, each in part.items()} for part in parts
        ]
        if stream is not None:
            for tensor in (tensor for part in parts if part is not None for tensor in _tensors_in(part)):
                tensor.record_stream(stream)
        return copies

    def _tensors(self) -> Iterator[torch.Tensor]:
        for part in self._parts:
            if part is not None:
                yield from _tensors_in(part)

    def _stream(self) -> Any:
        """The present stream of this thread, None on a CPU."""
        device = next((each.device for each in self._tensors() if each.device.type == "cuda"), None)
        return None if device is None else torch.cuda.current_stream(device)


def begin(layers: Sequence[Any], parts: Sequence[Part | None]) -> None:
    """Gives the layers of a cache, whose other tokens are there, that state. `parts`: of `StateSnapshot.copied`."""
    for layer, part in zip(layers, parts, strict=True):
        if part is not None:
            vars(layer).update(part)


def _names(layer: Any) -> list[str]:
    """The names of the attributes that are its state."""
    if isinstance(layer, ElasticLayer):
        return [name for name in vars(LinearAttentionLayer()) if name not in _OF_TOKENS]
    return list(vars(layer))


def _forget(layer: ElasticHybridLayer) -> None:
    fresh = vars(LinearAttentionLayer(number_of_states=layer.number_of_states))
    vars(layer).update({name: fresh[name] for name in _names(layer)})


def _taken(value: Any, move: bool) -> Any:
    """The same in tensors of its own, or as it is, as far as it holds no more memory than it shows."""
    if isinstance(value, torch.Tensor):
        loose = value.untyped_storage().nbytes() > DEFAULT.prefixes.loose * value.nbytes
        return value if move and not loose else value.clone()
    if isinstance(value, Mapping):
        return {key: _taken(each, move) for key, each in value.items()}
    return value


def _tensors_in(value: Mapping[Any, Any], everything: bool = True) -> Iterator[torch.Tensor]:
    """Returns the tensors of a part; but for `everything` only those with more than one number in them."""
    for each in value.values():
        if isinstance(each, Mapping):
            yield from _tensors_in(each, everything)
        elif isinstance(each, torch.Tensor) and (everything or each.numel() > 1):
            yield each
