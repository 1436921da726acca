"""Weights in ranges: where a model's parameters and buffers lie in the pool, and their backings.

Note [Weights that stream]
    The addresses of a layer that streams lead to its backing; its own forward reads a slot instead (hooks/streaming).
    This module treats its ranges as any other.

Note [Whose pages they are]
    A page belongs to the tensors over it and is freed with the last of them (`auto_retire`): at once where a weight is
    given other memory (`half()`, `load_state_dict(assign=True)`) or is removed, with `release()`, or when the model is
    collected. So a view of a weight keeps its memory, and so does a weight that outlives its model. A page that several
    small tensors share stays until the last of them is freed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

from torch import nn

from ...allocator._native import Device, Range
from ...offload.policy.layout import Block, place
from ...offload.policy.plan import Plan, Rule
from ...offload.policy.tuning import DEFAULT, WeightPlans
from ...offload.residency.backing import FileLoader
from ...offload.residency.ring import LayerPart, Ring, live
from ..device import streams
from . import capacity, moving
from .backings import Files, WeightBackings, is_away
from .moving import MoveIn, Step
from .storages import TensorMember, TensorSpan, members, spans


class Weights:
    """The ranges that hold one model's weights, and their `backings`."""

    def __init__(
        self,
        device: Device,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
        plans: WeightPlans = DEFAULT.weights,
    ) -> None:
        """`waiting`: as for `Ring`."""
        self.plans = plans
        self.device = device
        self.group = device.group()
        self._standin = device.kind == "standin"
        self.stream = streams.stream_of(device)
        self._note = streams.note_of(device)
        # By the index of the decoder layer; under None ranges of no layer, or of several.
        self.ranges: dict[int | None, list[Range]] = {}
        self.ring = Ring(device, self.group, waiting)
        self.backings = WeightBackings(device)
        self._hosted: set[int] = set()  # addresses of ranges whose tensors are moved in on the host

    def all_ranges(self) -> list[Range]:
        return [range_ for of_layer in list(self.ranges.values()) for range_ in of_layer]

    def of(self, layers: Iterable[int]) -> list[Range]:
        """The ranges of these layers."""
        return [range_ for layer in layers for range_ in self.ranges.get(layer, ())]

    @property
    def pages(self) -> int:
        """Device pages of the ranges and of the slots, now."""
        return sum(range_.backed for range_ in self.all_ranges() if not is_away(range_)) + self.ring.pages

    def adopt(
        self,
        moved: Sequence[TensorSpan],
        working: int,
        layers: int,
        rule: Rule,
        still: Collection[int] = (),
        known: Files | None = None,
        progress: Callable[[int], object] = int,
    ) -> Plan:
        """Moves the spans into new ranges, all or none: one for each of the `layers` decoder layers, one for tensors of
        no layer.

        `working`: pages that using the model needs beside them. `rule`: which layers stream; their weights stay on the
        host. `still`: layers that must not. `known`: tensors whose bytes are in files, of a model that was not handed
        out yet: they are read from there and not from the tensor's memory. `progress` is called with the bytes of each
        step. Returns the plan. BudgetError before anything is moved; torch.OutOfMemoryError, WeightsFileChanged,
        DriverError, ManageError.
        """
        blocks = (Block(n, span.nbytes, None if span.layer in still else span.layer) for n, span in enumerate(moved))
        layout = place(blocks, self.device.page_size, self.plans.large)
        plan = capacity.plan_under_budget(self.device, layout, moved, working, layers, rule)
        twins = self.backings.in_files(layout, moved, plan.streamed, known or {})
        capacity.check_host(self.device, sum(plan.pages[layer] for layer in plan.streamed if layer not in twins))
        made: dict[int | None, Range] = {}
        loader = FileLoader(self.device, self.backings.files, self.stream())
        move = MoveIn(self._back, self._note, {} if known is None else known, loader, progress)
        with ExitStack() as always, ExitStack() as undo:
            undo.callback(self.backings.files.keep, self.backings.in_use())
            always.callback(self._hosted.clear)
            slots = () if self.ring.streamed else plan.slot_pages
            if slots:
                undo.callback(self.ring.close)
            slot_of = dict(zip(plan.streamed, plan.slots, strict=True))
            for range_ in layout.ranges:
                opened = made[range_.layer] = self.device.reserve(
                    range_.nbytes, "weights", self.group, auto_retire=True
                )
                undo.callback(opened.close)
                if range_.layer is not None and range_.layer in slot_of:
                    self._hosted.add(opened.address)
                    self.backings.make(opened, twins.get(range_.layer))
                    undo.callback(self.backings.drop, opened.address)
            ranges = list(made.values())
            leaving = slot_of.keys() - twins.keys()  # to host pages: their present memory serves the others

            def steps() -> Iterator[Step]:
                for leave in True, False:
                    for step in layout.steps():
                        moves = [(n, spot) for n, spot in step.moves if (layout.ranges[n].layer in leaving) == leave]
                        if moves:
                            yield [(ranges[n], spot.offset, moved[spot.block.key]) for n, spot in moves]
                self.ring.shared.make(slots)  # in pages that layers have left by now

            moving.run(self.device, steps(), do=move.do, undo=lambda step: move.undo(step, self._step_out))
            loader.finish([*self.backings.in_use(), *twins.values()])
            undo.pop_all()
        for layer, opened in made.items():
            self.ranges.setdefault(layer, []).append(opened)
        return plan

    def parts(self, layer: int) -> tuple[LayerPart, ...]:
        """The ranges of a layer, with their movers."""
        parts: list[LayerPart] = []
        for opened in list(self.ranges.get(layer, ())):  # a copy, as a finalizer may empty it at any moment
            if not opened.backed:
                continue
            mover = self.backings.mover(opened)
            for first, count in live(opened, 0, opened.pieces):
                offset = sum(part.count for part in parts)
                parts.append(LayerPart(opened, mover, offset, first, count))
        return tuple(parts)

    def away(self) -> tuple[int, ...]:
        """The layers that have no device pages of their own."""
        back = self.ring.own.layers
        return tuple(layer for layer in self.on_host() if layer not in back)

    def on_host(self) -> tuple[int, ...]:
        """The layers whose addresses lead to a backing."""
        return tuple(
            sorted(
                layer for layer, ranges in list(self.ranges.items()) if layer is not None and any(map(is_away, ranges))
            )
        )

    def layer_pages(self, layers: int) -> tuple[int, ...]:
        """Returns the pages of each of so many decoder layers that can be streamed."""
        return tuple(sum(range_.backed for range_ in self.ranges.get(layer, ())) for layer in range(layers))

    def use(self, layer: int | None) -> None:
        """Tells the core that this thread is about to read the weights of `layer`, with None those of no layer."""
        if opened := self.ranges.get(layer):
            stream = 0 if self._standin else self.stream()
            for range_ in opened:
                range_.note_use(stream, False)

    def sort(self, tenants: Iterable[tuple[TensorMember, Range]]) -> None:
        """Finds out anew which layer each range belongs to, and closes empty ranges.

        A range under None stays there: it holds tensors that are too small to stream.
        """
        users: dict[int, set[int | None]] = {}
        for member, opened in tenants:
            users.setdefault(opened.address, set()).update(member.layers)
        before, self.ranges = self.ranges, {}
        for layer, ranges in before.items():
            for opened in ranges:
                layers = {None} if layer is None else users.get(opened.address, {None})
                if opened.backed:
                    self.ranges.setdefault(layers.pop() if len(layers) == 1 else None, []).append(opened)
                    self.backings.trim(opened)
                else:
                    opened.close()
                    self.backings.drop(opened.address)

    def restore(self, model: nn.Module) -> None:
        """Moves every tensor of `model` that lies in a range out of it, wherever in the model it is by now.

        On the stand-in to torch's own memory, on CUDA to blocks of torch's allocator. All or none: raises
        torch.OutOfMemoryError, DriverError, WeightsFileChanged or ManageError with the weights in the pool as before.
        """
        try:
            moving.run(self.device, self._steps_out(model), do=self._step_out, undo=self._step_back_in)
        finally:
            self._hosted.clear()
        self.forget()

    def forget(self) -> None:
        """Closes every range. Pages under a live tensor stay until it is freed."""
        for opened in self.all_ranges():
            opened.close()
            self.backings.drop(opened.address)
        self.ranges.clear()
        self.ring.close()
        self.backings.close()

    def _back(self, opened: Range, first: int, count: int) -> bool:
        """Maps pages to pieces, of the device or of the backing. False where they need not be filled."""
        if opened.address not in self._hosted:
            opened.map(first, count)
            return True
        return self.backings.back(opened, first, count)

    def _steps_out(self, model: nn.Module) -> list[Step]:
        """Returns the steps that empty the ranges: layers first, whose pages serve the rest, which moves one by one."""
        tenants = moving.tenants_of(self.all_ranges(), members(model, ()))
        range_of = {id(member.tensor): opened for member, opened in tenants}
        layer_of = {opened.address: layer for layer, ranges in self.ranges.items() for opened in ranges}
        layers: dict[int, Step] = {}
        resident: list[Step] = []
        for span in spans([member.tensor for member, _ in tenants], {}):
            opened = range_of[id(span.tensors[0])]
            move = (opened, span.start - opened.address, span)
            layer = layer_of[opened.address]
            if layer is None:
                resident.append([move])
            else:
                layers.setdefault(layer, []).append(move)
        return [*layers.values(), *resident]

    def _step_out(self, step: Step) -> None:
        for layer, ranges in self.ranges.items():
            if layer is not None and step[0][0] in ranges:
                self.ring.reveal(layer)  # one at a time: reading a file backing takes host pages
        self._hosted.update(opened.address for opened, _, _ in step if is_away(opened))
        moving.out(self.device, step, self._note)

    def _step_back_in(self, step: Step) -> None:
        with moving.swapping() as pairs:
            for opened, offset, span in step:
                first = offset // self.device.page_size
                self._back(opened, first, -(-(offset + span.nbytes) // self.device.page_size) - first)
                flat = moving.flat_over(opened, offset, span.nbytes)
                moving.copy(span, flat)
                pairs.extend(zip(span.tensors, span.over(flat), strict=True))
                del flat
