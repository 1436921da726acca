"""The layers of one model that CUDA graphs have captured: the model's side of hooks/device/graphs.py.

Note [Kept at home]
    A layer that a graph has captured stays at home. To the governor it is one with no pages that could stream (`plan`),
    so that it is in no plan and not on the list; what is there of it already is withdrawn before anything is captured,
    and a plan that was made before that is not arranged.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...allocator._native import Device, Group
from ...allocator.errors import ManageError
from ...allocator.interrupts import if_free
from ...offload.governor.governor import Governor
from ...offload.policy.plan import Plan
from ..device import governors, graphs
from ..forward.hook import Hook
from ..measure.pace import Pace
from ..weights.layers import decoder_layers
from ..weights.ranges import Weights

CAPTURED: Final = (
    "layers that stream cannot be captured in a CUDA graph, nor those that gave their pages for something else: "
    "capture layers that are resident, or give a budget in which nothing streams"
)


class Captured(ABC):
    """As `graphs.Model`, of one model; what the governor may do with it follows."""

    def __init__(self, model: nn.Module, weights: Weights, pace: Pace, governor: Governor) -> None:
        self.name = type(model).__name__
        self.plan = Plan(())
        self.followed = False
        self._model = weakref.ref(model)
        self._weights = weights
        self._pace = pace
        self._governor = governor
        self._lock = threading.RLock()  # held while layers come and go
        self._order: list[int] = []  # ids of the decoder layers
        self._pages: tuple[int, ...] = ()  # of each that could be streamed
        self._kept: frozenset[int] = frozenset()  # layers
        self._thread = _Thread()

    @property
    def group(self) -> Group:
        return self._weights.group

    @property
    def device(self) -> Device:
        return self._weights.device

    @property
    def here(self) -> bool:
        return self._thread.open

    @property
    def kept_layers(self) -> tuple[int, ...]:
        """The layers that stay resident, as graphs have captured them."""
        return tuple(sorted(self._kept))

    @property
    def kept_pages(self) -> int:
        return sum(self._pages[layer] for layer in self._kept)

    def keep(self, layers: Iterable[int] | None, records: Sequence[graphs.Record]) -> None:
        with self._lock:
            on_host = {*self._weights.on_host(), *self._weights.ring.streamed}
            chosen = set(range(len(self._order))) - on_host if layers is None else set(layers)
            if not chosen.isdisjoint(on_host):
                raise ManageError(CAPTURED)
            for each in records:
                each.add(self, [self._order[layer] for layer in chosen])
            self._keep_home()

    def kept(self) -> bool:
        return if_free(self._lock, self._keep_home)

    def listen(self) -> list[RemovableHandle]:
        model = self._model()
        if model is None:
            return []
        layers = {id(part): index for index, each in enumerate(decoder_layers(model)) for part in each.modules()}
        return [
            part.register_forward_pre_hook(Hook(self._captured, layers.get(id(part))))
            for part in model.modules()
            if not isinstance(part, torch.jit.ScriptModule)
        ]

    def obey(self) -> None:
        if self.device.demand and not self._pace.capturing():
            governors.obey(self.device, self._governor)

    def _captured(self, layer: int | None) -> None:
        """Where this is captured: this layer is about to run, or to be looked at; None: something outside of layers.
        ManageError where it cannot be."""
        if self._pace.capturing():
            graphs.noticed(self, () if layer is None else (layer,))

    def _attend(self) -> None:
        """Finds the layers of the model anew. The caller holds the lock, or has the model to itself."""
        self._kept = self._captured_layers()
        self._plan_of(self.plan.streamed, self.plan.slots)
        self.followed = True
        graphs.attend(self)

    def _keep_home(self) -> None:
        """What graphs have captured by now stays, and nothing else. The caller holds the lock. See Note [Kept at
        home]."""
        now = self._captured_layers()
        if now == self._kept:
            return
        self._kept = now
        self._plan_of(self.plan.streamed, self.plan.slots)
        self._replanned()

    @abstractmethod
    def prepare_capture(self) -> None:
        """See graphs.Model."""

    @abstractmethod
    def _replanned(self) -> None:
        """Other layers may stream than before: tells the governor, which withdraws what it has published of others.
        The caller holds the lock."""

    def _plan_of(self, streamed: tuple[int, ...], slots: tuple[int, ...]) -> None:
        """Returns the plan that streams from now on."""
        pages = (0 if layer in self._kept else pages for layer, pages in enumerate(self._pages))
        self.plan = Plan(tuple(pages), streamed, slots)

    def _captured_layers(self) -> frozenset[int]:
        ids = graphs.layers_of(self)
        return frozenset(layer for layer, each in enumerate(self._order) if each in ids)


class _Thread(threading.local):
    open = False  # is a forward?
