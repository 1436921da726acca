"""Stand-ins for layers of a cache whose tokens lie on another replica: they hold no tokens, but know their number.

Note [Lengths of layers elsewhere]
    A model asks its cache for lengths: where positions go on, how wide masks are, whether there is a recurrent state.
    It asks for the first layer, or the first of a kind, wherever that is. So a layer that another replica runs is
    replaced by one of a class derived from its own, which reports as many tokens as the layers that do run: it grows by
    as much in a forward as they do. Where none of those counts tokens (they keep states, or use other layers' tokens),
    it grows by the length of the input. A stand-in is asked for lengths only: writing tokens to it raises SpliceError.
    The layer that it stands for, which is unused, is put back by `hold`.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Hashable
from typing import Any

from ...allocator.errors import SpliceError
from ..compat import EncoderDecoderCache, LinearAttentionLayer, StaticLayer
from ..kv.layer import ElasticLayer


class Elsewhere:
    """The stand-in for a layer of a cache. Mixed in before the layer's own class."""

    _layer_type = None  # transformers registers classes that have one
    is_initialized = False
    replaced: Any
    has_previous_state: dict[int, bool]
    cumulative_length: int  # tokens, by the name that layers with a window use

    def advance(self, tokens: int) -> None:
        """Counts tokens that the running layers have got."""
        self.cumulative_length += tokens
        if hasattr(self, "has_previous_state"):
            self.has_previous_state = dict.fromkeys(self.has_previous_state, True)

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def crop(self, tokens_to_remove: int) -> None:
        self.cumulative_length -= min(abs(tokens_to_remove), self.cumulative_length)

    def reset(self) -> None:
        self.cumulative_length = 0
        if hasattr(self, "has_previous_state"):
            self.has_previous_state = dict.fromkeys(self.has_previous_state, False)

    def nothing(self, *_: Any, **__: Any) -> None:
        """Does nothing: there are no tokens."""

    offload = prefetch = reorder_cache = batch_repeat_interleave = batch_select_indices = nothing

    def update(self, *_: Any, **__: Any) -> Any:
        """Raises SpliceError."""
        raise SpliceError(
            "a layer of this cache runs here, but its tokens are on another replica: bring them over before its span "
            "changes (elsewhere.hold), or begin with an empty cache"
        )

    update_conv_state = update_recurrent_state = update_indexer = lazy_initialization = update


@functools.cache
def _class_for(stock: Hashable) -> type[Any]:
    assert isinstance(stock, type)
    return type(f"{stock.__name__}Elsewhere", (Elsewhere, stock), {})


def stands_for(layer: Any, length: int) -> Any:
    """Returns a stand-in for `layer`, which is unused, with so many tokens."""
    elastic = isinstance(layer, ElasticLayer)
    stock: Any = layer.stock if elastic else type(layer)
    found = object.__new__(_class_for(stock))
    found.__dict__.update((name, value) for name, value in vars(layer).items() if not (elastic and name[0] == "_"))
    found.keys = found.values = None
    found.replaced, found.cumulative_length = layer, 0
    if length:
        found.advance(length)
    return found


def leave(cache: Any, index: int) -> None:
    """Replaces this layer of the cache by a stand-in, and drops its tokens, which are on another replica."""
    layers = layers_of(cache)
    if layers is not None and not isinstance(layer := layers[index], Elsewhere):
        length = _length(layer)
        layer.reset()
        if isinstance(layer, LinearAttentionLayer):  # `reset` would keep its memory
            LinearAttentionLayer.__init__(layer, number_of_states=layer.number_of_states)
        layers[index] = stands_for(layer, length)


def hold(cache: Any, index: int) -> Any:
    """Puts the layer back in the place of its stand-in, and returns it. It is empty: the caller writes the tokens
    before the next forward."""
    layers = layers_of(cache)
    if layers is None or not isinstance(found := layers[index], Elsewhere):
        return None if layers is None else layers[index]
    layers[index] = found.replaced
    return found.replaced


class Lengths:
    """The stand-ins of one cache in one forward."""

    def __init__(self, cache: Any, here: Collection[int], elsewhere: Collection[int]) -> None:
        """Puts stand-ins into the cache for the layers `elsewhere`. `here`: the layers that this replica uses.
        SpliceError where the former hold tokens, or the latter do not, or the cache does not grow."""
        self._here = here
        self._elsewhere = elsewhere
        self._layers = layers_of(cache)
        self._before = 0
        if self._layers is None:
            return
        for index, layer in enumerate(self._layers):
            _check(layer, index, index in here, index in elsewhere)
        self._before = self._held()
        self._stand_in(0)

    def settle(self, cache: Any, tokens: int) -> None:
        """Updates the lengths after the forward. `cache`: the one that it used, or made; `tokens`: of its input."""
        if self._layers is None and (layers := layers_of(cache)) is not None:
            self._layers = layers
        layers = self._layers
        if layers is None:
            return
        after = self._held()
        grown = after - self._before if after > self._before else tokens
        for layer in layers:
            if isinstance(layer, Elsewhere):
                layer.advance(grown)
        make = getattr(cache, "layer_class_to_replicate", None)
        if not layers and make is not None:
            layers.append(make())
        self._stand_in(max(after, grown))

    def _stand_in(self, length: int) -> None:
        assert self._layers is not None
        for index, layer in enumerate(self._layers):
            if index in self._elsewhere and not isinstance(layer, Elsewhere):
                self._layers[index] = stands_for(layer, length)

    def _held(self) -> int:
        """Tokens of the first running layer that counts them."""
        for index in sorted(self._here):
            if (
                self._layers is not None
                and index < len(self._layers)
                and hasattr(self._layers[index], "get_seq_length")
            ):
                return _length(self._layers[index])
        return 0


def layers_of(cache: Any) -> list[Any] | None:
    """The list of a cache's layers, in an encoder-decoder's those of self-attention; None for an object without."""
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    layers = getattr(cache, "layers", None)
    return layers if isinstance(layers, list) else None


def marks(cache: Any) -> tuple[object, ...]:
    """Returns a value for each layer of a cache that changes when the layer is written to."""
    return tuple(
        (_length(layer), any(getattr(layer, "has_previous_state", {}).values())) for layer in layers_of(cache) or ()
    )


def _length(layer: Any) -> int:
    return int(layer.get_seq_length()) if hasattr(layer, "get_seq_length") else 0


def _check(layer: Any, index: int, here: bool, elsewhere: bool) -> None:
    if isinstance(layer, StaticLayer):
        raise SpliceError(
            "a cache of a fixed size has memory for layers that do not run here: give one that grows (DynamicCache, "
            "ballonet.KVCache), or none"
        )
    if here and isinstance(layer, Elsewhere):
        layer.update()
    if elsewhere and not isinstance(layer, Elsewhere) and _holds(layer):
        raise SpliceError(
            f"layer {index} of this cache holds tokens, but does not run here: hand them over to the replica where it "
            "runs first (elsewhere.leave drops them)"
        )


def _holds(layer: Any) -> bool:
    return _length(layer) > 0 or any(getattr(layer, "has_previous_state", {}).values())
