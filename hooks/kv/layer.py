"""The elastic KV cache: layers of a transformers cache whose keys and values lie in ranges of the pool.

Note [Elastic or stock]
    An `ElasticLayer` is a `DynamicLayer` in every respect. It keeps its tokens in a range while it can, and otherwise
    in ordinary tensors of torch, as `DynamicLayer` does: when gradients or tangents flow through the new tokens
    (written in place they would be lost), when torch traces or compiles, for tensors that are not on the installed
    device or are no plain tensors, for shapes that do not fit the range, and once `keys` or `values` are assigned. At
    its next update under ordinary circumstances it moves (back) into a range.

    A traced function reads the tokens of a range but never changes the range: the layer works on tensors of its own
    there, as `DynamicLayer`. The place in the range is left at the next update outside of tracing.

    Operations that replace all tokens (another batch, a longer reservation, a reordering while the old order is still
    referred to) first fill a new place and then leave the old one, so that a failure in between changes nothing.

Note [Pickled as stock]
    A pickle holds what it would hold without ballonet: a layer of transformers' own with tensors of its own. So it can
    be loaded where there is no ballonet, and where only classes of transformers are allowed. A layer stays stock then;
    a `KVCache` makes its layers elastic again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, ClassVar, Final, Self, cast

import torch

from ...allocator.errors import ManageError
from ..compat import DynamicLayer, cropped, eager
from ..device import graphs
from ..forward.lease import GroupLease
from .ranges import CacheRanges, KVRange
from .tensors import KVShape, Latest, Pair

_THERE: Final = ("_range", "_latest")  # attributes that a copy cannot have


class ElasticLayer(DynamicLayer):
    """The keys and values of one full-attention layer, [batch, heads, tokens, dim], at the growing tail of a range.

    Raises torch.OutOfMemoryError where no page is left for new tokens, and DriverError; it is then as long as before.
    """

    stock: ClassVar[type[DynamicLayer]] = DynamicLayer  # the class that this one replaces

    def __init__(self, ranges: CacheRanges | None = None, *, number: int | None = None, **kwargs: Any) -> None:
        """`ranges`: shared with the other layers of the cache. `number`: of the layer in its model, None where layers
        are made in order. `kwargs`: transformers' own."""
        self.ranges = CacheRanges() if ranges is None else ranges  # shared with the other layers of its cache
        self.number = self.ranges.number() if number is None else number
        self._range: KVRange | None = None
        self._place = 0
        self._latest: Latest | None = None  # in `_range`
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]

    @property
    def keys(self) -> torch.Tensor | None:
        """[batch, heads, tokens, k_dim]; None before the first update."""
        self._give_to_graph()
        if self._keys is not None or self._range is None or self._latest is None:
            return self._keys
        keys = self._latest.keys
        return self._range.pair(self._place)[0] if keys is None else keys

    @keys.setter
    def keys(self, tensor: torch.Tensor | None) -> None:
        self._keys = tensor

    @property
    def values(self) -> torch.Tensor | None:
        """[batch, heads, tokens, v_dim]; None before the first update."""
        self._give_to_graph()
        if self._values is not None or self._range is None or self._latest is None:
            return self._values
        values = self._latest.values
        return self._range.pair(self._place)[1] if values is None else values

    @values.setter
    def values(self, tensor: torch.Tensor | None) -> None:
        self._values = tensor

    @property
    def elastic(self) -> bool:
        """Do the tokens lie in a range now?"""
        return self._range is not None and self._keys is None and self._values is None

    @classmethod
    def take(cls, layer: DynamicLayer, ranges: CacheRanges, number: int) -> None:
        """Makes a stock `layer`, of the class `stock`, one of this class, in place: whoever refers to it sees the same
        tokens, which move into a range if they can. `ranges`, `number`: as for a new one."""
        held = vars(layer)
        made = vars(cls(ranges, number=number, number_of_states=getattr(layer, "number_of_states", 1)))
        held.update({name: value for name, value in made.items() if name not in held})
        held.update(_keys=held["keys"], _values=held["values"])
        layer.__class__ = cls  # an interrupt before this line leaves a stock layer, one behind it an elastic one
        del held["keys"], held["values"]
        elastic = cast(Self, layer)
        keys, values = elastic._tokens()
        if keys is None or keys.dim() != 4 or values.dim() != 4 or not keys.shape[2] or not eager(keys, values):
            return
        shape = KVShape.of(keys, values)
        with suppress(torch.OutOfMemoryError):  # the next update says so, if there is one
            if shape.fits(keys, values):
                elastic._fill(shape, keys.shape[2], (keys, values))

    def get_seq_length(self) -> int:
        """Tokens held."""
        if self._keys is None and self._latest is not None:
            return self._latest.length
        return int(super().get_seq_length())

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Appends tokens, [batch, heads, new, dim], and returns all keys and values."""
        if not eager(key_states, value_states):
            return self._stock_update(key_states, value_states, *args, **kwargs)
        kv_range = self._range if self._keys is self._values is None else None
        if (
            kv_range is not None
            and (appended := kv_range.append_next(self._place, key_states, value_states)) is not None
        ):
            return appended
        if kv_range is None or not kv_range.takes(self._place, key_states, value_states):
            if not self._move_in(key_states, value_states):
                return self._stock_update(key_states, value_states, *args, **kwargs)
            kv_range = cast(KVRange, self._range)
        return kv_range.append(self._place, key_states, value_states)

    def append_eagerly(self, keys: torch.Tensor, values: torch.Tensor, stream: int) -> Pair | None:
        """Does what `update` does, in few calls, with a token of plain tensors that nothing traces, on the current
        stream; None, and nothing has changed, where more has to be done than to write it."""
        kv_range = self._range if self._keys is self._values is None else None
        return None if kv_range is None else kv_range.append_next(self._place, keys, values, stream)

    def reset(self) -> None:
        """Forgets everything, as if never used."""
        self.is_initialized = False
        self._keys = self._values = None
        self._leave()

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens; a positive number means what transformers says."""
        kv_range = self._changeable()
        if kv_range is None:
            super().crop(tokens_to_remove)
        elif tokens_to_remove:
            kv_range.cut(self._place, cropped(self.get_seq_length(), tokens_to_remove))

    def cut(self, length: int, then: int) -> None:
        """Forgets the tokens from `length` on. `then`: the length that is expected soon."""
        if (kv_range := self._changeable()) is None:
            ElasticLayer.crop(self, length - self.get_seq_length())
        else:
            kv_range.cut(self._place, length, then)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence i becomes what sequence beam_idx[i] is (int64[sequences])."""
        kv_range = self._changeable()
        if kv_range is None:
            super().reorder_cache(cast(torch.LongTensor, beam_idx))
            return
        rows = beam_idx.to(kv_range.shape.device)
        if rows.shape == (kv_range.shape.batch,) and kv_range.shown.exclusive():
            kv_range.reorder(self._place, rows)
        else:
            self._replace(lambda tensor: tensor.index_select(0, rows))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence becomes `repeats` sequences."""
        if self._changeable() is None:
            super().batch_repeat_interleave(repeats)
        else:
            self._replace(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the sequences that `indices` selects."""
        if self._changeable() is None:
            super().batch_select_indices(indices)
        else:
            self._replace(lambda tensor: tensor[indices, ...])

    def offload(self) -> None:
        """Moves the tokens to ordinary host memory; does nothing on a CPU."""
        if self.is_initialized and self.device.type != "cpu":
            with self._held():
                super().offload()  # type: ignore[no-untyped-call]
            self._leave()

    def prefetch(self) -> None:
        """Brings them back to the layer's device; the next update moves them into the pool."""
        if not self.elastic:
            super().prefetch()  # type: ignore[no-untyped-call]

    def __copy__(self) -> Self:
        """A copy whose tokens lie in another place."""
        return self._twin(self.__dict__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy whose tokens lie in a range of its own."""
        return self._twin(
            {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items() if name not in _THERE}
        )

    def __reduce__(self) -> tuple[type[DynamicLayer], tuple[()], dict[str, Any]]:
        """Pickles a stock layer: see Note [Pickled as stock]."""
        ours = ElasticLayer().__dict__.keys() - self.stock().__dict__.keys()
        state = {name: value for name, value in self.__dict__.items() if name not in ours}
        elastic = self.elastic
        with self._held():
            for name, tensor in (("keys", self.keys), ("values", self.values)):
                state[name] = tensor.clone() if elastic and tensor is not None else tensor
        return self.stock, (), state

    # -- for caches that are kept for later prompts (hooks/prefix)

    @property
    def kv_range(self) -> KVRange | None:
        """The range that the tokens lie in, None where they do not."""
        return self._range if self.elastic else None

    def part(self, start: int, end: int) -> Pair:
        """Keys and values of the tokens [start, end), as new tensors over the range, on any thread. BallonetError where
        they are not in a range."""
        kv_range = self.kv_range
        if kv_range is None:
            raise ManageError("these tokens lie in no range")
        return kv_range.part(self._place, start, end)

    def write(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes tokens that the range is missing, see ranges.py, Note [Released prefix]. The caller holds a lease."""
        cast(KVRange, self._range).write(self._place, start, keys, values)

    def _twin(self, state: dict[str, Any]) -> Self:
        twin = type(self).__new__(type(self))
        twin.__dict__.update(state, **dict.fromkeys(_THERE))
        if self.elastic:
            with self._held():
                twin._keep(self._tokens())
        return twin

    def _held(self) -> AbstractContextManager[object]:
        """A `with` block for launching kernels that read the tokens: no other thread moves their pages meanwhile."""
        return nullcontext() if self._range is None else GroupLease(self._range.group)

    def _changeable(self) -> KVRange | None:
        """The range that the tokens lie in; None where they lie in none, or must not be changed there now."""
        return self._range if self.elastic and not torch.compiler.is_compiling() else None

    def _tokens(self) -> Pair:
        return cast(torch.Tensor, self.keys), cast(torch.Tensor, self.values)

    def _stock_update(self, *args: Any, **kwargs: Any) -> Pair:
        pair = super().update(*args, **kwargs)
        if not torch.compiler.is_compiling():
            self._leave()
        return pair

    def _move_in(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Moves the layer's tokens to a place with space for these behind them. False where that cannot be."""
        if keys.dim() != 4 or values.dim() != 4 or not keys.shape[2]:
            return False
        shape = KVShape.of(keys, values)
        if not shape.fits(keys, values):
            return False
        held = self._tokens()
        if held[0] is None or held[0].dim() != 4:  # never used, or initialized with nothing
            return self._fill(shape, keys.shape[2], None)
        room = held[0].shape[2] + keys.shape[2]
        return shape.fits(*held) and eager(*held) and self._fill(shape, room, held)

    def _fill(self, shape: KVShape, room: int, tokens: Pair | None) -> bool:
        """Takes a new place for so many tokens (`room`), puts `tokens` there, and only then leaves the old one."""
        device = self.ranges.device_at(shape.device)
        if device is None:
            return False
        joined = self.ranges.join(device, shape, room, self.number)
        if joined is None:
            return False
        kv_range, place = joined
        if tokens is not None:
            try:
                kv_range.append(place, *tokens)
            except BaseException:
                kv_range.leave(place)
                raise
        before, at = self._range, self._place
        self._range, self._place, self._latest = kv_range, place, kv_range.shown.latest[place]
        self._keys = self._values = None
        if before is not None:
            before.leave(at)
        self.dtype, self.device, self.is_initialized = shape.dtype, shape.device, True
        return True

    def _replace(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces the keys and the values, if there are any, by the results of `change`."""
        if self.get_seq_length():
            with self._held():
                keys, values = self._tokens()
                self._keep((change(keys), change(values)))

    def _keep(self, tokens: Pair) -> None:
        """Stores these tokens: in a new place, or as they are where there is none."""
        keys, values = tokens
        if not keys.shape[0] or not self._fill(KVShape.of(keys, values), keys.shape[2], tokens):
            self._leave()
            self._keys, self._values = keys.clone(), values.clone()

    def _give_to_graph(self) -> None:
        """Makes the layer a stock one where a CUDA graph is about to capture its tokens: they keep their place for as
        long as the graph or the layer needs them."""
        kv_range = None if torch.compiler.is_compiling() else self._range
        if kv_range is None or not graphs.capturing(kv_range.shape.device.type == "cuda"):
            return
        if self.elastic:
            tokens = kv_range.pair(self._place)
            graphs.shows(kv_range.device, kv_range.group, tokens)
            self._keys, self._values = tokens
        self._leave()

    def _leave(self) -> None:
        kv_range, self._range, self._latest = self._range, None, None
        if kv_range is not None:
            kv_range.leave(self._place)
