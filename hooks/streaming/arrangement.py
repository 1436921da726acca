"""The arrangement of one model's streamed layers: where their weights lie, and what their calls read.

Note [Host copies of returned layers]
    A layer that has left and come back is read from a slot of its own, and its parameters stay on the host (ring.py,
    Note [Starting and stopping to stream]), so that its weights are copied there once. The host copy lasts while device
    pages were short recently (`DevicePages.scarce`) and while all such copies take no more host pages than are free
    beside them. When it ends, and before a forward with gradients or a capture, which read a layer's own addresses, the
    layer is resident again (`make_resident`); the next time that it leaves it is copied anew.

Note [Dropped layers]
    A layer that another replica runs for this one is dropped. The manager counts no pages for it, so it is in no plan,
    and only `restore` makes it resident again. In fact it streams, through one slot that all dropped layers share,
    behind those of the plan. While this process does not run it (hooks/forward/hook_base.py) it has no place in that
    slot's order and nothing is copied. If this process has to run it, having lost its partner, it streams as any layer:
    slow, and right.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from ...allocator._native import Range
from ...allocator.errors import ManageError
from ...offload.policy.plan import Plan, streaming
from ...offload.residency.ring import StreamedLayer, spans
from ..weights import moving, ranges
from ..weights.model_parts import decoder_layers, members
from ..weights.ranges import Weights
from .streamed import CAPTURED, Layer, Streaming


class Arrangement:
    """`plan`: what streams, valid at any time. `pages`: of each layer that could stream. `order`: the ids of the
    decoder layers' modules. `in_graphs`: layers that CUDA graphs have captured, which stay resident. `dropped`: see
    Note [Dropped layers]."""

    def __init__(self, model: nn.Module, weights: Weights, passes: Streaming) -> None:
        self.plan = Plan(())
        self.pages: tuple[int, ...] = ()
        self.order: list[int] = []
        self.in_graphs: frozenset[int] = frozenset()
        self.dropped: tuple[int, ...] = ()
        self.tell: Callable[[int, bool], None] = lambda layer, on_host: None  # is told which layers stream
        self._model = weakref.ref(model)
        self._weights = weights
        self._passes = passes

    def follow(self, layers: Sequence[nn.Module], slots: int) -> None:
        """Arranges these layers, whose ranges hold the model's weights. `slots`: how many to make if there are none
        yet. Raises PoolExhausted, ManageError, DriverError; the arrangement is valid then, too."""
        self._passes.close()
        order = [id(layer) for layer in layers]
        if order != self.order:
            self._weights.ring.release_layers()  # the layers are numbered anew
            self.order, self.dropped = order, ()
        self.pages = self._weights.layer_pages(len(layers))
        self._arrange_away(len(self._weights.ring.shared.slots) - bool(self.dropped) or max(slots, 1))

    def arrange(self, plan: Plan) -> None:
        """Makes the layers of `plan` stream. Raises as `Ring.arrange`."""
        weights, ring = self._weights, self._weights.ring
        layers = [
            StreamedLayer(layer, slot, weights.parts(layer))
            for layer, slot in zip(plan.streamed, plan.slots, strict=True)
        ]
        slot_pages = plan.slot_pages
        if self.dropped:
            dropped = [StreamedLayer(layer, len(slot_pages), weights.parts(layer)) for layer in self.dropped]
            slot_pages = *slot_pages, max(streamed.pages for streamed in dropped)
            layers += dropped
        same = [layer for layer in ring.own.layers if (its := ring.layer(layer)) and its.parts == weights.parts(layer)]
        coming = sorted(set(weights.on_host()).difference(plan.streamed, self.dropped, same))
        self._passes.close()
        try:
            ring.arrange(slot_pages, layers, [StreamedLayer(layer, 0, weights.parts(layer)) for layer in coming])
        finally:
            self._bind()

    def leave(self, layers: Sequence[int]) -> None:
        """Moves these layers to the host, and gives up all slots: each layer there is read in place until `arrange`.
        Raises as `Ring.arrange`."""
        weights, there = self._weights, {*self._weights.on_host(), *layers}
        self._passes.close()
        try:
            weights.ring.arrange((), [StreamedLayer(layer, 0, weights.parts(layer)) for layer in sorted(there)])
        finally:
            self._bind(whole=True)

    @property
    def away(self) -> frozenset[int]:
        """The layers whose weights lie on the host only: they stream, or are read there."""
        return frozenset(self._weights.on_host()).difference(self._weights.ring.own.layers)

    @property
    def coming(self) -> tuple[int, ...]:
        """The layers that get pages as the next pass reaches them, ascending."""
        return tuple(sorted(self._weights.ring.own.coming))

    @property
    def read_in_place(self) -> int:
        """Pages of layers that are on the host and have no slot: each forward reads them there."""
        ring = self._weights.ring
        slotted = {layer for layer in ring.streamed if ring.slot(layer) is not None}.union(ring.own.back)
        return sum(self.pages[layer] for layer in self._weights.on_host() if layer not in slotted)

    def has_arranged(self, plan: Plan) -> bool:
        """Is there nothing to do for `plan`? What the core took of layers that it has on the device is read in place
        until then."""
        return plan == self.plan and not self._weights.ring.own.back and not self.read_in_place

    def drop(self, layers: Collection[int]) -> None:
        """Drops these layers too, all or none; their backings are ready. After a failure, layers that have left the
        device stream. ManageError where a CUDA graph has captured one; else raises as `Ring.arrange`."""
        if not self.in_graphs.isdisjoint(layers):
            raise ManageError(CAPTURED)
        with self._weights.backings.leaving(self._weights.of(layers)):
            before, self.dropped = self.dropped, tuple(sorted({*self.dropped, *layers}))
            try:
                self._arrange_away(max(1, len(self.plan.slot_pages)))
            except BaseException:
                self.dropped = before
                self._bind()
                raise

    def restore(self, layer: int, filled: Range) -> None:
        """Makes a dropped layer resident with the pages of `filled`. Raises as `Ring.adopt`; it is dropped then."""
        self._passes.close()
        try:
            if self._weights.ring.layer(layer) is not None:
                self._weights.ring.adopt(layer, filled)
            self._weights.backings.set_aside(self._weights.of([layer]))
            self.dropped = tuple(other for other in self.dropped if other != layer)
        finally:
            self._bind()
        self._arrange_away(max(1, len(self.plan.slot_pages)))  # gives up their slot with the last of them

    def release(self) -> None:
        """Turns dropped layers into layers that stream."""
        self.dropped = ()
        self._bind()

    def plainly(self, act: Callable[[], None]) -> None:
        """Calls `act` while the modules of streamed layers hold plain dictionaries, so that access to them is not
        noticed. `act` must not read the weights."""
        whole = bool(self._passes.bound) and not self._weights.ring.ranges
        self._passes.close()
        try:
            act()
        finally:
            self._bind(whole)

    def keep_resident(self, layers: frozenset[int]) -> None:
        """Sets the layers that stay resident, as graphs have captured them."""
        self.in_graphs = layers
        self._plan_of(self.plan.streamed, self.plan.slots)

    def entry(self, layer: int | None) -> list[Any]:
        """The parts of a resident layer, with None of what is in no layer, for `Device.publish`; none where it has not
        come back yet."""
        own = self._weights.ring.own
        if layer in own.coming:
            return []
        return (own.offer(layer) if layer is not None else []) or [
            (part.range, first, count, part.backing.pages, first, [])
            for part in self._weights.parts(layer)
            for first, count in spans(part)
        ]

    def returned(self, scarce: bool) -> tuple[int, ...]:
        """The layers whose host copies are to be given up now. `scarce`: were device pages short recently? See Note
        [Host copies of returned layers]."""
        own = self._weights.ring.own
        if torch.is_grad_enabled():
            return tuple(sorted(self._weights.ring.own.back))
        layers = own.layers
        if not layers or not scarce:
            return layers
        over = own.host_pages - ranges.host_pages_left(self._weights.device)
        pages = accumulate((self.pages[layer] for layer in layers), initial=0)
        return tuple(layer for layer, before in zip(layers, pages, strict=False) if before < over)

    def make_resident(self, layers: Iterable[int], tell: Callable[[int], None]) -> None:
        """Makes layers resident that have come back; calls `tell(host pages)` for each. Raises as
        `Ring.make_resident`."""
        unchanged = {layer: self._passes.unchanged(layer) for layer in layers}
        self._passes.close()
        try:
            for layer in unchanged:
                streamed = self._weights.ring.layer(layer)
                parts = () if streamed is None else streamed.parts
                copied = sum(part.count for part in parts if part.backing.file is None)
                self._weights.ring.make_resident(layer, unchanged[layer])
                tell(copied)
        finally:
            self._bind()

    def close(self) -> None:
        """Ends streaming: layers stay where they are, and are read there."""
        for layer in self._weights.on_host():
            self.tell(layer, False)
        self._passes.close()

    def _arrange_away(self, slots: int) -> None:
        """Makes all layers stream that are on the host, through so many slots."""
        streamed = [layer for layer in self._weights.away() if layer not in self.dropped]
        self.arrange(streaming(self.pages, streamed, slots))

    def _bind(self, whole: bool = False) -> None:
        """Makes the calls of layers that are on the host read slots. `whole`: there are no slots, and access is noticed
        to all tensors of a layer's modules, also those that lie with the weights outside of layers."""
        self._passes.close()  # the modules are looked at below, which must not be noticed
        ring = self._weights.ring
        layers = [on_host for layer in (*ring.streamed, *ring.own.layers) if (on_host := ring.layer(layer)) is not None]
        streamed = layers[: len(ring.streamed)]
        planned = [its for its in streamed if its.layer not in self.dropped and its.layer not in ring.own.coming]
        self._plan_of(tuple(its.layer for its in planned), tuple(its.slot for its in planned))
        model = self._model()
        modules = () if model is None else decoder_layers(model)
        bound = {}
        for streamed_layer in layers:
            if streamed_layer.layer < len(modules):
                module = modules[streamed_layer.layer]
                keys = (streamed_layer.layer, None) if whole else (streamed_layer.layer,)
                ranges_of = [opened for key in keys for opened in self._weights.ranges.get(key, ())]
                lying = moving.tenants_of(ranges_of, members(module, ()))
                tensors = frozenset(id(member.tensor) for member, _ in lying)
                bound[streamed_layer.layer] = Layer(module, tensors, streamed_layer.parts)
        self._passes.bind(bound, self._weights.device.page_size)
        for layer in range(len(modules)):
            self.tell(layer, layer in bound)

    def _plan_of(self, streamed: tuple[int, ...], slots: tuple[int, ...]) -> None:
        absent = self.in_graphs.union(self.dropped)
        pages = (0 if layer in absent else pages for layer, pages in enumerate(self.pages))
        self.plan = Plan(tuple(pages), streamed, slots)
