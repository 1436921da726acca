"""Which decoder layers of a model this process runs: the one question that running a span and streaming share.

Note [Layers of other processes]
    A forward over a span (hooks/splice) calls every layer up to its end, but layers outside of the span only pass their
    input through. Their hooks are called as ever. So code that acts on a layer because it is about to run checks
    `LocalLayers` first: the hook before a layer (forwards.py), and the ring of slots, whose order leaves out such a
    layer (offload/residency/ring.py). The span changes between forwards only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

from torch import nn

from ...offload.policy.replicas.groups import Span


class LocalLayers:
    """Which layers of one model this process runs: those of `span`; None: all."""

    def __init__(self) -> None:
        self.span: Span | None = None
        self.spliced_by: Callable[[], Any] = lambda: None  # returns the Splice that sets it, None where there is none

    def runs(self, layer: int) -> bool:
        """Does this process run the decoder layer of this number?"""
        span = self.span
        return span is None or layer in span


_known: Final[weakref.WeakKeyDictionary[nn.Module, LocalLayers]] = weakref.WeakKeyDictionary()


def local_layers_of(model: nn.Module) -> LocalLayers:
    """The `LocalLayers` of this model, always the same object."""
    return _known.setdefault(model, LocalLayers())
