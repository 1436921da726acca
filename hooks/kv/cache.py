"""`KVCache`: the elastic cache for programs that make a model's cache themselves."""

from __future__ import annotations

import functools
from typing import Any, cast

from ...allocator import devices
from ..compat import DynamicCache
from .grouping import CacheRanges
from .kinds import elastic_counterpart, elastic_layers
from .layer import ElasticLayer


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
        self.layers = [elastic_counterpart(layer, self._ranges, number) for number, layer in enumerate(self.layers)]
        if config is None:
            self.layer_class_to_replicate = cast(Any, functools.partial(ElasticLayer, self._ranges))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Makes the layers of a copy or of an unpickled cache elastic: see layer.py, Note [Pickled as stock]."""
        self.__dict__.update(state)
        self.layers = [self._elastic(layer, number) for number, layer in enumerate(self.layers)]

    def _elastic(self, layer: Any, number: int) -> Any:
        """Returns the elastic layer in the place of `layer`, which may hold tokens. `number`: its place in the
        cache."""
        if isinstance(layer, ElasticLayer):
            return layer
        counterpart = elastic_counterpart(layer, self._ranges, number)
        if counterpart is not layer:
            counterpart.adopt(layer)
        return counterpart
