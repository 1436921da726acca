"""How a managed model comes by elastic KV layers with no argument: in `generate()`, and when a forward makes a cache.

Note [Who builds the cache]
    Both call `DynamicCache(config=...)`, which asks a table of transformers for the class of each layer. While any
    model is attached the entry for full attention is a function of ours: it makes elastic layers where an attached
    model is building a cache on this very thread, and calls what was there before in every other case. That it is
    building is said by two sides: by the entry and exit of its forward (`forward_entered`), and by
    `_prepare_cache_for_generation`, which is wrapped on its class, so that the model itself carries nothing that a
    copy or a pickle of it would take along. The cache's own type stays `DynamicCache`. With the last model both
    entries go back to what they were; where someone else has wrapped ours meanwhile, ours stays below and passes on.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..allocator.errors import AlreadyManaged
from .cache_ranges import CacheRanges
from .compat import (
    FULL_ATTENTION,
    PREPARE_CACHE,
    GenerationMixin,
    decodes_with_dynamic_cache,
    full_attention_layers,
    layer_types,
)
from .kv import ElasticLayer
from .lease import ForwardLease

_ELASTIC = (None, "dynamic")  # values of `cache_implementation` that mean a cache which grows on the device


class Building:
    """A managed model that may be building caches: makes their full-attention layers."""

    def __init__(self, config: Any, alone: bool, expected: int = 0) -> None:
        """`expected`: tokens that a sequence will reach, 0 if unknown. `alone`: see `attach`."""
        self._config = config
        self._alone = alone
        self._expected = expected
        self._ranges: CacheRanges | None = None
        self._left = 0  # layers that the present cache still lacks

    def layer(self, **kwargs: Any) -> ElasticLayer:
        """The next layer; it shares ranges with the others of its cache."""
        if self._ranges is None or not self._left:
            self._ranges = CacheRanges.of(self._config, self._expected, self._alone)
            self._left = full_attention_layers(self._config)
        self._left -= 1
        return ElasticLayer(self._ranges, **kwargs)


class _Thread(threading.local):
    building: Building | None = None


_thread = _Thread()
_lock = threading.RLock()  # a model may be collected, and so detached, anywhere
# id of a model that lives -> its configuration, and whether something acts on single layers of its caches
_attached: dict[int, tuple[Any, bool]] = {}
_undo: list[Callable[[], None]] = []


def attach(model: nn.Module, *, alone: bool = False) -> Callable[[], object]:
    """Makes the caches that `model` builds elastic, until the returned function is called (again does nothing) or the
    model is gone.

    A model that does not decode with a `DynamicCache` is left as it is. `alone`: something streams, offloads or drops
    single layers of the cache, which then share no pages. Raises AlreadyManaged, UnsupportedVersion.
    """
    if not decodes_with_dynamic_cache(model):
        return lambda: None
    table = layer_types()
    with _lock:
        if id(model) in _attached:
            raise AlreadyManaged(f"this {type(model).__name__} is attached already: release the first Managed before")
        _attached[id(model)] = (model.config, alone)
        if not _undo:
            _undo.extend((_patch_layer_types(table), _patch_preparation()))
    detach = weakref.finalize(model, _detach, id(model))
    detach.atexit = False
    return detach


def forward_entered(model: nn.Module) -> ForwardLease:
    """The forward of a managed model begins on this thread. Returns its lease, to be closed when it ends."""
    known = _attached.get(id(model))
    return _Forward(None if known is None else Building(*known))


class _Forward(ForwardLease):
    """The lease of a forward that may build caches."""

    def __init__(self, building: Building | None) -> None:
        super().__init__()
        self._before = _thread.building
        _thread.building = building
        self._open = True

    def close(self) -> None:
        if self._open:
            self._open = False
            _thread.building = self._before
        super().close()


@contextmanager
def _building(building: Building | None) -> Iterator[None]:
    before, _thread.building = _thread.building, building
    try:
        yield
    finally:
        _thread.building = before


def _detach(key: int) -> None:
    with _lock:
        del _attached[key]
        if not _attached:
            while _undo:
                _undo.pop()()


def _patch_layer_types(table: dict[str, Any]) -> Callable[[], None]:
    stock = table[FULL_ATTENTION]

    def full_attention_layer(**kwargs: Any) -> Any:
        # Asked first, so that a compiler that traces this sees nothing else.
        if torch.compiler.is_compiling() or _thread.building is None:
            return stock(**kwargs)
        return _thread.building.layer(**kwargs)

    def undo() -> None:
        if table[FULL_ATTENTION] is full_attention_layer:
            table[FULL_ATTENTION] = stock

    table[FULL_ATTENTION] = full_attention_layer
    return undo


def _patch_preparation() -> Callable[[], None]:
    stock: Callable[..., Any] = getattr(GenerationMixin, PREPARE_CACHE)
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def prepare(model: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(model, *args, **kwargs).arguments
        known = _attached.get(id(model))
        if getattr(given.get("generation_config"), "cache_implementation", None) not in _ELASTIC:
            known = None
        # The longest that the cache gets to be: the last token generated is never put into it.
        expected = int(given.get("max_cache_length") or 0)
        with _building(None if known is None else Building(*known, expected)):
            return stock(model, *args, **kwargs)

    def undo() -> None:
        if getattr(GenerationMixin, PREPARE_CACHE) is prepare:
            setattr(GenerationMixin, PREPARE_CACHE, stock)

    setattr(GenerationMixin, PREPARE_CACHE, prepare)
    return undo
