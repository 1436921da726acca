"""The layers of one model that CUDA graphs have captured: the model's side of hooks/device/graphs.py.

Note [Kept resident]
    A layer that a graph has captured stays resident, and so does all that lies outside of layers where a graph reads
    any weight of the model. The manager counts no pages for it that could stream, so it is in
    no plan and not on the list of what may be taken. An entry of it on that list is withdrawn before anything is
    captured, and a plan that was made before is not arranged.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...allocator._native import Device, Group
from ...allocator.errors import ManageError
from ...allocator.interrupts import if_free
from ...offload.manager.memory_manager import MemoryManager
from ..device import graphs, managers
from ..forward.hook_base import Hook
from ..measure.pace import Pace
from ..weights.model_parts import decoder_layers
from ..weights.ranges import Weights
from .arrangement import Arrangement
from .streamed import CAPTURED


class Captured:
    """The `graphs.CapturedModel` of one managed model."""

    def __init__(
        self,
        model: nn.Module,
        weights: Weights,
        pace: Pace,
        manager: MemoryManager,
        arrangement: Arrangement,
        prepare: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        """`prepare()` is called before a capture begins; `changed()`, under the lock, when the layers that may stream
        have changed: it tells the manager, which withdraws what it has published of other layers."""
        self.name = type(model).__name__
        self.followed = False
        self.lock = threading.RLock()  # held while layers come and go
        self.prepare_capture = prepare
        self._model = weakref.ref(model)
        self._weights = weights
        self._pace = pace
        self._manager = manager
        self._arrangement = arrangement
        self._changed = changed
        self.reads = False  # do graphs read weights of the model, of layers or not?
        self.thread = _Thread()

    @property
    def group(self) -> Group:
        return self._weights.group

    @property
    def device(self) -> Device:
        return self._weights.device

    @property
    def runs_on_this_thread(self) -> bool:
        return self.thread.open

    @property
    def kept_pages(self) -> int:
        return sum(self._arrangement.pages[layer] for layer in self._arrangement.in_graphs)

    def keep(self, layers: Iterable[int] | None, records: Sequence[graphs.CaptureRecord]) -> None:
        with self.lock:
            on_host = {*self._weights.on_host(), *self._weights.ring.streamed}
            chosen = set(range(len(self._arrangement.order))) - on_host if layers is None else set(layers)
            if not chosen.isdisjoint(on_host):
                raise ManageError(CAPTURED)
            for record in records:
                record.add(self, [self._arrangement.order[layer] for layer in chosen])
            self._keep_resident()

    def update_kept(self) -> bool:
        return if_free(self.lock, self._keep_resident)

    def listen(self) -> list[RemovableHandle]:
        model = self._model()
        if model is None:
            return []
        layers = {id(part): index for index, layer in enumerate(decoder_layers(model)) for part in layer.modules()}
        return [
            part.register_forward_pre_hook(Hook(self.noticed, layers.get(id(part))))
            for part in model.modules()
            if not isinstance(part, torch.jit.ScriptModule)
        ]

    def yield_pages(self) -> None:
        if self.device.page_request and not self._pace.capturing():
            managers.yield_pages(self.device, self._manager)

    def noticed(self, layer: int | None) -> None:
        """Records, if a capture runs, that it includes this layer; None: a module outside of layers. ManageError where
        the layer cannot be captured."""
        if self._pace.capturing():
            graphs.noticed(self, () if layer is None else (layer,))

    def attend(self) -> None:
        """Finds the layers of the model anew. The caller holds the lock, or has the model to itself."""
        self.reads = graphs.read(self)
        self._arrangement.keep_resident(self._layers())
        self.followed = True
        graphs.attend(self)

    def forget(self) -> None:
        """Ends this at the model's release."""
        self.followed = False
        graphs.forget(self)

    def _keep_resident(self) -> None:
        """Keeps resident what graphs have captured by now, and nothing else. The caller holds the lock. See Note [Kept
        resident]."""
        now, reads = self._layers(), graphs.read(self)
        if (now, reads) != (self._arrangement.in_graphs, self.reads):
            self.reads = reads
            self._arrangement.keep_resident(now)
            self._changed()

    def _layers(self) -> frozenset[int]:
        ids = graphs.layers_of(self)
        return frozenset(layer for layer, key in enumerate(self._arrangement.order) if key in ids)


class _Thread(threading.local):
    open = False  # is a forward of the model open?
