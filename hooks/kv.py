"""The elastic KV cache: layers of a transformers cache whose keys and values lie in ranges of the pool.

Note [Elastic or stock]
    An `ElasticLayer` is a `DynamicLayer` in every respect. It keeps its tokens in a range while it can, and otherwise
    in ordinary tensors of torch, where all that it does is what `DynamicLayer` does: when gradients flow through the
    new tokens (written in place they would be lost), when torch traces or compiles, for tensors that are not on the
    installed device or are no plain tensors, for shapes that do not fit what is there, and from the moment someone
    assigns `keys` or `values`. At its next update under ordinary circumstances it moves (back) in.

    Whatever replaces the tokens as a whole (another batch, a longer reservation, a reordering while someone looks at
    the old order) first fills a new place and then leaves the old one, so that a failure in between changes nothing.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.jit import is_tracing  # type: ignore[attr-defined]

from ..allocator import runtime
from .cache_ranges import CacheRanges
from .compat import DynamicCache, DynamicLayer, cropped
from .kv_range import KVRange, Shape
from .weights import torch_device

Pair = tuple[torch.Tensor, torch.Tensor]


class ElasticLayer(DynamicLayer):
    """The keys and values of one full-attention layer, [batch, heads, tokens, dim], at the growing tail of a range.

    Raises torch.OutOfMemoryError where no page is left for new tokens, and DriverError; it is then as long as before.
    """

    def __init__(self, ranges: CacheRanges | None = None, **kwargs: Any) -> None:
        """`ranges`: shared with the other layers of the cache. `kwargs`: what transformers gives to any layer."""
        self._ranges = CacheRanges() if ranges is None else ranges
        self._home: KVRange | None = None
        self._place = 0
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]

    @property
    def keys(self) -> torch.Tensor | None:
        """[batch, heads, tokens, k_dim]; None before the first update."""
        if self._keys is not None or self._home is None:
            return self._keys
        return self._home.keys(self._place)

    @keys.setter
    def keys(self, tensor: torch.Tensor | None) -> None:
        self._keys = tensor

    @property
    def values(self) -> torch.Tensor | None:
        """[batch, heads, tokens, v_dim]; None before the first update."""
        if self._values is not None or self._home is None:
            return self._values
        return self._home.values(self._place)

    @values.setter
    def values(self, tensor: torch.Tensor | None) -> None:
        self._values = tensor

    @property
    def elastic(self) -> bool:
        """Do the tokens lie in a range now?"""
        return self._home is not None and self._keys is None and self._values is None

    def get_seq_length(self) -> int:
        """Tokens held."""
        if self._keys is None and self._home is not None:
            return self._home.length(self._place)
        return int(super().get_seq_length())

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Appends tokens, [batch, heads, new, dim], and returns all keys and values."""
        if not _plain(key_states, value_states):
            return self._stock_update(key_states, value_states, *args, **kwargs)
        home = self._home
        if home is None or not self.elastic or not home.takes(self._place, key_states, value_states):
            if not self._move_in(key_states, value_states):
                return self._stock_update(key_states, value_states, *args, **kwargs)
            home = cast(KVRange, self._home)
        return home.append(self._place, key_states, value_states)

    def reset(self) -> None:
        """Forgets everything, as if never used."""
        self._leave()
        self._keys = self._values = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens; what a positive number means is up to transformers."""
        if self._home is None or not self.elastic:
            super().crop(tokens_to_remove)
        elif tokens_to_remove:
            self._home.cut(self._place, cropped(self._home.length(self._place), tokens_to_remove))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence i becomes what sequence beam_idx[i] is (int64[sequences])."""
        home = self._home
        if home is None or not self.elastic:
            super().reorder_cache(cast(torch.LongTensor, beam_idx))
            return
        rows = beam_idx.to(home.shape.device)
        if rows.shape == (home.shape.batch,) and home.exclusive():
            home.reorder(self._place, rows)
        else:
            self._replace(lambda tensor: tensor.index_select(0, rows))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence becomes `repeats` sequences."""
        if self.elastic:
            self._replace(lambda tensor: tensor.repeat_interleave(repeats, dim=0))
        else:
            super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the sequences that `indices` selects."""
        if self.elastic:
            self._replace(lambda tensor: tensor[indices, ...])
        else:
            super().batch_select_indices(indices)

    def offload(self) -> None:
        """Moves the tokens to ordinary host memory; on a CPU that is where they are."""
        if self.is_initialized and self.device.type != "cpu":
            super().offload()  # type: ignore[no-untyped-call]
            self._leave()

    def prefetch(self) -> None:
        """Brings them back to the layer's device; the next update moves them into the pool."""
        if not self.elastic:
            super().prefetch()  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> ElasticLayer:
        """A copy whose tokens lie in a range of its own."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(
            {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items() if name != "_home"}
        )
        twin._home = None
        if self.elastic:
            twin._settle(self._tokens())
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy.copy: the tokens as tensors of their own, which the next update of the copy moves in."""
        state = self.__dict__ | {"_home": None}
        if self.elastic:
            state["_keys"], state["_values"] = (tensor.clone() for tensor in self._tokens())
        return state

    def _tokens(self) -> Pair:
        return cast(torch.Tensor, self.keys), cast(torch.Tensor, self.values)

    def _stock_update(self, *args: Any, **kwargs: Any) -> Pair:
        pair = super().update(*args, **kwargs)
        if not torch.compiler.is_compiling():
            self._leave()
        return pair

    def _move_in(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Makes a place for these tokens behind those that are there, which come along. False where that cannot be."""
        if keys.dim() != 4 or values.dim() != 4 or not keys.shape[2]:
            return False
        shape = Shape.of(keys, values)
        if not shape.fits(keys, values):
            return False
        length = self.get_seq_length()
        tokens = self._tokens() if length else None
        if tokens is not None and not (shape.fits(*tokens) and _plain(*tokens)):
            return False
        return self._fill(shape, length + keys.shape[2], tokens)

    def _fill(self, shape: Shape, room: int, tokens: Pair | None) -> bool:
        """Takes a new place with room for so many tokens, puts `tokens` there, and only then leaves the old one."""
        device = runtime.current()
        if device is None or shape.device != torch_device(device):
            return False
        found = self._ranges.join(device, shape, room)
        if found is None:
            return False
        home, place = found
        if tokens is not None:
            try:
                home.append(place, *tokens)
            except BaseException:
                home.leave(place)
                raise
        self._leave()
        self._home, self._place = home, place
        self._keys = self._values = None
        self.dtype, self.device, self.is_initialized = shape.dtype, shape.device, True
        return True

    def _replace(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """The tokens become what `change` makes of the keys and of the values, if there are any."""
        if self.get_seq_length():
            keys, values = self._tokens()
            self._settle((change(keys), change(values)))

    def _settle(self, tokens: Pair) -> None:
        """Holds these tokens from now on: in a new place, or where that cannot be as they are."""
        keys, values = tokens
        if not keys.shape[0] or not self._fill(Shape.of(keys, values), keys.shape[2], tokens):
            self._leave()
            self._keys, self._values = keys.clone(), values.clone()

    def _leave(self) -> None:
        home, self._home = self._home, None
        if home is not None:
            home.leave(self._place)


class KVCache(DynamicCache):
    """A cache for `past_key_values=` whose full-attention layers are elastic; the others are transformers' own.

    Works with any model on the installed device, managed or not. NotInstalled before `ballonet.install()`.
    """

    def __init__(self, config: Any = None, *, max_length: int = 0) -> None:
        """`config`: the model's, which says what its layers are (without it all are full attention). `max_length`:
        tokens that one sequence is expected to reach; a hint, not a limit."""
        runtime.require()
        super().__init__(config=config)
        ranges = CacheRanges.of(config, max_length)
        stock = (DynamicLayer, ElasticLayer)
        self.layers = [ElasticLayer(ranges) if type(layer) in stock else layer for layer in self.layers]
        if config is None:
            self.layer_class_to_replicate = cast(Any, functools.partial(ElasticLayer, ranges))


def _plain(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Can these be copied in place? See Note [Elastic or stock]."""
    if torch.compiler.is_compiling() or is_tracing():
        return False
    if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
        return False
    return type(keys) is torch.Tensor and type(values) is torch.Tensor
