"""Weights in ranges: where a model's parameters and buffers lie in the pool, and where they are beside that.

Note [Weights that stream]
    The addresses of a layer that streams lead to its backing for as long as it does, and what its own forward
    reads instead is told in hooks/streaming. Everything here treats its ranges as any other. A resident layer has a
    backing without pages: the addresses where its weights go when it gives its own.

Note [Which backing]
    Where all of a range lies in weights files byte for byte, of a model that was just loaded and that nobody has seen
    yet, its backing is those files, and no second copy is in memory until somebody looks. All others have host pages.

Note [Whose pages they are]
    A page belongs to the tensors over it and goes with the last of them (`auto_retire`): at once where a weight is
    given other memory (`half()`, `load_state_dict(assign=True)`) or is removed, with `release()`, when the model is
    collected. So a view that someone took of a weight keeps its memory, and so does a weight that outlives its model. A
    page that several small tensors share stays until none of them needs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

from torch import nn

from ...allocator._native import Device, Range
from ...allocator.interrupts import Guarded, guarded
from ...offload.policy.layout import Block, Layout, place
from ...offload.policy.plan import Plan, Rule
from ...offload.policy.tuning import DEFAULT, WeightPlans
from ...offload.residency.backing import Backing
from ...offload.residency.file_backing import FileBacking, FileBackings, FileLoader, Place
from ...offload.residency.layer_parts import Part, live
from ...offload.residency.mover import Mover
from ...offload.residency.ring import Ring
from ...offload.residency.weights_file import FileSpan
from ..device import streams
from . import moving, room
from .moving import MoveIn, Step
from .storages import Member, Span, members, spans

Files = Mapping[int, FileSpan]  # id of a tensor -> its bytes in a file


class Weights:
    """The ranges that hold one model's weights, and their backings."""

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
        self._backing_group = device.group()  # no lease keeps backings where they are
        self._note = streams.note_of(device)
        # Of each decoder layer by its index; under None those of no layer, or of several.
        self.ranges: dict[int | None, list[Range]] = {}
        self.ring = Ring(device, self.group, waiting)
        self._file_backings = FileBackings(device)
        self._movers: dict[int, Mover] = {}  # by the address of the range
        # By the same, of layers that are to be dropped at once: has their bytes, and is not shown to the core.
        self.ready: dict[int, Backing] = {}
        self._moving = threading.Lock()
        self._hosted: set[int] = set()  # addresses of ranges whose tensors are moved in on the host
        self._blank: Range | None = None  # a page, see backing.py, Note [File backings]

    def all_ranges(self) -> list[Range]:
        return [each for of_layer in list(self.ranges.values()) for each in of_layer]

    @property
    def pages(self) -> int:
        """Device pages that are behind the ranges now, and behind the slots."""
        return sum(each.backed for each in self.all_ranges() if not is_away(each)) + self.ring.pages

    @property
    def host_pages(self) -> int:
        """Host pages that hold weights."""
        return sum(each.backed for each in self._backings())

    @property
    def file_bytes(self) -> int:
        """Bytes of weights whose backings are files."""
        return sum(nbytes for file in self._kept() for _, _, nbytes in file.copies)

    def adopt(
        self,
        found: Sequence[Span],
        working: int,
        layers: int,
        rule: Rule,
        still: Collection[int] = (),
        known: Files | None = None,
        progress: Callable[[int], object] = int,
    ) -> Plan:
        """Moves the spans into new ranges, all or none: one for each of the `layers` decoder layers, one for what
        belongs to no layer.

        `working`: pages that using the model needs beside them. `rule`: which layers stream; their weights stay on the
        host. `still`: layers that must not. `known`: tensors whose bytes are in files, of a model that nobody has seen
        yet: they are read from there and not from the tensor's memory. `progress` is told the bytes of each step.
        Returns what was planned. BudgetError before anything is moved; torch.OutOfMemoryError, WeightsFileChanged,
        DriverError, ManageError.
        """
        blocks = (Block(n, span.nbytes, None if span.layer in still else span.layer) for n, span in enumerate(found))
        layout = place(blocks, self.device.page_size, self.plans.large)
        plan = room.plan_under_budget(self.device, layout, found, working, layers, rule)
        twins = self._backings_in_files(layout, found, plan, known)
        room.check_host(self.device, sum(plan.pages[layer] for layer in plan.streamed if layer not in twins))
        made: dict[int | None, Range] = {}
        loader = FileLoader(self.device, self._file_backings, self.stream())
        move = MoveIn(self._back, self._note, {} if known is None else known, loader, progress)
        with ExitStack() as always, ExitStack() as undo:
            undo.callback(self._file_backings.keep, self._kept())
            always.callback(self._hosted.clear)
            slots = () if self.ring.streamed else plan.slot_pages
            if slots:
                undo.callback(self.ring.close)
            slot_of = dict(zip(plan.streamed, plan.slots, strict=True))
            for each in layout.ranges:
                opened = made[each.layer] = self.device.reserve(each.nbytes, "weights", self.group, auto_retire=True)
                undo.callback(opened.close)
                if each.layer is not None and each.layer in slot_of:
                    self._hosted.add(opened.address)
                    self._make_mover(opened, twins.get(each.layer))
                    undo.callback(self._drop_backing, opened.address)
            ranges = list(made.values())
            leaving = slot_of.keys() - twins.keys()  # for host pages: where they lie now is room for the others

            def steps() -> Iterator[Step]:
                for leave in True, False:
                    for step in layout.steps():
                        moves = [(n, spot) for n, spot in step.moves if (layout.ranges[n].layer in leaving) == leave]
                        if moves:
                            yield [(ranges[n], spot.offset, found[spot.block.key]) for n, spot in moves]
                self.ring.make(slots)  # the pages that layers have left are there by now

            moving.run(self.device, steps(), do=move.do, undo=lambda step: move.undo(step, self._step_out))
            loader.finish([*self._kept(), *twins.values()])
            undo.pop_all()
        for layer, opened in made.items():
            self.ranges.setdefault(layer, []).append(opened)
        return plan

    def parts(self, layer: int) -> tuple[Part, ...]:
        """The ranges of a layer, with what moves them."""
        parts: list[Part] = []
        for opened in list(self.ranges.get(layer, ())):  # which a finalizer may empty at any moment
            if not opened.backed:
                continue
            mover = self._movers.get(opened.address)
            if mover is None or mover.backing.closed:
                mover = self._make_mover(opened)
            for first, count in live(opened, 0, opened.pieces):
                offset = sum(part.count for part in parts)
                parts.append(Part(opened, mover, offset, first, count))
        return tuple(parts)

    def file_backing(self, opened: Range, found: Iterable[Span], files: Files) -> FileBacking | None:
        """The file backing of a range in which these spans lie, all of them in files; else None. WeightsFileChanged."""
        return self._file_backing([(span.start - opened.address, span) for span in found], files)

    def new_backing(self, opened: Range, file: FileBacking | None = None) -> Backing:
        """A backing for a range beside the one that it has."""
        if file is not None and self._blank is None:
            blank = self.device.reserve(self.device.page_size, "weights", self._backing_group)
            (blank.map_host if self.device.host_pages else blank.map)(0, 1)
            self._blank = blank
        return Backing(self.device, self._backing_group, opened, "weights", file=file, blank=self._blank)

    def leaving(self, layers: Collection[int]) -> Guarded[None]:
        """Within it these layers leave to backings that are ready; those of layers that have not left are set aside
        again at the end. Nothing of the layers is taken meanwhile."""
        concerned = [opened for layer in layers for opened in self.ranges.get(layer, ())]

        def begin() -> None:
            for opened in concerned:
                if (backing := self.ready.get(opened.address)) is not None and not is_away(opened):
                    backing.ready = True
                    self._movers[opened.address] = Mover(self.device, opened, backing, self._moving)
                    del self.ready[opened.address]

        def end(failed: bool) -> None:
            for opened in concerned:
                mover = self._movers.get(opened.address)
                if mover is not None and mover.backing.ready:
                    mover.backing.ready = False
                    if not is_away(opened):
                        self.ready[opened.address] = mover.backing
                        del self._movers[opened.address]

        return guarded(begin, end)

    def set_aside(self, layer: int) -> None:
        """The layer is resident again: what it was copied from is ready for the next time, if it was before."""
        for opened in self.ranges.get(layer, ()):
            if (mover := self._movers.get(opened.address)) is not None and not is_away(opened):
                if mover.backing.sums:
                    self.ready[opened.address] = mover.backing
                else:
                    mover.backing.close()
                del self._movers[opened.address]

    def forget_ready(self, layer: int) -> None:
        """What was ready of the layer is not what it is, or not needed."""
        for opened in self.ranges.get(layer, ()):
            if (backing := self.ready.pop(opened.address, None)) is not None:
                backing.drop()
                backing.close()
        self._file_backings.keep(self._kept())

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
        """Pages of each of so many decoder layers that can be streamed."""
        return tuple(sum(each.backed for each in self.ranges.get(layer, ())) for layer in range(layers))

    def use(self, layer: int | None) -> None:
        """Says that this thread is about to read the weights of `layer`, with None those of no layer."""
        if opened := self.ranges.get(layer):
            stream = 0 if self._standin else self.stream()
            for each in opened:
                each.note_use(stream, False)

    def sort(self, tenants: Iterable[tuple[Member, Range]]) -> None:
        """Finds out anew which layer each range belongs to, and closes those that nothing is left of.

        What was resident once stays so: it holds what is too small to be streamed.
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
                    if opened.address in self._movers:
                        self._movers[opened.address].backing.trim(live(opened, 0, opened.pieces))
                else:
                    opened.close()
                    self._drop_backing(opened.address)

    def restore(self, model: nn.Module) -> None:
        """Moves out whatever tensor of `model` lies in a range now, wherever in the model it has got to meanwhile.

        On the stand-in it goes to torch's own memory, on CUDA to blocks of torch's allocator. All or none: raises
        torch.OutOfMemoryError, DriverError, WeightsFileChanged or ManageError with the weights in the pool as before.
        """
        try:
            moving.run(self.device, self._steps_out(model), do=self._step_out, undo=self._step_back_in)
        finally:
            self._hosted.clear()
        self.forget()

    def forget(self) -> None:
        """Lets go of every range. Where a tensor still lies, the pages stay until it is gone."""
        for opened in self.all_ranges():
            opened.close()
            self._drop_backing(opened.address)
        self.ranges.clear()
        self.ring.close()
        self._blank = None
        self._file_backings.close()

    def _backings_in_files(
        self, layout: Layout, found: Sequence[Span], plan: Plan, known: Files | None
    ) -> dict[int, FileBacking]:
        """By layer, of those that stream: what has all of their ranges. See Note [Which backing]."""
        ranges = [each for each in layout.ranges if each.layer in plan.streamed]
        lying = {each.layer: [(at.offset, found[at.block.key]) for at in each.placements] for each in ranges}
        twins = {layer: self._file_backing(at, known or {}) for layer, at in lying.items() if layer is not None}
        return {layer: twin for layer, twin in twins.items() if twin is not None}

    def _file_backing(self, at: Iterable[tuple[int, Span]], files: Files) -> FileBacking | None:
        """Returns the file twin of a range in which these spans lie; None where not all of them are in files that can
        be registered, or nobody says what lies there."""
        places: list[Place] = []
        for offset, span in at:
            found = _in_file(span, files)
            if found is None:
                return None
            places.append((offset, found))
        twin = self._file_backings.twin(places) if places else None
        return twin if twin is not None and twin.registered else None

    def _make_mover(self, opened: Range, file: FileBacking | None = None) -> Mover:
        made = Mover(self.device, opened, self.new_backing(opened, file), self._moving)
        before = self._movers.get(opened.address)
        if before is not None and before.backing.closed:
            self._movers.pop(opened.address, None)
        return self._movers.setdefault(opened.address, made)  # another thread may have been here

    def _kept(self) -> list[FileBacking]:
        return [each.file for each in self._backings() if each.file is not None]

    def _backings(self) -> list[Backing]:
        return [*(mover.backing for mover in list(self._movers.values())), *list(self.ready.values())]

    def _drop_backing(self, address: int) -> None:
        """Pages of it that tensors still show stay until those are gone."""
        if (mover := self._movers.pop(address, None)) is not None:
            mover.backing.close()
        if (ready := self.ready.pop(address, None)) is not None:
            ready.close()

    def _back(self, opened: Range, first: int, count: int) -> bool:
        """Puts pages behind pieces, of the device or of the backing. False where they need not be filled."""
        if opened.address not in self._hosted:
            opened.map(first, count)
            return True
        backing = self._movers[opened.address].backing
        if backing.file is None:
            backing.pages.map_host(first, count)
        backing.lead(first, count)
        return backing.file is None

    def _steps_out(self, model: nn.Module) -> list[Step]:
        """What lies in the ranges: layers first, whose pages are room for the rest, which goes one by one."""
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
                self.ring.reveal(layer)  # one at a time: what has its backing in a file needs host pages to be read
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


def is_away(opened: Range) -> bool:
    """Do its addresses lead to pages of another range?"""
    return any(opened.backing(first) == "alias" for first, _ in live(opened, 0, opened.pieces)[:1])


def _in_file(span: Span, files: Files) -> FileSpan | None:
    """Returns the span's bytes in a file, None where they do not lie there as they lie in memory."""
    found: FileSpan | None = None
    for tensor in sorted(span.tensors, key=lambda tensor: tensor.data_ptr()):
        of_tensor = files.get(id(tensor))
        if of_tensor is None:
            return None
        start = of_tensor.start - (tensor.data_ptr() - span.start)  # of the span, in the file
        end = of_tensor.start + of_tensor.nbytes
        if found is None:
            found = FileSpan(of_tensor.file, start, end - start)
        elif found.file is not of_tensor.file or found.start != start:
            return None
        else:
            found = FileSpan(found.file, start, max(found.start + found.nbytes, end) - start)
    return found if found is not None and found.nbytes == span.nbytes else None
