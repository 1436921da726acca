"""Which layers of a cache become elastic, why the others stay what transformers makes of them, and `KVCache`, for
programs that make a model's cache themselves.

Note [One decision]
    For each type of layer ("full_attention") transformers has a class in a table, from which a `DynamicCache` is made.
    Whether a layer becomes elastic depends on that class alone, which must be exactly one of those in `ELASTIC`:
    subclasses store more than keys and values. `generation` decides so when a managed model builds a cache or is given
    one, `KVCache` for its own layers, and `plan` for a model that need not exist.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch

from ...allocator import devices
from ..compat import (
    DynamicCache,
    DynamicLayer,
    EncoderDecoderCache,
    GenerationMixin,
    HybridLayer,
    LinearAttentionLayer,
    builds_dynamic_cache,
    layer_classes,
    layer_count,
    prepared_caches,
    without_modules,
)
from .layer import ElasticLayer
from .ranges import CacheRanges

CROSS_ATTENTION: Final = "cross_attention"
_STORES: Final = {  # class of layer -> what it stores
    "DynamicLayer": "keys and values of every token, which grow with the sequence",
    "LinearAttentionAndFullAttentionLayer": "keys and values of every token, which grow, beside a state of fixed size",
    "DynamicSlidingWindowLayer": "the last tokens of a window only, whose size is fixed",
    "DynamicIndexedLayer": "the keys of an index beside keys and values, for which there is no elastic layer",
    "LinearAttentionLayer": "a state of fixed size, whatever the number of tokens",
    "LinearAttentionAndSlidingWindowAttentionLayer": "a state and a window, both of fixed size",
    "DummyLayer": "nothing: the layer has no attention, or uses what another layer stores",
}


class ElasticHybridLayer(HybridLayer, ElasticLayer):  # type: ignore[misc, override]
    """The state of a linear-attention layer, which has a fixed size, beside keys and values in a range.

    The state is transformers' own. The stock class calls both halves by name and not by `super()`
    (`DynamicLayer.reset(self)`), so each of those methods is written again here with the elastic half; the others are
    inherited from the half that has them.
    """

    stock = HybridLayer

    def __init__(self, ranges: CacheRanges | None = None, number_of_states: int = 1, **kwargs: Any) -> None:
        """`ranges`: shared with the other layers of the cache. `kwargs`: what transformers gives to any layer."""
        ElasticLayer.__init__(self, ranges, **kwargs)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def offload(self) -> None:
        ElasticLayer.offload(self)
        LinearAttentionLayer.offload(self)

    def prefetch(self) -> None:
        ElasticLayer.prefetch(self)
        LinearAttentionLayer.prefetch(self)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        ElasticLayer.reset(self)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)  # type: ignore[arg-type]
        ElasticLayer.reorder_cache(self, beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        LinearAttentionLayer.crop(self, tokens_to_remove)
        ElasticLayer.crop(self, tokens_to_remove)


ELASTIC: Final[Mapping[object, type[ElasticLayer]]] = {kind.stock: kind for kind in (ElasticLayer, ElasticHybridLayer)}


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Whether one layer of a cache becomes elastic."""

    kind: str  # the type that transformers gives it, such as "full_attention", or CROSS_ATTENTION; empty if unknown
    stock: str  # the class that transformers makes of it
    layer: str  # the class that the cache of a managed model has
    elastic: bool
    why: str


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Which layers of the cache that `generate()` makes for a model become elastic."""

    reason: str  # why its caches are left alone; empty where they are not
    layers: tuple[LayerPlan, ...] = ()
    cross: tuple[LayerPlan, ...] = ()  # an encoder-decoder model's layers for the encoder's output

    @property
    def elastic(self) -> int:
        """How many layers are elastic."""
        return sum(layer.elastic for layer in (*self.layers, *self.cross))


def plan(model_class: type, config: Any) -> CachePlan:
    """The plan for a model of that class and configuration. Builds no model and needs no device.

    UnsupportedVersion; errors of the class itself where the configuration is not one of its own.
    """
    reason = reason_to_leave(model_class, config)
    if reason:
        return CachePlan(reason)
    caches = prepared_caches(without_modules(model_class, config))
    if not caches:
        return CachePlan(f"{model_class.__name__} prepares no DynamicCache for generate()")
    own, *cross = caches
    kinds = [kind for kind, _ in layer_classes(config)]
    if len(kinds) != len(own.layers):  # it was made for a configuration that the class made itself
        kinds = [""] * len(own.layers)
    layers = [_plan(kind, type(layer), by_table=True) for kind, layer in zip(kinds, own.layers, strict=True)]
    return CachePlan("", tuple(layers), tuple(plan for cache in cross for plan in _cross_plans(cache, len(layers))))


def reason_to_leave(model_class: type, config: Any) -> str:
    """Why caches of such a model are not made elastic; empty where they may be."""
    name = model_class.__name__
    if config is None or not issubclass(model_class, GenerationMixin):
        return f"{name} does not generate text the way transformers does"
    if not builds_dynamic_cache(model_class):
        return f"{name} keeps its state in its own way: transformers builds no DynamicCache for it"
    if not layer_count(config):
        return f"the configuration of {name} does not say how many layers it has"
    return ""


def elastic_layers(config: Any) -> int:
    """Counts the elastic layers of one `DynamicCache` for `config`."""
    return len(elastic_numbers(config))


def elastic_numbers(config: Any) -> list[int]:
    """Returns which layers of one `DynamicCache` for `config` are elastic."""
    return [number for number, (_, stock) in enumerate(layer_classes(config)) if stock in ELASTIC]


def make_elastic(layers: Iterable[Any], ranges: CacheRanges) -> None:
    """Makes the stock layers of a cache elastic, over `ranges`, those whose class has an elastic counterpart."""
    for number, layer in enumerate(layers):
        if (counterpart := ELASTIC.get(type(layer))) is not None:
            counterpart.take(layer, ranges, number)


def make_given_elastic(cache: Any, config: Any, ranges: Callable[[int], CacheRanges]) -> None:
    """Makes the layers of a cache that the program has made elastic, if it is a `DynamicCache` or an encoder-decoder's
    pair of those, without offloading; each may hold tokens. `config`: of the model that is about to use it. `ranges`
    makes those of a cache with so many elastic layers."""
    if isinstance(cache, EncoderDecoderCache):
        make_given_elastic(cache.self_attention_cache, config, ranges)
        make_given_elastic(cache.cross_attention_cache, config, ranges)
    elif type(cache) is DynamicCache and not cache.offloading:
        if not cache.layers and cache.layer_class_to_replicate is DynamicLayer:  # it was made without a configuration
            cache.layers.extend(DynamicLayer() for _ in range(layer_count(config)))
        if count := sum(type(layer) in ELASTIC for layer in cache.layers):
            make_elastic(cache.layers, ranges(count))


def _cross_plans(cache: DynamicCache, count: int) -> Iterator[LayerPlan]:
    """Returns the plans for the cache of the encoder's output, whose layers may be of other classes."""
    for layer in cache.layers:
        yield _plan(CROSS_ATTENTION, type(layer), by_table=True)
    if not cache.layers:
        yield from [_plan(CROSS_ATTENTION, DynamicLayer, by_table=False)] * count


def _plan(kind: str, stock: type, *, by_table: bool) -> LayerPlan:
    name = stock.__name__
    stores = _STORES.get(name)
    counterpart = ELASTIC.get(stock)
    if stores is None:
        why = f"a class of {stock.__module__}, which may store more than keys and values"
    elif counterpart is not None and not by_table:
        why = f"stores {stores}, but the model makes it without a configuration, layer by layer"
    else:
        why = f"stores {stores}"
    if counterpart is None or not by_table:
        return LayerPlan(kind, name, name, False, why)
    return LayerPlan(kind, name, counterpart.__name__, True, why)


class KVCache(DynamicCache):
    """A cache for `cache=` (transformers 5.23: `past_key_values=`) whose growing layers are elastic; others are stock.

    Works with any model on the installed device, managed or not. NotInstalled before `ballonet.install()`.
    """

    def __init__(self, config: Any = None, *, max_length: int = 0) -> None:
        """`config`: the model's, which says what its layers are (without it all are full attention). `max_length`:
        tokens that one sequence is expected to reach; a hint, not a limit."""
        devices.require()
        super().__init__(config=config)
        self._ranges = CacheRanges.of(config, elastic_layers(config) if config else 1, max_length)
        make_elastic(self.layers, self._ranges)
        if config is None:
            self.layer_class_to_replicate = cast(Any, functools.partial(ElasticLayer, self._ranges))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Makes the layers of a copy or of an unpickled cache elastic: see layer.py, Note [Pickled as stock]."""
        self.__dict__.update(state)
        make_elastic(self.layers, self._ranges)
