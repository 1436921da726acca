"""Layers of a cache whose tokens lie on another replica: they hold nothing, and know how many tokens there are.

Note [Lengths of what is elsewhere]
    A model asks its cache for lengths: where positions go on, how wide masks are, whether there is a recurrent state.
    It asks for the first layer, or the first of a kind, wherever that is. So a layer that does not run here is replaced
    by one of a class derived from its own, which answers as if it held as many tokens as the layers that do run: their
    growth in a forward is its own. Where none of those counts tokens (they keep states, or use what others keep), the
    length of the input is. A stand-in is asked for lengths only: what would read or write its tokens raises SpliceError.
    The layer that it stands for, which is unused, comes back by `hold`.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

from ...allocator.errors import SpliceError
from ..compat import EncoderDecoderCache, LinearAttentionLayer, StaticLayer
from ..kv.layer import ElasticLayer


class Elsewhere:
    """What stands for a layer of a cache. Mixed in before the layer's own class."""

    _layer_type = None  # transformers registers classes that have one
    is_initialized = False
    replaced: Any
    cumulative_length: int  # tokens, under the name that layers with a window have for it

    def advance(self, tokens: int) -> None:
        """So many more tokens are held by the layers that run here."""
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
        """There are no tokens that this could be done to."""

    offload = prefetch = reorder_cache = batch_repeat_interleave = batch_select_indices = nothing

    def update(self, *_: Any, **__: Any) -> Any:
        """SpliceError."""
        raise SpliceError(
            "a layer of this cache runs here, but its tokens are on another replica: bring them over before its span "
            "changes (elsewhere.hold), or begin with an empty cache"
        )

    update_conv_state = update_recurrent_state = update_indexer = lazy_initialization = update


@functools.cache
def _class_for(stock: type) -> type:
    return type(f"{stock.__name__}Elsewhere", (Elsewhere, stock), {})


def stands_for(layer: Any, length: int) -> Any:
    """Returns what stands for `layer`, which is unused, with so many tokens."""
    elastic = isinstance(layer, ElasticLayer)
    cls = _class_for(layer.stock if elastic else type(layer))
    found = cls.__new__(cls)
    found.__dict__.update((name, value) for name, value in vars(layer).items() if not (elastic and name[0] == "_"))
    found.keys = found.values = None
    found.replaced, found.cumulative_length = layer, 0
    if length:
        found.advance(length)
    return found


def leave(cache: Any, index: int) -> None:
    """The tokens of this layer of the cache are on another replica from now on: what it holds is dropped."""
    layers = layers_of(cache)
    if layers is not None and not isinstance(layer := layers[index], Elsewhere):
        length = _length(layer)
        layer.reset()
        if isinstance(layer, LinearAttentionLayer):  # which would keep its memory
            LinearAttentionLayer.__init__(layer, number_of_states=layer.number_of_states)
        layers[index] = stands_for(layer, length)


def hold(cache: Any, index: int) -> Any:
    """Returns the layer that comes to the place of its stand-in: it is empty, and the caller puts the tokens in before
    the next forward."""
    layers = layers_of(cache)
    if layers is None or not isinstance(found := layers[index], Elsewhere):
        return None if layers is None else layers[index]
    layers[index] = found.replaced
    return found.replaced


class Lengths:
    """The stand-ins of one cache in one forward."""

    def __init__(self, cache: Any, here: Collection[int], elsewhere: Collection[int]) -> None:
        """Puts stand-ins into it for the layers `elsewhere`; `here`: those that are used here. SpliceError where the
        former hold tokens, or the latter do not, or the cache is not one that grows."""
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
        """The forward has run: `cache` is the one that it used, or made; `tokens`: of its input."""
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
        """Tokens of the first layer that runs here and counts them."""
        for index in sorted(self._here):
            if (
                self._layers is not None
                and index < len(self._layers)
                and hasattr(self._layers[index], "get_seq_length")
            ):
                return _length(self._layers[index])
        return 0


def layers_of(cache: Any) -> list[Any] | None:
    """The list of a cache's layers, in an encoder-decoder's those of self-attention; None for what has none."""
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    layers = getattr(cache, "layers", None)
    return layers if isinstance(layers, list) else None


def marks(cache: Any) -> tuple[object, ...]:
    """What tells of each layer of a cache whether it has been written to between two looks."""
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
