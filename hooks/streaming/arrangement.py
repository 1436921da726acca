"""The layers of one model that stream, as they are arranged: where they lie, and what their calls read.

Note [Copies that are kept]
    A layer that has left and come back is read from a slot of its own, and its parameters stay on the host (ring.py,
    Note [Starting and stopping to stream]): so its weights go there once. That lasts while pages have been short not
    long ago (`DevicePages.scarce`), and no longer than host pages are ample: such copies have no more of them than are
    free beside. Then, and before a forward with gradients or a capture, which read a layer's own addresses, it is
    resident again (`make_resident`), and the next time that it leaves it is copied anew.

Note [Dropped layers]
    A layer that another replica runs for this one is dropped: to the governor it is one with no pages, so that it is in
    no plan, and whatever is free nobody brings it home but `restore`. In fact it streams, through one slot that all
    dropped layers share, behind those of the plan. While it does not run here (hooks/forward/local_layers.py) it has no
    turn in that slot and nothing is copied; where it runs after all, as the replica has lost its partner, it is as any
    layer that streams: slow, and right.
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
from ...offload.residency.layer_parts import StreamedLayer, spans
from ..weights import moving, room
from ..weights.layers import decoder_layers
from ..weights.ranges import Weights
from ..weights.storages import members
from .streamed import CAPTURED, Layer, Streaming


class Arrangement:
    """`plan` is what streams, valid at any time; `pages` of each layer that could, and `order`, the ids of the decoder
    layers' modules; `kept`: the layers that stay resident; `dropped`: see Note [Dropped layers]."""

    def __init__(self, model: nn.Module, weights: Weights, passes: Streaming) -> None:
        self.plan = Plan(())
        self.pages: tuple[int, ...] = ()
        self.order: list[int] = []
        self.kept: frozenset[int] = frozenset()
        self.dropped: tuple[int, ...] = ()
        self.tell: Callable[[int, bool], None] = lambda layer, here: None  # is told of layers that stream
        self._model = weakref.ref(model)
        self._weights = weights
        self._passes = passes

    def follow(self, layers: Sequence[nn.Module], slots: int) -> None:
        """Takes over these layers, whose ranges hold what the model says. `slots`: those of what streams, if there are
        none yet. PoolExhausted, ManageError, DriverError: what streams is valid then."""
        self._passes.close()
        order = [id(layer) for layer in layers]
        if order != self.order:
            self._weights.ring.release_layers()  # another layer has the number of one that streams
            self.order, self.dropped = order, ()
        self.pages = self._weights.layer_pages(len(layers))
        self._arrange_away(len(self._weights.ring.shared.slots) - bool(self.dropped) or max(slots, 1))

    def arrange(self, plan: Plan) -> None:
        """Streams what the plan says, as far as it can. Raises as `Ring.arrange`."""
        weights, ring = self._weights, self._weights.ring
        layers = [
            StreamedLayer(layer, slot, weights.parts(layer))
            for layer, slot in zip(plan.streamed, plan.slots, strict=True)
        ]
        slot_pages = plan.slot_pages
        if self.dropped:
            dropped = [StreamedLayer(layer, len(slot_pages), weights.parts(layer)) for layer in self.dropped]
            slot_pages = *slot_pages, max(each.pages for each in dropped)
            layers += dropped
        same = [layer for layer in ring.own.layers if (its := ring.layer(layer)) and its.parts == weights.parts(layer)]
        coming = sorted(set(weights.on_host()).difference(plan.streamed, self.dropped, same))
        self._passes.close()
        try:
            ring.arrange(slot_pages, layers, [StreamedLayer(layer, 0, weights.parts(layer)) for layer in coming])
        finally:
            self._bind()

    @property
    def read_in_place(self) -> int:
        """Pages of layers that are on the host and have no slot: each forward reads them there."""
        ring = self._weights.ring
        slotted = {layer for layer in ring.streamed if ring.slot(layer) is not None}.union(ring.own.layers)
        return sum(self.pages[layer] for layer in self._weights.on_host() if layer not in slotted)

    def drop(self, layers: Collection[int]) -> None:
        """Drops these layers beside those that are, all or none, to backings that are ready: after a failure those that
        have left stream. ManageError where a CUDA graph has captured one; else raises as `Ring.arrange`."""
        if not self.kept.isdisjoint(layers):
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
        """A dropped layer is resident again, with the pages of `filled`. Raises as `Ring.adopt`, which leaves it
        dropped."""
        self._passes.close()
        try:
            if self._weights.ring.layer(layer) is not None:
                self._weights.ring.adopt(layer, filled)
            self._weights.backings.set_aside(self._weights.of([layer]))
            self.dropped = tuple(each for each in self.dropped if each != layer)
        finally:
            self._bind()
        self._arrange_away(max(1, len(self.plan.slot_pages)))  # the slot may go, too

    def release(self) -> None:
        """No layer is dropped any more: those that were stream."""
        self.dropped = ()
        self._bind()

    def plainly(self, act: Callable[[], None]) -> None:
        """Calls `act` while the modules of layers that stream hold plain dictionaries, so that whoever asks them is not
        heard, and must not look at the bytes."""
        self._passes.close()
        try:
            act()
        finally:
            self._bind()

    def keep(self, layers: frozenset[int]) -> None:
        """Says which layers stay resident."""
        self.kept = layers
        self._plan_of(self.plan.streamed, self.plan.slots)

    def entry(self, layer: int) -> list[Any]:
        """The parts of a resident layer for `Device.publish`."""
        return self._weights.ring.own.offer(layer) or [
            (part.range, first, count, part.backing.pages, first, [])
            for part in self._weights.parts(layer)
            for first, count in spans(part)
        ]

    def returned(self, scarce: bool) -> tuple[int, ...]:
        """The layers whose copies on the host are to be given up now. `scarce`: were pages short not long ago? See Note
        [Copies that are kept]."""
        own = self._weights.ring.own
        layers = own.layers
        if not layers or not scarce or torch.is_grad_enabled():
            return layers
        over = own.host_pages - room.host_pages_left(self._weights.device)
        pages = accumulate((self.pages[layer] for layer in layers), initial=0)
        return tuple(layer for layer, before in zip(layers, pages, strict=False) if before < over)

    def make_resident(self, layers: Iterable[int], tell: Callable[[int], None]) -> None:
        """Makes layers resident that have come back. `tell(host pages)` hears of each. Raises as the ring's method."""
        self._passes.close()
        try:
            for layer in layers:
                each = self._weights.ring.layer(layer)
                parts = () if each is None else each.parts
                copied = sum(part.count for part in parts if part.backing.file is None)
                self._weights.ring.make_resident(layer)
                tell(copied)
        finally:
            self._bind()

    def close(self) -> None:
        """Ends streaming: layers stay where they are, and are read there."""
        for layer in self._weights.on_host():
            self.tell(layer, False)
        self._passes.close()

    def _arrange_away(self, slots: int) -> None:
        """What is away streams through so many slots."""
        streamed = [layer for layer in self._weights.away() if layer not in self.dropped]
        self.arrange(streaming(self.pages, streamed, slots))

    def _bind(self) -> None:
        """The calls of its layers that are on the host read slots from now on."""
        self._passes.close()  # who looks at the modules here is not heard
        ring = self._weights.ring
        found = [each for layer in (*ring.streamed, *ring.own.layers) if (each := ring.layer(layer)) is not None]
        streamed = found[: len(ring.streamed)]
        planned = [each for each in streamed if each.layer not in self.dropped]
        self._plan_of(tuple(each.layer for each in planned), tuple(each.slot for each in planned))
        model = self._model()
        modules = () if model is None else decoder_layers(model)
        bound = {}
        for each in found:
            if each.layer < len(modules):
                module = modules[each.layer]
                lying = moving.tenants_of(self._weights.ranges.get(each.layer, ()), members(module, ()))
                tensors = frozenset(id(member.tensor) for member, _ in lying)
                bound[each.layer] = Layer(module, tensors, each.parts)
        self._passes.bind(bound, self._weights.device.page_size)
        for layer in range(len(modules)):
            self.tell(layer, layer in bound)

    def _plan_of(self, streamed: tuple[int, ...], slots: tuple[int, ...]) -> None:
        absent = self.kept.union(self.dropped)
        pages = (0 if layer in absent else pages for layer, pages in enumerate(self.pages))
        self.plan = Plan(tuple(pages), streamed, slots)
