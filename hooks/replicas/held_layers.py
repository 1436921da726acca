"""The layers that a replica holds: it drops others, whose pages serve KV, and restores them (KunServe §4).

Note [A drop is a plan with a pinned span]
    Layers outside of the span stream, through one slot that they share; that is all there is to it. The pin is that no
    governor's plan has them (hooks/streaming/arrangement.py, Note [Dropped layers]). So a replica that has to run alone
    goes on at once, and slowly, where the paper restores first. Everything is done between two forwards, and takes no
    copy to the host where the layers were made ready before (ready.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from ...allocator._native import Range
from ...allocator.errors import ManageError
from ...offload.policy.reclaim_order import Rung
from ...offload.policy.replicas.groups import Span
from ..device import governors
from ..managed import Managed, between_forwards, managed_as, residency_of, weights_of
from ..streaming.arrangement import Arrangement
from ..weights.layers import decoder_layers
from .layer_bytes import Came, LayerBytes
from .piecewise import Piecewise
from .ready import ReadyLayers
from .restore_pages import RestorePages

Source = Callable[[int], Mapping[str, torch.Tensor] | None]


class Prepared(NamedTuple):
    """A step of `prepare`: the layer that is ready now, and how many of how many are."""

    layer: int
    done: int
    of: int


class Restored(NamedTuple):
    """A step of `restore`: the layer that is resident again, its pages, and whether a peer gave its bytes."""

    layer: int
    pages: int
    from_peer: bool


class HeldLayers:
    """Which decoder layers of a managed model a replica holds. Thread-safe: one call, or step, at a time; forwards may
    run meanwhile on other threads. Does not keep the model alive. `pieces`: tells that work on a layer goes on."""

    def __init__(self, handle: Managed) -> None:
        """`handle`: of a model with `interval="auto"`; ManageError for another, whose dropped layers no governor would
        bring home after `release`."""
        elastic = residency_of(handle)
        if elastic.interval != "auto":
            raise ManageError(
                f"{elastic.name} is managed with interval={elastic.interval!r}: a replica whose layers are dropped and "
                'restored is managed with interval="auto"'
            )
        self._handle = handle
        self._elastic = elastic
        self._weights = weights_of(handle)
        self._device = self._weights.device
        self._governor = governors.of(self._device)
        composed = governors.composed_with(self._device)
        self.pieces = Piecewise(self._device, composed.tuning.replicas.moved)
        self._ready = ReadyLayers(self._model, self._weights, self.pieces, composed.interpreter)
        self._pages = RestorePages(self._weights)
        name = elastic.name
        self._bytes = LayerBytes(
            self._weights, name, lambda layer: decoder_layers(_model_of(handle, name))[layer], self.pieces
        )
        self._lock = threading.RLock()
        self._withdraw: Callable[[], None] | None = None

    @property
    def dropped(self) -> tuple[int, ...]:
        """The layers that are dropped, ascending; none where the model is managed no more."""
        model = self._handle.model
        return self._elastic.arrangement.dropped if model is not None and managed_as(model) is self._handle else ()

    @property
    def ready(self) -> tuple[int, ...]:
        """The layers that a drop would copy nothing of to the host, as far as known."""
        return tuple(layer for layer in self._droppable() if self._ready.is_ready(layer))

    def offer(self, wanted: Callable[[int], object]) -> None:
        """`wanted(pages)` is told when the ladder has come to rung 7 for lack of pages, until `close`: see
        offload/governor/duplicates.py. It returns at once; what it leads to is a `drop` later, or nothing."""
        with self._lock:
            self.end_offer()
            self._withdraw = self._governor.duplicates.register(wanted, self._freed_at_most)

    def end_offer(self) -> None:
        """Nobody is told any more. Idempotent."""
        with self._lock:
            if self._withdraw is not None:
                self._withdraw()
                self._withdraw = None

    def prepare(self, layers: Iterable[int]) -> Iterator[Prepared]:
        """Makes layers ready to be dropped, one in each step, while forwards run. Layers that are ready, or on the
        host, are passed over. For the background: a thread that runs through it.

        Raises as `ReadyLayers.check`, first, and `ReadyLayers.make`, and those before are ready."""
        with self._lock:
            self._check_managed()
            self._ready.check()
            wanted = [layer for layer in layers if layer in self._droppable() and not self._ready.is_ready(layer)]
            if wanted:
                self._look_for_files()
        for done, layer in enumerate(wanted, 1):
            with self._lock:
                if not self._ready.is_ready(layer):
                    self._ready.make(layer, self._module(layer))
            yield Prepared(layer, done, len(wanted))

    def drop(self, span: Span) -> int:
        """Drops all layers outside of `span` and those that are dropped. Returns how many device pages that freed:
        those of the layers, less the slot that they share. They stay dropped until they are restored, or released.

        All or nothing. ManageError for a span that the model does not have, where a CUDA graph has captured one of the
        layers, or where the model is managed no more; DropRefused where there are no host pages, WeightsFileChanged
        where the file is another one, ModelInUse: nothing has changed then. DriverError, PoolExhausted: what has left
        by then streams, and the governor brings it home.
        """
        with self._lock:
            self._check_managed()
            self.give_back()
            layers = self._outside(span)
            self._reserve(layers)
            return between_forwards(self._handle, lambda: self._drop(layers))

    def restore(self, order: Iterable[int], source: Source | None = None) -> Iterator[Restored]:
        """Brings dropped layers home, one in each step, in this order; those that are there are passed over.

        `source(layer)`: the bytes of a peer, as tensors by their names in the layer, on any device; None where no peer
        answers: then they come from the layer's backing. Raises torch.OutOfMemoryError where no pages are free for the
        layer, WeightsFileChanged where its file is another one and no peer has it, ManageError, ModelInUse,
        DriverError, and what `source` raises: the layer is dropped then as before, and may be tried again.
        """
        for layer in order:
            with self._lock:
                found = self._restore(layer, source) if layer in self.dropped else None
            if found is not None:
                yield found

    def keep_room(self) -> None:
        """Takes the pages that dropped layers need, as far as they are free, so that nobody else has them until
        `restore` does: KV would, and the layers would stream as long as there are requests."""
        with self._lock:
            self._pages.keep(self.dropped)

    def give_back(self) -> None:
        """Gives up the pages that `keep_room` took. Idempotent."""
        with self._lock:
            self._pages.give_back()

    def release(self) -> None:
        """The governor decides about all layers again, and brings home what there are pages for. Idempotent.
        ModelInUse, ManageError."""
        with self._lock:
            self.give_back()
            if self.dropped:
                self._change(lambda arrangement: arrangement.release())

    def close(self) -> None:
        """As `release`; nothing is ready or offered any more."""
        with self._lock:
            self.end_offer()
            self.release()
            for layer in list(self._weights.ranges):
                if layer is not None:
                    self._weights.backings.forget_ready(self._weights.of([layer]))

    # -- dropping

    def _reserve(self, layers: Iterable[int]) -> None:
        """Whatever is not ready is made so, while forwards run."""
        lacking = [layer for layer in layers if not self._ready.is_ready(layer)]
        if lacking:
            self._look_for_files()
        for layer in lacking:
            self._ready.make(layer, self._module(layer))

    def _drop(self, layers: tuple[int, ...]) -> int:
        for layer in layers:
            if not self._ready.still(layer, self._module(layer)):
                self._ready.make(layer, self._module(layer))
        before = self._weights.pages
        with self._elastic.changing() as arrangement:
            arrangement.drop(layers)
        freed = before - self._weights.pages
        self._governor.events.decided(Rung.DUPLICATES.label, "pull", freed, what=self._elastic.name)
        self._governor.pages.given()
        return freed

    def _outside(self, span: Span) -> tuple[int, ...]:
        count = len(self._elastic.arrangement.pages)
        if not 0 <= span.begin < span.end <= count:
            raise ManageError(
                f"{self._elastic.name} has the layers 0 to {count}: layers [{span.begin}, {span.end}) are none of it "
                "that a replica can hold"
            )
        return tuple(layer for layer in self._droppable() if layer not in span and layer not in self.dropped)

    def _droppable(self) -> list[int]:
        return [layer for layer, pages in enumerate(self._elastic.arrangement.pages) if pages]

    def _freed_at_most(self) -> int:
        """By a drop of all but one layer."""
        pages = sorted(pages for pages in self._elastic.plan.pages if pages)
        return sum(pages[1:-1])

    def _look_for_files(self) -> None:
        """See ReadyLayers. Layers that stream from files are not shown because of it."""
        model = self._model
        self._change(lambda arrangement: arrangement.plainly(lambda: self._ready.look_for_files(model)))

    def _change(self, act: Callable[[Arrangement], None]) -> None:
        """Changes the layers between two forwards."""

        def changed() -> None:
            with self._elastic.changing() as arrangement:
                act(arrangement)

        between_forwards(self._handle, changed)

    # -- restoring

    def _restore(self, layer: int, source: Source | None) -> Restored | None:
        each = self._weights.ring.layer(layer)
        if each is None:  # an interrupt came between
            return None
        given = None if source is None else source(layer)
        filled = self._pages.take(layer, each.pages)
        try:
            came = self._bytes.fill(each, filled, given)
            peer = between_forwards(self._handle, lambda: self._bring(layer, filled, came))
        finally:
            filled.close()  # where it was adopted there is nothing left
        self._governor.pages.went_back()
        self._governor.events.decided(Rung.DUPLICATES.label, "revert", each.pages, what=self._elastic.name)
        return Restored(layer, each.pages, peer)

    def _bring(self, layer: int, filled: Range, came: Came) -> bool:
        """Between two forwards: the layer is resident again with those pages. Were they filled by a peer?"""
        each = self._weights.ring.layer(layer)
        if each is None or each.pages != filled.pieces:
            raise ManageError(f"layer {layer} of {self._elastic.name} has changed while it came home: try again")
        peer = self._bytes.complete(each, filled, came)
        with self._elastic.changing() as arrangement:
            arrangement.restore(layer, filled)
        return peer

    # -- the model

    def _check_managed(self) -> None:
        _ = self._model

    @property
    def _model(self) -> nn.Module:
        return _model_of(self._handle, self._elastic.name)

    def _module(self, layer: int) -> nn.Module:
        return decoder_layers(self._model)[layer]


def _model_of(handle: Managed, name: str) -> nn.Module:
    model = handle.model
    if model is None or managed_as(model) is not handle:
        raise ManageError(f"this {name} is managed no more: make HeldLayers of what manage() returns")
    return model
