"""Drops the layers outside of a replica's span, whose pages then serve KV, and restores them (KunServe §4).

Note [Where a layer is restored from]
    The bytes are copied to new pages while forwards run, and the pages are mapped at the layer's addresses between two
    forwards. A peer's bytes are used only if their checksum equals that of the layer's backing. Bytes from a file need
    no check, as only the layer can have been mapped to it; host pages may have been written to meanwhile, so they are
    copied, or compared with a peer's, between the forwards.

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
from ...allocator.errors import ManageError, PoolExhausted
from ...offload.policy.reclaim_order import Rung
from ...offload.policy.replicas.groups import Span
from ...offload.residency.layer_parts import StreamedLayer
from ...offload.residency.slots import open_pages
from ..device import governors
from ..managed import Managed, between_forwards, managed_as, residency_of, weights_of
from ..streaming.arrangement import Arrangement
from ..weights.layers import decoder_layers
from ..weights.moving import flat_over
from ..weights.ranges import Weights
from ..weights.storages import like_over
from .ready_layers import Piecewise, ReadyLayers, checksum, lying_in, sums


class RestorePages:
    """Pages for layers that are restored. Used under the lock of HeldLayers."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._kept: dict[int, Range] = {}  # reserved pages, by layer

    def keep(self, layers: Iterable[int]) -> None:
        """Reserves pages for these dropped layers, as far as there are free ones."""
        for layer in layers:
            each = self._weights.ring.layer(layer)
            if each is None or layer in self._kept:
                continue
            try:
                self._kept[layer] = self._open(layer, each.pages)
            except torch.OutOfMemoryError:
                return

    def give_back(self) -> None:
        """Frees the reserved pages. Idempotent."""
        while self._kept:
            self._kept.popitem()[1].close()

    def take(self, layer: int, pages: int) -> Range:
        """Returns the pages reserved for a layer, or else allocates so many. torch.OutOfMemoryError."""
        return self._kept.pop(layer, None) or self._open(layer, pages)

    def _open(self, layer: int, pages: int) -> Range:
        """Allocates free pages, without reclaiming any. torch.OutOfMemoryError."""
        device = self._weights.device
        if device.available < pages:
            device.trim()
            device.reap(wait=True)
        try:
            if device.available < pages:
                raise PoolExhausted(f"it has {pages} pages, and {device.available} are free")
            return open_pages(device, self._weights.group, "weights", pages)
        except PoolExhausted as error:
            raise torch.OutOfMemoryError(f"no room for layer {layer}, which is dropped: {error}") from error


# How new pages were filled: checksums of a peer's bytes, by range and offset; empty: from a file; None: not yet
Filled = dict[int, dict[int, bytes]] | None


class LayerBytes:
    """Fills pages of restored layers. Used under the lock of HeldLayers. See Note [Where a layer is restored from]."""

    def __init__(self, weights: Weights, name: str, module: Callable[[int], nn.Module], pieces: Piecewise) -> None:
        """`name`: of the model; `module(layer)`: returns a decoder layer's module."""
        self._weights = weights
        self._name = name
        self._module = module
        self._pieces = pieces

    def fill(self, each: StreamedLayer, filled: Range, given: Mapping[str, torch.Tensor] | None) -> Filled:
        """Copies a layer's bytes to the pages `filled` while forwards run: those that a peer has `given`, else those of
        its file, if it has one. WeightsFileChanged, DriverError; ManageError where `given` does not fit the layer."""
        if given is not None:
            return self._fill_from(each, filled, given)
        if not _in_files(each):
            return None
        self._copy(each, filled, self._weights.stream())
        return {}

    def _fill_from(
        self, each: StreamedLayer, filled: Range, given: Mapping[str, torch.Tensor]
    ) -> dict[int, dict[int, bytes]]:
        """Copies a peer's bytes. Returns their checksums, by range and offset. ManageError."""
        lying = lying_in({part.range: None for part in each.parts}, self._module(each.layer))
        if wrong := sorted(
            name
            for name, (_, tensor) in lying.items()
            if name not in given or (given[name].dtype, given[name].shape) != (tensor.dtype, tensor.shape)
        ):
            raise ManageError(
                f"what a peer gave for layer {each.layer} of {self._name} lacks, or has in other shapes or "
                f"dtypes: {', '.join(wrong)}"
            )
        found: dict[int, dict[int, bytes]] = {part.range.address: {} for part in each.parts}
        flat = flat_over(filled, 0, filled.nbytes)
        with torch.no_grad():
            for name, (opened, tensor) in lying.items():
                new = like_over(tensor, flat, _place(each, tensor.data_ptr(), self._weights.device.page_size))
                new.copy_(given[name])
                found[opened.address][tensor.data_ptr() - opened.address] = checksum(new)
                self._pieces.done()
        return found

    def complete(self, each: StreamedLayer, filled: Range, came: Filled) -> bool:
        """Fills the pages between two forwards, unless they have the right bytes already. Returns whether these are a
        peer's. WeightsFileChanged, DriverError."""
        peer = bool(came) and came == self._sums(each)
        if not (peer or (came == {} and _in_files(each))):
            self._copy(each, filled, None)
        return peer

    def _sums(self, each: StreamedLayer) -> dict[int, dict[int, bytes]]:
        """Returns the checksums of a layer's backing, by range and offset; those of files may be missing."""
        if _in_files(each):
            return {part.range.address: dict(part.backing.sums) for part in each.parts}
        lying = lying_in({part.range: None for part in each.parts}, self._module(each.layer))
        return {part.range.address: sums(part.range, lying, self._pieces) for part in each.parts}

    def _copy(self, each: StreamedLayer, filled: Range, after: int | None) -> None:
        """Copies the layer's backing. WeightsFileChanged, DriverError."""
        each.check()
        try:
            self._pieces.copy(each.copies(filled), after, "device")
        finally:
            each.check()


def _in_files(each: StreamedLayer) -> bool:
    """Returns whether all backings of a layer are files, so only the layer can have been mapped to them."""
    return all(part.backing.file is not None for part in each.parts)


def _place(each: StreamedLayer, address: int, page: int) -> int:
    """Returns the offset in the layer's slot of the byte at an address of the layer."""
    for part in each.parts:
        offset = address - part.range.address - part.first * page
        if 0 <= offset < part.count * page:
            return offset + part.offset * page
    raise AssertionError(f"{address:#x} is no address of layer {each.layer}")


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
