"""The hooks before and after each decoder layer of a managed model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling

from .hook_base import CallKeywords, Hook, opaquely

if TYPE_CHECKING:
    from .forwards import Forwards


class EnterLayer(Hook):
    """The hook before a decoder layer: gives pages that other threads request, copies a streamed
    layer to its slot, and tells the core which pages the layer reads. Runs for each token, so it is one call, which
    makes others only where they have something to do. `opaque`: the compiler breaks its graph at this hook, see
    hook_base.py, Note [Streaming and torch.compile]."""

    opaque = False

    def __init__(self, forwards: Forwards, layer: int) -> None:
        self._forwards = forwards
        self._layer = layer

    def __call__(self, module: object = None, args: Any = (), kwargs: Any = None) -> Any:
        # There are no keywords from the compiler, nor from torch for a hook that was removed since the call began.
        if is_dynamo_compiling() or torch.compiler._is_compiling_flag:  # `is_compiling`, in one call
            if self.opaque:
                opaquely(self)
            return None
        forwards, weights, layer = self._forwards, self._forwards.weights, self._layer
        if (span := forwards.local_layers.span) is not None and layer not in span:  # passes its input through
            return None
        if forwards.at_layer is not None:
            forwards.at_layer()
        # Another thread found no free pages: this one may have some to spare.
        if weights.device.page_request:
            forwards.yield_pages()
        # A resident layer reads its own addresses, but a capture is announced to every layer.
        if not self.opaque and not forwards.layers.capturing():
            weights.use(layer)
            return None
        call = None if kwargs is None else CallKeywords(kwargs)
        slot = forwards.layers.enter(layer, call)
        if slot is None:
            weights.use(layer)
            return None
        slot.note_use(weights.stream(), False)
        return None if call is None else (args, call)


class LeaveLayer(Hook):
    """The hook after a decoder layer that streams: frees its slot. The compiler breaks its graph at it, too."""

    def __init__(self, forwards: Forwards, layer: int) -> None:
        self._forwards = forwards
        self._layer = layer

    def __call__(self, *_: Any) -> None:
        if is_dynamo_compiling() or torch.compiler._is_compiling_flag:
            opaquely(self)
        elif self._forwards.layers.inside == self._layer:
            self._forwards.layers.leave(self._layer)
