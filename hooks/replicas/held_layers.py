"""Drops the layers outside of a replica's span, whose pages then serve KV, and restores them (KunServe §4).

Note [A drop is a plan with a pinned span]
    Dropped layers stream, through one slot that they share, and no plan of the governor has them
    (hooks/streaming/arrangement.py, Note [Dropped layers]). So a replica that has to run alone goes on at once, though
    slowly, where the paper restores first. A drop happens between two forwards, and copies nothing to the host where
    the layers were made ready before (ready_layers.py).
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
from .layer_bytes import Filled, LayerBytes
from .piecewise import Piecewise
from .ready_layers import ReadyLayers
from .restore_pages import RestorePages

Source = Callable[[int], Mapping[str, torch.Tensor] | None]


class PreparedLayer(NamedTuple):
    """A step of `prepare`: the layer that is ready now; `done` layers `of` all are."""

    layer: int
    done: int
    of: int


class RestoredLayer(NamedTuple):
    """A step of `restore`: the layer that is resident again, its pages, and whether a peer's bytes were used."""

    layer: int
    pages: int
    from_peer: bool


class HeldLayers:
    """The decoder layers of a managed model that a replica holds. Thread-safe: one call, or step, at a time; forwards
    may run meanwhile on other threads. Does not keep the model alive. `pieces`: reports progress of work on a layer."""

    def __init__(self, handle: Managed) -> None:
        """`handle`: of a model with `interval="auto"`; ManageError for another, whose dropped layers no governor would
        restore after `release`."""
        residency = residency_of(handle)
        if residency.interval != "auto":
            raise ManageError(
                f"{residency.name} is managed with interval={residency.interval!r}: a replica whose layers are dropped "
                'and restored is managed with interval="auto"'
            )
        self._handle = handle
        self._residency = residency
        self._weights = weights_of(handle)
        self._device = self._weights.device
        self._governor = governors.of(self._device)
        composed = governors.composed_with(self._device)
        self.pieces = Piecewise(self._device, composed.tuning.replicas.moved)
        self._ready = ReadyLayers(self._model, self._weights, self.pieces, composed.interpreter)
        self._pages = RestorePages(self._weights)
        name = residency.name
        self._bytes = LayerBytes(
            self._weights, name, lambda layer: decoder_layers(_model_of(handle, name))[layer], self.pieces
        )
        self._lock = threading.RLock()
        self._withdraw: Callable[[], None] | None = None

    @property
    def dropped(self) -> tuple[int, ...]:
        """The dropped layers, ascending; none where the model is no longer managed."""
        model = self._handle.model
        return self._residency.arrangement.dropped if model is not None and managed_as(model) is self._handle else ()

    @property
    def ready(self) -> tuple[int, ...]:
        """The layers whose drop would copy nothing to the host, as far as known."""
        return tuple(layer for layer in self._droppable() if self._ready.is_ready(layer))

    def offer(self, wanted: Callable[[int], object]) -> None:
        """Has `wanted(pages)` called when the ladder lacks pages at rung 7, until `end_offer`; see
        offload/governor/duplicates.py. `wanted` has to return at once; a `drop` may follow later."""
        with self._lock:
            self.end_offer()
            self._withdraw = self._governor.duplicates.register(wanted, self._freed_at_most)

    def end_offer(self) -> None:
        """Ends `offer`. Idempotent."""
        with self._lock:
            if self._withdraw is not None:
                self._withdraw()
                self._withdraw = None

    def prepare(self, layers: Iterable[int]) -> Iterator[PreparedLayer]:
        """Makes layers ready to be dropped, one in each step, while forwards run. Skips layers that are ready, or on
        the host.

        Raises as `ReadyLayers.check`, at first, and as `ReadyLayers.make`; earlier layers stay ready."""
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
            yield PreparedLayer(layer, done, len(wanted))

    def drop(self, span: Span) -> int:
        """Drops all layers outside of `span`. Returns the number of device pages freed: those of the layers, less the
        slot that they share. They stay dropped until `restore` or `release`.

        Nothing has changed after ManageError (a span that the model does not have, a CUDA graph that has captured one
        of the layers, a model that is no longer managed), DropRefused (no host pages), WeightsFileChanged and
        ModelInUse. After DriverError and PoolExhausted layers that have left stream, and the governor restores them.
        """
        with self._lock:
            self._check_managed()
            self.give_back()
            layers = self._outside(span)
            self._reserve(layers)
            return between_forwards(self._handle, lambda: self._drop(layers))

    def restore(self, order: Iterable[int], source: Source | None = None) -> Iterator[RestoredLayer]:
        """Restores dropped layers, one in each step, in this order; skips those that are resident.

        `source(layer)`: returns a peer's tensors by their names in the layer, on any device; None where no peer
        answers: then the bytes come from the layer's backing. On an error the layer stays dropped, and may be tried
        again: torch.OutOfMemoryError where no pages are free for it, WeightsFileChanged where its file has changed and
        no peer has it, ManageError, ModelInUse, DriverError, and what `source` raises.
        """
        for layer in order:
            with self._lock:
                found = self._restore(layer, source) if layer in self.dropped else None
            if found is not None:
                yield found

    def keep_room(self) -> None:
        """Reserves the pages that dropped layers need, as far as there are free ones, until `restore`: else KV would
        take them, and the layers would stream as long as there are requests."""
        with self._lock:
            self._pages.keep(self.dropped)

    def give_back(self) -> None:
        """Frees the pages that `keep_room` has reserved. Idempotent."""
        with self._lock:
            self._pages.give_back()

    def release(self) -> None:
        """Lets the governor decide about all layers again; it restores those for which there are pages. Idempotent.
        ModelInUse, ManageError."""
        with self._lock:
            self.give_back()
            if self.dropped:
                self._change(lambda arrangement: arrangement.release())

    def close(self) -> None:
        """Releases all layers, ends `offer`, and discards ready backings. Raises as `release`."""
        with self._lock:
            self.end_offer()
            self.release()
            for layer in list(self._weights.ranges):
                if layer is not None:
                    self._weights.backings.forget_ready(self._weights.of([layer]))

    # -- dropping

    def _reserve(self, layers: Iterable[int]) -> None:
        """Makes those layers ready that are not, while forwards run."""
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
        with self._residency.changing() as arrangement:
            arrangement.drop(layers)
        freed = before - self._weights.pages
        self._governor.events.decided(Rung.DUPLICATES.label, "pull", freed, what=self._residency.name)
        self._governor.pages.given()
        return freed

    def _outside(self, span: Span) -> tuple[int, ...]:
        count = len(self._residency.arrangement.pages)
        if not 0 <= span.begin < span.end <= count:
            raise ManageError(
                f"{self._residency.name} has the layers 0 to {count}: layers [{span.begin}, {span.end}) are none of it "
                "that a replica can hold"
            )
        return tuple(layer for layer in self._droppable() if layer not in span and layer not in self.dropped)

    def _droppable(self) -> list[int]:
        return [layer for layer, pages in enumerate(self._residency.arrangement.pages) if pages]

    def _freed_at_most(self) -> int:
        """Returns the pages that a drop of all but one layer would free."""
        pages = sorted(pages for pages in self._residency.plan.pages if pages)
        return sum(pages[1:-1])

    def _look_for_files(self) -> None:
        """Finds the weights files, see ReadyLayers, without mapping layers that stream from files."""
        model = self._model
        self._change(lambda arrangement: arrangement.plainly(lambda: self._ready.look_for_files(model)))

    def _change(self, act: Callable[[Arrangement], None]) -> None:
        """Changes the layers between two forwards."""

        def changed() -> None:
            with self._residency.changing() as arrangement:
                act(arrangement)

        between_forwards(self._handle, changed)

    # -- restoring

    def _restore(self, layer: int, source: Source | None) -> RestoredLayer | None:
        each = self._weights.ring.layer(layer)
        if each is None:  # an interrupt came in between
            return None
        given = None if source is None else source(layer)
        filled = self._pages.take(layer, each.pages)
        try:
            came = self._bytes.fill(each, filled, given)
            peer = between_forwards(self._handle, lambda: self._map(layer, filled, came))
        finally:
            filled.close()  # does nothing where its pages were adopted
        self._governor.pages.went_back()
        self._governor.events.decided(Rung.DUPLICATES.label, "revert", each.pages, what=self._residency.name)
        return RestoredLayer(layer, each.pages, peer)

    def _map(self, layer: int, filled: Range, came: Filled) -> bool:
        """Makes the layer resident with those pages, between two forwards. Returns whether they have a peer's bytes."""
        each = self._weights.ring.layer(layer)
        if each is None or each.pages != filled.pieces:
            raise ManageError(f"layer {layer} of {self._residency.name} has changed while it came home: try again")
        peer = self._bytes.complete(each, filled, came)
        with self._residency.changing() as arrangement:
            arrangement.restore(layer, filled)
        return peer

    # -- the model

    def _check_managed(self) -> None:
        _ = self._model

    @property
    def _model(self) -> nn.Module:
        return _model_of(self._handle, self._residency.name)

    def _module(self, layer: int) -> nn.Module:
        return decoder_layers(self._model)[layer]


def _model_of(handle: Managed, name: str) -> nn.Module:
    model = handle.model
    if model is None or managed_as(model) is not handle:
        raise ManageError(f"this {name} is managed no more: make HeldLayers of what manage() returns")
    return model
